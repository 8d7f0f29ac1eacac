"""``synapse-replication pipeline report``: writes an HTML page with plots."""

from __future__ import annotations

from typing import Any

import click

from synapse_replication.cli.common import command
from synapse_replication.cli.pipeline.options import (
    master_option,
    optional_source_options,
    recordings_option,
)
from synapse_replication.pipeline.settings import PipelineSettings


@command("report", "pipeline report -c homeserver.yaml --out report")
@optional_source_options
@click.option(
    "--out",
    required=True,
    metavar="DIR",
    help="The folder to create, for report.html and a PNG of each plot. It must not "
    "exist.",
)
@click.option(
    "--archive",
    metavar="DIR",
    help="Count the rows and recordings of this archive, instead of the rows in the "
    "database. An audit reads the archive and the database.",
)
@recordings_option
@click.option(
    "--findings",
    metavar="DIR",
    help="Use the output of 'pipeline audit --out' instead of running an audit.",
)
@click.option(
    "--no-audit", is_flag=True, help="Skip the audit, the slowest part of a report."
)
@click.option(
    "--window",
    type=click.IntRange(min=1),
    metavar="SECONDS",
    help="The length of the intervals for which a plot shows one value each; chosen "
    "automatically by default.",
)
@click.option(
    "--identify",
    is_flag=True,
    help="Show the names of rooms and users instead of keyed hashes, whose key is not "
    "stored.",
)
@master_option
def report_command(
    settings: PipelineSettings | None, no_audit: bool, **options: Any
) -> None:
    """Write a page about streams and writers: rows, lags, and findings of an audit.

    The rows come from the database or an archive, and the traffic from recordings or
    the archive. The page is one HTML file that needs no network; each plot is also
    written as a PNG.
    """
    if not (settings or options["archive"] or options["recordings"]):
        raise click.UsageError(
            "nothing to report on: add -c or --dsn, --archive, or --recording"
        )
    from synapse_replication.pipeline.report.job import run_report

    page = run_report(settings, with_audit=not no_audit, **options)
    click.echo(f"written: {page}")
