"""Plots of the results, which require matplotlib (the extra ``bench``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

from scripts.tools.bench.growth import Series
from scripts.tools.bench.tasks import Result

mpl.use("Agg")

from matplotlib import pyplot


def plot_ratios(results: Sequence[Result], other: str, file: Path) -> None:
    """Draw a bar for the ratio of each task."""
    names = [result.name for result in reversed(results)]
    ratios = [result.ratio for result in reversed(results)]
    figure, axes = pyplot.subplots(figsize=(9, 0.4 * len(names) + 1.5))
    bars = axes.barh(names, ratios, color="#3465a4")
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel(f"times as good as {other} (medians)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def plot_growth(series: Sequence[Series], file: Path) -> None:
    """Draw the cost of a row by size, with a diagram for each growing quantity."""
    figure, all_axes = pyplot.subplots(
        1, len(series), figsize=(4 * len(series), 3.2), squeeze=False
    )
    for axes, one in zip(all_axes[0], series, strict=True):
        sizes, costs = zip(*one.points, strict=True)
        axes.plot(sizes, costs, marker="o", color="#3465a4")
        axes.set_xscale("log")
        axes.set_ylim(0, 1.15 * max(costs))
        axes.set_xlabel(one.name)
        axes.set_ylabel("µs a row")
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
