"""``synapse-replication pipeline bootstrap``: computes positions from tables."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from synapse_replication.cli.common import command
from synapse_replication.cli.pipeline.options import json_option, source_options
from synapse_replication.pipeline.settings import PipelineSettings
from synapse_replication.text import counted

if TYPE_CHECKING:
    from synapse_replication.pipeline.bootstrap import Bootstrap


@command("bootstrap", "pipeline bootstrap -c homeserver.yaml")
@source_options
@click.option("--write", is_flag=True, help="Write the positions without confirmation.")
@json_option
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
        _print(found, settings)
        if to_write and not write and sys.stdin.isatty():
            write = click.confirm(f"Write {counted(to_write, 'position')}?")
    if to_write and write:
        write_bootstrap(settings, found)
    if as_json:
        click.echo(json.dumps(_describe(found, written=bool(to_write and write))))
    elif not to_write:
        click.echo("nothing to write")
    elif write:
        click.echo(f"written: {counted(to_write, 'position')}")
    else:
        click.echo(
            f"nothing was written; --write writes {counted(to_write, 'position')}"
        )


def _print(found: Bootstrap, settings: PipelineSettings) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("stream", "writer", "stored", "new", "change")
    for column in table.columns[2:4]:
        column.justify = "right"
    previous = ""
    for change in found.changes:
        table.add_row(
            change.stream if change.stream != previous else "",
            change.instance_name,
            "none" if change.old is None else str(change.old),
            str(change.new) if change.is_written else "",
            change.treatment.value,
            style="bold" if change.is_written else None,
        )
        previous = change.stream
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    for stream, token in sorted(found.without_writer.items()):
        click.echo(
            f"{stream}: rows up to {token} have no writer; they affect only the "
            "positions of writers that have no rows"
        )
    if not settings.writers:
        click.echo(
            "Without -c, the declared writers are unknown; only writers with rows or "
            "positions are listed."
        )


def _describe(found: Bootstrap, *, written: bool) -> dict[str, Any]:
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
