"""Tests for :mod:`synapse_replication.app.announcements`."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.app.announcements import AnnouncementReader
from synapse_replication.handlers.events import DiscardReason
from synapse_replication.wire.commands import Command, PositionCommand, RdataCommand
from tests.support.recording_observer import RecordingObserver


class AnnouncementReaderTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.observer = RecordingObserver()
        self.received: list[Command] = []
        self.reader = AnnouncementReader(
            {"events"}, self.observer, self.received.append
        )

    def test_valid(self) -> None:
        """Valid lines are passed on, and nothing is reported."""
        self.reader.tap("c", b"RDATA events w1 7 [1]")
        self.reader.tap("c", b"RDATA events w1 batch [2]")
        self.reader.tap("c", b"POSITION events w1 7 9")
        self.assertEqual(
            self.received,
            [
                RdataCommand("events", "w1", 7, [1]),
                RdataCommand("events", "w1", None, [2]),
                PositionCommand("events", "w1", 7, 9),
            ],
        )
        self.assertEqual(self.observer.discards, {})

    def test_row_that_is_not_json(self) -> None:
        """A row that is not JSON is announced, and counted as discarded."""
        self.reader.tap("c", b"RDATA events w1 7 [1")
        self.assertEqual(self.received, [RdataCommand("events", "w1", 7, None)])
        self.assertEqual(
            self.observer.discards, {("events", "w1", DiscardReason.UNDECODABLE): 1}
        )
        ((what, _),) = self.observer.failures
        self.assertEqual(what, "decoding rows of events")

    def test_line_that_is_not_valid(self) -> None:
        """A row that is lost with its line is counted; a stream may be made up."""
        for line in (b"RDATA events w1 x [1]", b"RDATA made.up w1 x [1]", b"WHAT \xff"):
            self.reader.tap("c", line)
        self.assertEqual(self.received, [])
        self.assertEqual(
            self.observer.discards,
            {
                ("events", "w1", DiscardReason.UNPARSABLE): 1,
                ("made.up", "w1", DiscardReason.UNKNOWN_STREAM): 1,
            },
        )
