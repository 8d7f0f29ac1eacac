"""Read-only connections of Spark's driver, with time limits and short error messages.

The tasks that read rows open their own connections, and apply :func:`session_settings`
to them. ``pipeline bootstrap`` does not use this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

from synapse_replication.errors import PipelineError

if TYPE_CHECKING:
    from psycopg2.extensions import connection, cursor

__all__ = [
    "CONNECT_TIMEOUT",
    "PLAN_TIMEOUT",
    "READ_TIMEOUT",
    "SESSION_SETTINGS",
    "connect",
    "describe",
    "reading",
    "session_settings",
]

#: The timeout for connecting, in s.
CONNECT_TIMEOUT = 10

#: The timeout of a statement that queries positions and ids, in s.
PLAN_TIMEOUT = 60

#: The timeout, in s, of a query with which a Spark task reads one span of a stream. It
#: is long, because Spark may read slowly.
READ_TIMEOUT = 3600

#: Most queries are index scans, for which parallel workers and JIT compilation would
#: cost more than they save. Waiting for locks is limited.
SESSION_SETTINGS: Mapping[str, str] = {
    "lock_timeout": "30s",
    "jit": "off",
    "max_parallel_workers_per_gather": "0",
    "standard_conforming_strings": "on",
}

# With these plan types disabled, the server reads a range in the order of an index. The
# planner may estimate that they are cheaper, but they read the whole table for each
# range, or sort on disk.
_WALK_INDEXES = ("enable_seqscan", "enable_bitmapscan", "enable_hashagg")


def describe(conninfo: Mapping[str, Any]) -> str:
    """Describe a database for messages, without its password."""
    shown = [
        f"{key}={conninfo[key]}"
        for key in ("service", "host", "port", "dbname", "user")
        if conninfo.get(key) is not None
    ]
    return " ".join(shown) or "libpq's defaults"


def connect(conninfo: Mapping[str, Any]) -> connection:
    """Open a connection whose transactions are read-only, each with one snapshot.

    :raises PipelineError: if the database cannot be reached, or refuses the connection.
    """
    import psycopg2

    try:
        opened: connection = psycopg2.connect(
            **{
                "connect_timeout": CONNECT_TIMEOUT,
                "application_name": "synapse-replication pipeline",
                **conninfo,
            }
        )
    except psycopg2.OperationalError as error:
        reason = " ".join(str(error).split())
        raise PipelineError(
            f"the database ({describe(conninfo)}) cannot be reached: {reason}; is it "
            "running, can this machine reach it, and are user and password right?"
        ) from None
    opened.set_session(isolation_level="REPEATABLE READ", readonly=True)
    return opened


@contextmanager
def reading(
    conninfo: Mapping[str, Any], timeout: float, *, walk_indexes: bool = True
) -> Iterator[cursor]:
    """Yield a cursor in a read-only transaction, which ends with the context.

    :param timeout: the statement timeout, in s.
    :param walk_indexes: whether the planner must use index scans where possible.
    :raises PipelineError: if the database cannot be reached or a statement fails.
    """
    import psycopg2

    with closing(connect(conninfo)) as opened, opened.cursor() as txn:
        try:
            begin(txn, timeout, walk_indexes=walk_indexes)
            yield txn
        except psycopg2.Error as error:
            reason = " ".join(str(error).split())
            raise PipelineError(
                f"a query to the database ({describe(conninfo)}) failed: {reason}"
            ) from error


def begin(txn: cursor, timeout: float, *, walk_indexes: bool) -> None:
    """Apply the settings for reading to the current transaction."""
    settings = session_settings(timeout, walk_indexes=walk_indexes)
    for name, value in settings.items():
        txn.execute(f"SET LOCAL {name} = '{value}'")


def session_settings(timeout: float, *, walk_indexes: bool) -> dict[str, str]:
    """Return the server's settings for reading, by name.

    :param timeout: the statement timeout, in s.
    :param walk_indexes: see :func:`reading`.
    """
    return {
        **SESSION_SETTINGS,
        "statement_timeout": str(int(timeout * 1000)),
        **dict.fromkeys(_WALK_INDEXES, "off" if walk_indexes else "on"),
    }
