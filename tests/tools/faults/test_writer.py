"""Tests for :mod:`scripts.tools.faults.writer`."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import attrs
import psycopg2
from twisted.internet import task
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.client import HTTPConnectionPool
from twisted.web.http import HTTPChannel

from scripts.tools.faults import writer
from scripts.tools.faults.writer import (
    REFUSED_PAUSE,
    SteadyWriter,
    own_writes,
)
from synapse_replication.demo.script import Write, read_script
from synapse_replication.recordings.reader import shipped_recording
from tests.demo.doubles import MemoryHost

#: Interval in s at which a row is due.
ROW = 0.1


class SteadyWriterTests(SynchronousTestCase):
    def setUp(self) -> None:
        # It would call the reactor during later tests.
        self.patch(writer, "LoopingCall", Mock())
        self.begin_file = Path(self.mktemp())
        self.begin_file.touch()
        self.end_file = Path(self.mktemp())
        self.log_file = Path(self.mktemp())
        self.written: list[list[Any]] = []

    def write(self, rows: list[Any]) -> int:
        self.written.append(rows)
        return len(self.written)

    def start(self, write: Callable[[list[Any]], Any]) -> MemoryHost:
        host = MemoryHost(write)
        writes = (Write("typing", "typing_writer", [[n]], n) for n in range(100))
        steady = SteadyWriter(host, writes, 1 / ROW, self.begin_file, self.log_file)
        steady.end_file = self.end_file
        steady.startService()
        return host

    def log(self) -> list[Any]:
        return [json.loads(line) for line in self.log_file.read_text().splitlines()]

    def test_ends_on_request(self) -> None:
        """
        The writer writes until the end file exists, and logs that it has finished.
        """
        host = self.start(self.write)
        host.reactor.pump([ROW] * 5)
        count = len(self.written)
        self.assertGreater(count, 4)
        self.end_file.touch()
        host.reactor.pump([ROW] * 20)
        self.assertEqual(len(self.written), count)
        self.assertEqual(self.log()[-1], {"finished": True})

    def test_rejected_write_is_skipped(self) -> None:
        """A write that the database rejects is not logged, and the next one is made."""
        refused: list[list[Any]] = []

        def write(rows: list[Any]) -> int:
            if not refused:
                refused.append(rows)
                raise psycopg2.OperationalError("No space left on device")
            return self.write(rows)

        host = self.start(write)
        host.reactor.pump([ROW] * int(2 * REFUSED_PAUSE / ROW + 10))
        self.end_file.touch()
        host.reactor.pump([ROW] * 20)
        self.assertEqual(refused, [[[0]]])
        self.assertNotIn([[0]], self.written)
        self.assertGreater(len(self.written), 4)
        self.assertEqual(len(self.log()), len(self.written) + 1)

    def test_restart_appends_to_log(self) -> None:
        """A restarted process appends to its log."""
        self.log_file.write_text('{"finished": false}\n')
        self.start(self.write)
        self.assertEqual(len(self.log()), 2)


class CountTests(SynchronousTestCase):
    def test_timers_of_http_connections(self) -> None:
        """They are not counted: the connections are."""
        reactor = task.Clock()
        pool = HTTPConnectionPool(reactor)
        calls = [
            reactor.callLater(240, pool._removeConnection, ("key",), None),
            reactor.callLater(300, HTTPChannel().timeoutConnection),
            reactor.callLater(5, reactor.seconds),
        ]
        self.assertEqual(
            [writer.is_counted(call) for call in calls], [False, False, True]
        )


class OwnWritesTests(SynchronousTestCase):
    def test_a_part_of_a_script(self) -> None:
        """Writes that were omitted at the beginning of a script cause no waiting."""
        script = list(read_script(shipped_recording(), 400))[100:]
        first = script[0]
        own = list(own_writes(script, first.instance_name))
        self.assertEqual(own[0], attrs.evolve(first, row_number=0))
        self.assertEqual({write.instance_name for write in own}, {first.instance_name})

    def test_moved(self) -> None:
        """
        Tables that were moved are written by the new writers in turn; streams in memory
        are not moved.
        """
        script = [
            Write("events", "event_writer1", [["a"]], 0),
            Write("events", "event_writer1", [["b"]], 1),
            Write("typing", "typing_writer", [["c"]], 2),
            Write("events", "event_writer2", [["d"]], 3),
        ]

        def rows(name: str, *to: str) -> list[Any]:
            moved = {"event_writer1": to}
            writes = list(own_writes(script, name, moved))
            self.assertEqual({write.instance_name for write in writes} - {name}, set())
            return [row for write in writes for (row,) in write.rows]

        self.assertEqual(rows("typing_writer", "typing_writer"), ["a", "b", "c"])
        self.assertEqual(rows("event_writer1", "event_writer1", "event_writer2"), ["a"])
        self.assertEqual(
            rows("event_writer2", "event_writer1", "event_writer2"), ["b", "d"]
        )
        # An endless script is not searched for a writer without writes.
        endless = (Write("events", "event_writer1", [], n) for n in count())
        moved = {"event_writer1": ["event_writer2"]}
        self.assertEqual(list(own_writes(endless, "event_writer1", moved)), [])
