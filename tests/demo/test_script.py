"""Tests for :mod:`synapse_replication.demo.script`."""

from __future__ import annotations

from itertools import islice

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.demo.deployment import WRITERS
from synapse_replication.demo.script import STREAMS, Write, make_script

LINES = [
    "REPLICATE ",
    'RDATA typing stream_writer1 7 ["!r:x",["@a:x"]]',
    'RDATA events event_persister1 batch ["ev",1]',
    'RDATA events event_persister2 9 ["ev",2]',
    'RDATA caches master 5 ["f",["k"],3]',
    'RDATA events event_persister1 8 ["ev",3]',
    "POSITION events event_persister1 8 9",
]


class MakeScriptTests(SynchronousTestCase):
    def test_batches_are_writes(self) -> None:
        """Rows that shared a token are written together, by the mapped writer."""
        self.assertEqual(
            list(make_script(LINES, 4)),
            [
                Write("typing", "typing_writer", [["!r:x", ["@a:x"]]], 0),
                Write("events", "event_writer2", [["ev", 2]], 1),
                Write("events", "event_writer1", [["ev", 1], ["ev", 3]], 2),
            ],
        )

    def test_a_short_recording_is_repeated(self) -> None:
        """There are at least the requested rows, and no batch is split."""
        writes = list(make_script(LINES, 7))
        self.assertEqual([write.row_number for write in writes], [0, 1, 2, 4, 5, 6])
        self.assertEqual(sum(len(write.rows) for write in writes), 8)

    def test_a_recording_without_rows_is_refused(self) -> None:
        """A recording without rows of the demo's streams is rejected."""
        with self.assertRaises(ValueError):
            next(make_script(["REPLICATE ", LINES[4]], 1))

    def test_a_recording_that_cannot_be_read_is_refused(self) -> None:
        """A malformed RDATA line is an error and not skipped."""
        with self.assertRaises(ValueError) as caught:
            next(make_script(["RDATA typing stream_writer1 x y"], 1))
        self.assertIn("cannot be read", str(caught.exception))

    def test_rows_are_made_as_they_are_needed(self) -> None:
        """Writes are generated lazily."""
        first = list(islice(make_script(LINES, 10**9), 2))
        self.assertEqual(len(first), 2)


class StreamsTests(SynchronousTestCase):
    def test_every_writer_has_something_to_write(self) -> None:
        """The streams name exactly the writing processes."""
        named = {
            name for stream in STREAMS.values() for name in stream.writers.values()
        }
        self.assertEqual(named, set(WRITERS))

    def test_only_typing_is_in_memory(self) -> None:
        """All streams except typing have a table."""
        self.assertEqual([s.name for s in STREAMS.values() if s.in_memory], ["typing"])
