"""Draw performance-ratios.svg from the table of figures in docs/performance.rst.

Run it with matplotlib installed: python docs/images/performance_ratios.py
"""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
# Write text as text elements, and make the output reproducible.
mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "performance-ratios"}

from matplotlib import pyplot  # noqa: E402

HERE = Path(__file__).parent


def read_ratios() -> list[tuple[str, float]]:
    """Return each task of the table with its ratio."""
    page = (HERE.parent / "performance.rst").read_text()
    table = page.partition("\nFigures\n")[2].partition("list-table::")[2]
    rows = re.findall(r"\* - (.+)\n +- .+\n +- .+\n +- .+\n +- ([\d.]+)\n", table)
    return [(task, float(ratio)) for task, ratio in rows]


def draw(file: Path) -> None:
    """Draw the ratios as bars, on a logarithmic scale."""
    ratios = read_ratios()[::-1]
    figure, axes = pyplot.subplots(figsize=(8, 0.3 * len(ratios) + 1))
    bars = axes.barh(
        [task for task, _ in ratios], [ratio for _, ratio in ratios], color="#4a6fa5"
    )
    axes.bar_label(bars, [f"{ratio:g}" for _, ratio in ratios], padding=3, fontsize=8)
    axes.set_xscale("log")
    axes.axvline(1, color="#b04a4a", linewidth=1)
    axes.set_xlabel("stock = 1; more is better")
    axes.tick_params(labelsize=8)
    axes.margins(x=0.1)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


if __name__ == "__main__":
    draw(HERE / "performance-ratios.svg")
