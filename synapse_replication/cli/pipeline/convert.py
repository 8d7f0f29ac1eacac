"""``synapse-replication pipeline convert``: converts an old archive to Delta tables.

Old archives were written by versions of this package that did not use Delta tables.
"""

from __future__ import annotations

import json
import sys

import attrs
import click

from synapse_replication.cli.common import examples
from synapse_replication.cli.pipeline.options import (
    archive_option,
    json_option,
    optional_source_options,
)
from synapse_replication.pipeline.settings import PipelineSettings

__all__ = ["convert_command"]


@click.command(
    "convert",
    epilog=examples(
        "pipeline convert -c homeserver.yaml --from /srv/old --archive /srv/archive",
    ),
)
@optional_source_options
@click.option(
    "--from",
    "old",
    required=True,
    metavar="DIR",
    help="The archive that an older version of this package wrote. It is not changed.",
)
@archive_option
@json_option
def convert_command(
    settings: PipelineSettings | None, old: str, archive: str, as_json: bool
) -> None:
    """Convert an archive of an older version of this package; write a new archive.

    The archive job continues the new archive where the old one ends. If the old one has
    streams of your own tables, -c is required. Java is not required.
    """
    from synapse_replication.pipeline.archive.convert import convert_archive
    from synapse_replication.pipeline.progress import JobProgress
    from synapse_replication.pipeline.tables import table_of_declaration

    declared = () if settings is None else settings.declared
    with JobProgress(sys.stderr, 1, unit="files") as progress:
        progress.begin("read the old archive")
        done = convert_archive(
            old,
            archive,
            {each.name: table_of_declaration(each) for each in declared},
            progress,
        )
    if as_json:
        click.echo(json.dumps(attrs.asdict(done)))
    else:
        click.echo(
            f"converted {done.rows:,} rows of {done.streams} streams and "
            f"{done.commands:,} commands of recordings to {archive}"
        )
