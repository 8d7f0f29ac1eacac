"""Prints a line for each module, and the tests that fail only with this package."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from scripts.tools.synapse_suite.run import Comparison

#: The maximum number of lost tests of a module that are listed.
_NAMED = 30


def show(console: Console, version: str, comparisons: Sequence[Comparison]) -> None:
    """Show the table, followed by the lost tests and a line with the sums."""
    table = Table(
        title=f"Tests of matrix-synapse {version}, successes", title_justify="left"
    )
    table.add_column("module", no_wrap=True)
    for heading in ("tests", "stock", "ours", "lost", "s, stock", "s, ours"):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in comparisons:
        _add(table, each.name, [each])
    _add(table, "all", comparisons)
    # Widen the console if needed: a truncated table is useless in a log.
    Console(width=max(console.width, 120), file=console.file).print(table)
    for each in comparisons:
        if not each.stock.outcomes:
            console.print(f"{each.name}: no test ran on stock; see {each.stock.log}")
        for failing in each.stock.failing:
            console.print(f"fails on stock: {failing}", soft_wrap=True)
        for test in each.lost[:_NAMED]:
            outcome = each.ours.outcomes.get(test, "not finished")
            console.print(
                f"lost: {test} ({outcome}; see {each.ours.log})", soft_wrap=True
            )
        if len(each.lost) > _NAMED:
            console.print(f"{each.name}: {len(each.lost) - _NAMED} more are lost")
    stock, ours, lost = _sums(comparisons)
    console.print(f"stock {stock}, ours {ours}, lost {lost}")


def _add(table: Table, name: str, comparisons: Sequence[Comparison]) -> None:
    stock, ours, lost = _sums(comparisons)
    table.add_row(
        name,
        str(sum(len(each.stock.outcomes) for each in comparisons)),
        str(stock),
        str(ours),
        f"[bold red]{lost}[/]" if lost else "0",
        f"{sum(each.stock.seconds for each in comparisons):.0f}",
        f"{sum(each.ours.seconds for each in comparisons):.0f}",
    )


def _sums(comparisons: Sequence[Comparison]) -> tuple[int, int, int]:
    """Return the numbers of successes on stock and on ours, and of lost tests."""
    return (
        sum(len(each.stock.successes) for each in comparisons),
        sum(len(each.ours.successes) for each in comparisons),
        sum(len(each.lost) for each in comparisons),
    )
