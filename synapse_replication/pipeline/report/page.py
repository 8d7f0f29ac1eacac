"""The page of a report: one self-contained HTML file."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import attrs
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from synapse_replication import __version__
from synapse_replication.pipeline.report.drawing import Plot
from synapse_replication.pipeline.report.report_data import LagLine, ReportData


@attrs.frozen
class ReportVerdict:
    """The overall result, which the page shows first.

    :ivar tone: ``good``, ``busy`` or ``bad``.
    """

    tone: str
    text: str


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
        times=_times,
        duration=_duration,
        moment=_moment,
        passed=_passed,
        size=lambda seconds: _duration(seconds * 1000),
    )
    return environment.get_template("report.html").render(
        data=data,
        verdict=judge(data),
        # Matplotlib has escaped the texts of the SVG.
        plots={
            plot.name: {"title": plot.title, "svg": Markup(plot.svg + plot.narrow)}
            for plot in plots
        },
        rows=sum(total.rows for total in data.totals),
        streams=len({total.stream for total in data.totals}),
        writers=len({total.instance_name for total in data.totals}),
        timed=sum(total.timed for total in data.totals),
        arrived=sum(count.rows for count in data.arrived),
        worst_lag=_worst(data.lags),
        first=min((t.first_ts for t in data.totals if t.first_ts), default=None),
        last=max((t.last_ts for t in data.totals if t.last_ts), default=None),
        version=__version__,
    )


def judge(data: ReportData) -> ReportVerdict:
    """Summarise the result of an audit in one line."""
    if data.findings is None:
        return ReportVerdict("busy", "Not audited: the sources were not compared")
    errors = data.finding_count.get("error", 0)
    warnings = data.finding_count.get("warning", 0)
    if errors:
        return ReportVerdict("bad", f"The audit found {_times(errors, 'error')}")
    if warnings:
        return ReportVerdict("busy", f"The audit found {_times(warnings, 'warning')}")
    return ReportVerdict("good", "The audit found nothing wrong")


def _times(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _worst(lags: Sequence[LagLine]) -> LagLine | None:
    return max(lags, key=lambda line: line.p99, default=None)


def _moment(value: datetime.datetime | None) -> str:
    if value is None:
        return "unknown"
    return value.strftime("%Y-%m-%d %H:%M:%S")


def _passed(value: datetime.datetime | None) -> str:
    """Format a relative time, which is stored as a time after 1970-01-01."""
    return "unknown" if value is None else f"+{_duration(value.timestamp() * 1000)}"


def _duration(milliseconds: float) -> str:
    """Format a duration in ms with a unit, to three digits or the nearest integer."""
    if milliseconds < 0:
        return f"-{_duration(-milliseconds)}"
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000)):
        if milliseconds >= size:
            return f"{_rounded(milliseconds / size)} {unit}"
    if milliseconds >= 1000:
        return f"{_rounded(milliseconds / 1000)} s"
    return f"{_rounded(milliseconds)} ms"


def _rounded(value: float) -> str:
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"
