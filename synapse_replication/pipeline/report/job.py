"""``synapse-replication pipeline report``: what there is, as a page to look at."""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import click

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive.layout import (
    open_archive,
    read_archive,
    read_archived_wire,
)
from synapse_replication.pipeline.audit.job import audited
from synapse_replication.pipeline.options import (
    master_option,
    new_folder,
    optional_source_options,
)
from synapse_replication.pipeline.report.counts import ReportInputs, collect_report
from synapse_replication.pipeline.report.data import ReportData
from synapse_replication.pipeline.schemas import FINDINGS_SCHEMA, WIRE_SCHEMA
from synapse_replication.pipeline.settings import PipelineSettings
from synapse_replication.pipeline.source.jdbc import read_backfill
from synapse_replication.pipeline.spark.session import job_session
from synapse_replication.pipeline.wire_lines import read_recordings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["report_command", "write_report"]


@click.command("report")
@optional_source_options
@click.option(
    "--out",
    required=True,
    metavar="DIR",
    help="The folder to make, with report.html and a PNG of each plot. It must not "
    "exist.",
)
@click.option(
    "--archive",
    metavar="DIR",
    help="An archive: its rows, in place of the database's, and its recordings.",
)
@click.option(
    "--recording",
    "recordings",
    multiple=True,
    metavar="PATH",
    help="A recording of the wire, or a folder of them. May be given again.",
)
@click.option(
    "--findings",
    metavar="DIR",
    help="What 'pipeline audit --out' wrote, in place of an audit of the database.",
)
@click.option("--no-audit", is_flag=True, help="Audit nothing: that takes the longest.")
@click.option(
    "--window",
    type=click.IntRange(min=1),
    metavar="SECONDS",
    help="How long a window of a plot is; chosen by what there is if not given.",
)
@click.option(
    "--identify",
    is_flag=True,
    help="Show the names of rooms and users, not hashes with a key that is thrown away.",
)
@master_option
def report_command(
    settings: PipelineSettings | None,
    out: str,
    archive: str | None,
    recordings: tuple[str, ...],
    findings: str | None,
    no_audit: bool,
    window: int | None,
    identify: bool,
    master: str | None,
) -> None:
    """Write a page about streams and writers: rows over time, lags, shares, findings.

    One file of HTML that needs no network, and PNGs. Of the database, or of an archive;
    and of recordings.
    """
    if settings is None and not archive and not recordings:
        raise click.UsageError(
            "of what? Give -c or --dsn, or --archive, or --recording"
        )
    # What is wrong is told at once: Spark takes its time.
    folder = new_folder(out)
    if archive:
        open_archive(archive)
    with (
        job_session("synapse-replication report", master=master) as session,
        contextlib.ExitStack() as stack,
    ):
        inputs = _read(session, settings, archive, recordings, findings)
        if settings is not None and findings is None and not no_audit:
            found = stack.enter_context(
                audited(session, settings, recordings=recordings, archive=archive)
            )
            inputs = attrs.evolve(
                inputs,
                findings=found,
                sources=[*inputs.sources, f"an audit of the {_name_of(settings)}"],
            )
        data = collect_report(inputs, window_s=window, identify=identify)
    write_report(data, folder)
    click.echo(f"written: {folder / 'report.html'}")


def write_report(data: ReportData, folder: Path) -> None:
    """Write the page and the plots; the folder appears when all is there.

    :raises PipelineError: it exists, or cannot be written.
    """
    # Heavy, and not needed where the results are only counted.
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
    archive: str | None,
    recordings: Sequence[str],
    findings: str | None,
) -> ReportInputs:
    sources = []
    rows = wire = None
    if archive:
        sources.append(f"rows and recordings of the archive {archive}")
        rows = read_archive(session, archive)
        wire = read_archived_wire(session, archive).select(*WIRE_SCHEMA.names)
        if not recordings and wire.isEmpty():
            wire = None
    elif settings is not None:
        sources.append(f"rows that the {_name_of(settings)} has now")
        rows = read_backfill(session, settings)
    if recordings:
        sources.append(f"recordings: {', '.join(recordings)}")
        recorded = read_recordings(session, recordings)
        wire = recorded if wire is None else wire.unionByName(recorded)
    return ReportInputs(
        rows,
        wire,
        None if findings is None else _read_findings(session, findings),
        sources,
    )


def _name_of(settings: PipelineSettings) -> str:
    return f"database {settings.conninfo.get('dbname', '')}".strip()


def _read_findings(session: SparkSession, folder: str) -> DataFrame:
    path = Path(folder).absolute() / "findings.parquet"
    if not path.exists():
        raise PipelineError(
            f"--findings {folder}: there is no findings.parquet; 'pipeline audit --out' "
            "writes it"
        )
    return session.read.schema(FINDINGS_SCHEMA).parquet(f"file://{path}")
