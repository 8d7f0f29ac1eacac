"""Tests for :mod:`scripts.tools.faults.synapse.monitored`."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.faults.synapse.alarms import Fault
from scripts.tools.faults.synapse.monitored import (
    AFTER,
    DATABASE,
    LINK,
    PATIENCE,
    UNANNOUNCED,
    Alarm,
    MonitoredResult,
    is_caused,
    read_alarms,
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


class ResultTests(SynchronousTestCase):
    def test_verdict(self) -> None:
        """A false alarm, an unnamed process, or a monitor that failed is bad."""

        def result(
            named: float | None = 5.0, false: tuple[str, ...] = (), exit_status: int = 0
        ) -> MonitoredResult:
            return MonitoredResult(
                60.0, 1, 9, 9, {"w1": [named]}, false, false, 0, 0, exit_status
            )

        self.assertTrue(result().is_good)
        self.assertFalse(result(named=None).is_good)
        self.assertIn("w1 killed, named after never s", list(result(None).lines()))
        self.assertFalse(result(false=("w2",)).is_good)
        self.assertFalse(result(exit_status=1).is_good)
