"""The commands that write an archive, and that export or purge its rows."""

from __future__ import annotations

import datetime
import json
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import attrs
import click

from synapse_replication.cli.common import command, echo
from synapse_replication.cli.pipeline import options
from synapse_replication.pipeline.settings import PipelineSettings
from synapse_replication.text import counted

if TYPE_CHECKING:
    from synapse_replication.pipeline.archive.job import ArchiveSettings, Numbers


@command("archive", "pipeline archive -c homeserver.yaml --archive /srv/archive --once")
@options.optional_source_options
@options.archive_option
@click.option(
    "--recording",
    "recordings",
    multiple=True,
    metavar="PATH",
    help="A closed recording to archive, or a folder, whose closed recordings are "
    "archived. Each recording is archived once. May be repeated.",
)
@click.option(
    "--stream",
    "streams",
    multiple=True,
    help="Archive only the rows of this stream, not of all streams. May be repeated.",
)
@click.option(
    "--once",
    is_flag=True,
    help="Stop when all complete rows and all closed recordings are archived.",
)
@click.option(
    "--repair",
    is_flag=True,
    help="Instead of archiving, read the rows of damaged files from the database "
    "again. Stop other archive jobs first.",
)
@click.option(
    "--every",
    type=click.FloatRange(min=0.1),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="The pause between two searches for new rows and recordings.",
)
@click.option(
    "--batch-ids",
    type=click.IntRange(min=1),
    show_default="2,000,000 per core",
    help="The maximum number of ids in a batch. Only a batch with a single range of "
    "ids may exceed it, because a range is never divided between batches. Progress is "
    "saved after each batch.",
)
@click.option(
    "--compact-files",
    type=click.IntRange(min=2),
    show_default="8",
    help="Merge the small files of a table and day if there are at least this many.",
)
@click.option(
    "--retention-hours",
    type=click.IntRange(min=1),
    show_default="168",
    help="How long to retain replaced files for readers and time travel.",
)
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    help="Serve Prometheus metrics over HTTP on this port.",
)
@click.option(
    "--metrics-host",
    default="127.0.0.1",
    show_default=True,
    help="The address for --metrics-port. Access is not restricted.",
)
@options.master_option
@options.json_option
def archive_command(
    settings: PipelineSettings | None,
    repair: bool,
    metrics_port: int | None,
    metrics_host: str,
    as_json: bool,
    **given: Any,
) -> None:
    """Archive the rows of a database, and recordings, exactly once in Delta tables.

    Archives rows if a database is named with -c or --dsn, and recordings if
    --recording is given.

    Resumes after the last commit. Runs until SIGTERM or SIGINT, or, with --once, until
    all complete rows and all closed recordings are archived. A row is complete if its
    writer cannot commit a row with a lower id any more.
    """
    if settings is None and not given["recordings"]:
        raise click.UsageError(
            "nothing to archive: add -c or --dsn for the rows of a database, "
            "--recording for recordings, or both"
        )
    if repair and settings is None:
        raise click.UsageError(
            "--repair reads rows from the database again: add -c or --dsn"
        )
    from synapse_replication.pipeline.archive.job import ArchiveSettings

    chosen = {name: value for name, value in given.items() if value is not None}
    archive_settings = ArchiveSettings(source=settings, **chosen)
    if repair:
        _repair(archive_settings, as_json=as_json)
        return
    numbers = _archive(
        archive_settings, None if metrics_port is None else (metrics_host, metrics_port)
    )
    if as_json:
        click.echo(json.dumps(attrs.asdict(numbers)))
    else:
        echo(
            f"archived {numbers.rows:,} rows in {numbers.batches:,} batches and "
            f"{numbers.commands:,} commands of {numbers.recordings:,} recordings"
        )
        if numbers.skipped:
            echo(
                f"{numbers.skipped:,} ids were skipped, because PostgreSQL cannot "
                "convert their rows; the lines above name them"
            )


def _archive(settings: ArchiveSettings, address: tuple[str, int] | None) -> Numbers:
    from synapse_replication.pipeline.archive.job import ArchiveProgress, run_archive
    from synapse_replication.pipeline.archive.metrics import ArchiveMetrics

    metrics = ArchiveMetrics()
    with ExitStack() as stack:
        if address is not None:
            stack.enter_context(metrics.served(*address))
        progress = stack.enter_context(ArchiveProgress(sys.stderr))
        return run_archive(settings, progress, metrics, with_signals=True)


def _repair(settings: ArchiveSettings, *, as_json: bool) -> None:
    from synapse_replication.pipeline.archive.repair import repair_archive
    from synapse_replication.pipeline.spark.session import SparkJob

    source = settings.source_options()
    assert source is not None
    with SparkJob("synapse-replication repair", master=settings.master) as spark:
        repairs = repair_archive(
            settings.archive, source, spark, lambda text: echo(text, err=True)
        )
    if as_json:
        shown = [
            {
                "stream": each.stream,
                "files": [damaged.file.path for damaged in each.damaged],
                "rows": each.rows,
                "lost": each.lost,
            }
            for each in repairs
        ]
        click.echo(json.dumps(shown))
        return
    for each in repairs:
        echo(each.describe())
    if not repairs:
        echo("no file is damaged")


#: The output formats.
FORMATS = ("parquet", "csv", "jsonl")


@command(
    "export", "pipeline export --archive /srv/archive --out rows --stream receipts"
)
@options.archive_option
@click.option(
    "--out",
    required=True,
    metavar="DIR",
    help="The folder to create for the file. It must not exist.",
)
@click.option(
    "--format",
    "format_",
    type=click.Choice(FORMATS),
    default="parquet",
    show_default=True,
)
@click.option(
    "--stream",
    metavar="NAME",
    help="Export only this stream, with a column for each field of its rows. By "
    "default, all streams are exported, with rows as JSON.",
)
@click.option(
    "--where",
    metavar="SQL",
    help="Export only the rows for which this expression of Spark's SQL over the "
    "columns is true, for instance \"stream = 'events' AND day >= '2026-01-31'\".",
)
@options.master_option
@options.json_option
def export_command(
    archive: str,
    out: str,
    format_: str,
    stream: str | None,
    where: str | None,
    master: str | None,
    as_json: bool,
) -> None:
    """Write rows of an archive to a file for other programs.

    Without --stream, the content of each row is JSON in the column named row: an array
    in jsonl, the text of an array in csv and parquet.
    """
    from synapse_replication.pipeline.export import export_rows
    from synapse_replication.pipeline.progress import JobProgress
    from synapse_replication.pipeline.spark.session import SparkJob

    with (
        JobProgress(sys.stderr, 1) as progress,
        SparkJob(
            "synapse-replication export", master=master, progress=progress
        ) as spark,
    ):
        progress.begin("write rows")
        rows = export_rows(archive, out, format_, where, spark, stream=stream)
    if as_json:
        click.echo(json.dumps({"rows": rows, "folder": out, "format": format_}))
    else:
        echo(f"{rows} rows written to {out}")


@command("purge", "pipeline purge --archive /srv/archive --before 2026-01-31 --dry-run")
@options.archive_option
@click.option(
    "--before",
    required=True,
    type=click.DateTime(["%Y-%m-%d"]),
    metavar="DATE",
    help="Remove all days before this date, YYYY-MM-DD in UTC.",
)
@click.option(
    "--dry-run", is_flag=True, help="Print what would be removed; change nothing."
)
@options.json_option
def purge_command(
    archive: str, before: datetime.datetime, dry_run: bool, as_json: bool
) -> None:
    """Permanently remove whole days of rows and recordings from an archive.

    The archive job may be running; it does not archive purged rows again. A vacuum of
    that job removes the files of purged days once their retention period has passed.
    Java is not required.
    """
    from synapse_replication.pipeline.archive.purges import purge_archive
    from synapse_replication.pipeline.progress import JobProgress

    with JobProgress(sys.stderr, 1, unit="files") as progress:
        progress.begin("open the archive")
        days = purge_archive(archive, before.date(), progress, dry_run=dry_run)
    if as_json:
        described = [
            {
                "stream": day.stream,
                "day": day.day.isoformat(),
                "rows": day.rows,
                "bytes": day.size,
            }
            for day in days
        ]
        click.echo(json.dumps({"purged": not dry_run, "days": described}))
        return
    for day in days:
        echo(
            f"{day.day}  {day.stream or 'recordings of the wire'}: {day.rows} rows, "
            f"{day.size / 1e6:.1f} MB"
        )
    rows, size = sum(day.rows for day in days), sum(day.size for day in days)
    partitions = counted(len(days), "daily partition")
    what = f"{partitions} with {rows} rows, {size / 1e6:.1f} MB"
    if not days:
        echo(f"nothing is older than {before.date()}")
    elif dry_run:
        echo(f"would be removed: {what}; nothing was changed (--dry-run)")
    else:
        echo(f"removed: {what}")
