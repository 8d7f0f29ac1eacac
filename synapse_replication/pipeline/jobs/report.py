"""``synapse-replication pipeline report``: what there is, as a page to look at.

Spark counts; what comes to the driver is bounded, whatever was read: windows, writers
of streams, and the first so many of all else.
"""

from __future__ import annotations

import contextlib
import datetime
import secrets
import shutil
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import click

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive_layout import (
    open_archive,
    read_archive,
    read_archived_wire,
)
from synapse_replication.pipeline.jdbc import read_backfill
from synapse_replication.pipeline.jobs.audit import audited
from synapse_replication.pipeline.options import (
    master_option,
    new_folder,
    optional_source_options,
)
from synapse_replication.pipeline.recordings import read_recordings
from synapse_replication.pipeline.report_data import (
    BatchBucket,
    CommandCount,
    FindingLine,
    Hot,
    LagLine,
    ReportData,
    StreamEvent,
    WindowCount,
    WriterTotal,
    choose_window,
    hide_names,
)
from synapse_replication.pipeline.schemas import (
    FINDINGS_SCHEMA,
    ROWS_SCHEMA,
    WIRE_SCHEMA,
)
from synapse_replication.pipeline.session import job_session
from synapse_replication.pipeline.settings import PipelineSettings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["ReportInputs", "collect_report", "report_command", "write_report"]

#: Rooms, and as many users.
MAX_HOT = 15

MAX_EVENTS = 50
MAX_FINDINGS = 200

#: Windows that somebody asks for, at most.
MAX_WINDOWS = 2000

_T = TypeVar("_T")


@attrs.frozen
class ReportInputs:
    """What a report is made of.

    :ivar rows: at least the columns of ROWS_SCHEMA; ``None`` if only the wire is known.
    :ivar wire: of WIRE_SCHEMA.
    :ivar findings: of FINDINGS_SCHEMA; ``None`` if nobody looked for any.
    :ivar sources: what these are, for people.
    """

    rows: DataFrame | None
    wire: DataFrame | None
    findings: DataFrame | None
    sources: Sequence[str]


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


def collect_report(
    inputs: ReportInputs,
    *,
    window_s: int | None = None,
    identify: bool = False,
    now: datetime.datetime | None = None,
) -> ReportData:
    """Count what there is, and fetch the small results.

    :param window_s: of plots; chosen if not given.
    :param identify: names of rooms and users stay.
    :param now: when the report was made, UTC.
    :raises PipelineError: there would be too many windows.
    """
    data = ReportData(
        made=now or datetime.datetime.now(datetime.timezone.utc),
        sources=inputs.sources,
        identified=identify,
    )
    # Each is read several times over.
    rows = None
    if inputs.rows is not None:
        rows = inputs.rows.select(*ROWS_SCHEMA.names).persist()
    wire = None
    if inputs.wire is not None:
        wire = inputs.wire.select(*WIRE_SCHEMA.names).persist()
    try:
        if rows is not None:
            data = _add_rows(data, rows, window_s)
        if wire is not None:
            data = _add_wire(data, wire, rows, window_s)
        data = _add_hottest(data, rows, wire, identify=identify)
        if inputs.findings is not None:
            data = _add_findings(data, inputs.findings)
    finally:
        for frame in (rows, wire):
            if frame is not None:
                frame.unpersist()
    return data


def write_report(data: ReportData, folder: Path) -> None:
    """Write the page and the plots; the folder appears when all is there.

    :raises PipelineError: it exists, or cannot be written.
    """
    # Heavy, and not needed where the results are only counted.
    from synapse_replication.pipeline.report_page import render_page
    from synapse_replication.pipeline.report_plots import draw_plots

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


# -- counting ----------------------------------------------------------------------


def _add_rows(data: ReportData, rows: DataFrame, window_s: int | None) -> ReportData:
    from synapse_replication.pipeline.transforms import report_rows

    tokens = report_rows.by_token(rows).persist()
    try:
        totals = _fetch(
            report_rows.totals(tokens).orderBy("stream", "instance_name"), WriterTotal
        )
        batches = _fetch(
            report_rows.batch_sizes(tokens).orderBy("stream", "bucket"), BatchBucket
        )
    finally:
        tokens.unpersist()
    window = _window(
        window_s,
        (total.first_ts for total in totals),
        (total.last_ts for total in totals),
    )
    return attrs.evolve(
        data,
        totals=totals,
        batches=batches,
        rows_window=window,
        over_time=_fetch(report_rows.over_time(rows, window), WindowCount),
    )


def _add_wire(
    data: ReportData, wire: DataFrame, rows: DataFrame | None, window_s: int | None
) -> ReportData:
    from pyspark.sql import functions as sf

    from synapse_replication.pipeline.transforms import report_rows, report_wire

    first, last = _span(wire)
    relative = first is None
    if relative:
        wire = report_wire.since_beginning(wire)
        first, last = _span(wire)
    window = _window(window_s, [first], [last])
    arrived = report_wire.arrived_rows(wire).persist()
    late = report_wire.lags(arrived, rows)
    if relative:
        late = late.limit(0)
    late = late.persist()
    events = report_wire.stream_events(wire).persist()
    timed = arrived.withColumnRenamed("received_ts", "written_ts")
    latest = events.orderBy(
        sf.desc_nulls_last("received_ts"), sf.desc("line_number")
    ).limit(MAX_EVENTS)
    try:
        return attrs.evolve(
            data,
            has_wire=True,
            wire_window=window,
            wire_relative=relative,
            arrived=_fetch(report_rows.over_time(timed, window), WindowCount),
            lags=_fetch(
                report_wire.lag_percentiles(late, None).orderBy("stream"), LagLine
            ),
            lags_over_time=_fetch(report_wire.lag_percentiles(late, window), LagLine),
            events=_fetch(latest, StreamEvent),
            event_count=events.count(),
            commands=_fetch(
                report_wire.commands(wire).orderBy(sf.desc("lines")), CommandCount
            ),
        )
    finally:
        for frame in (arrived, late, events):
            frame.unpersist()


def _span(
    wire: DataFrame,
) -> tuple[datetime.datetime | None, datetime.datetime | None]:
    from pyspark.sql import functions as sf

    (span,) = wire.agg(
        sf.min("received_ts").alias("first"), sf.max("received_ts").alias("last")
    ).collect()
    return _utc(span["first"]), _utc(span["last"])


def _add_hottest(
    data: ReportData,
    rows: DataFrame | None,
    wire: DataFrame | None,
    *,
    identify: bool,
) -> ReportData:
    from synapse_replication.pipeline.transforms import report_rows, report_wire

    if rows is None:
        assert wire is not None
        rows = report_wire.arrived_rows(wire)
    found = _fetch(report_rows.hottest(rows, MAX_HOT), Hot)
    found.sort(key=lambda hot: (hot.kind, -hot.rows, hot.name))
    if not identify:
        found = hide_names(found, secrets.token_bytes(32))
    return attrs.evolve(data, hottest=found)


def _add_findings(data: ReportData, findings: DataFrame) -> ReportData:
    from pyspark.sql import functions as sf

    counted = findings.groupBy("severity").agg(sf.count(sf.lit(1)).alias("findings"))
    order = sf.array_position(
        sf.array(sf.lit("error"), sf.lit("warning"), sf.lit("info")),
        sf.col("severity"),
    )
    worst = (
        findings.drop("evidence")
        .orderBy(order, "kind", "stream", "instance_name", "first_token")
        .limit(MAX_FINDINGS)
    )
    return attrs.evolve(
        data,
        findings=_fetch(worst, FindingLine),
        finding_count={row["severity"]: row["findings"] for row in counted.collect()},
    )


def _fetch(frame: DataFrame, to: Callable[..., _T]) -> list[_T]:
    return [
        to(**{name: _utc(value) for name, value in row.asDict().items()})
        for row in frame.collect()
    ]


def _utc(value: Any) -> Any:
    """Give times their zone: PySpark makes them naive, in this process's zone."""
    if isinstance(value, datetime.datetime):
        return value.astimezone(datetime.timezone.utc)
    return value


def _window(
    asked: int | None,
    first: Iterable[datetime.datetime | None],
    last: Iterable[datetime.datetime | None],
) -> int:
    begin = min((time for time in first if time), default=None)
    end = max((time for time in last if time), default=None)
    if asked is None:
        return choose_window(begin, end)
    if begin and end and (end - begin).total_seconds() / asked > MAX_WINDOWS:
        raise PipelineError(
            f"--window {asked}: there would be more than {MAX_WINDOWS} windows from "
            f"{begin:%Y-%m-%d} to {end:%Y-%m-%d}; take longer ones"
        )
    return asked
