"""Drawing of the plots of a report: colours, panels, axes and output formats.

Each plot is drawn three times: as an SVG for a wide page, as an SVG for a narrow page,
and as an image. The SVGs refer to CSS variables instead of colours, so that they follow
the page's light or dark theme.
"""

from __future__ import annotations

import datetime
import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import matplotlib as mpl
import matplotlib.dates
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter

#: The label of all series that do not get a colour of their own.
OTHERS = "all others"

#: The number of colours; the last one is for :data:`OTHERS`.
COLOURS = 8


@attrs.frozen
class Plot:
    """A rendered plot.

    :ivar name: the name of the plot's file, without the suffix.
    :ivar title: the title, which is also the text for screen readers.
    :ivar svg: an SVG element for a wide HTML page.
    :ivar narrow: an SVG element for a narrow HTML page.
    :ivar png: the plot as a PNG image.
    """

    name: str
    title: str
    svg: str
    narrow: str
    png: bytes


@attrs.frozen
class Style:
    """The style of a plot.

    :ivar series: the colours of series; the last one is for :data:`OTHERS`.
    :ivar width: the width in inches, divided into at most ``columns`` panels.
    :ivar names: the maximum number of entries in a line of the legend.
    :ivar ticks: the maximum number of ticks of a time axis.
    """

    text: str
    soft: str
    line: str
    back: str
    series: tuple[str, ...]
    width: float = 9.6
    columns: int = 2
    names: int = 5
    ticks: int = 8


_LIGHT = Style(
    "#1b1d21",
    "#5c626d",
    "#dcdfe4",
    "#ffffff",
    (
        *("#0b62a4", "#d9760a", "#1a8a5a", "#b0419c"),
        *("#7a5c00", "#2aa3c4", "#c4303a", "#9aa2ae"),
    ),
)

#: Placeholder colours, which are replaced by CSS variables.
_NAMED = Style(
    "#010001",
    "#010002",
    "#010003",
    "none",
    tuple(f"#01000{n + 4:x}" for n in range(COLOURS)),
)
_NARROW = attrs.evolve(_NAMED, width=4.2, columns=1, names=2, ticks=6)
_VARIABLES = {
    _NAMED.text: "var(--text)",
    _NAMED.soft: "var(--soft)",
    _NAMED.line: "var(--line)",
    **{colour: f"var(--s{n})" for n, colour in enumerate(_NAMED.series)},
}

Draw = Callable[[Style], Figure]

#: Matplotlib is only partially typed.
_dates: Any = matplotlib.dates


def colour_of(style: Style, name: str, names: Sequence[str]) -> str:
    """Return the colour of a series: that of its index in ``names``, or the last."""
    index = names.index(name) if name in names else COLOURS - 1
    return style.series[index]


def moment(start: int) -> datetime.datetime:
    """Return a time in UTC.

    :param start: s since 1970.
    """
    return datetime.datetime.fromtimestamp(start, datetime.timezone.utc)


def length(seconds: int) -> str:
    """Format the length of a window."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds % size == 0:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def _since_beginning(days: float, _position: object = None) -> str:
    return f"+{duration(round(days * 86_400_000))}"


def duration(milliseconds: float, _position: object = None) -> str:
    """Format a duration in ms for an axis."""
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000)):
        if milliseconds >= 2 * size:
            return f"{milliseconds / size:.0f} {unit}"
    if milliseconds >= 1000:
        return f"{milliseconds / 1000:g} s"
    return f"{milliseconds:g} ms"


def make_panels(
    style: Style, count: int, *, height: float, share_x: bool = False
) -> tuple[Figure, list[Any]]:
    """Create a figure with a number of panels, stacked or side by side.

    :param height: the height of each panel, in inches.
    :param share_x: whether all panels share one time axis.
    """
    columns = 1 if count == 1 else style.columns
    lines = -(-count // columns)
    figure = Figure(figsize=(style.width, height * lines + 0.35), layout="constrained")
    FigureCanvasAgg(figure)
    figure.set_facecolor(style.back)
    grid = figure.subplots(lines, columns, squeeze=False, sharex=share_x)
    panels = list(grid.flat)
    for axes in panels[count:]:
        axes.set_visible(False)
    for axes in panels[:count]:
        axes.set_facecolor("none")
        axes.set_axisbelow(True)
        axes.grid(visible=True, color=style.line, linewidth=0.8)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        axes.tick_params(length=0)
    return figure, panels[:count]


def use_time(style: Style, axes: Any, *, relative: bool = False) -> None:
    """Format an axis as times.

    :param relative: whether times are relative to the beginning of each recording, and
        stored as times after 1970-01-01.
    """
    locator = _dates.AutoDateLocator(minticks=3, maxticks=style.ticks)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(
        FuncFormatter(_since_beginning)
        if relative
        else _dates.ConciseDateFormatter(locator, tz=datetime.timezone.utc)
    )
    axes.tick_params(axis="x", labelbottom=True)


def add_legend(figure: Figure, panels: Any, style: Style) -> None:
    """Add one legend for all panels."""
    named: dict[str, Any] = {}
    for axes in panels if isinstance(panels, list) else [panels]:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    names = sorted(named, key=lambda name: name == OTHERS)
    figure.legend(
        [named[name] for name in names],
        names,
        loc="outside upper left",
        ncols=min(len(names), style.names),
        frameon=False,
        labelcolor=style.soft,
        handlelength=1.2,
        columnspacing=1.4,
    )


def render(name: str, title: str, draw: Draw) -> Plot:
    """Draw a plot in each of its three forms.

    :param draw: returns the figure in a style.
    """
    with mpl.rc_context(_settings(_LIGHT, name)):
        png = io.BytesIO()
        draw(_LIGHT).savefig(png, format="png", dpi=120)
    return Plot(
        name,
        title,
        _svg(_NAMED, name, "wide", draw),
        _svg(_NARROW, name, "narrow", draw),
        png.getvalue(),
    )


def _svg(style: Style, name: str, form: str, draw: Draw) -> str:
    with mpl.rc_context(_settings(style, f"{name} {form}")):
        text = io.StringIO()
        draw(style).savefig(
            text, format="svg", metadata={"Date": None, "Creator": None}
        )
    return _for_page(text.getvalue(), name, form)


def _settings(style: Style, name: str) -> dict[Any, Any]:
    return {
        "text.color": style.text,
        "axes.labelcolor": style.soft,
        "axes.edgecolor": style.line,
        "axes.titlecolor": style.text,
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
        "xtick.color": style.soft,
        "ytick.color": style.soft,
        "font.size": 9.5,
        # A dollar sign in a name does not start a formula.
        "text.parse_math": False,
        "svg.fonttype": "none",
        # Make ids deterministic, and different for each plot.
        "svg.hashsalt": name,
    }


def _for_page(svg: str, name: str, form: str) -> str:
    """Turn an SVG file into an element for an HTML page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Remove the ids of groups (figure_1, axes_1 ...): they are unused, and would not be
    # unique on the page.
    svg = re.sub(r'<g id="[^"]*"(/?)>', r"<g\1>", svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg.replace(
        "<svg ",
        f'<svg class="plot {form}" role="img" aria-labelledby="{name}-title" ',
        1,
    )
