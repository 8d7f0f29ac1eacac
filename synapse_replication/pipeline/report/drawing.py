"""How the plots of a report are drawn: colours, panels, axes, and what comes of them.

Each plot is drawn three times: for a page on a screen, for one on a phone, and as an
image. The SVG has no colours of its own but names of CSS variables, so that the page is
light or dark as its reader likes.
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

__all__ = [
    "COLOURS",
    "OTHERS",
    "Draw",
    "Plot",
    "Style",
    "add_legend",
    "colour_of",
    "duration",
    "length",
    "make_panels",
    "moment",
    "render",
    "use_time",
]

#: What does not have a colour of its own.
OTHERS = "all others"

#: Colours there are, the last of them for :data:`OTHERS`.
COLOURS = 8


@attrs.frozen
class Plot:
    """A plot, ready to be shown.

    :ivar name: of its file, without the suffix.
    :ivar title: what it shows, also for those who cannot see it.
    :ivar svg: an element for a page of HTML.
    :ivar narrow: the same for a phone.
    """

    name: str
    title: str
    svg: str
    narrow: str
    png: bytes


@attrs.frozen
class Style:
    """How a plot looks.

    :ivar series: the colours of series, the last one that of :data:`OTHERS`.
    :ivar width: in inches; ``columns`` of panels fit in.
    :ivar names: entries of a legend in a line, at most.
    :ivar ticks: along an axis of time, at most.
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

#: Colours that stand for CSS variables.
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

#: Only in part typed.
_dates: Any = matplotlib.dates


def colour_of(style: Style, name: str, names: Sequence[str]) -> str:
    """Return the colour of a series by its place in ``names``."""
    index = names.index(name) if name in names else COLOURS - 1
    return style.series[index]


def moment(start: int) -> datetime.datetime:
    """Return a time, UTC.

    :param start: s since 1970.
    """
    return datetime.datetime.fromtimestamp(start, datetime.timezone.utc)


def length(seconds: int) -> str:
    """Write how long a window is."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds % size == 0:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def _since_beginning(days: float, _position: object = None) -> str:
    return f"+{duration(round(days * 86_400_000))}"


def duration(milliseconds: float, _position: object = None) -> str:
    """Write ms at an axis."""
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000)):
        if milliseconds >= 2 * size:
            return f"{milliseconds / size:.0f} {unit}"
    if milliseconds >= 1000:
        return f"{milliseconds / 1000:g} s"
    return f"{milliseconds:g} ms"


def make_panels(
    style: Style, count: int, *, height: float, share_x: bool = False
) -> tuple[Figure, list[Any]]:
    """Make a figure with so many panels, below one another or side by side.

    :param height: of each, in inches.
    :param share_x: all have the same axis of time.
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
    """Write times at an axis.

    :param relative: times are since the beginning, as if that were 1970.
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
    """Explain the colours of all panels, once."""
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
    """Draw a plot in each of its forms.

    :param draw: makes the figure in a style.
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
        # A dollar in a name is one.
        "text.parse_math": False,
        "svg.fonttype": "none",
        # Ids that are the same each time, and differ from plot to plot.
        "svg.hashsalt": name,
    }


def _for_page(svg: str, name: str, form: str) -> str:
    """Make an element of a drawing that is a file."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Ids of groups (figure_1, axes_1 ...) are the same in each drawing, and unused.
    svg = re.sub(r'<g id="[^"]*"(/?)>', r"<g\1>", svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg.replace(
        "<svg ",
        f'<svg class="plot {form}" role="img" aria-labelledby="{name}-title" ',
        1,
    )
