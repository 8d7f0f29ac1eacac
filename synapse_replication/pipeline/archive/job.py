"""``synapse-replication pipeline archive``: rows and recordings, kept as Parquet."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack

import attrs
import click
from prometheus_client import CollectorRegistry

from synapse_replication.pipeline.archive.compaction import ENOUGH_FILES
from synapse_replication.pipeline.archive.metrics import ArchiveMetrics, serve_metrics
from synapse_replication.pipeline.archive.progress import make_reporter
from synapse_replication.pipeline.archive.run import ArchiveSettings, run_archive
from synapse_replication.pipeline.options import (
    json_option,
    master_option,
    optional_source_options,
)
from synapse_replication.pipeline.settings import PipelineSettings

__all__ = ["archive_command"]


@click.command("archive")
@optional_source_options
@click.option("--archive", "folder", required=True, metavar="DIR", help="The archive.")
@click.option(
    "--recording",
    "recordings",
    multiple=True,
    metavar="PATH",
    help="Archive this recording too, or those of this folder; each once, when it is "
    "closed. May be given again.",
)
@click.option("--stream", "streams", multiple=True, help="Only this stream.")
@click.option(
    "--once", is_flag=True, help="Archive all that is there now, and stop then."
)
@click.option(
    "--every",
    type=click.FloatRange(min=0.1),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="How often to look for new rows and recordings.",
)
@click.option(
    "--max-rows",
    type=click.IntRange(min=1),
    default=1_000_000,
    show_default=True,
    help="Rows in a batch at most.",
)
@click.option(
    "--compact-files",
    type=click.IntRange(min=2),
    default=ENOUGH_FILES,
    show_default=True,
    help="Make one file of the small ones of a stream and day, when there are as many.",
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
    help="The address to serve them on. Whoever reaches it can read them.",
)
@master_option
@json_option
def archive_command(
    settings: PipelineSettings | None,
    folder: str,
    recordings: tuple[str, ...],
    streams: tuple[str, ...],
    once: bool,
    every: float,
    max_rows: int,
    compact_files: int,
    metrics_port: int | None,
    metrics_host: str,
    master: str | None,
    as_json: bool,
) -> None:
    """Keep all rows of all streams, and recordings, as Parquet; each once.

    Goes on where it was, whatever ended it, until SIGTERM or SIGINT, or with --once
    until everything that is there is archived.
    """
    if settings is None and not recordings:
        raise click.UsageError(
            "what to archive? Give -c or --dsn for the rows of a database, "
            "--recording for recordings, or both"
        )
    registry = CollectorRegistry()
    with ExitStack() as stack:
        metrics = ArchiveMetrics(registry)
        if metrics_port is not None:
            stack.callback(serve_metrics(registry, metrics_host, metrics_port))
        reporter = make_reporter(sys.stderr)
        stack.enter_context(reporter)
        numbers = run_archive(
            ArchiveSettings(
                folder,
                settings,
                recordings,
                streams,
                once,
                every,
                max_rows,
                compact_files,
                master,
            ),
            reporter,
            metrics,
            with_signals=True,
        )
    if as_json:
        click.echo(json.dumps(attrs.asdict(numbers)))
    else:
        click.echo(
            f"archived {numbers.rows:,} rows in {numbers.batches:,} batches and "
            f"{numbers.commands:,} commands of {numbers.recordings:,} recordings"
        )
