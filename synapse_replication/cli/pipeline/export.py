"""``synapse-replication pipeline export``: writes rows of an archive to files."""

from __future__ import annotations

import json
import sys

import click

from synapse_replication.cli.common import command
from synapse_replication.cli.pipeline.options import archive_option, json_option

#: The output formats: the keys of ``pipeline.export.OPTIONS``. This copy keeps the help from
#: importing the job.
FORMATS = ("parquet", "csv", "jsonl")


@command(
    "export", "pipeline export --archive /srv/archive --out rows --stream receipts"
)
@archive_option
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
    help="Export only the rows for which this expression over the columns is true, for "
    "instance \"stream = 'events' AND day >= '2026-01-31'\".",
)
@json_option
def export_command(
    archive: str,
    out: str,
    format_: str,
    stream: str | None,
    where: str | None,
    as_json: bool,
) -> None:
    """Write rows of an archive to a file for other programs.

    Without --stream, the content of each row is JSON in the column named row: an array
    in jsonl, the text of an array in csv and parquet.
    """
    from synapse_replication.pipeline.export import export_rows
    from synapse_replication.pipeline.progress import JobProgress

    with JobProgress(sys.stderr, 1) as progress:
        progress.begin("write rows")
        rows = export_rows(archive, out, format_, where, stream=stream)
    if as_json:
        click.echo(json.dumps({"rows": rows, "folder": out, "format": format_}))
    else:
        click.echo(f"{rows} rows written to {out}")
