"""The terminal output of the demonstration."""

from __future__ import annotations

from collections.abc import Sequence

from rich import progress
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from synapse_replication.demo.check import WriterTally


class TextScreen(progress.Progress):
    """Prints lines and, on a terminal, progress bars for the writers and each reader.

    :param console: the console to print to.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(
            progress.TextColumn("  {task.description:<10}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._bars: dict[str, progress.TaskID] = {}
        self._tenths = 0

    def print_line(self, text: str) -> None:
        """Show a line."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def progress(self, rows: dict[str, int], total: int) -> None:
        """Show how many rows were written, and how many each reader has received."""
        if self.disable:
            self._print_progress(rows, total)
            return
        if not self._bars:
            self._bars = {name: self.add_task(name, total=total) for name in rows}
        for name, count in rows.items():
            # More rows than planned may be written: those of the last transactions.
            self.update(
                self._bars[name], completed=count, total=max(total, *rows.values())
            )

    def _print_progress(self, rows: dict[str, int], total: int) -> None:
        tenths = 10 * rows["written"] // total
        if tenths > self._tenths:
            self._tenths = tenths
            counts = ", ".join(f"{name} {count}" for name, count in rows.items())
            self.print_line(f"  {10 * tenths:3}%  {counts}")


def show_table(console: Console, tallies: Sequence[WriterTally]) -> None:
    """Show the comparison for each (stream, writer) and reader."""
    # The table fits into 80 columns.
    table = Table(
        title="Rows by stream, writer and reader",
        title_justify="left",
        box=None,
        pad_edge=False,
        collapse_padding=True,
    )
    for heading in ("stream", "writer", "reader"):
        table.add_column(heading, no_wrap=True)
    for heading in (
        "written",
        "received",
        "lost",
        "twice",
        "out of\norder",
        "final\nposition",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for tally in tallies:
        table.add_row(
            tally.stream_name,
            tally.instance_name,
            tally.reader,
            *(str(number) for number in (tally.written, tally.received)),
            *(
                f"[bold red]{number}[/]" if number else "0"
                for number in (tally.missing, tally.duplicated, tally.out_of_order)
            ),
            str(tally.final_position)
            if tally.has_caught_up
            else f"[bold red]{tally.final_position} of {tally.last_token}[/]",
        )
    # Widen the console if needed: a truncated table is useless in a log.
    needed = Measurement.get(console, console.options.update(width=1000), table)
    console.width = max(console.width, needed.maximum)
    console.print(table)


def positions_agree(tallies: Sequence[WriterTally]) -> bool:
    """Return whether all readers have caught up and are at the same positions.

    The writers of a stream share one sequence. At the end, each writer announces the
    last id of that sequence, whichever writer used it.
    """
    positions: dict[str, set[int | None]] = {}
    for tally in tallies:
        positions.setdefault(tally.stream_name, set()).add(tally.final_position)
    return all(tally.has_caught_up for tally in tallies) and all(
        len(found) == 1 for found in positions.values()
    )
