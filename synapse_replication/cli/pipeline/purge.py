"""``synapse-replication pipeline purge``: removes old days from an archive."""

from __future__ import annotations

import datetime
import json
import sys

import click
import msgspec

from synapse_replication.cli.common import command
from synapse_replication.cli.pipeline.options import archive_option, json_option
from synapse_replication.text import counted


@command("purge", "pipeline purge --archive /srv/archive --before 2026-01-31 --dry-run")
@archive_option
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
@json_option
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
        described = msgspec.to_builtins(days)
        click.echo(json.dumps({"purged": not dry_run, "days": described}))
        return
    for day in days:
        click.echo(
            f"{day.day}  {day.stream or 'recordings of the wire'}: {day.rows} rows, "
            f"{day.size / 1e6:.1f} MB"
        )
    rows, size = sum(day.rows for day in days), sum(day.size for day in days)
    partitions = counted(len(days), "daily partition")
    what = f"{partitions} with {rows} rows, {size / 1e6:.1f} MB"
    if not days:
        click.echo(f"nothing is older than {before.date()}")
    elif dry_run:
        click.echo(f"would be removed: {what}; nothing was changed (--dry-run)")
    else:
        click.echo(f"removed: {what}")
