"""Tests for :mod:`scripts.tools.faults.synapse.evidence`."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.faults.synapse.evidence import Evidence, read_witness
from scripts.tools.faults.synapse.verdict import Committed, Delivery
from scripts.tools.faults.synapse.witness import log_name


class ReadWitnessTests(SynchronousTestCase):
    def test_start(self) -> None:
        """The first line has the positions at the start."""
        positions = {"events": {"persister1": 6}}
        line = json.dumps(["start", 12.5, positions])
        self.assertEqual(read_witness(line, []), ("start", 12.5, positions))

    def test_rows(self) -> None:
        """Further lines are deliveries; only streams in memory have eras."""
        starts = [10.0, 20.0]
        for stream, at, era in (
            ("events", 15.0, 0),
            ("typing", 5.0, 0),
            ("typing", 15.0, 1),
            ("typing", 25.0, 2),
        ):
            line = json.dumps(["rows", at, stream, "writer1", 3, []])
            self.assertEqual(
                read_witness(line, starts),
                ("rows", at, (Delivery(stream, 3, era), "writer1")),
            )


class FakeCluster:
    """A cluster of the process ``sync1``, and one event of ``persister1``."""

    starts_of_writer = ()

    def __init__(self, folder: Path) -> None:
        self.witness_folder = folder
        self.pid = 0

    def start(self, at: float, position: int) -> None:
        """Start the process; if it runs, restart it."""
        self.pid += 1
        self.log("start", at, {"events": {"persister1": position}})

    def log(self, kind: str, *values: Any) -> None:
        with (self.witness_folder / log_name("sync1", self.pid)).open("a") as file:
            file.write(json.dumps([kind, *values]) + "\n")

    def process(self, name: str) -> Any:
        return SimpleNamespace(is_running=True, pid=self.pid)

    def is_ours(self, name: str) -> bool:
        return False

    def fetch_typing(self) -> list[int]:
        return []

    def query(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        if "FROM witness.rows" in sql:
            return [(1, "events", 7, "persister1", 20.0)]
        return [(7,)] if sql.endswith("FROM events") else []


class UnannouncedTests(SynchronousTestCase):
    def setUp(self) -> None:
        folder = Path(self.mktemp())
        folder.mkdir()
        self.cluster = FakeCluster(folder)
        self.cluster.start(10.0, 6)
        fake: Any = self.cluster
        self.evidence = Evidence(fake)

    def unannounced(self, within: float) -> list[Committed]:
        self.assertTrue(self.evidence.collect())
        return self.evidence.unannounced(within)[0]

    def test_restart(self) -> None:
        """What a process did not receive, it has not received after its restart."""
        row = Committed("events", 7, "persister1", 20.0)
        self.assertEqual(self.unannounced(30.0), [row])
        self.evidence.judge_until(25.0)
        self.cluster.start(26.0, 7)
        self.assertEqual(self.unannounced(30.0), [row])

    def test_received(self) -> None:
        """A row that arrives in time is announced; one that arrives later is not."""
        self.cluster.log("rows", 45.0, "events", "persister1", 7, [])
        self.assertEqual(self.unannounced(30.0), [])
        self.assertEqual(len(self.unannounced(20.0)), 1)
