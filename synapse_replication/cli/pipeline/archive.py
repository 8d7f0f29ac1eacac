"""``synapse-replication pipeline archive``: archives rows and recordings with Spark."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import attrs
import click

from synapse_replication.cli.common import command
from synapse_replication.cli.pipeline.options import (
    archive_option,
    json_option,
    master_option,
    optional_source_options,
)
from synapse_replication.pipeline.settings import PipelineSettings

if TYPE_CHECKING:
    from synapse_replication.pipeline.archive.job import ArchiveSettings, Numbers


@command("archive", "pipeline archive -c homeserver.yaml --archive /srv/archive --once")
@optional_source_options
@archive_option
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
@master_option
@json_option
def archive_command(
    settings: PipelineSettings | None,
    repair: bool,
    metrics_port: int | None,
    metrics_host: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Archive the rows of a database, and recordings, exactly once in Delta tables.

    Archives rows if a database is named with -c or --dsn, and recordings if
    --recording is given.

    Resumes after the last commit. Runs until SIGTERM or SIGINT, or, with --once, until
    all complete rows and all closed recordings are archived. A row is complete if its
    writer cannot commit a row with a lower id any more.
    """
    if settings is None and not options["recordings"]:
        raise click.UsageError(
            "nothing to archive: add -c or --dsn for the rows of a database, "
            "--recording for recordings, or both"
        )
    if repair and settings is None:
        raise click.UsageError(
            "--repair reads rows from the database again: add -c or --dsn"
        )
    from synapse_replication.pipeline.archive.job import ArchiveSettings

    given = {name: value for name, value in options.items() if value is not None}
    archive_settings = ArchiveSettings(source=settings, **given)
    if repair:
        _repair(archive_settings, as_json=as_json)
        return
    numbers = _archive(
        archive_settings, None if metrics_port is None else (metrics_host, metrics_port)
    )
    if as_json:
        click.echo(json.dumps(attrs.asdict(numbers)))
    else:
        click.echo(
            f"archived {numbers.rows:,} rows in {numbers.batches:,} batches and "
            f"{numbers.commands:,} commands of {numbers.recordings:,} recordings"
        )
        if numbers.skipped:
            click.echo(
                f"{numbers.skipped:,} ids were skipped, because PostgreSQL cannot "
                "convert their rows; the lines above name them"
            )


def _archive(settings: ArchiveSettings, metrics: tuple[str, int] | None) -> Numbers:
    from prometheus_client import CollectorRegistry

    from synapse_replication.pipeline.archive.job import ArchiveProgress, run_archive
    from synapse_replication.pipeline.archive.metrics import (
        ArchiveMetrics,
        serve_metrics,
    )

    registry = CollectorRegistry()
    archive_metrics = ArchiveMetrics(registry)
    with ExitStack() as stack:
        if metrics is not None:
            stack.callback(serve_metrics(registry, *metrics))
        progress = stack.enter_context(ArchiveProgress(sys.stderr))
        return run_archive(settings, progress, archive_metrics, with_signals=True)


def _repair(settings: ArchiveSettings, *, as_json: bool) -> None:
    from synapse_replication.pipeline.archive.repair import repair_archive

    options = settings.source_options()
    assert options is not None
    repairs = repair_archive(
        settings.archive, options, lambda text: click.echo(text, err=True)
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
        click.echo(each.describe())
    if not repairs:
        click.echo("no file is damaged")
