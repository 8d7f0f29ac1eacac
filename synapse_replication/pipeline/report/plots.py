"""The plots of a report, drawn from its values.

Each plot has a bounded number of series and points.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, NullLocator

from synapse_replication.pipeline.report.counts import ReportData, Rows
from synapse_replication.pipeline.report.drawing import (
    COLOURS,
    OTHERS,
    Draw,
    Form,
    Plot,
    add_legend,
    colour_of,
    duration,
    make_panels,
    moment,
    render,
    use_time,
)

_MAX_PANELS = 6
_MAX_LAG_PANELS = 4
_MAX_BARS = 12

_Key = TypeVar("_Key", bound=Hashable)


def draw_plots(data: ReportData) -> list[Plot]:
    """Draw all plots for which there is data."""
    streams = _top(
        _sum((t.stream, t.rows) for t in data.totals)
        + _sum((c.stream, c.rows) for c in data.arrived)
    )
    writers = _top(_sum((t.instance_name, t.rows) for t in data.totals))
    plots: dict[str, tuple[str, bool, Draw]] = {
        "rows-over-time": (
            "Rows written, by stream",
            bool(data.over_time),
            partial(_stacked, data.over_time, data.rows_window, streams),
        ),
        "rows-by-writer": (
            "Rows written, by writer of each stream",
            bool(data.over_time),
            partial(_writers, data.over_time, data.rows_window, writers),
        ),
        "shares": (
            "Share of each writer in the rows of a stream",
            bool(data.totals),
            partial(_shares, data.totals, writers),
        ),
        "batches": (
            "Tokens by the number of their rows",
            any(batch.largest > 1 for batch in data.batches),
            partial(_batches, data.batches),
        ),
        "arrived": (
            "Rows that arrived, by stream",
            bool(data.arrived),
            partial(
                _stacked,
                data.arrived,
                data.wire_window,
                streams,
                relative=data.wire_relative,
            ),
        ),
        "lag": (
            "Time from writing to arrival: median, 95th and 99th percentile",
            any(line.tokens > 1 for line in data.lags_over_time),
            partial(_lags, data.lags_over_time, data.lags),
        ),
    }
    return [
        render(name, title, draw)
        for name, (title, shown, draw) in plots.items()
        if shown
    ]


# -- each plot ---------------------------------------------------------------------


def _stacked(
    counts: Rows,
    window_s: int,
    colours: Sequence[str],
    form: Form,
    *,
    relative: bool = False,
) -> Figure:
    by_series = _series(((c.stream, c.start, c.rows) for c in counts), colours)
    figure, (axes,) = make_panels(form, 1, height=3.4)
    starts = sorted({start for counter in by_series.values() for start in counter})
    base = [0] * len(starts)
    for name, counter in by_series.items():
        heights = [counter[start] for start in starts]
        axes.bar(
            [moment(start) for start in starts],
            heights,
            width=datetime.timedelta(seconds=window_s * 0.92),
            bottom=base,
            align="edge",
            label=name,
            color=colour_of(name, colours),
            linewidth=0,
        )
        base = [low + high for low, high in zip(base, heights, strict=True)]
    axes.set_ylabel(f"rows in {duration(window_s * 1000)}")
    use_time(form, axes, relative=relative)
    add_legend(figure, [axes], form)
    return figure


def _writers(counts: Rows, window_s: int, writers: Sequence[str], form: Form) -> Figure:
    rows = _sum((count.stream, count.rows) for count in counts)
    streams = [name for name, _ in rows.most_common(_MAX_PANELS)]
    figure, panels = make_panels(form, len(streams), height=2.1, share_x=True)
    starts = sorted({count.start for count in counts})
    # Show a window without rows as zero.
    steps = range(starts[0], starts[-1] + window_s, window_s)
    for axes, stream in zip(panels, streams, strict=True):
        of_stream = (count for count in counts if count.stream == stream)
        by_writer = _series(
            ((c.instance_name, c.start, c.rows) for c in of_stream), writers
        )
        for name, counter in by_writer.items():
            axes.plot(
                [moment(step) for step in steps],
                [counter[step] for step in steps],
                label=name,
                color=colour_of(name, writers),
                linewidth=1.4,
            )
        axes.set_title(stream)
        axes.set_ylim(bottom=0)
        use_time(form, axes)
    add_legend(figure, panels, form)
    return figure


def _shares(totals: Rows, writers: Sequence[str], form: Form) -> Figure:
    rows = _sum((total.stream, total.rows) for total in totals)
    streams = [name for name, _ in rows.most_common(_MAX_BARS)][::-1]
    figure, (axes,) = make_panels(form, 1, height=0.9 + 0.3 * len(streams))
    offsets = range(len(streams))
    left = [0.0] * len(streams)
    shown = (total for total in totals if total.stream in streams)
    by_writer = _series(((t.instance_name, t.stream, t.rows) for t in shown), writers)
    for name, of_writer in by_writer.items():
        widths = [100 * of_writer[stream] / rows[stream] for stream in streams]
        axes.barh(
            offsets,
            widths,
            left=left,
            height=0.7,
            label=name,
            color=colour_of(name, writers),
            edgecolor="white",
        )
        left = [low + width for low, width in zip(left, widths, strict=True)]
    axes.set_yticks(offsets, streams)
    axes.set_xlim(0, 100)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f} %"))
    axes.grid(visible=False, axis="y")
    add_legend(figure, [axes], form)
    return figure


def _batches(batches: Rows, form: Form) -> Figure:
    # Omit a stream in which each token has exactly one row.
    shown = [batch for batch in batches if batch.largest > 1]
    tokens = _sum((batch.stream, batch.tokens) for batch in shown)
    streams = [name for name, _ in tokens.most_common(_MAX_PANELS)]
    figure, panels = make_panels(form, len(streams), height=1.9)
    for axes, stream in zip(panels, streams, strict=True):
        found = {b.bucket: b.tokens for b in shown if b.stream == stream}
        buckets = [2**n for n in range(max(found).bit_length())]
        labels = [str(b) if b == 1 else f"{b}-{2 * b - 1}" for b in buckets]
        if len(buckets) > 6:
            labels = [str(b) if n % 2 == 0 else "" for n, b in enumerate(buckets)]
        axes.bar(
            range(len(buckets)),
            [found.get(bucket, 0) for bucket in buckets],
            color=COLOURS[0],
            width=0.8,
        )
        axes.set_xticks(range(len(buckets)), labels)
        axes.set_yscale("log")
        axes.set_ylim(bottom=0.7)
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_title(stream)
        axes.set_xlabel("rows of a token")
    return figure


def _lags(lags: Rows, whole: Rows, form: Form) -> Figure:
    order = sorted(whole, key=lambda line: -line.tokens)
    streams = [line.stream for line in order][:_MAX_LAG_PANELS]
    figure, panels = make_panels(form, len(streams), height=2.3, share_x=True)
    for axes, stream in zip(panels, streams, strict=True):
        of_stream = (line for line in lags if line.stream == stream)
        lines = sorted(of_stream, key=lambda line: line.start)
        for index, percentile in ((6, "p99"), (1, "p95"), (0, "p50")):
            axes.plot(
                [moment(line.start) for line in lines],
                [max(getattr(line, percentile), 0) for line in lines],
                label=percentile,
                color=COLOURS[index],
                marker=".",
                markersize=4,
                linewidth=1.2,
            )
        axes.set_title(stream)
        axes.set_yscale("symlog", linthresh=1)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda ms, _: duration(ms)))
        axes.yaxis.set_minor_locator(NullLocator())
        use_time(form, axes)
    add_legend(figure, panels, form)
    return figure


def _series(
    items: Iterable[tuple[str, _Key, int]], known: Sequence[str]
) -> dict[str, Counter[_Key]]:
    """Sum numbers by series and key.

    :param items: the series, the key, and the number.
    :param known: the series in order; all others are one series.
    """
    found: dict[str, Counter[_Key]] = {name: Counter() for name in (*known, OTHERS)}
    for name, key, number in items:
        found[name if name in known else OTHERS][key] += number
    return {name: counter for name, counter in found.items() if counter}


def _sum(pairs: Iterable[tuple[str, int]]) -> Counter[str]:
    summed: Counter[str] = Counter()
    for name, number in pairs:
        summed[name] += number
    return summed


def _top(counted: Counter[str]) -> list[str]:
    """Return the names with the largest counts, which get colours of their own."""
    return [name for name, _ in counted.most_common(len(COLOURS) - 1)]
