"""Tests for :mod:`synapse_replication.demo.display`."""

from __future__ import annotations

import io

import attrs
from rich.console import Console
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.demo.check import WriterTally
from synapse_replication.demo.display import (
    TextScreen,
    positions_agree,
    show_table,
)

GOOD = WriterTally("events", "event_writer1", "reader1", 12, 12, 0, 0, 0, 99, 98)


def printed(*tallies: WriterTally) -> str:
    file = io.StringIO()
    show_table(Console(file=file, width=40), tallies)
    return file.getvalue()


class ShowTableTests(SynchronousTestCase):
    def test_every_figure_is_shown(self) -> None:
        """On a narrow screen no figure is truncated."""
        (row,) = (
            line for line in printed(GOOD).splitlines() if "event_writer1" in line
        )
        self.assertEqual(
            row.split(),
            ["events", "event_writer1", "reader1", "12", "12", "0", "0", "0", "99"],
        )

    def test_eighty_columns(self) -> None:
        """The table fits into a terminal of the usual width."""
        many = attrs.evolve(
            GOOD, stream_name="account_data", written=10_000, received=10_000
        )
        widest = max(map(len, printed(many).splitlines()))
        self.assertLessEqual(widest, 80)

    def test_a_reader_that_is_behind_is_marked(self) -> None:
        """
        A position below the writer's last row is shown together with that row's token.
        """
        self.assertIn("90 of 98", printed(attrs.evolve(GOOD, final_position=90)))


class PositionsAgreeTests(SynchronousTestCase):
    def test_agreement(self) -> None:
        """
        Readers agree if they end at the same position of the stream, at its last row.
        """
        other = attrs.evolve(GOOD, reader="reader2")
        self.assertTrue(positions_agree([GOOD, other]))
        self.assertFalse(
            positions_agree([GOOD, attrs.evolve(other, final_position=98)])
        )
        writer2 = attrs.evolve(GOOD, instance_name="event_writer2", last_token=0)
        self.assertTrue(positions_agree([GOOD, writer2]))
        self.assertFalse(
            positions_agree([GOOD, attrs.evolve(writer2, final_position=98)])
        )
        behind = attrs.evolve(GOOD, final_position=90)
        self.assertFalse(positions_agree([behind]))


class TextScreenTests(SynchronousTestCase):
    def test_a_file_gets_a_line_for_each_tenth(self) -> None:
        """Without a terminal, progress is printed at most ten times."""
        file = io.StringIO()
        with TextScreen(Console(file=file)) as screen:
            screen.print_line("Writing [all] of it")
            for rows in range(0, 101, 5):
                screen.progress({"written": rows, "reader1": rows}, 100)
        lines = file.getvalue().splitlines()
        self.assertEqual(lines[0], "Writing [all] of it")
        self.assertEqual(lines[1], "   10%  written 10, reader1 10")
        self.assertEqual(len(lines), 11)

    def test_a_terminal_gets_bars(self) -> None:
        """On a terminal there is a bar for each count."""
        file = io.StringIO()
        terminal = Console(
            file=file, force_terminal=True, width=80, _environ={"TERM": "xterm"}
        )
        with TextScreen(terminal) as screen:
            screen.progress({"written": 1, "reader1": 0}, 100)
            screen.progress({"written": 50, "reader1": 40}, 100)
        self.assertIn("reader1", file.getvalue())
