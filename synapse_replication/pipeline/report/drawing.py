"""Drawing of the plots of a report: colours, panels, axes and output formats.

Each plot is drawn twice: for a wide page and for a narrow page. The wide form is also
an image. The SVGs refer to CSS variables instead of colours, so that they follow the
page's light or dark theme.
"""

from __future__ import annotations

import datetime
import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import matplotlib as mpl
import matplotlib.dates
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter

#: The label of all series that do not get a colour of their own.
OTHERS: Final = "all others"

#: The colours of series; the last one is for :data:`OTHERS`.
COLOURS: Final = (
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
    **{colour: f"var(--s{n})" for n, colour in enumerate(COLOURS)},
}

_UNITS: Final = (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000))

#: Matplotlib is only partially typed.
_dates: Any = matplotlib.dates


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


_WIDE: Final = Form("wide", width=9.6, columns=2, names=5, ticks=8)
_NARROW: Final = Form("narrow", width=4.2, columns=1, names=2, ticks=6)

Draw = Callable[[Form], Figure]


def colour_of(name: str, names: Sequence[str]) -> str:
    """Return the colour of a series: that of its index in ``names``, or the last."""
    return COLOURS[names.index(name) if name in names else -1]


def moment(start: int) -> datetime.datetime:
    """Return a time in UTC.

    :param start: s since 1970.
    """
    return datetime.datetime.fromtimestamp(start, datetime.timezone.utc)


def duration(milliseconds: float) -> str:
    """Format a duration in ms with a unit, to three digits or the nearest integer."""
    longest = (each for each in _UNITS if abs(milliseconds) >= each[1])
    unit, size = next(longest, ("ms", 1))
    value = milliseconds / size
    digits = f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"
    return f"{digits} {unit}"


def make_panels(
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


def use_time(form: Form, axes: Any, *, relative: bool = False) -> None:
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


def add_legend(figure: Figure, panels: Sequence[Any], form: Form) -> None:
    """Add one legend for all panels."""
    named: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    names = sorted(named, key=lambda name: name == OTHERS)
    figure.legend(
        [named[name] for name in names],
        names,
        loc="outside upper left",
        ncols=min(len(names), form.names),
    )


def render(name: str, title: str, draw: Draw) -> Plot:
    """Draw a plot in each of its forms.

    :param draw: returns the figure in a form.
    """
    with mpl.rc_context(fname=_STYLE):
        wide = draw(_WIDE)
        png = io.BytesIO()
        wide.savefig(png, format="png", dpi=120)
        svg = _svg(wide, name, _WIDE)
        return Plot(
            name, title, svg, _svg(draw(_NARROW), name, _NARROW), png.getvalue()
        )


def _svg(figure: Figure, name: str, form: Form) -> str:
    """Return an SVG element for an HTML page."""
    text = io.StringIO()
    # The salt makes ids deterministic, and different for each plot.
    with mpl.rc_context({"svg.hashsalt": f"{name} {form.name}"}):
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
    return svg.replace(
        "<svg ",
        f'<svg class="plot {form.name}" role="img" aria-labelledby="{name}-title" ',
        1,
    )
