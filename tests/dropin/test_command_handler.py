"""Tests for the command handler inside a host."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from twisted.internet.defer import Deferred
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.dropin.command_handler import (
    _DRAIN_TIMEOUT,
    ASK_AGAIN,
    DropInCommandHandler,
)
from synapse_replication.redis.subscriber import RedisSubscriber
from synapse_replication.streams.writer_positions import WriterPositions
from synapse_replication.wire.commands import (
    FederationAckCommand,
    LockReleasedCommand,
    PositionCommand,
    RdataCommand,
    ReplicateCommand,
    UserSyncCommand,
)
from tests.dropin.host import (
    FakeStream,
    HostWithHandler,
    SingleCommandConnection,
    fake_modules,
)


class _Subscriber(RedisSubscriber):
    """A subscription that stores what is sent on it."""

    name = "redis"

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send_command(self, cmd: Any) -> None:
        self.sent.append(cmd)


class HandlerTests(SynchronousTestCase):
    """Tests for DropInCommandHandler with a foreign connection."""

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
        On a new foreign connection, only the users that sync with this instance are
        sent.
        """
        self.handler.new_connection(self.connection)
        self.assertEqual(
            self.connection.sent, [UserSyncCommand("abc", "@u:test", "D", True, 0)]
        )
        self.assertTrue(self.handler.connected())
        self.handler.lost_connection(self.connection)
        self.assertFalse(self.handler.connected())

    def test_unanswered_request(self) -> None:
        """
        Positions are requested once more if a writer without the extension has not
        announced its own after some time.
        """
        replicate = ReplicateCommand()
        positions = [
            PositionCommand("typing", "master", 2, 2),
            PositionCommand("events", "master", 1, 1),
        ]
        for epoch, answers, expected in (
            (None, positions, []),
            (None, positions[:1], [replicate]),
            ("epoch", [], []),
        ):
            subscriber = _Subscriber()
            self.handler.new_connection(subscriber)
            self.assertIn(replicate, subscriber.sent)
            subscriber.sent.clear()
            for answer in answers:
                self.handler.on_POSITION(subscriber, answer)
            epochs = Mock(epoch_of=Mock(return_value=epoch), __len__=lambda _: 1)
            self.patch(self.handler._parts, "epochs", epochs)
            self.hs.reactor.advance(2 * ASK_AGAIN)
            self.assertEqual(subscriber.sent, expected, (epoch, answers))
            self.handler.lost_connection(subscriber)

    def test_request_on_a_lost_connection(self) -> None:
        """Nothing is requested again on a connection that was lost."""
        subscriber = _Subscriber()
        self.handler.new_connection(subscriber)
        self.handler.on_POSITION(subscriber, PositionCommand("events", "master", 1, 1))
        self.handler.lost_connection(subscriber)
        subscriber.sent.clear()
        self.hs.reactor.advance(2 * ASK_AGAIN)
        self.assertEqual(subscriber.sent, [])

    def test_positions(self) -> None:
        """
        REPLICATE is answered with the positions of the streams that this instance
        writes.
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
        """Rows are delivered only after their writer's POSITION."""
        self.handler.new_connection(self.connection)
        row = RdataCommand("events", "master", 2, ["a"])
        self.handler.on_RDATA(self.connection, row)
        self.handler.on_POSITION(
            self.connection, PositionCommand("events", "master", 1, 1)
        )
        self.handler.on_RDATA(self.connection, row)
        rows = [call for call in self.hs.calls if call[0] == "on_rdata"]
        self.assertEqual(rows, [("on_rdata", "events", "master", 2, ["A"])])

    def test_commands_of_the_host(self) -> None:
        """Commands of the host are sent, except for locks of other instances."""
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
        """The host's own stream objects are returned to the host."""
        self.assertIs(self.handler.get_streams()["events"], self.events)
        self.assertEqual(
            self.handler.get_streams_to_replicate(), [self.events, self.typing]
        )

    def test_without_redis(self) -> None:
        """Without Redis there is no link, but the streamer exists."""
        self.handler.start_replication(self.hs)
        self.assertIsNot(self.hs._streamer, None)


class StartAndStopTests(SynchronousTestCase):
    """Tests for the link to Redis, with doubles of the factories."""

    def _start(self) -> Any:
        """Create a host and start replication on it."""
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

    def test_reactor_shuts_down(self) -> None:
        """
        The host's reactor connects the subscription; one turn after the reactor's
        shutdown begins, both connections are closed, so that other shutdown handlers
        can still send.
        """
        hs = self.hs = self._start()
        ((host, port, factory, _),) = self.connected
        self.assertEqual((host, port, factory.channel_names), ("r", 6379, ["USER_IP"]))
        stopped = self.triggers["before shutdown"]()
        self.assertNoResult(stopped)
        self.assertEqual(self.ended, [])
        hs.reactor.advance(0)
        self.successResultOf(stopped)
        self.assertEqual(self.ended, ["no more", "closed"] * 2)
        self.assertEqual(hs.observers.calls, ["start", "stopping", "stop"])
        # Although the host's own shutdown handler runs, too, connections are closed
        # only once.
        (stop,) = self.hs.at_shutdown
        self.assertEqual((stop["phase"], stop["eventType"]), ("during", "shutdown"))
        stop["shutdown_func"]()
        self.assertEqual(self.ended, ["no more", "closed"] * 2)

    def test_connections_that_stay_open(self) -> None:
        """A connection to Redis that does not close in time is logged."""
        hs = self._start()
        ((_, _, factory, _),) = self.connected
        factory.pool = [Mock()]
        factory.waitForEmptyPool = Deferred
        with capturedLogs() as logged:
            stopped = self.triggers["before shutdown"]()
            hs.reactor.pump([0, _DRAIN_TIMEOUT])
            self.successResultOf(stopped)
            gc.collect()
        self.assertEqual(
            [formatEvent(event) for event in logged],
            [
                "A step of the stop failed (closing the Redis connections): it did not "
                f"finish within {_DRAIN_TIMEOUT:g} s"
            ],
        )

    def test_host_shuts_down(self) -> None:
        """
        If the host shuts down but its reactor continues, connections and triggers are
        removed.
        """
        self.hs = self._start()
        (stop,) = self.hs.at_shutdown
        stop["shutdown_func"]()
        self.assertEqual(self.ended, ["no more", "closed"] * 2)
        self.assertEqual(self.triggers, {})


class _EventsOfTwoWriters(FakeStream):
    """
    A stream with two writers as in a host: a position of one writer advances both.
    """

    def __init__(self) -> None:
        super().__init__("events")
        self.positions = WriterPositions("reader", ["p1", "p2"], {"p1": 10, "p2": 10})

    def current_token(self, instance_name: str) -> int:
        return self.positions.current_token(instance_name)

    async def get_updates_since(
        self, instance_name: str, from_token: int, upto_token: int
    ) -> Any:
        # All rows belong to the first writer.
        if instance_name != "p1":
            return [], upto_token, False
        return await super().get_updates_since(instance_name, from_token, upto_token)


class MissedRowTests(SynchronousTestCase):
    """Tests for a reader of two persisters that misses one row of the first."""

    def setUp(self) -> None:
        self.events = _EventsOfTwoWriters()
        fake_modules(self, {"events": lambda hs: self.events})
        hs: Any = HostWithHandler(
            "reader",
            writers=SimpleNamespace(events=["p1", "p2"], presence=["master"]),
        )
        # A host's store advances with each row and POSITION.
        hs.get_replication_data_handler = lambda: SimpleNamespace(
            on_rdata=self._on_rdata, on_position=self._on_position
        )
        self.handler: DropInCommandHandler = hs.get_replication_command_handler()
        self.connection = SingleCommandConnection()
        self.rows: list[tuple[str, int]] = []
        self.delivered_positions: list[tuple[str, int]] = []
        self._connect(10)

    async def _on_rdata(
        self, stream_name: str, instance_name: str, token: int, rows: list[Any]
    ) -> None:
        self.rows.append((instance_name, token))
        self.events.positions.advance(instance_name, token)

    async def _on_position(
        self, stream_name: str, instance_name: str, token: int
    ) -> None:
        self.delivered_positions.append((instance_name, token))
        self.events.positions.advance(instance_name, token)

    def _connect(self, token: int) -> None:
        self.handler.new_connection(self.connection)
        for name in ("p2", "p1"):
            self._announce(name, token, token)

    def _announce(self, name: str, prev_token: int, new_token: int) -> None:
        self.handler.on_POSITION(
            self.connection, PositionCommand("events", name, prev_token, new_token)
        )

    def _receive_row(self, name: str, token: int) -> None:
        self.handler.on_RDATA(
            self.connection, RdataCommand("events", name, token, ["a"])
        )

    def _miss_a_row(self) -> None:
        # The second writer has seen the row, and announces that all ids up to it are
        # finished.
        self.events.updates = [(11, ["a"])]

    def test_reconnected(self) -> None:
        """
        The row is fetched on the next connection, even if the POSITION of the other
        writer arrives first and covers it.
        """
        self.handler.lost_connection(self.connection)
        self._miss_a_row()
        self._connect(11)
        self.assertEqual(self.rows, [("p1", 11)])

    def test_revealed(self) -> None:
        """
        The POSITION of the other writer, which advances the position shown to users, is
        delivered after the row, once its writer has announced it.
        """
        self._miss_a_row()
        self._announce("p2", 10, 11)
        self.assertEqual((self.rows, self.delivered_positions), ([], []))
        self._announce("p1", 11, 11)
        self._receive_row("p1", 11)
        self.assertEqual(self.rows, [("p1", 11)])
        self.assertEqual(self.delivered_positions, [("p2", 11)])

    def test_announced(self) -> None:
        """The row is fetched when its writer announces it."""
        self._announce("p2", 10, 11)
        self.assertEqual(self.events.current_token("p1"), 11)
        self._miss_a_row()
        self._announce("p1", 11, 11)
        self.assertEqual(self.rows, [("p1", 11)])

    def test_reported(self) -> None:
        """The row is fetched when its writer reports its position on the extension."""
        self._announce("p2", 10, 11)
        self._miss_a_row()
        self.handler.writer_reported(
            self.handler._foreign[self.connection], "p1", {"events": 11}
        )
        self.assertEqual(self.rows, [("p1", 11)])

    def test_late_row(self) -> None:
        """
        A row that arrives after another writer's POSITION covered it is delivered once.
        """
        self._announce("p2", 10, 11)
        self._receive_row("p1", 11)
        self.assertEqual(self.rows, [("p1", 11)])
        self._announce("p1", 11, 11)
        self._receive_row("p1", 11)
        self.assertEqual(self.rows, [("p1", 11)])
