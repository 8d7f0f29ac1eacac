"""Access to the configured database, for commands that need no reactor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg2

from synapse_replication.cli.common import fail, load_or_exit
from synapse_replication.config.process import ProcessConfig
from synapse_replication.errors import StorageError
from synapse_replication.storage.database import connect

#: The connection timeout in s, unless one is configured.
_CONNECT_TIMEOUT = 10


@contextlib.contextmanager
def open_database(
    config_paths: Sequence[str],
) -> Iterator[tuple[Any, ProcessConfig]]:
    """Read the configuration and connect to its database.

    An invalid configuration, a failed connection, or a failure of the caller's queries
    ends the process with status 2 and a message. The caller must commit.
    """
    config = load_or_exit(config_paths, None)
    if config.database is None:
        fail(
            "the configuration has no PostgreSQL database; add the section 'database' "
            "with 'name: psycopg2'"
        )
    conninfo = {"connect_timeout": _CONNECT_TIMEOUT, **config.database.conninfo}
    try:
        connection = connect(conninfo)
    except psycopg2.Error as error:
        fail(f"cannot connect to the database: {str(error).strip()}")
    with contextlib.closing(connection):
        try:
            yield connection, config
        except (StorageError, psycopg2.Error) as error:
            fail(f"no table was changed: {str(error).strip()}")
