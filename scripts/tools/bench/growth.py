"""Measures whether the cost of a row is constant as other quantities grow."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs

from scripts.tools.bench.runner import run_measure

#: The timeout of one measure, in s; ten million rows take a minute or two.
_TIMEOUT = 3600


@attrs.frozen(kw_only=True)
class Growth:
    """One quantity that grows.

    :ivar name: the name of the quantity.
    :ivar measure: the function in ``ours_growth.py``.
    :ivar sizes: the measured sizes.
    :ivar quick_sizes: the measured sizes in a quick run.
    """

    name: str
    measure: str
    sizes: tuple[int, ...]
    quick_sizes: tuple[int, ...]


GROWTHS = (
    Growth(
        name="rows",
        measure="rows",
        sizes=(10_000, 100_000, 1_000_000, 10_000_000),
        quick_sizes=(10_000, 100_000, 1_000_000),
    ),
    Growth(
        name="streams",
        measure="streams",
        sizes=(1, 2, 5, 10, 20, 50),
        quick_sizes=(1, 10, 50),
    ),
    Growth(
        name="writers in a token",
        measure="writers",
        sizes=(1, 2, 5, 10, 20, 50, 100),
        quick_sizes=(1, 10, 100),
    ),
)


@attrs.frozen
class Series:
    """The cost of one row, by size.

    :ivar points: the pairs of a size and the median cost of a row, in µs.
    """

    name: str
    points: Sequence[tuple[int, float]]

    def to_json(self) -> dict[str, object]:
        """Return the series as a JSON value."""
        return {"grows": self.name, "us_per_row": dict(self.points)}

    def to_text(self) -> str:
        """Return the series as one line."""
        points = ", ".join(f"{size:,}: {cost:.2f}" for size, cost in self.points)
        return f"µs a row by {self.name}: {points}"


def measure_growth(
    quick: bool, rounds: int, print_line: Callable[[str], object]
) -> list[Series]:
    """Measure all quantities.

    :raises BenchError: if a measure failed.
    """
    program = str(Path(__file__).with_name("ours_growth.py"))
    series = []
    for growth in GROWTHS:
        points = []
        for size in growth.quick_sizes if quick else growth.sizes:
            print_line(f"{growth.name}: {size:,}")
            costs = [
                run_measure(
                    [sys.executable, program],
                    growth.measure,
                    {"size": size},
                    time_limit=_TIMEOUT,
                )
                for _ in range(rounds)
            ]
            cost = statistics.median(c["microseconds"] for c in costs)
            points.append((size, round(cost, 3)))
        series.append(Series(growth.name, points))
        # Print the series now, because a later measure may fail.
        print_line(series[-1].to_text())
    return series
