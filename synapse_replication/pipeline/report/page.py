"""The page of a report: one self-contained HTML file."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from synapse_replication import __version__
from synapse_replication.pipeline.report.counts import ReportData
from synapse_replication.pipeline.report.plots import Plot, duration
from synapse_replication.text import counted


def render_page(data: ReportData, plots: Sequence[Plot]) -> str:
    """Return the page as HTML."""
    environment = Environment(
        loader=PackageLoader("synapse_replication.pipeline.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        number="{:,}".format,
        times=counted,
        duration=duration,
        moment=_moment,
        passed=_passed,
        size=lambda seconds: duration(seconds * 1000),
    )
    return environment.get_template("report.html").render(
        data=data,
        # Matplotlib has escaped the texts of the SVG.
        plots={plot.name: Markup(plot.svg + plot.narrow) for plot in plots},
        version=__version__,
    )


def _moment(value: datetime.datetime | None) -> str:
    return "unknown" if value is None else value.strftime("%Y-%m-%d %H:%M:%S")


def _passed(value: datetime.datetime | None) -> str:
    """Format a relative time, which is stored as a time after 1970-01-01."""
    return "unknown" if value is None else f"+{duration(value.timestamp() * 1000)}"
