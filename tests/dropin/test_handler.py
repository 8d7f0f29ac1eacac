"""Tests for the command handler inside a host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.dropin.handler import ReplicationCommandHandler
from synapse_replication.dropin.resource import ReplicationStreamer
from synapse_replication.wire.commands.standard import (
    FederationAckCommand,
    LockReleasedCommand,
    PositionCommand,
    RdataCommand,
    ReplicateCommand,
    UserSyncCommand,
)
from tests.dropin.host import FakeHomeserver, FakeStream, fake_modules
from tests.dropin.test_bridges import SingleCommandConnection


class HostWithHandler(FakeHomeserver):
    """A host that makes its handler and its streamer when they are asked for."""

    _handler: ReplicationCommandHandler | None = None
    _streamer: ReplicationStreamer | None = None

    def get_replication_command_handler(self) -> ReplicationCommandHandler:
        if self._handler is None:
            self._handler = ReplicationCommandHandler(self)
        return self._handler

    def get_replication_streamer(self) -> ReplicationStreamer:
        if self._streamer is None:
            self._streamer = ReplicationStreamer(self)
        return self._streamer


class HandlerTests(SynchronousTestCase):
    """Tests for ReplicationCommandHandler, on a connection that is not ours."""

    def setUp(self) -> None:
        self.events = FakeStream("events", {"w": 5, "master": 1})
        self.typing = FakeStream("typing", {"master": 2, "w": 3})
        fake_modules(
            self,
            {"events": lambda hs: self.events, "typing": lambda hs: self.typing},
        )
        self.hs = HostWithHandler("w")
        self.handler = self.hs.get_replication_command_handler()
        self.connection = SingleCommandConnection()

    def test_new_connection(self) -> None:
        """
        A connection of others is told who syncs here; it asks for the rest itself.
        """
        self.handler.new_connection(self.connection)
        self.assertEqual(
            self.connection.sent, [UserSyncCommand("abc", "@u:test", "D", True, 0)]
        )
        self.assertTrue(self.handler.connected())
        self.handler.lost_connection(self.connection)
        self.assertFalse(self.handler.connected())

    def test_positions(self) -> None:
        """
        Whoever asks is told where the streams stand that this process writes.
        """
        self.handler.new_connection(self.connection)
        self.connection.sent.clear()
        self.handler.on_REPLICATE(self.connection, ReplicateCommand())
        self.assertEqual(
            self.connection.sent,
            [
                PositionCommand("events", "w", 5, 5),
                PositionCommand("typing", "w", 3, 3),
            ],
        )

    def test_rows(self) -> None:
        """
        Rows that come one by one reach the host, after their writer's POSITION.
        """
        self.handler.new_connection(self.connection)
        row = RdataCommand("events", "master", 2, ["a"])
        self.handler.on_RDATA(self.connection, row)
        self.handler.on_POSITION(
            self.connection, PositionCommand("events", "master", 1, 1)
        )
        self.handler.on_RDATA(self.connection, row)
        rows = [call for call in self.hs.calls if call[0] == "on_rdata"]
        self.assertEqual(rows, [("on_rdata", "events", "master", 2, ["A"])])

    def test_said_by_the_host(self) -> None:
        """
        What the host says goes out; locks of others are not said again.
        """
        self.handler.new_connection(self.connection)
        self.connection.sent.clear()
        self.handler.send_federation_ack(7)
        self.handler.on_lock_released("w", "name", "key")
        self.handler.on_lock_released("other", "name", "key")
        self.assertEqual(
            self.connection.sent,
            [FederationAckCommand("w", 7), LockReleasedCommand("w", "name", "key")],
        )

    def test_streams_of_the_host(self) -> None:
        """
        The host is given its own stream objects.
        """
        self.assertIs(self.handler.get_streams()["events"], self.events)
        self.assertEqual(
            self.handler.get_streams_to_replicate(), [self.events, self.typing]
        )

    def test_without_redis(self) -> None:
        """
        C20: without Redis nothing is connected, and rows are streamed all the same.
        """
        self.handler.start_replication(self.hs)
        self.assertIsNot(self.hs._streamer, None)


class StartAndStopTests(SynchronousTestCase):
    """Tests for the link to Redis, with factories that are doubles."""

    def _start(self) -> Any:
        """Make a host and start replication on it."""
        connected: list[tuple[Any, ...]] = []
        ended: list[str] = []
        self.connected, self.ended = connected, ended

        class Factory:
            pool: tuple[()] = ()
            connector = SimpleNamespace(disconnect=lambda: ended.append("closed"))

            def __init__(
                self, hs: Any, outbound: Any, channel_names: list[str]
            ) -> None:
                self.channel_names = channel_names

            def stopTrying(self) -> None:
                ended.append("no more")

        fake_modules(
            self,
            modules={
                "synapse.replication.tcp.redis": {
                    "RedisDirectTcpReplicationClientFactory": Factory
                }
            },
        )
        hs: Any = HostWithHandler()
        hs.config.redis = SimpleNamespace(
            redis_enabled=True,
            redis_path=None,
            redis_use_tls=False,
            redis_host="r",
            redis_port=6379,
        )
        hs.get_outbound_redis_connection = lambda: SimpleNamespace(
            _factory=Factory(hs, None, [])
        )
        hs.reactor.connectTCP = lambda *args, **named: connected.append((*args, named))
        self.triggers: dict[str, Any] = {}

        def add(phase: str, event: str, func: Any) -> str:
            self.triggers[f"{phase} {event}"] = func
            return f"{phase} {event}"

        hs.reactor.addSystemEventTrigger = add
        hs.reactor.removeSystemEventTrigger = self.triggers.pop
        hs.get_replication_command_handler().start_replication(hs)
        return hs

    def test_the_reactor_ends(self) -> None:
        """
        The host's reactor connects the subscription; at the end both connections are
        closed, after what others still had to say.
        """
        hs = self.hs = self._start()
        ((host, port, factory, _),) = self.connected
        self.assertEqual((host, port, factory.channel_names), ("r", 6379, ["USER_IP"]))
        stopped = self.triggers["before shutdown"]()
        self.assertNoResult(stopped)
        hs.reactor.advance(0)
        self.successResultOf(stopped)
        self.assertEqual(self.ended, ["no more", "closed"] * 2)
        # The host tells of its end, too: once is enough.
        (stop,) = self.hs.at_shutdown
        self.assertEqual((stop["phase"], stop["eventType"]), ("during", "shutdown"))
        stop["shutdown_func"]()
        self.assertEqual(self.ended, ["no more", "closed"] * 2)

    def test_the_host_ends(self) -> None:
        """
        When the host ends and its reactor goes on, nothing of ours is left in it.
        """
        self.hs = self._start()
        (stop,) = self.hs.at_shutdown
        stop["shutdown_func"]()
        self.assertEqual(self.ended, ["no more", "closed"] * 2)
        self.assertEqual(self.triggers, {})
