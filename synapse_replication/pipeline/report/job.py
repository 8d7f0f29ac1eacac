"""The job that writes a report: an HTML page with counts and plots."""

from __future__ import annotations

import contextlib
import shutil
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive.frames import ArchivedTables, read_archive
from synapse_replication.pipeline.archive.store import open_archive
from synapse_replication.pipeline.audit.job import STEPS as AUDIT_STEPS, audited
from synapse_replication.pipeline.folders import new_folder
from synapse_replication.pipeline.progress import JobProgress
from synapse_replication.pipeline.report.counts import ReportInputs, collect_report
from synapse_replication.pipeline.report.report_data import ReportData
from synapse_replication.pipeline.report.row_counts import ABOUT, with_names
from synapse_replication.pipeline.schemas import FINDINGS_SCHEMA, WIRE_SCHEMA
from synapse_replication.pipeline.settings import PipelineSettings
from synapse_replication.pipeline.source.frames import read_rows
from synapse_replication.pipeline.spark.session import SCHEDULES_ONLY, job_session
from synapse_replication.pipeline.wire_lines import find_recordings, read_recordings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: The number of steps in addition to those of an audit: start Spark, count, draw.
_STEPS: Final = 3


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
    """Write a report in a new Spark session, and return the path of its page.

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
    # Check the arguments first, because starting Spark takes a while.
    folder = new_folder(out)
    if archive:
        open_archive(archive)
    audits = settings is not None and findings is None and with_audit
    with (
        JobProgress(sys.stderr, _STEPS + AUDIT_STEPS * audits) as progress,
        contextlib.ExitStack() as stack,
    ):
        session = stack.enter_context(
            job_session(
                "synapse-replication report",
                master=master,
                settings=SCHEDULES_ONLY,
                progress=progress,
            )
        )
        archived = read_archive(session, archive, verify=audits) if archive else None
        inputs = _read(session, settings, archived, recordings, findings, stack)
        if audits:
            assert settings is not None
            # Audit the version of the archive that the rest of the report describes.
            audit = audited(
                session,
                settings,
                recordings=recordings,
                archive=archived,
                begin=progress.begin,
            )
            inputs = _add_audit(inputs, settings, stack.enter_context(audit))
        progress.begin("count rows and lines")
        data = collect_report(inputs, window_s=window, identify=identify)
        progress.begin("draw plots")
        write_report(data, folder)
    return folder / "report.html"


def write_report(data: ReportData, folder: Path) -> None:
    """Write the page and the plots; the folder appears once it is complete.

    :raises PipelineError: if the folder exists and is not empty, or cannot be
        written.
    """
    # Import these here: they are slow to import, and counting does not need them.
    from synapse_replication.pipeline.report.page import render_page
    from synapse_replication.pipeline.report.plots import draw_plots

    plots = draw_plots(data)
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    try:
        temporary.mkdir()
        (temporary / "report.html").write_text(render_page(data, plots), "utf-8")
        for plot in plots:
            (temporary / f"{plot.name}.png").write_bytes(plot.png)
        temporary.rename(folder)
    except OSError as error:
        raise PipelineError(f"cannot write {folder}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _read(
    session: SparkSession,
    settings: PipelineSettings | None,
    archived: ArchivedTables | None,
    recordings: Sequence[str],
    findings: str | None,
    stack: contextlib.ExitStack,
) -> ReportInputs:
    sources = []
    rows = wire = None
    given = find_recordings(recordings)
    if archived is not None:
        sources.append(f"rows and recordings of the archive {archived.uri}")
        rows = archived.keys(*ABOUT)
        wire = archived.wire.select(*WIRE_SCHEMA.names)
        # Do not count recordings of the archive twice.
        given = [path for path in given if archived.lacks(path)]
        if not recordings and wire.isEmpty():
            wire = None
    elif settings is not None:
        sources.append(f"rows that the {_name_of(settings)} has now")
        # Cache the rows: otherwise, each query would read the database again.
        rows = with_names(read_rows(session, settings)).persist()
        stack.callback(rows.unpersist)
    if given:
        sources.append(f"recordings: {', '.join(map(str, given))}")
        recorded = read_recordings(session, given)
        wire = recorded if wire is None else wire.unionByName(recorded)
    return ReportInputs(
        rows,
        wire,
        None if findings is None else _read_findings(session, findings),
        sources,
    )


def _add_audit(
    inputs: ReportInputs, settings: PipelineSettings, findings: DataFrame
) -> ReportInputs:
    source = f"an audit of the {_name_of(settings)}"
    return attrs.evolve(inputs, findings=findings, sources=[*inputs.sources, source])


def _name_of(settings: PipelineSettings) -> str:
    return f"database {settings.conninfo.get('dbname', '')}".strip()


def _read_findings(session: SparkSession, folder: str) -> DataFrame:
    path = Path(folder).absolute() / "findings.parquet"
    if not path.exists():
        raise PipelineError(
            f"--findings {folder}: the folder has no findings.parquet, which "
            "'pipeline audit --out' writes"
        )
    return session.read.schema(FINDINGS_SCHEMA).parquet(f"file://{path}")
