"""Tests for :mod:`scripts.tools.bench.growth`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.bench import growth, ours_growth
from scripts.tools.bench.growth import GROWTHS, Series, measure_growth


class GrowthTests(SynchronousTestCase):
    """Tests for the cost of a row by size."""

    def test_medians(self) -> None:
        """Each size is measured several times, and the median is used."""
        costs = iter([3.0, 1.0, 2.0] * 100)
        measured_sizes: list[tuple[str, object]] = []

        def measured(
            command: Sequence[str],
            measure: str,
            parameters: dict[str, object],
            *,
            time_limit: float,
        ) -> dict[str, float]:
            self.assertEqual(command[0], sys.executable)
            measured_sizes.append((measure, parameters["size"]))
            return {"microseconds": next(costs)}

        self.patch(growth, "run_measure", measured)
        printed: list[str] = []
        series = measure_growth(True, 3, printed.append)
        self.assertEqual([one.name for one in series], [g.name for g in GROWTHS])
        for one, what in zip(series, GROWTHS, strict=True):
            self.assertEqual(
                list(one.points), [(size, 2.0) for size in what.quick_sizes]
            )
        self.assertEqual(
            measured_sizes[:4], [("rows", 10_000)] * 3 + [("rows", 100_000)]
        )
        self.assertEqual(printed[0], "rows: 10,000")
        self.assertEqual(printed[-1], series[-1].to_text())

    def test_text_and_json(self) -> None:
        """A series has a text for people and a JSON value for programs."""
        series = Series("rows", [(10_000, 3.456), (100_000, 3.5)])
        self.assertEqual(
            series.to_text(), "µs a row by rows: 10,000: 3.46, 100,000: 3.50"
        )
        self.assertEqual(
            series.to_json(),
            {"grows": "rows", "us_per_row": {10_000: 3.456, 100_000: 3.5}},
        )

    def test_every_measure_needs_all_rows(self) -> None:
        """Each measure exists, and fails if a row is not delivered."""
        self.patch(ours_growth, "_ROWS", 700)
        for what in GROWTHS:
            size = 700 if what.measure == "rows" else 3
            cost = ours_growth.MEASURES[what.measure](size)["microseconds"]
            self.assertGreater(cost, 0, what.name)
        self.patch(ours_growth, "WRITER", "nobody")
        with self.assertRaisesRegex(AssertionError, "rows were not delivered"):
            ours_growth.MEASURES["rows"](700)
