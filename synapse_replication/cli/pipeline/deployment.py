"""The commands that examine a deployment, and that compute its stored positions."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from synapse_replication.cli.common import cell, command, echo, fail
from synapse_replication.cli.pipeline import options
from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.settings import PipelineSettings
from synapse_replication.text import counted

if TYPE_CHECKING:
    from synapse_replication.pipeline.bootstrap import Bootstrap


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
        from synapse_replication.pipeline.audit.job import run_audit
        from synapse_replication.pipeline.audit.kinds import Severity

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
    echo(f"written: {page}")


@command("bootstrap", "pipeline bootstrap -c homeserver.yaml")
@options.source_options
@click.option("--write", is_flag=True, help="Write the positions without confirmation.")
@options.json_option
def bootstrap_command(settings: PipelineSettings, write: bool, as_json: bool) -> None:
    """Fill stream_positions from existing rows. Stop all writers first.

    The command prints the changes and, with --write or after a confirmation, writes
    them in one transaction. It asks for a confirmation only on a terminal, and not with
    --json. No position is decreased.
    """
    from synapse_replication.pipeline.bootstrap import read_bootstrap, write_bootstrap
    from synapse_replication.pipeline.progress import JobProgress

    with JobProgress(sys.stderr, 1) as progress:
        progress.begin("find the last row of each writer")
        found = read_bootstrap(settings)
    to_write = sum(change.is_written for change in found.changes)
    if not as_json:
        _print_plan(found, settings)
        if to_write and not write and sys.stdin.isatty():
            write = click.confirm(f"Write {counted(to_write, 'position')}?")
    if to_write and write:
        write_bootstrap(settings, found)
    if as_json:
        click.echo(json.dumps(_to_json(found, written=bool(to_write and write))))
    elif not to_write:
        echo("nothing to write")
    elif write:
        echo(f"written: {counted(to_write, 'position')}")
    else:
        echo(f"nothing was written; --write writes {counted(to_write, 'position')}")


def _print_plan(found: Bootstrap, settings: PipelineSettings) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("stream", "writer", "stored", "new", "change")
    for column in table.columns[2:4]:
        column.justify = "right"
    previous = ""
    for change in found.changes:
        table.add_row(
            change.stream if change.stream != previous else "",
            cell(change.instance_name),
            "none" if change.old is None else str(change.old),
            str(change.new) if change.is_written else "",
            change.treatment.value,
            style="bold" if change.is_written else None,
        )
        previous = change.stream
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    for stream, token in sorted(found.without_writer.items()):
        echo(
            f"{stream}: rows up to {token} have no writer; they affect only the "
            "positions of writers that have no rows"
        )
    if not settings.writers:
        echo(
            "Without -c, the declared writers are unknown; only writers with rows or "
            "positions are listed."
        )


def _to_json(found: Bootstrap, *, written: bool) -> dict[str, Any]:
    return {
        "written": written,
        "positions": [
            {
                "stream": change.stream,
                "stored_as": change.positions_name,
                "writer": change.instance_name,
                "old": change.old,
                "new": change.new,
                "change": change.treatment.name.lower(),
            }
            for change in found.changes
        ],
        "rows_without_writer": dict(found.without_writer),
    }
