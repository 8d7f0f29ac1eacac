"""Tests for synapse_replication.app.host."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from twisted.internet.task import Clock
from twisted.internet.testing import MemoryReactorClock
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.app.host import (
    PositionsOnlySink,
    StandaloneHost,
)
from synapse_replication.app.service import Replication
from synapse_replication.config.process import load_config
from synapse_replication.handlers import interfaces
from synapse_replication.handlers.host_parts import ReactorClock
from synapse_replication.handlers.interfaces import Identity
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.http.client import HttpCatchUpClient
from synapse_replication.streams.memory import MemoryStream
from synapse_replication.streams.standard.registry import STANDARD_STREAMS
from synapse_replication.text import process_label
from tests.config.process_case import HOMESERVER, WORKER
from tests.support.config_files import FilesMixin
from tests.support.hooks import silent_hooks

if TYPE_CHECKING:
    _sink: type[interfaces.RowSink] = PositionsOnlySink

    def _check(host: StandaloneHost) -> interfaces.ReplicationHost:
        return host


def typing_stream() -> MemoryStream:
    return MemoryStream(STANDARD_STREAMS["typing"].description, instance_name="me")


class StandaloneHostTests(FilesMixin):
    def make(self) -> StandaloneHost:
        reactor = Clock()
        clock = ReactorClock(reactor)
        return StandaloneHost(
            Identity("x.test", "writer1", "an id"),
            clock,
            ReplicationObserver(),
            silent_hooks(clock),
            HttpCatchUpClient(None, {}, None, reactor).for_stream,
        )

    def test_identity(self) -> None:
        """Names come from the configuration; each host gets a new instance id."""
        config = load_config(
            [self.write("h.yaml", HOMESERVER), self.write("w.yaml", WORKER)]
        )
        one, two = (
            Replication(MemoryReactorClock(), config).host.identity for _ in range(2)
        )
        self.assertEqual((one.server_name, one.instance_name), ("x.test", "writer1"))
        self.assertNotEqual(one.instance_id, two.instance_id)

    def test_rows_advance_streams(self) -> None:
        """
        A row or position that is delivered to the sink updates the stream's token.
        """
        host = self.make()
        stream = typing_stream()
        host.streams.add(stream, is_written_here=False)
        host.set_sink(PositionsOnlySink(), None)
        host.rows.on_rdata("typing", "w", 5, [])
        self.assertEqual(stream.current_token("w"), 5)
        host.rows.on_position("typing", "w", 3)
        self.assertEqual(stream.current_token("w"), 3)

    def test_user_ips(self) -> None:
        """An instance stores client IPs if its code subscribes to USER_IP."""
        host = self.make()
        self.assertFalse(host.stores_user_ips)
        host.outgoing.subscribe_to_channel("USER_IP")
        self.assertTrue(host.stores_user_ips)

    def test_row_to_json(self) -> None:
        """A typed row is converted to the JSON value that is sent on the wire."""
        host = self.make()
        host.streams.add(typing_stream(), is_written_here=False)
        codec = STANDARD_STREAMS["typing"].description.codec
        row = codec.from_json(["!r", ["@u:s"]])
        self.assertEqual(host.row_to_json("typing", row), ["!r", ["@u:s"]])


class ProcessLabelTests(SynchronousTestCase):
    """Tests for the label of an OS process."""

    def test_one_word(self) -> None:
        """
        The label is one bounded word with host name and pid, whatever the host's name.
        """
        self.patch(socket, "gethostname", lambda: "a host\n" + "x" * 300)
        self.assertEqual(process_label(), f"a_host_{'x' * 193}:{os.getpid()}")
