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
TYPED = TableStream(
    name="typed",
    table="typed",
    id_column="stream_id",
    columns={"value": "text"},
    sequence="typed_seq",
    writers="w1",
    row_type=Row,
)
CURSORS = InMemory(
    name="cursors", row_type=Row, writers="w1", key=lambda row: assert_type(row, Row)
)


def orders_of(replication: Replication) -> PostgresStream:
    """Return a stream in the database, as a service's own code would.

    No checker knows the class of its rows, which is created from the columns.
    """
    return assert_type(replication[ORDERS], PostgresStream[Any])


def typed_of(replication: Replication) -> PostgresStream[Row]:
    """Return a stream in the database that has a class for its rows."""
    return assert_type(replication[TYPED], PostgresStream[Row])


def cursors_of(replication: Replication) -> MemoryStream[Row]:
    """Return a stream in memory."""
    return assert_type(replication[CURSORS], MemoryStream[Row])


async def use_rows(replication: Replication, txn: Any) -> None:
    """Write and read rows; checkers report those of another type."""
    typed, cursors = typed_of(replication), cursors_of(replication)
    await typed.write([Row("a")])
    await typed.write(["wrong"])  # type: ignore[list-item]
    typed.write_txn(txn, ["wrong"])  # type: ignore[list-item]
    cursors.write(["wrong"])  # type: ignore[list-item]
    await orders_of(replication).write(["not known to be wrong"])
    for page in (
        await typed.get_rows_between(None, None),
        await cursors.get_rows_between(None, None),
    ):
        for each in page.rows:
            assert_type(each.row, Row)
    in_module = MemoryStream(CURSORS.description, "w1")
    assert_type(in_module, MemoryStream[Row])


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
