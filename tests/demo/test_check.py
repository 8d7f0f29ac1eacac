"""Tests for :mod:`synapse_replication.demo.check`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.demo.check import (
    JournalEntry,
    WriterTally,
    compare,
    read_entries,
)

WRITTEN: list[tuple[int, Any]] = [(1, ["a"]), (3, ["b"]), (3, ["b"]), (4, {"k": 1})]


def entries(*tokens_and_rows: tuple[int, list[Any]]) -> list[JournalEntry]:
    return [
        JournalEntry("events", "w1", token, rows) for token, rows in tokens_and_rows
    ]


def tally(journal: list[JournalEntry]) -> WriterTally:
    return compare("events", "w1", "r1", WRITTEN, journal)


def counts(found: WriterTally) -> tuple[int, int, int, int, int]:
    return (
        found.written,
        found.received,
        found.missing,
        found.duplicated,
        found.out_of_order,
    )


GOOD = entries((1, [["a"]]), (3, [["b"], ["b"]]), (4, [{"k": 1}]), (9, []))


class CompareTests(SynchronousTestCase):
    def test_in_order(self) -> None:
        """
        If each row was received once and in order, the tally is good; rows of other
        writers are ignored.
        """
        found = tally([*GOOD, JournalEntry("events", "w2", 2, [["x"]])])
        self.assertEqual(counts(found), (4, 4, 0, 0, 0))
        self.assertEqual((found.final_position, found.last_token), (9, 4))
        self.assertTrue(found.is_good)

    def test_missing(self) -> None:
        """A row that was not received is missing, even one of two equal rows."""
        found = tally(entries((3, [["b"]]), (4, [{"k": 1}])))
        self.assertEqual(counts(found), (4, 2, 2, 0, 0))
        self.assertFalse(found.is_good)

    def test_duplicated(self) -> None:
        """A row received twice is duplicated, even if it was out of order."""
        found = tally([*GOOD[:3], *entries((3, [["b"]]))])
        self.assertEqual(counts(found), (4, 5, 0, 1, 1))
        self.assertFalse(found.is_good)

    def test_altered(self) -> None:
        """An altered row counts as one missing and one duplicated row."""
        found = tally(entries((1, [["A"]]), *[(e.token, e.rows) for e in GOOD[1:]]))
        self.assertEqual(counts(found), (4, 4, 1, 1, 0))

    def test_under_another_token(self) -> None:
        """A row under another token counts as one missing and one duplicated row."""
        found = tally(entries((2, [["a"]]), *[(e.token, e.rows) for e in GOOD[1:]]))
        self.assertEqual(counts(found), (4, 4, 1, 1, 0))

    def test_out_of_order(self) -> None:
        """A row received after one with a greater token is out of order."""
        found = tally([GOOD[1], GOOD[0], GOOD[2]])
        self.assertEqual(counts(found), (4, 4, 0, 0, 1))
        self.assertFalse(found.is_good)

    def test_not_caught_up(self) -> None:
        """
        If a reader has no position, or is behind the writer, the tally is not good.
        """
        found = compare("events", "w1", "r1", [], [])
        self.assertIsNone(found.final_position)
        self.assertFalse(found.is_good)
        self.assertFalse(tally(GOOD[:2]).has_caught_up)


class ReadEntriesTests(SynchronousTestCase):
    def test_torn_last_line_is_skipped(self) -> None:
        """An incomplete last line is skipped."""
        path = Path(self.mktemp())
        path.write_text(
            '{"stream":"s","writer":"w","token":1,"rows":[["a"]]}\n{"stream":"s"'
        )
        self.assertEqual(read_entries(path), [JournalEntry("s", "w", 1, [["a"]])])
