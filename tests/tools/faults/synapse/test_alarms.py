"""Tests for :mod:`scripts.tools.faults.synapse.alarms`."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.faults.stalls import AFTER, RESET, LoggedStall
from scripts.tools.faults.synapse.alarms import RESET_WITHIN, Fault, is_true

CUT = Fault(("cut-publishing",), {"persister1"}, 100.0, 110.0)
REDIS = Fault(("redis-away",), set(), 200.0, 208.0)
POSTGRES = Fault(("postgres-restart", "pause"), {"sync1"}, 300.0, 301.0)


def judge(
    reason: str, since: float, writers: str = "events/persister1", process: str = "m"
) -> bool:
    stall = LoggedStall(process, writers, since, 0, "", reason)
    return is_true(stall, [CUT, REDIS, POSTGRES], [400.0])


class AlarmTests(SynchronousTestCase):
    def test_writer(self) -> None:
        """Only a process that a fault concerns may be gone, and only then."""
        self.assertTrue(judge("writer_gone", 101.0))
        self.assertFalse(judge("writer_gone", 101.0, "events/persister2"))
        self.assertFalse(judge("writer_gone", 101.0, "caches/m, events/persister1"))
        self.assertFalse(judge("writer_gone", 110.0 + AFTER + 1.0))
        self.assertFalse(judge("no_progress", 101.0))

    def test_link(self) -> None:
        """A link is down where it was cut; without Redis, at all processes."""
        self.assertTrue(judge("no_link", 101.0, "events/persister2", "persister1"))
        self.assertFalse(judge("no_link", 101.0, "events/persister2"))
        self.assertTrue(judge("no_link", 201.0))
        self.assertFalse(judge("writer_gone", 201.0))

    def test_source(self) -> None:
        """Rows cannot be fetched without PostgreSQL, or from a process that is down."""
        self.assertTrue(judge("catch_up_fails", 301.0))
        self.assertTrue(judge("source_silent", 301.0))
        self.assertFalse(judge("source_silent", 201.0))
        self.assertFalse(judge("writer_gone", 301.0))

    def test_reset(self) -> None:
        """A reset is true if its writer was started before."""
        self.assertTrue(judge(RESET, 405.0, "typing/writer1"))
        self.assertFalse(judge(RESET, 400.0 + RESET_WITHIN + 1.0, "typing/writer1"))
        self.assertFalse(judge(RESET, 101.0, "typing/writer1"))
        self.assertFalse(judge(RESET, 405.0, "events/persister1"))
