"""``synapse-replication init-db``: creates the tables that replication needs."""

from __future__ import annotations

import click

from synapse_replication.cli.common import command, config_option
from synapse_replication.cli.database import open_database
from synapse_replication.storage.schema import prepare_database
from synapse_replication.text import counted


@command("init-db", "init-db -c homeserver.yaml")
@config_option
def init_db_command(config_paths: tuple[str, ...]) -> None:
    """Create the tables that replication needs, once per database.

    A main process does the same when it starts. Existing tables, including those of a
    homeserver, are not changed. Running the command again changes nothing.
    """
    with open_database(config_paths) as (connection, _):
        applied = prepare_database(connection.cursor())
        connection.commit()
    what = (
        f"applied {counted(applied, 'schema change')}" if applied else "nothing to do"
    )
    click.echo(f"The database is ready: {what}.")
