"""Tests for the types of the streams of a service; mypy and pyright check them."""

from __future__ import annotations

from typing import Any

from twisted.internet.testing import MemoryReactorClock
from twisted.trial.unittest import SynchronousTestCase
from typing_extensions import assert_type

from synapse_replication.api import (
    InMemory,
    MemoryStream,
    PostgresStream,
    Replication,
    ReplicationOptions,
    TableStream,
)
from tests.handlers.fixtures import Row

ORDERS = TableStream(
    name="orders",
    table="orders",
    id_column="stream_id",
    columns={"order_id": "text"},
    sequence="orders_seq",
    writers="w1",
)
CURSORS = InMemory(name="cursors", row_type=Row, writers="w1")


def orders_of(replication: Replication) -> PostgresStream:
    """Return a stream in the database, as a service's own code would."""
    return assert_type(replication[ORDERS], PostgresStream)


def cursors_of(replication: Replication) -> MemoryStream:
    """Return a stream in memory."""
    return assert_type(replication[CURSORS], MemoryStream)


def by_name(replication: Replication) -> Any:
    """Return a stream by its name, whose type no checker knows."""
    return assert_type(replication["orders"], Any)


class TypedStreamsTests(SynchronousTestCase):
    def test_declaration_and_name(self) -> None:
        """A declaration and its name lead to one stream."""
        options = ReplicationOptions(
            server_name="x.test", instance_name="w1", streams=[CURSORS]
        )
        replication = Replication(MemoryReactorClock(), options)
        streams: Any = {"cursors": object()}
        self.patch(replication.host.streams, "get_streams", lambda: streams)
        self.assertIs(cursors_of(replication), streams["cursors"])
        self.assertIs(replication["cursors"], streams["cursors"])
        self.assertRaises(KeyError, orders_of, replication)
