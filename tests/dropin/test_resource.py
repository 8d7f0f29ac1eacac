"""Tests for the streamer and the server factory inside a host."""

from __future__ import annotations

import sys
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.dropin.id_generators import DropInIdGenerator
from synapse_replication.dropin.resource import (
    NOTIFIED_INTERVAL,
    DropInProtocolFactory,
)
from synapse_replication.wire.commands import PositionCommand, RdataCommand
from tests.dropin.host import (
    FakeStream,
    HostWithHandler,
    SingleCommandConnection,
    fake_modules,
)


class ResourceTests(SynchronousTestCase):
    """Tests for ReplicationStreamer and DropInProtocolFactory."""

    def setUp(self) -> None:
        self.events = FakeStream("events", {"w": 5, "master": 1})
        fake_modules(
            self,
            {"events": lambda hs: self.events},
            {
                "synapse.replication.tcp.protocol": {
                    "ServerReplicationStreamProtocol": lambda *args: args
                }
            },
        )
        self.hs = HostWithHandler("w")
        self.handler = self.hs.get_replication_command_handler()
        self.connection = SingleCommandConnection()

    def test_streamer(self) -> None:
        """Written rows are sent when the host's notifier pokes the streamer."""
        self.handler.new_connection(self.connection)
        streamer = self.hs.get_replication_streamer()
        self.connection.sent.clear()
        self.events.tokens["w"] = 7
        self.events.updates.append((7, ["a"]))
        streamer.on_notifier_poke()
        self.assertEqual(self.connection.sent, [RdataCommand("events", "w", 7, ["a"])])

    def test_interval(self) -> None:
        """
        The position of an idle stream is checked every second if it has other writers
        and the host's own ids; otherwise, less often.
        """
        for writers, ids, interval in (
            (["w", "w2"], object, 1.0),
            (["w"], object, NOTIFIED_INTERVAL),
            (["w", "w2"], DropInIdGenerator, NOTIFIED_INTERVAL),
        ):
            module = sys.modules["synapse.storage.util.id_generators"]
            self.patch(module, "MultiWriterIdGenerator", ids)
            hs = HostWithHandler("w")
            hs.config.worker.writers.events = writers
            handler = hs.get_replication_command_handler()
            handler.new_connection(connection := SingleCommandConnection())
            hs.get_replication_streamer()
            connection.sent.clear()
            # Nothing notifies the streamer of this.
            self.events.local_token = self.events.tokens["w"] = 9
            hs.reactor.advance(interval - 0.1)
            self.assertEqual(connection.sent, [])
            hs.reactor.advance(0.2)
            self.assertIn(PositionCommand("events", "w", 5, 9), connection.sent)
            self.events.local_token = self.events.tokens["w"] = 5

    def test_limited_position(self) -> None:
        """While a sequence must be read, the streams are checked every second."""
        module = sys.modules["synapse.storage.util.id_generators"]
        self.patch(module, "MultiWriterIdGenerator", DropInIdGenerator)
        self.handler.new_connection(self.connection)
        streamer = self.hs.get_replication_streamer()
        self.connection.sent.clear()
        stream: Any = self.handler.host.streams.get_streams()["events"]
        stream.is_limited = True
        streamer.on_notifier_poke()
        for token in (9, 10):
            self.events.local_token = self.events.tokens["w"] = token
            self.hs.reactor.advance(1)
            self.assertEqual(self.connection.sent.pop().new_token, token)
        stream.is_limited = False
        self.hs.reactor.advance(1)
        self.events.local_token = self.events.tokens["w"] = 11
        self.hs.reactor.advance(NOTIFIED_INTERVAL - 1)
        self.assertEqual(self.connection.sent, [])

    def test_server_factory(self) -> None:
        """The factory creates the host's server protocol, with the host's handler."""
        factory = DropInProtocolFactory(self.hs)
        self.assertEqual(
            factory.buildProtocol(None),
            (self.hs, "test", self.hs.clock, self.handler),
        )
