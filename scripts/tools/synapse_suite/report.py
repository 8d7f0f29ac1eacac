"""Prints a line for each module, and the tests that fail only with this package."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from scripts.tools.synapse_suite.run import Comparison

__all__ = ["show"]

#: The most lost tests of a module that are listed.
_NAMED = 30


def show(console: Console, version: str, comparisons: Sequence[Comparison]) -> None:
    """Show the table, followed by the lost tests."""
    table = Table(
        title=f"Tests of matrix-synapse {version}, successes", title_justify="left"
    )
    table.add_column("module", no_wrap=True)
    for heading in ("tests", "stock", "ours", "lost", "s, stock", "s, ours"):
        table.add_column(heading, justify="right", no_wrap=True)
    for it in comparisons:
        _add(table, it.name, [it])
    _add(table, "all", comparisons)
    # Wide enough not to be truncated in a log.
    Console(width=max(console.width, 120), file=console.file).print(table)
    for it in comparisons:
        if not it.stock.successes:
            console.print(f"{it.name}: no test succeeds on stock; see {it.stock.log}")
        for test in it.lost[:_NAMED]:
            became = it.ours.outcomes.get(test, "not finished")
            console.print(f"lost: {test} ({became}; see {it.ours.log})", soft_wrap=True)
        if len(it.lost) > _NAMED:
            console.print(f"{it.name}: {len(it.lost) - _NAMED} more are lost")


def _add(table: Table, name: str, comparisons: Sequence[Comparison]) -> None:
    lost = sum(len(it.lost) for it in comparisons)
    table.add_row(
        name,
        str(sum(len(it.stock.outcomes) for it in comparisons)),
        str(sum(len(it.stock.successes) for it in comparisons)),
        str(sum(len(it.ours.successes) for it in comparisons)),
        f"[bold red]{lost}[/]" if lost else "0",
        f"{sum(it.stock.seconds for it in comparisons):.0f}",
        f"{sum(it.ours.seconds for it in comparisons):.0f}",
    )
