"""Tests for the streamer inside a host, and for the notifier that starts it."""

from __future__ import annotations

import sys
from typing import Any

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.dropin.id_generators import DropInIdGenerator
from synapse_replication.dropin.streamer import (
    NOTIFICATION_PAUSE,
    NOTIFIED_INTERVAL,
    combine_notifications,
    with_combining,
)
from synapse_replication.wire.commands import PositionCommand, RdataCommand
from tests.dropin.host import (
    FakeHomeserver,
    FakeStream,
    HostNotifier,
    HostWithHandler,
    SingleCommandConnection,
    fake_modules,
)


class CombiningTests(SynchronousTestCase):
    """Tests for notifications that are combined."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.notifier: Any = with_combining(HostNotifier)()
        self.calls: list[float] = []
        self.notifier.add_replication_callback(
            lambda: self.calls.append(self.clock.seconds())
        )

    def _combine(self) -> None:
        hs = FakeHomeserver()
        hs.reactor = self.clock
        hs.replication_notifier = self.notifier
        combine_notifications(hs)

    def test_before_combining(self) -> None:
        """Without a reactor, each notification is delivered at once."""
        self.notifier.notify_replication()
        self.notifier.notify_replication()
        self.assertEqual(self.calls, [0.0, 0.0])

    def test_one_turn(self) -> None:
        """The notifications of one turn call the callbacks once, in the next turn."""
        self._combine()
        self.notifier.notify_replication()
        self.notifier.notify_replication()
        self.assertEqual(self.calls, [])
        self.clock.advance(0)
        self.assertEqual(self.calls, [0.0])
        self.clock.advance(1)
        self.assertEqual(self.calls, [0.0])

    def test_later_turns(self) -> None:
        """Each turn with a notification is followed by a call."""
        self._combine()
        for _ in range(2):
            self.clock.advance(1)
            self.notifier.notify_replication()
        self.clock.advance(1)
        self.assertEqual(self.calls, [2.0, 3.0])

    def test_from_a_callback(self) -> None:
        """A notification by a callback is delivered in the turn after it."""
        self._combine()
        self.notifier.add_replication_callback(
            lambda: self.notifier.notify_replication() if len(self.calls) < 3 else None
        )
        self.notifier.notify_replication()
        for _ in range(5):
            self.clock.advance(0)
        self.assertEqual(self.calls, [0.0, 0.0, 0.0])

    def test_favoured_callback(self) -> None:
        """
        A favoured callback is called in the next turn, as before; the others in the
        next turn too, but not again until the pause has ended.
        """
        favoured: list[float] = []
        self.notifier.add_replication_callback(
            callback := lambda: favoured.append(self.clock.seconds())
        )
        self._combine()
        self.notifier.favour(callback)
        for _ in range(5):
            self.notifier.notify_replication()
            self.clock.advance(NOTIFICATION_PAUSE / 4)
        self.assertEqual(
            favoured, [NOTIFICATION_PAUSE * n / 4 for n in (1, 2, 3, 4, 5)]
        )
        self.assertEqual(
            self.calls, [NOTIFICATION_PAUSE / 4, NOTIFICATION_PAUSE * 5 / 4]
        )
        self.clock.advance(NOTIFICATION_PAUSE)
        self.assertEqual(len(self.calls), 2)
        self.notifier.notify_replication()
        self.clock.advance(0)
        self.assertEqual(len(self.calls), 3)

    def test_clock_set_back(self) -> None:
        """If the clock is set back during a pause, all callbacks are called again."""
        self._combine()
        self.notifier.favour(lambda: None)
        for _ in range(2):
            self.notifier.notify_replication()
            self.clock.advance(0)
        self.clock.rightNow -= 3600
        self.notifier.notify_replication()
        self.clock.advance(0)
        self.assertEqual(self.calls, [0.0, -3600.0])

    def test_a_failing_callback(self) -> None:
        """After a callback failed, later notifications are delivered."""
        self._combine()
        failures = [ValueError("a bug of the host")]

        def fail_once() -> None:
            if failures:
                raise failures.pop()

        self.notifier.add_replication_callback(fail_once)
        self.notifier.notify_replication()
        with self.assertRaises(ValueError):
            self.clock.advance(0)
        self.notifier.notify_replication()
        self.clock.advance(0)
        self.assertEqual(self.calls, [0.0, 0.0])

    def test_not_replaced(self) -> None:
        """A notifier of the host itself is not changed."""
        hs = FakeHomeserver()
        hs.replication_notifier = HostNotifier()
        combine_notifications(hs)
        self.assertEqual(hs.reactor.getDelayedCalls(), [])


class StreamerTests(SynchronousTestCase):
    """Tests for DropInStreamer."""

    def setUp(self) -> None:
        self.events = FakeStream("events", {"w": 5, "master": 1})
        fake_modules(self, {"events": lambda hs: self.events})
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
