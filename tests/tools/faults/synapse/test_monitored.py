"""Tests for :mod:`scripts.tools.faults.synapse.monitored`."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.faults.synapse.alarms import Fault
from scripts.tools.faults.synapse.monitored import (
    AFTER,
    DATABASE,
    LINK,
    PATIENCE,
    UNANNOUNCED,
    UNVERIFIED_BEFORE,
    Alarm,
    MonitoredResult,
    find_wrong_counts,
    is_caused,
    read_alarms,
    read_counts,
)
from scripts.tools.faults.synapse.verdict import Committed
from synapse_replication.handlers.events import RowsUnannounced
from synapse_replication.instrumentation.prometheus import (
    PrometheusObserver,
    ReplicationMetrics,
)


def status(**wrong: Any) -> dict[str, Any]:
    """Return a status of a monitor."""
    well = {
        "instances": [{"instance_name": "w1", "problem": ""}],
        "not_ready": [],
        "unannounced": 0,
        "stuck_ids": [],
        "duplicates": [],
    }
    return {**well, **wrong}


class ReadAlarmsTests(SynchronousTestCase):
    def test_well(self) -> None:
        """Nothing is wrong."""
        self.assertEqual(read_alarms(status()), {})

    def test_each_kind(self) -> None:
        """Each problem has what it is about; a problem of an instance is one alarm."""
        found = read_alarms(
            status(
                instances=[{"instance_name": "w1", "problem": "refused"}],
                not_ready=[
                    "w1: refused",
                    "w2 has not answered yet",
                    "no link is up",
                    "cannot read the database: gone",
                ],
                unannounced=2,
                stuck_ids=["x"],
            )
        )
        self.assertEqual(
            list(found), ["w1", "w2", LINK, DATABASE, UNANNOUNCED, "stuck_ids"]
        )


class IsCausedTests(SynchronousTestCase):
    def caused(self, about: str, at: float, *names: str, lost: float = -1e9) -> bool:
        fault = Fault(names, {"w1"}, 100.0, 110.0)
        return is_caused(Alarm(about, "", at, at), [fault], [lost])

    def test_instances(self) -> None:
        """Only a victim, and only while the fault lasts or just after it."""
        self.assertTrue(self.caused("w1", 105, "kill-w1"))
        self.assertFalse(self.caused("w2", 105, "kill-w1"))
        self.assertFalse(self.caused("w1", 99, "kill-w1"))
        self.assertFalse(self.caused("w1", 111 + AFTER, "kill-w1"))

    def test_servers(self) -> None:
        """A lost link or database is caused by the faults of its server only."""
        self.assertTrue(self.caused(LINK, 105, "redis-away"))
        self.assertFalse(self.caused(LINK, 105, "kill-w1"))
        self.assertTrue(self.caused(DATABASE, 105, "pause", "postgres-restart"))
        self.assertFalse(self.caused(DATABASE, 105, "redis-away"))

    def test_rows(self) -> None:
        """Rows are unannounced if no process received one that is old enough."""
        self.assertTrue(self.caused(UNANNOUNCED, 200 + PATIENCE, "pause", lost=200))
        self.assertFalse(self.caused(UNANNOUNCED, 201, "pause", lost=200))
        self.assertFalse(self.caused(UNANNOUNCED, 300, "client-kill"))


class CountsTests(SynchronousTestCase):
    ROWS = (
        Committed("events", 5, "p1", at=100.0),
        Committed("events", 6, "p1", at=200.0),
        Committed("receipts", 9, "w1", at=200.0),
    )

    def wrong(self, missed: int, *names: str, **counts: int) -> list[str]:
        """Return what is wrong if the last rows were only late, or were removed."""
        found = {(name, self.ROWS[-1].writer): n for name, n in counts.items()}
        found["events", "p1"] = counts.pop("events", 0)
        found.pop(("events", "w1"), None)
        end = 100.0 + UNVERIFIED_BEFORE
        return find_wrong_counts(
            found, self.ROWS[:missed], self.ROWS, [Fault(names, set(), end, end)]
        )

    def test_counts(self) -> None:
        """Each row that reached no process is counted; one that was removed may be."""
        self.assertEqual(self.wrong(2, events=2), [])
        self.assertEqual(self.wrong(2, events=2, receipts=1), [])
        self.assertEqual(
            self.wrong(2, events=2, receipts=2),
            [
                "receipts of w1: 2 rows counted, and 0 to 1 reached no process in "
                "time: 9 at 00:03:20"
            ],
        )
        self.assertEqual(
            self.wrong(2, events=1),
            [
                "events of p1: 1 rows counted, and 2 to 2 reached no process in time: "
                "5 at 00:01:40, 6 at 00:03:20"
            ],
        )
        self.assertEqual(len(self.wrong(3, events=2)), 1)

    def test_link(self) -> None:
        """Rows from just before a fault of the link need not be counted."""
        self.assertEqual(self.wrong(1, "redis-kill"), [])
        self.assertEqual(len(self.wrong(1, "pause")), 1)
        self.assertEqual(len(self.wrong(2, "redis-kill")), 1)

    def test_read(self) -> None:
        """The counts are read from the metrics, by stream and writer."""
        registry = CollectorRegistry()
        observer = PrometheusObserver(ReplicationMetrics(registry), "x.test")
        self.assertEqual(read_counts(generate_latest(registry).decode()), {})
        observer.observe(RowsUnannounced("events", "p1", (5, 6)))
        counts = read_counts(generate_latest(registry).decode())
        self.assertEqual(counts, {("events", "p1"): 2})


class ResultTests(SynchronousTestCase):
    def test_verdict(self) -> None:
        """A false alarm, an unnamed process, or a monitor that failed is bad."""

        def result(
            named: float | None = 5.0,
            false: tuple[str, ...] = (),
            exit_status: int = 0,
            wrong: tuple[str, ...] = (),
        ) -> MonitoredResult:
            return MonitoredResult(
                *(60.0, 1, 9, 9, {"w1": [named]}, false, false),
                *(0, 0, 0, wrong, exit_status),
            )

        self.assertTrue(result().is_good)
        self.assertFalse(result(named=None).is_good)
        self.assertIn("w1 killed, named after never s", list(result(None).lines()))
        self.assertFalse(result(false=("w2",)).is_good)
        self.assertFalse(result(exit_status=1).is_good)
        self.assertFalse(result(wrong=("events of p1",)).is_good)
