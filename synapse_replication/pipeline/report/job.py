"""The job that writes a report: an HTML page with counts and plots."""

from __future__ import annotations

import datetime
import functools
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from synapse_replication import __version__
from synapse_replication.pipeline.archive.snapshot import Snapshot, open_snapshot
from synapse_replication.pipeline.audit.findings import read_findings
from synapse_replication.pipeline.audit.job import AUDIT_STEPS, audited, count_rows
from synapse_replication.pipeline.audit.kinds import KINDS
from synapse_replication.pipeline.progress import JobProgress
from synapse_replication.pipeline.recorded_lines import lines_frame
from synapse_replication.pipeline.report import counts, tallies
from synapse_replication.pipeline.result_folder import (
    created_atomically,
    path_of_new_folder,
)
from synapse_replication.pipeline.settings import PipelineSettings
from synapse_replication.pipeline.source.planning import scan_rows
from synapse_replication.pipeline.spark.session import SparkJob, own_session
from synapse_replication.text import counted, duration

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from synapse_replication.pipeline.report.plots import Plot

#: The number of steps in addition to those of an audit: count, draw.
_STEPS: Final = 2


def run_report(
    settings: PipelineSettings | None,
    out: str,
    *,
    archive: str | None = None,
    recordings: Sequence[str] = (),
    findings: str | None = None,
    with_audit: bool = True,
    window: int | None = None,
    identify: bool = False,
    master: str | None = None,
) -> Path:
    """Write a report, and return the path of its page.

    :param out: the folder to create.
    :param findings: the folder of an audit's findings, to be used instead of a new
        audit.
    :param window: the length of the intervals for which a plot shows one value each, in
        s; ``None`` to choose it by the period that the rows or the lines cover.
    :param identify: whether to show the names of rooms and users.
    :param master: the Spark master URL; see :func:`make_session`.
    :raises PipelineError: if an input cannot be read, ``window`` is too short for the
        period, Java or PySpark cannot be used, or the report cannot be written.
    """
    # Check the arguments first, because reading takes a while.
    folder = path_of_new_folder(out)
    archived = open_snapshot(archive) if archive else None
    given = None if findings is None else read_findings(findings)
    rows = count_rows(settings, archived, recordings)
    has_lines = recordings or (archived is not None and archived.wire_files)
    audits = settings is not None and findings is None and with_audit
    name, steps = "synapse-replication report", _STEPS + AUDIT_STEPS * audits
    with JobProgress(sys.stderr, steps) as progress:
        with SparkJob(name, master=master, progress=progress) as spark:
            spark.start(rows if audits or has_lines else rows // tallies.ROWS_PER_TALLY)
            if audits:
                assert settings is not None
                # Audit the version of the archive that the rest of the report uses.
                given = audited(
                    settings,
                    recordings=recordings,
                    archive=archived,
                    spark=spark,
                    begin=progress.begin,
                )
            progress.begin("count rows and lines")
            session = own_session(spark())
            wire = lines_frame(session, counts.LINE_COLUMNS, recordings, archived)
            data = counts.collect_report(
                session,
                tallies=_tallies(session, settings, archived, window),
                written=None if wire is None else _written(session, settings, archived),
                wire=wire,
                findings=given,
                sources=_sources(settings, archived, recordings, audits=audits),
                window_s=window,
                identify=identify,
            )
        progress.begin("draw plots")
        write_report(data, folder)
    return folder / "report.html"


def _tallies(
    session: SparkSession,
    settings: PipelineSettings | None,
    archive: Snapshot | None,
    window: int | None,
) -> DataFrame | None:
    if archive is not None:
        rows = archive.rows(*tallies.COLUMNS)
    elif settings is not None:
        rows = scan_rows(settings, *tallies.COLUMNS)
    else:
        return None
    count = functools.partial(tallies.tally, window=window)
    return rows.then(count, tallies.SCHEMA).frame(session)


def _written(
    session: SparkSession, settings: PipelineSettings | None, archive: Snapshot | None
) -> DataFrame | None:
    if archive is not None:
        return archive.rows_frame(session, *counts.WRITTEN_COLUMNS)
    if settings is None:
        return None
    return scan_rows(settings, *counts.WRITTEN_COLUMNS).frame(session)


def _sources(
    settings: PipelineSettings | None,
    archived: Snapshot | None,
    recordings: Sequence[str],
    *,
    audits: bool,
) -> list[str]:
    sources = []
    conninfo = {} if settings is None else settings.conninfo
    name = f"database {conninfo.get('dbname', '')}".strip()
    if archived is not None:
        sources.append(f"rows and recordings of the archive {archived.store.uri}")
    elif settings is not None:
        sources.append(f"rows that the {name} has now")
    if recordings:
        sources.append(f"recordings: {', '.join(recordings)}")
    if audits:
        sources.append(f"an audit of the {name}")
    return sources


# -- the page ----------------------------------------------------------------------


def write_report(data: counts.ReportData, folder: Path) -> None:
    """Write the page and the plots; the folder appears once it is complete.

    :raises PipelineError: if the folder exists and is not empty, or cannot be
        written.
    """
    # Import it here: it is slow to import, and counting does not need it.
    from synapse_replication.pipeline.report.plots import draw_plots

    plots = draw_plots(data)
    with created_atomically(folder) as temporary:
        (temporary / "report.html").write_text(render_page(data, plots), "utf-8")
        for plot in plots:
            (temporary / f"{plot.name}.png").write_bytes(plot.png)


def render_page(data: counts.ReportData, plots: Sequence[Plot]) -> str:
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
        remedy=_remedy,
        size=lambda seconds: duration(seconds * 1000),
    )
    return environment.get_template("report.html").render(
        data=data,
        # Matplotlib has escaped the texts of the SVG.
        plots={plot.name: Markup(plot.svg + plot.narrow) for plot in plots},
        version=__version__,
    )


def _remedy(kind: str) -> Markup:
    """Return what to do about the findings of a kind."""
    return Markup(
        re.sub("``(.+?)``", r"<code>\1</code>", str(escape(KINDS[kind].remedy)))
    )


def _moment(value: datetime.datetime | None) -> str:
    return "unknown" if value is None else value.strftime("%Y-%m-%d %H:%M:%S")


def _passed(value: datetime.datetime | None) -> str:
    """Format a relative time, which is stored as a time after 1970-01-01."""
    return "unknown" if value is None else f"+{duration(value.timestamp() * 1000)}"
