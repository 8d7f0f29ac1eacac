"""Tests for :mod:`synapse_replication.instrumentation.status.stalls`."""

from __future__ import annotations

from typing import Any

import attrs
from twisted.internet.task import Clock
from twisted.logger import Logger, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.events import PeerHeartbeat
from synapse_replication.instrumentation.status.stalls import StallLog, sentence
from synapse_replication.instrumentation.status.status_observer import StatusObserver
from synapse_replication.instrumentation.turns import Stall
from synapse_replication.streams.stuck_ids import StuckId
from tests.support.known_readers import KnownReaders

WRITERS = [("events", "w1"), ("caches", "w1"), ("typing", "w2")]


class StallLogTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.observer = StatusObserver(
            "x.test", "me", WRITERS, monotonic=self.clock.seconds
        )
        self.known = KnownReaders(self.observer)
        self.events: list[Any] = []
        logger = Logger("test", observer=self.events.append)  # type: ignore[arg-type]
        self.log = StallLog(logger, self.clock.seconds)
        self.connect()

    def connect(self) -> None:
        self.known.link_up()
        for key in WRITERS:
            self.known.go_live(*key, 5)

    def lines(self, seconds: int = 5) -> list[str]:
        """Update the log every 5 s for some time, and return what was logged."""
        for _ in range(0, seconds, 5):
            self.clock.advance(5)
            self.log.update(self.observer.snapshot())
        lines = [f"{e['log_level'].name} {formatEvent(e)}" for e in self.events]
        self.events.clear()
        return lines

    def leave(self, name: str) -> None:
        self.observer.observe(PeerHeartbeat(name, "e", "1", "host", True, {}))

    def test_nothing(self) -> None:
        """Without a stall nothing is logged."""
        self.assertEqual(self.lines(300), [])

    def test_from_its_beginning_to_its_end(self) -> None:
        """
        All stalls with the same cause share one line with a hint, which is repeated
        each minute, and one line at their end.
        """
        self.known.link_lost(why="it was cut")
        (line,) = self.lines(60)
        self.assertIn("warn caches/w1, events/w1, typing/w2 stalled for 10 s", line)
        self.assertIn("redis: it was cut. Check that Redis", line)
        self.assertIn("ReplicationStalled, no_link)", line)
        self.assertEqual(len(self.lines(60)), 1)
        self.connect()
        self.assertEqual(
            self.lines(60),
            ["info caches/w1, events/w1, typing/w2 no longer stalled"],
        )

    def test_reactor_blocked(self) -> None:
        """The line says what was executed, or that this was not seen."""
        self.log.report_turns(None)
        self.log.report_turns(Stall(2, 0.5, "f at sink.py:3"))
        self.log.report_turns(Stall(1, 0.3, ""))
        seen, unseen = (formatEvent(event) for event in self.events)
        self.assertIn("blocked for 0.50 s", seen)
        self.assertIn("It was executing f at sink.py:3", seen)
        self.assertIn("It ended before it was seen what was executed", unseen)

    def test_stuck_id(self) -> None:
        """A stuck id is logged each minute, once its session is known."""
        stuck = StuckId("events", 7, "w1", 15.0)
        self.known.connect(stuck_ids=lambda: [stuck])
        self.assertEqual(self.lines(10), [])
        stuck = attrs.evolve(stuck, session="session 12, idle", hint="End it.")
        (line,) = self.lines(60)
        self.assertIn("id 7 of events, written by w1, is not finished for 15 s", line)
        self.assertIn("session 12, idle. End it. (See the runbook", line)
        self.assertEqual(len(self.lines(60)), 1)
        self.known.connect(stuck_ids=tuple)
        self.assertEqual(
            self.lines(10),
            ["info No longer true: id 7 of events, written by w1, is not finished"],
        )
        self.assertEqual(self.lines(10), [])

    def test_sentences(self) -> None:
        """A detail that is a question is followed by no full stop."""
        self.assertEqual(sentence("is it running?"), "is it running?")
        self.assertEqual(sentence("refused"), "refused.")

    def test_new_stall(self) -> None:
        """A new stream or a new cause is logged immediately."""
        self.leave("w1")
        (line,) = self.lines(15)
        self.assertIn("caches/w1, events/w1 stalled", line)
        self.leave("w2")
        (line,) = self.lines(10)
        self.assertIn("typing/w2 stalled", line)
        self.assertIn("w2 announced its exit", line)
        self.known.link_lost(why="it was cut")
        (line,) = self.lines(10)
        self.assertIn("no_link", line)

    def test_two_groups(self) -> None:
        """Stalls with different causes each have a line per minute."""
        self.leave("w1")
        self.leave("w2")
        self.assertEqual(len(self.lines(15)), 2)
        self.assertEqual(len(self.lines(60)), 2)

    def test_fields(self) -> None:
        """The log event has reason and streams as fields."""
        self.leave("w2")
        self.clock.advance(10)
        self.log.update(self.observer.snapshot())
        (event,) = self.events
        self.assertEqual(
            (event["reason"], event["streams"]), ("writer_gone", "typing/w2")
        )
