"""The commands that examine a deployment: an audit of its rows, and a report."""

from __future__ import annotations

import sys
from typing import Any

import click

from synapse_replication.cli.common import command, fail
from synapse_replication.cli.pipeline import options
from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.settings import PipelineSettings


@command("audit", "pipeline audit -c homeserver.yaml --archive /srv/archive")
@options.source_options
@options.recordings_option
@click.option(
    "--archive",
    metavar="DIR",
    help="An archive whose rows are compared with the tables. Its recordings are also "
    "audited.",
)
@click.option(
    "--out",
    metavar="DIR",
    help="Write all findings to findings.parquet and findings.json in this folder.",
)
@options.master_option
@options.json_option
def audit_command(settings: PipelineSettings, **given: Any) -> None:
    """Check for lost, duplicate and misplaced rows.

    The audit compares tables, sequences, positions, recordings and archive. It changes
    none of them, and can be run while the deployment is running. Exit status: 1 if it
    finds an error in the data, 2 if the audit itself fails.
    """
    try:
        with options.needs_spark():
            from synapse_replication.pipeline.audit.findings import Severity
            from synapse_replication.pipeline.audit.job import run_audit

            counts = run_audit(settings, **given)
    except PipelineError as error:
        fail(f"Error: {error}")
    if counts[Severity.ERROR]:
        sys.exit(1)


@command("report", "pipeline report -c homeserver.yaml --out report")
@options.optional_source_options
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
@options.recordings_option
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
@options.master_option
def report_command(
    settings: PipelineSettings | None, no_audit: bool, **given: Any
) -> None:
    """Write a page about streams and writers: rows, lags, and findings of an audit.

    The rows come from the database or an archive, and the traffic from recordings or
    the archive. The page is one HTML file that needs no network; each plot is also
    written as a PNG.
    """
    if not (settings or given["archive"] or given["recordings"]):
        raise click.UsageError(
            "nothing to report on: add -c or --dsn, --archive, or --recording"
        )
    from synapse_replication.pipeline.report.job import run_report

    page = run_report(settings, with_audit=not no_audit, **given)
    click.echo(f"written: {page}")
