"""The plots of a report: values in, figures out; as SVG for the page, and as PNG.

Each shows a bounded number of series and points. The SVG has no colours of its own but
names of CSS variables, so that the page is light or dark as its reader likes.
"""

from __future__ import annotations

import datetime
import io
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import matplotlib as mpl
import matplotlib.dates
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, NullLocator

from synapse_replication.pipeline.report.data import (
    BatchBucket,
    LagLine,
    ReportData,
    WindowCount,
    WriterTotal,
)

__all__ = ["OTHERS", "Plot", "draw_plots"]

#: What does not have a colour of its own.
OTHERS = "all others"

#: Colours there are, the last of them for :data:`OTHERS`.
_COLOURS = 8

_MAX_PANELS = 6
_MAX_LAG_PANELS = 4
_MAX_BARS = 12


@attrs.frozen
class Plot:
    """A plot, ready to be shown.

    :ivar name: of its file, without the suffix.
    :ivar title: what it shows, also for those who cannot see it.
    :ivar svg: an element for a page of HTML.
    """

    name: str
    title: str
    svg: str
    png: bytes


@attrs.frozen
class _Palette:
    text: str
    soft: str
    line: str
    back: str
    series: tuple[str, ...]


_LIGHT = _Palette(
    "#1b1d21",
    "#5c626d",
    "#dcdfe4",
    "#ffffff",
    (
        *("#0b62a4", "#d9760a", "#1a8a5a", "#b0419c"),
        *("#7a5c00", "#2aa3c4", "#c4303a", "#9aa2ae"),
    ),
)

#: Colours that stand for CSS variables.
_NAMED = _Palette(
    "#010001",
    "#010002",
    "#010003",
    "none",
    tuple(f"#01000{n + 4:x}" for n in range(_COLOURS)),
)
_VARIABLES = {
    _NAMED.text: "var(--text)",
    _NAMED.soft: "var(--soft)",
    _NAMED.line: "var(--line)",
    **{colour: f"var(--s{n})" for n, colour in enumerate(_NAMED.series)},
}

_Draw = Callable[[_Palette], Figure]

#: Only in part typed.
_dates: Any = matplotlib.dates


def draw_plots(data: ReportData) -> list[Plot]:
    """Draw what there is to show; a plot without data is left out."""
    streams = _top(
        Counter({t.stream: 0 for t in data.totals})
        + _sum((t.stream, t.rows) for t in data.totals)
        + _sum((c.stream, c.rows) for c in data.arrived)
    )
    writers = _top(_sum((t.instance_name, t.rows) for t in data.totals))
    plots: list[Plot] = []

    def add(name: str, title: str, draw: _Draw) -> None:
        plots.append(_render(name, title, draw))

    if data.over_time:
        add(
            "rows-over-time",
            "Rows written, by stream",
            lambda p: _stacked(p, data.over_time, data.rows_window, streams),
        )
        add(
            "rows-by-writer",
            "Rows written, by writer of each stream",
            lambda p: _writers(p, data.over_time, data.rows_window, writers),
        )
    if data.totals:
        add(
            "shares",
            "Share of each writer in the rows of a stream",
            lambda p: _shares(p, data.totals, writers),
        )
    if any(batch.largest > 1 for batch in data.batches):
        add(
            "batches",
            "Tokens by the number of their rows",
            lambda p: _batches(p, data.batches),
        )
    if data.arrived:
        add(
            "arrived",
            "Rows that arrived, by stream",
            lambda p: _stacked(
                p,
                data.arrived,
                data.wire_window,
                streams,
                relative=data.wire_relative,
            ),
        )
    if any(line.tokens > 1 for line in data.lags_over_time):
        add(
            "lag",
            "Time from writing to arrival: median, 95th and 99th percentile",
            lambda p: _lags(p, data.lags_over_time, data.lags),
        )
    return plots


# -- each plot ---------------------------------------------------------------------


def _stacked(
    palette: _Palette,
    counts: Iterable[WindowCount],
    window_s: int,
    colours: Sequence[str],
    *,
    relative: bool = False,
) -> Figure:
    by_series: dict[str, Counter[int]] = defaultdict(Counter)
    for count in counts:
        name = count.stream if count.stream in colours else OTHERS
        by_series[name][count.start] += count.rows
    figure, (axes,) = _panels(palette, 1, height=3.4)
    starts = sorted({start for counter in by_series.values() for start in counter})
    base = [0] * len(starts)
    for name in (*colours, OTHERS):
        if name not in by_series:
            continue
        heights = [by_series[name][start] for start in starts]
        axes.bar(
            [_moment(start) for start in starts],
            heights,
            width=datetime.timedelta(seconds=window_s * 0.92),
            bottom=base,
            align="edge",
            label=name,
            color=_colour(palette, name, colours),
            linewidth=0,
        )
        base = [low + high for low, high in zip(base, heights, strict=True)]
    axes.set_ylabel(f"rows in {_length(window_s)}")
    _time_axis(axes, relative=relative)
    _legend(figure, axes, palette)
    return figure


def _writers(
    palette: _Palette,
    counts: Sequence[WindowCount],
    window_s: int,
    writers: Sequence[str],
) -> Figure:
    rows = _sum((count.stream, count.rows) for count in counts)
    streams = [name for name, _ in rows.most_common(_MAX_PANELS)]
    figure, panels = _panels(palette, len(streams), height=2.1, share_x=True)
    starts = sorted({count.start for count in counts})
    # A window without rows is a point at zero.
    steps = range(starts[0], starts[-1] + window_s, window_s)
    for axes, stream in zip(panels, streams, strict=True):
        by_writer: dict[str, Counter[int]] = defaultdict(Counter)
        for count in counts:
            if count.stream == stream:
                known = count.instance_name in writers
                name = count.instance_name if known else OTHERS
                by_writer[name][count.start] += count.rows
        for name in (*writers, OTHERS):
            if name in by_writer:
                axes.plot(
                    [_moment(step) for step in steps],
                    [by_writer[name][step] for step in steps],
                    label=name,
                    color=_colour(palette, name, writers),
                    linewidth=1.4,
                )
        axes.set_title(stream)
        axes.set_ylim(bottom=0)
        _time_axis(axes)
    _legend(figure, panels, palette)
    return figure


def _shares(
    palette: _Palette, totals: Sequence[WriterTotal], writers: Sequence[str]
) -> Figure:
    rows = _sum((total.stream, total.rows) for total in totals)
    streams = [name for name, _ in rows.most_common(_MAX_BARS)][::-1]
    figure, (axes,) = _panels(palette, 1, height=0.9 + 0.3 * len(streams))
    places = range(len(streams))
    left = [0.0] * len(streams)
    for name in (*writers, OTHERS):
        of_writer = _sum(
            (t.stream, t.rows)
            for t in totals
            if t.stream in streams
            and (t.instance_name if t.instance_name in writers else OTHERS) == name
        )
        if not of_writer:
            continue
        widths = [100 * of_writer[stream] / rows[stream] for stream in streams]
        axes.barh(
            places,
            widths,
            left=left,
            height=0.7,
            label=name,
            color=_colour(palette, name, writers),
            edgecolor=palette.back,
        )
        left = [low + width for low, width in zip(left, widths, strict=True)]
    axes.set_yticks(places, streams)
    axes.set_xlim(0, 100)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f} %"))
    axes.grid(visible=False, axis="y")
    _legend(figure, axes, palette)
    return figure


def _batches(palette: _Palette, batches: Sequence[BatchBucket]) -> Figure:
    # Where each token has one row, there is nothing to see.
    shown = [batch for batch in batches if batch.largest > 1]
    tokens = _sum((batch.stream, batch.tokens) for batch in shown)
    streams = [name for name, _ in tokens.most_common(_MAX_PANELS)]
    figure, panels = _panels(palette, len(streams), height=1.9)
    for axes, stream in zip(panels, streams, strict=True):
        found = {b.bucket: b.tokens for b in shown if b.stream == stream}
        buckets = [2**n for n in range(max(found).bit_length())]
        labels = [str(b) if b == 1 else f"{b}-{2 * b - 1}" for b in buckets]
        if len(buckets) > 6:
            labels = [str(b) if n % 2 == 0 else "" for n, b in enumerate(buckets)]
        axes.bar(
            range(len(buckets)),
            [found.get(bucket, 0) for bucket in buckets],
            color=palette.series[0],
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


def _lags(
    palette: _Palette, lags: Sequence[LagLine], whole: Sequence[LagLine]
) -> Figure:
    order = sorted(whole, key=lambda line: -line.tokens)
    streams = [line.stream for line in order][:_MAX_LAG_PANELS]
    figure, panels = _panels(palette, len(streams), height=2.3, share_x=True)
    for axes, stream in zip(panels, streams, strict=True):
        lines = sorted(
            (line for line in lags if line.stream == stream and line.start is not None),
            key=lambda line: line.start or 0,
        )
        for index, percentile in ((2, "p99"), (1, "p95"), (0, "p50")):
            axes.plot(
                [_moment(line.start or 0) for line in lines],
                [max(getattr(line, percentile), 0) for line in lines],
                label=percentile,
                color=palette.series[(0, 1, 6)[index]],
                marker=".",
                markersize=4,
                linewidth=1.2,
            )
        axes.set_title(stream)
        axes.set_yscale("symlog", linthresh=1)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(FuncFormatter(_duration))
        axes.yaxis.set_minor_locator(NullLocator())
        _time_axis(axes)
    _legend(figure, panels, palette)
    return figure


# -- what they share ---------------------------------------------------------------


def _sum(pairs: Iterable[tuple[str, int]]) -> Counter[str]:
    summed: Counter[str] = Counter()
    for name, number in pairs:
        summed[name] += number
    return summed


def _top(counted: Counter[str]) -> list[str]:
    """Return the names that get a colour of their own, the greatest first."""
    return [name for name, _ in counted.most_common(_COLOURS - 1)]


def _colour(palette: _Palette, name: str, names: Sequence[str]) -> str:
    index = names.index(name) if name in names else _COLOURS - 1
    return palette.series[index]


def _moment(start: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(start, datetime.timezone.utc)


def _length(seconds: int) -> str:
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds % size == 0:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def _since_beginning(days: float, _position: object = None) -> str:
    return f"+{_duration(round(days * 86_400_000))}"


def _duration(milliseconds: float, _position: object = None) -> str:
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000)):
        if milliseconds >= 2 * size:
            return f"{milliseconds / size:.0f} {unit}"
    if milliseconds >= 1000:
        return f"{milliseconds / 1000:g} s"
    return f"{milliseconds:g} ms"


def _panels(
    palette: _Palette, count: int, *, height: float, share_x: bool = False
) -> tuple[Figure, list[Any]]:
    columns = 1 if count == 1 else 2
    lines = -(-count // columns)
    figure = Figure(figsize=(9.6, height * lines + 0.35), layout="constrained")
    FigureCanvasAgg(figure)
    figure.set_facecolor(palette.back)
    grid = figure.subplots(lines, columns, squeeze=False, sharex=share_x)
    panels = list(grid.flat)
    for axes in panels[count:]:
        axes.set_visible(False)
    for axes in panels[:count]:
        axes.set_facecolor("none")
        axes.set_axisbelow(True)
        axes.grid(visible=True, color=palette.line, linewidth=0.8)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        axes.tick_params(length=0)
    return figure, panels[:count]


def _time_axis(axes: Any, *, relative: bool = False) -> None:
    locator = _dates.AutoDateLocator(minticks=3, maxticks=8)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(
        FuncFormatter(_since_beginning)
        if relative
        else _dates.ConciseDateFormatter(locator, tz=datetime.timezone.utc)
    )
    axes.tick_params(axis="x", labelbottom=True)


def _legend(figure: Figure, panels: Any, palette: _Palette) -> None:
    named: dict[str, Any] = {}
    for axes in panels if isinstance(panels, list) else [panels]:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    names = sorted(named, key=lambda name: name == OTHERS)
    figure.legend(
        [named[name] for name in names],
        names,
        loc="outside upper left",
        ncols=min(len(names), 5),
        frameon=False,
        labelcolor=palette.soft,
        handlelength=1.2,
        columnspacing=1.4,
    )


def _render(name: str, title: str, draw: _Draw) -> Plot:
    with mpl.rc_context(_settings(_LIGHT, name)):
        png = io.BytesIO()
        draw(_LIGHT).savefig(png, format="png", dpi=120)
    with mpl.rc_context(_settings(_NAMED, name)):
        text = io.StringIO()
        draw(_NAMED).savefig(
            text, format="svg", metadata={"Date": None, "Creator": None}
        )
    return Plot(name, title, _for_page(text.getvalue(), name), png.getvalue())


def _settings(palette: _Palette, name: str) -> dict[Any, Any]:
    return {
        "text.color": palette.text,
        "axes.labelcolor": palette.soft,
        "axes.edgecolor": palette.line,
        "axes.titlecolor": palette.text,
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
        "xtick.color": palette.soft,
        "ytick.color": palette.soft,
        "font.size": 9.5,
        # A dollar in a name is one.
        "text.parse_math": False,
        "svg.fonttype": "none",
        # Ids that are the same each time, and differ from plot to plot.
        "svg.hashsalt": name,
    }


def _for_page(svg: str, name: str) -> str:
    """Make an element of a drawing that is a file."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Ids of groups (figure_1, axes_1 ...) are the same in each drawing, and unused.
    svg = re.sub(r'<g id="[^"]*"(/?)>', r"<g\1>", svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg.replace(
        "<svg ", f'<svg class="plot" role="img" aria-labelledby="{name}-title" ', 1
    )
