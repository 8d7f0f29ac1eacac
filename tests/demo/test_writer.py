"""Tests for :mod:`synapse_replication.demo.writer`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.demo.script import Write
from synapse_replication.demo.writer import BEGIN_INTERVAL, MAX_SLEEP, ScriptWriter
from tests.demo.doubles import MemoryHost

WRITES = [
    Write("typing", "typing_writer", [["a"]], 0),
    Write("typing", "typing_writer", [["b"], ["c"]], 10),
]


class ScriptWriterTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.begin_file = Path(self.mktemp())
        self.log_file = Path(self.mktemp())
        self.written: list[list[Any]] = []

    def write(self, rows: list[Any]) -> int:
        self.written.append(rows)
        return len(self.written)

    def start(
        self, write: Callable[[list[Any]], Any], rate: float = 10.0
    ) -> MemoryHost:
        host = MemoryHost(write)
        self.writer = ScriptWriter(
            host, iter(WRITES), rate, self.begin_file, self.log_file
        )
        self.writer.startService()
        return host

    def log(self) -> list[Any]:
        return [json.loads(line) for line in self.log_file.read_text().splitlines()]

    def test_waits_for_begin_file(self) -> None:
        """Nothing is written before the begin file exists."""
        host = self.start(self.write)
        host.reactor.pump([BEGIN_INTERVAL] * 100)
        self.assertEqual(self.written, [])
        self.begin_file.touch()
        host.reactor.advance(BEGIN_INTERVAL)
        self.assertEqual(self.written, [[["a"]]])

    def test_paced_by_rate(self) -> None:
        """Each write is made and logged once the previous rows are due."""
        self.begin_file.touch()
        host = self.start(self.write)
        host.reactor.advance(0.9)
        self.assertEqual(len(self.written), 1)
        host.reactor.advance(0.2)
        self.assertEqual(self.written, [[["a"]], [["b"], ["c"]]])
        self.assertEqual(
            self.log(),
            [
                {
                    "stream": "typing",
                    "writer": "typing_writer",
                    "token": 1,
                    "rows": [["a"]],
                },
                {
                    "stream": "typing",
                    "writer": "typing_writer",
                    "token": 2,
                    "rows": [["b"], ["c"]],
                },
                {"finished": True},
            ],
        )

    def test_failure_is_logged(self) -> None:
        """A write that fails is logged and reported."""

        async def fail(rows: list[Any]) -> int:
            raise ValueError("no")

        self.begin_file.touch()
        host = self.start(fail)
        self.assertEqual(self.log(), [{"failed": "no"}])
        self.assertEqual(host.failures, ["no"])

    def test_stops_before_a_later_write(self) -> None:
        """A stop finishes promptly, however late the next write is due."""
        self.begin_file.touch()
        host = self.start(self.write, rate=0.01)
        ended = self.writer.stopService()
        assert isinstance(ended, Deferred)
        host.reactor.pump([MAX_SLEEP] * 2)
        self.successResultOf(ended)
        self.assertEqual(self.log()[-1], {"finished": False})

    def test_stops_between_writes(self) -> None:
        """A stop waits for the current write, and no further write is made."""
        under_way: Deferred[int] = Deferred()
        self.begin_file.touch()
        host = self.start(lambda rows: under_way)
        ended = self.writer.stopService()
        assert isinstance(ended, Deferred)
        self.assertNoResult(ended)
        under_way.callback(1)
        host.reactor.advance(1)
        self.successResultOf(ended)
        self.assertEqual(self.log()[-1], {"finished": False})
        self.assertEqual(len(self.log()), 2)
