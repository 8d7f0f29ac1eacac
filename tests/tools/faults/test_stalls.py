"""Tests for :mod:`scripts.tools.faults.stalls`."""

from __future__ import annotations

from datetime import datetime

from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.faults.stalls import (
    RESET,
    STUCK,
    LoggedStall,
    is_true,
    read_stalls,
    shown_stalls,
)

LOG = """\
2026-11-24T20:00:20+0000 [synapse_replication#info] Connected: redis
2026-11-24T20:00:20+0000 [synapse_replication#warn] events/w1, typing/w1 stalled for \
10 s: w1 announced its exit. Start the writer. (See the runbook: ReplicationStalled, \
writer_gone)
"""
#: 2026-11-24T20:00:10.
SINCE = 1_795_550_410.0


class StallTests(SynchronousTestCase):
    def test_read(self) -> None:
        """The lines about stalls are found in a log."""
        (stall,) = read_stalls("reader1", LOG)
        self.assertEqual(
            (stall.process, stall.reason, stall.names, stall.since),
            ("reader1", "writer_gone", {"w1"}, SINCE),
        )

    def test_read_log_of_synapse(self) -> None:
        """Stalls and resets are found in a log of Synapse, whose times have no zone."""
        at = datetime.fromtimestamp(SINCE + 10).strftime("%Y-%m-%d %H:%M:%S")
        log = (
            f"{at},123 - synapse_replication - 96 - WARNING - sentinel - events/p1, "
            "events/p2 stalled for 10 s: Redis: refused. Wait. (See the runbook: "
            "ReplicationStalled, no_link)\n"
            f"{at},124 - synapse_replication - 96 - INFO - sentinel - Stream typing "
            "of writer1 moved back from 7 to 0: its writer has restarted\n"
        )
        stall, reset = read_stalls("sync1", log)
        self.assertEqual(
            (stall.names, stall.since, stall.reason), ({"p1", "p2"}, SINCE, "no_link")
        )
        self.assertEqual(
            (reset.writers, reset.since, reset.reason),
            ("typing/writer1", SINCE + 10, RESET),
        )

    def test_shown(self) -> None:
        """The stalls and stuck ids that a status shows are found, and nothing else."""
        writer = {
            "stream_name": "events",
            "instance_name": "w1",
            "condition": "stalled",
            "reason": "writer_gone",
            "stalled_for": 7.9,
            "detail": "w1 announced its exit",
        }
        good = {**writer, "condition": "up_to_date", "reason": None}
        stuck_id = {
            "stream_name": "events",
            "instance_name": "w2",
            "id": 7,
            "age": 12.0,
            "session": "the answer to COMMIT was lost",
        }
        status = {"writers": [writer, good], "stuck_ids": [stuck_id]}
        stall, stuck = shown_stalls("reader1", status)
        self.assertEqual(
            str(stuck), "reader1: events/w2: stuck_id: the answer to COMMIT was lost"
        )
        self.assertEqual(
            str(stall), "reader1: events/w1: writer_gone: w1 announced its exit"
        )
        self.assertEqual((stall.names, stall.at - stall.since), ({"w1"}, 7))

    def test_judge(self) -> None:
        """A stall must fit the fault in its time, its reason and its writer."""

        def judge(
            scenario: str, reason: str, writer: str, since: float = SINCE
        ) -> bool:
            stall = LoggedStall("reader1", f"events/{writer}", since, 0, "", reason)
            return is_true(stall, scenario, SINCE, SINCE + 10)

        self.assertTrue(judge("writer-frozen", "writer_gone", "event_writer1"))
        self.assertFalse(judge("writer-frozen", "writer_gone", "event_writer2"))
        self.assertFalse(judge("writer-frozen", "no_progress", "event_writer1"))
        self.assertFalse(
            judge("writer-frozen", "writer_gone", "event_writer1", SINCE + 30)
        )
        self.assertFalse(judge("reader-frozen", "writer_gone", "event_writer1"))
        self.assertTrue(judge("redis-killed", "no_link", "event_writer2"))
        self.assertFalse(judge("redis-killed", "no_progress", "event_writer2"))
        self.assertFalse(judge("writer-killed", RESET, "event_writer1"))
        self.assertFalse(judge("hostile-bodies", "writer_gone", "event_writer1"))
        self.assertTrue(judge("writer-added", "writer_gone", "event_writer2"))
        self.assertFalse(judge("writer-killed", STUCK, "event_writer1"))
        self.assertTrue(judge("writer-killed-then-moved", STUCK, "event_writer1"))
