"""Tests for :mod:`scripts.tools.bench.plots`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.bench.growth import Series
from scripts.tools.bench.tasks import TASKS, Result, Unit


class PlotTests(SynchronousTestCase):
    """Tests for the plots of the figures."""

    if importlib.util.find_spec("matplotlib") is None:
        skip = "matplotlib is not installed; it comes with the extra 'bench'"

    def test_pictures(self) -> None:
        """Any figures become a PNG file, even a series with one point."""
        from scripts.tools.bench.plots import plot_growth, plot_ratios

        folder = Path(self.mktemp())
        folder.mkdir()
        results = [
            Result(TASKS[0], Unit.PER_SECOND, [3.0, 2.0], [1.0]),
            Result(TASKS[1], Unit.P99, [3.0], [1.0]),
        ]
        plot_ratios(results, "1.2.3", folder / "ratios.png")
        plot_growth(
            [Series("rows", [(1, 2.0), (10, 2.0)]), Series("streams", [(1, 5.0)])],
            folder / "growth.png",
        )
        for name in ("ratios.png", "growth.png"):
            data = (folder / name).read_bytes()
            self.assertTrue(data.startswith(b"\x89PNG"), name)
            self.assertGreater(len(data), 5000)
