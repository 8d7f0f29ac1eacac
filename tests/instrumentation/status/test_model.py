"""Tests for :mod:`synapse_replication.instrumentation.status.model`."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.app.status_page import judge
from synapse_replication.errors import StatusError
from synapse_replication.instrumentation.status.assessment import (
    Standing,
    assess,
    describe_process,
)
from synapse_replication.instrumentation.status.model import (
    HINTS,
    Condition,
    DuplicateStatus,
    LinkStatus,
    PeerStatus,
    ProcessStatus,
    StallReason,
    WriterStatus,
    decode_status,
    describe_lag,
    describe_writer,
    encode_status,
)
from synapse_replication.streams.stuck_ids import StuckId

STALLED = WriterStatus(
    "events",
    "w1",
    Condition.STALLED,
    10,
    30,
    20,
    12.5,
    reason=StallReason.CATCH_UP_FAILS,
    stalled_for=31.0,
    detail="the database is away",
    history=(0, 5, 20),
)
LIVE = WriterStatus("typing", "w2", Condition.LIVE, 7, 7)
STATUS = ProcessStatus(
    "x.test",
    "me",
    "0.1.0",
    3600.0,
    (),
    (STALLED, LIVE),
    (LinkStatus("redis", 1, 60.0, "", 2, 300),),
    (PeerStatus("w1", "abc", "0.1.0", "host:1", 1.0, False),),
    (DuplicateStatus("w2", "host:2 and host:3", 4.0),),
)


class StatusTests(SynchronousTestCase):
    def test_round_trip(self) -> None:
        """A status survives the round trip through JSON."""
        self.assertEqual(decode_status(encode_status(STATUS)), STATUS)

    def test_no_status(self) -> None:
        """Text that is not a status is rejected with an error that states this."""
        for text in (b"", b"[]", b"{}", b"<html>", b'{"writers": 3}', b"\xff"):
            error = self.assertRaises(StatusError, decode_status, text)
            self.assertIn("not a status", str(error))

    def test_stalled(self) -> None:
        """``stalled`` returns only the stalled writers."""
        self.assertEqual(STATUS.stalled, (STALLED,))

    def test_hints(self) -> None:
        """There is advice for each reason of a stall."""
        self.assertEqual(set(HINTS), set(StallReason))

    def test_one_line(self) -> None:
        """
        The line of a writer names its condition, with duration, reason or progress.
        """
        catching_up = WriterStatus(
            "events", "w1", Condition.CATCHING_UP, 12_134, 98_311, 86_177, 3.0, 100
        )
        lines = {
            describe_writer(
                STALLED
            ): "events/w1 stalled for 31 s: the database is away",
            describe_writer(LIVE): "typing/w2 live",
            describe_writer(catching_up): "events/w1 catching up, 12,034 of 98,211",
        }
        for line, expected in lines.items():
            self.assertEqual(line, expected)

    def test_queued_rows(self) -> None:
        """Rows that wait in the queue are described by their number."""
        writer = WriterStatus("events", "w1", Condition.CATCHING_UP, 1, 2001, 2000)
        self.assertEqual(describe_writer(writer), "events/w1 catching up, 2,000 behind")

    def test_lag_of_silent_writer(self) -> None:
        """
        The lag of a writer without heartbeats or position is a lower bound or unknown.
        """
        gone = replace(STALLED, reason=StallReason.WRITER_GONE)
        self.assertEqual(describe_lag(LIVE), "0")
        self.assertEqual(describe_lag(STALLED), "20")
        self.assertEqual(describe_lag(gone), "20+")
        self.assertEqual(describe_lag(replace(gone, lag=0)), "?")
        waiting = replace(LIVE, condition=Condition.WAITING)
        self.assertEqual(describe_lag(waiting), "?")


class DescribeProcessTests(SynchronousTestCase):
    def describe(self, *writers: WriterStatus, **more: Any) -> str:
        status = ProcessStatus("x.test", "w9", "1", 1.0, (), writers, (), (), ())
        return describe_process(replace(status, **more))

    def test_worst_first(self) -> None:
        """
        Problems are described before work in progress, and work in progress before
        normal operation.
        """
        fetching = WriterStatus(
            "events", "w1", Condition.CATCHING_UP, 12_134, 98_311, 86_177, 3.0, 100
        )
        waiting = WriterStatus("caches", "w1", Condition.WAITING, 1, 1)
        twice = (DuplicateStatus("w3", "", 1.0),)
        stuck = (StuckId("events", 7, "w1", 11.0),)
        down = (LinkStatus("redis", 0, 11.0, "refused"),)
        deaf = {"links": down, "cut_off_for": 11.0}
        for expected, described in (
            (
                "two processes are called w3",
                self.describe(STALLED, duplicates=twice, **deaf),
            ),
            (
                "stalled: events/w1: the database is away",
                self.describe(LIVE, STALLED, fetching, **deaf),
            ),
            (
                "stalled: events/w1: the database is away, and 1 more",
                self.describe(STALLED, replace(STALLED, stalled_for=1.0)),
            ),
            ("no link is up", self.describe(fetching, **deaf)),
            (
                "stuck: id 7 of events, written by w1, is not finished",
                self.describe(fetching, stuck_ids=stuck),
            ),
            ("waiting for caches/w1", self.describe(LIVE, fetching, waiting)),
            (
                "catching up events/w1 12,034 of 98,211",
                self.describe(LIVE, fetching),
            ),
            ("not ready: no link is up", self.describe(not_ready=("no link is up",))),
            ("live: 1 stream of 1 writer", self.describe(LIVE)),
            (
                "live: 1 stream of 2 writers, typing/w3 7 behind",
                self.describe(LIVE, replace(LIVE, instance_name="w3", lag=7)),
            ),
            (
                "live: 1 stream of 1 writer; partial resync of typing/w2",
                self.describe(replace(LIVE, was_resynced=True)),
            ),
            (
                "live: 6 streams of 1 writer; partial resync of s0/w2, s1/w2, s2/w2, "
                "s3/w2 and 2 more",
                self.describe(
                    *(
                        replace(LIVE, stream_name=f"s{number}", was_resynced=True)
                        for number in range(6)
                    )
                ),
            ),
            (
                "live: follows no other process",
                self.describe(replace(LIVE, condition=Condition.WRITTEN_HERE)),
            ),
        ):
            self.assertEqual(described, expected)


class AssessTests(SynchronousTestCase):
    """Tests that the page and the service manager's line use the same order."""

    def test_same_order(self) -> None:
        """Page and line describe the same condition for any combination of writers."""
        fetching = WriterStatus("events", "w1", Condition.CATCHING_UP, 1, 9, 8, 3.0, 0)
        draining = replace(fetching, condition=Condition.DRAINING)
        waiting = replace(fetching, condition=Condition.WAITING)
        for writers, standing, page, line in (
            ((draining, fetching), Standing.CATCHING_UP, "1 of 2", "catching up"),
            ((fetching, waiting), Standing.WAITING, "Waiting", "waiting"),
            ((draining, LIVE), Standing.DRAINING, "Draining", "draining"),
            ((waiting, STALLED), Standing.STALLED, "1 of 2", "stalled"),
        ):
            status = ProcessStatus("x.test", "w9", "1", 1.0, (), writers, (), (), ())
            self.assertEqual(assess(status).standing, standing)
            self.assertIn(page, judge(status).text)
            self.assertTrue(describe_process(status).startswith(line))
