"""The plots of a report, drawn from its values.

Each plot has a bounded number of series and points. It is drawn twice: for a wide page
and for a narrow page. The wide form is also an image. The SVGs refer to CSS variables
instead of colours, so that they follow the page's light or dark theme.
"""

from __future__ import annotations

import datetime
import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import attrs
import matplotlib as mpl
import matplotlib.dates
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, NullLocator

from synapse_replication.pipeline.report.counts import ReportData, Rows
from synapse_replication.text import duration

#: The label of all series that do not get a colour of their own.
OTHERS: Final = "all others"

#: The colours of series; the last one is for :data:`OTHERS`.
_COLOURS: Final = (
    *("#0b62a4", "#d9760a", "#1a8a5a", "#b0419c"),
    *("#7a5c00", "#2aa3c4", "#c4303a", "#9aa2ae"),
)

_STYLE: Final = Path(__file__).with_name("report.mplstyle")

#: The CSS variable of the page for each colour.
_VARIABLES: Final[Mapping[str, str]] = {
    "#1b1d21": "var(--text)",
    "#5c626d": "var(--soft)",
    "#dcdfe4": "var(--line)",
    "#ffffff": "var(--card)",
    **{colour: f"var(--s{n})" for n, colour in enumerate(_COLOURS)},
}

#: Matplotlib's unit of times, in s.
_DAY: Final = 86_400

#: Matplotlib is only partially typed.
_dates: Any = matplotlib.dates


@attrs.frozen
class Plot:
    """A rendered plot.

    :ivar name: the name of the plot's file, without the suffix.
    :ivar svg: an SVG element for a wide HTML page.
    :ivar narrow: an SVG element for a narrow HTML page.
    :ivar png: the plot as a PNG image.
    """

    name: str
    svg: str
    narrow: str
    png: bytes


@attrs.frozen
class Form:
    """The form of a plot.

    :ivar name: its name, which is a CSS class of the page.
    :ivar width: the width in inches, divided into at most ``columns`` panels.
    :ivar names: the maximum number of entries in a line of the legend.
    :ivar ticks: the maximum number of ticks of a time axis.
    """

    name: str
    width: float
    columns: int
    names: int
    ticks: int


#: The form for a wide page.
WIDE: Final = Form("wide", width=9.6, columns=2, names=5, ticks=8)
_NARROW: Final = Form("narrow", width=4.2, columns=1, names=2, ticks=6)

Draw = Callable[[Form], Figure]

_MAX_PANELS = 6
_MAX_LAG_PANELS = 4
_MAX_BARS = 12


def draw_plots(data: ReportData) -> list[Plot]:
    """Draw all plots for which there is data."""
    return [_render(name, draw) for name, draw in drawings(data).items()]


def drawings(data: ReportData) -> dict[str, Draw]:
    """Return a function that draws each plot for which there is data, by its name."""
    streams = _top(_sum(data.totals, "stream") + _sum(data.arrived, "stream"))
    writers = _top(_sum(data.totals, "instance_name"))
    plots: dict[str, Draw] = {}
    if data.over_time:
        rows = data.over_time, data.rows_window
        plots["rows-over-time"] = partial(_stacked, *rows, streams)
        plots["rows-by-writer"] = partial(_writers, *rows, writers)
    if data.totals:
        plots["shares"] = partial(_shares, data.totals, writers)
    if any(batch.largest > 1 for batch in data.batches):
        plots["batches"] = partial(_batches, data.batches)
    if data.arrived:
        arrived = partial(_stacked, data.arrived, data.wire_window, streams)
        plots["arrived"] = partial(arrived, relative=data.wire_relative)
    if any(line.tokens > 1 for line in data.lags_over_time):
        plots["lag"] = partial(_lags, data.lags_over_time, data.lags)
    return plots


# -- each plot ---------------------------------------------------------------------


def _stacked(
    counts: Rows,
    window_s: int,
    colours: Sequence[str],
    form: Form,
    *,
    relative: bool = False,
) -> Figure:
    by_series = _series(counts, "stream", "start", colours)
    figure, (axes,) = _make_panels(form, 1, height=3.4)
    starts = sorted({start for counter in by_series.values() for start in counter})
    base = Counter[int]()
    for name, counter in by_series.items():
        axes.bar(
            [start / _DAY for start in starts],
            [counter[start] for start in starts],
            width=0.92 * window_s / _DAY,
            bottom=[base[start] for start in starts],
            align="edge",
            label=_label(name),
            color=_colour_of(name, colours),
            linewidth=0,
        )
        base += counter
    axes.set_ylabel(f"rows in {duration(window_s * 1000)}")
    _use_time(form, axes, relative=relative)
    _add_legend(figure, [axes], form)
    return figure


def _writers(counts: Rows, window_s: int, writers: Sequence[str], form: Form) -> Figure:
    rows = _sum(counts, "stream")
    streams = [name for name, _ in rows.most_common(_MAX_PANELS)]
    figure, panels = _make_panels(form, len(streams), height=2.1, share_x=True)
    starts = sorted({count.start for count in counts})
    # Show a window without rows as zero.
    steps = range(starts[0], starts[-1] + window_s, window_s)
    for axes, stream in zip(panels, streams, strict=True):
        of_stream = (count for count in counts if count.stream == stream)
        by_writer = _series(of_stream, "instance_name", "start", writers)
        for name, counter in by_writer.items():
            axes.plot(
                [step / _DAY for step in steps],
                [counter[step] for step in steps],
                label=_label(name),
                color=_colour_of(name, writers),
                linewidth=1.4,
            )
        axes.set_title(stream)
        axes.set_ylim(bottom=0)
        _use_time(form, axes)
    _add_legend(figure, panels, form)
    return figure


def _shares(totals: Rows, writers: Sequence[str], form: Form) -> Figure:
    rows = _sum(totals, "stream")
    streams = [name for name, _ in rows.most_common(_MAX_BARS)][::-1]
    figure, (axes,) = _make_panels(form, 1, height=0.9 + 0.3 * len(streams))
    offsets = range(len(streams))
    left = Counter[str]()
    shown = (total for total in totals if total.stream in streams)
    by_writer = _series(shown, "instance_name", "stream", writers)
    for name, of_writer in by_writer.items():
        axes.barh(
            offsets,
            [100 * of_writer[stream] / rows[stream] for stream in streams],
            left=[100 * left[stream] / rows[stream] for stream in streams],
            height=0.7,
            label=_label(name),
            color=_colour_of(name, writers),
            edgecolor="white",
        )
        left += of_writer
    axes.set_yticks(offsets, streams)
    axes.set_xlim(0, 100)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f} %"))
    axes.grid(visible=False, axis="y")
    _add_legend(figure, [axes], form)
    return figure


def _batches(batches: Rows, form: Form) -> Figure:
    # Omit a stream in which each token has exactly one row.
    shown = [batch for batch in batches if batch.largest > 1]
    tokens = _sum(shown, "stream", "tokens")
    streams = [name for name, _ in tokens.most_common(_MAX_PANELS)]
    figure, panels = _make_panels(form, len(streams), height=1.9)
    for axes, stream in zip(panels, streams, strict=True):
        found = {b.bucket: b.tokens for b in shown if b.stream == stream}
        buckets = [2**n for n in range(max(found).bit_length())]
        labels = [str(b) if b == 1 else f"{b}-{2 * b - 1}" for b in buckets]
        if len(buckets) > 6:
            labels = [str(b) if n % 2 == 0 else "" for n, b in enumerate(buckets)]
        axes.bar(
            range(len(buckets)),
            [found.get(bucket, 0) for bucket in buckets],
            color=_COLOURS[0],
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
    figure, panels = _make_panels(form, len(streams), height=2.3, share_x=True)
    for axes, stream in zip(panels, streams, strict=True):
        of_stream = (line for line in lags if line.stream == stream)
        lines = sorted(of_stream, key=lambda line: line.start)
        for index, percentile in ((6, "p99"), (1, "p95"), (0, "p50")):
            axes.plot(
                [line.start / _DAY for line in lines],
                [max(getattr(line, percentile), 0) for line in lines],
                label=percentile,
                color=_COLOURS[index],
                marker=".",
                markersize=4,
                linewidth=1.2,
            )
        axes.set_title(stream)
        axes.set_yscale("symlog", linthresh=1)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda ms, _: duration(ms)))
        axes.yaxis.set_minor_locator(NullLocator())
        _use_time(form, axes)
    _add_legend(figure, panels, form)
    return figure


def _series(
    rows: Iterable[Any], series: str, key: str, known: Sequence[str]
) -> dict[str, Counter[Any]]:
    """Sum the numbers of rows by series and key.

    :param series: the column with the series.
    :param key: the column with the key.
    :param known: the series in order; all others are one series.
    """
    found: dict[str, Counter[Any]] = {name: Counter() for name in (*known, OTHERS)}
    for row in rows:
        name = getattr(row, series)
        found[name if name in known else OTHERS][getattr(row, key)] += row.rows
    return {name: counter for name, counter in found.items() if counter}


def _sum(rows: Iterable[Any], name: str, number: str = "rows") -> Counter[str]:
    """Sum the numbers in a column of rows by the names in another one."""
    summed: Counter[str] = Counter()
    for row in rows:
        summed[getattr(row, name)] += getattr(row, number)
    return summed


def _top(counted: Counter[str]) -> list[str]:
    """Return the names with the largest counts, which get colours of their own."""
    return [name for name, _ in counted.most_common(len(_COLOURS) - 1)]


# -- drawing -----------------------------------------------------------------------


def _label(name: str) -> str:
    """Return the label of a series; Matplotlib omits those that begin with ``_``."""
    return f"\N{ZERO WIDTH SPACE}{name}" if name.startswith("_") else name


def _colour_of(name: str, names: Sequence[str]) -> str:
    """Return the colour of a series: that of its index in ``names``, or the last."""
    return _COLOURS[names.index(name) if name in names else -1]


def _make_panels(
    form: Form, count: int, *, height: float, share_x: bool = False
) -> tuple[Figure, list[Any]]:
    """Create a figure with a number of panels, stacked or side by side.

    :param height: the height of each panel, in inches.
    :param share_x: whether all panels share one time axis.
    """
    columns = 1 if count == 1 else form.columns
    lines = -(-count // columns)
    figure = Figure(figsize=(form.width, height * lines + 0.35), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(lines, columns, squeeze=False, sharex=share_x)
    panels = list(grid.flat)
    for axes in panels[count:]:
        axes.set_visible(False)
    for axes in panels[:count]:
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    return figure, panels[:count]


def _use_time(form: Form, axes: Any, *, relative: bool = False) -> None:
    """Format an axis as times.

    :param relative: whether times are relative to the beginning of each recording, and
        stored as times after 1970-01-01.
    """
    locator = _dates.AutoDateLocator(minticks=3, maxticks=form.ticks)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda days, _: f"+{duration(round(days * 86_400_000))}")
        if relative
        else _dates.ConciseDateFormatter(locator, tz=datetime.timezone.utc)
    )
    axes.tick_params(axis="x", labelbottom=True)


def _add_legend(figure: Figure, panels: Sequence[Any], form: Form) -> None:
    """Add one legend for all panels."""
    named = {
        label: handle
        for axes in panels
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    names = sorted(named, key=lambda name: name == OTHERS)
    figure.legend(
        [named[name] for name in names],
        names,
        loc="outside upper left",
        ncols=min(len(names), form.names),
    )


def _render(name: str, draw: Draw) -> Plot:
    """Draw a plot in each of its forms.

    :param draw: returns the figure in a form.
    """
    svg, figure = draw_svg(name, draw, WIDE)
    png = io.BytesIO()
    with mpl.rc_context(fname=_STYLE):
        # The layout, which takes half of the time, is that of the SVG.
        figure.set_layout_engine("none")
        figure.savefig(png, format="png", dpi=120)
    return Plot(name, svg, draw_svg(name, draw, _NARROW)[0], png.getvalue())


def draw_svg(name: str, draw: Draw, form: Form) -> tuple[str, Figure]:
    """Draw a plot; return an SVG element for an HTML page, and the figure.

    :param draw: returns the figure in a form.
    """
    text = io.StringIO()
    with (
        mpl.rc_context(fname=_STYLE),
        # The salt makes ids deterministic, and different for each plot.
        mpl.rc_context({"svg.hashsalt": f"{name} {form.name}"}),
    ):
        figure = draw(form)
        metadata = {"Date": None, "Creator": None}
        figure.savefig(text, format="svg", metadata=metadata, facecolor="none")
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Remove the ids of groups (figure_1, axes_1 ...): they are unused, and would not be
    # unique on the page.
    svg = re.sub(r'<g id="[^"]*"(/?)>', r"<g\1>", svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    head = f'<svg class="plot {form.name}" role="img" aria-labelledby="{name}-title" '
    return svg.replace("<svg ", head, 1), figure
