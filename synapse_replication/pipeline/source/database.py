"""Connections that only read: short errors, time limits, and no full scans.

Used on the driver and on executors; each opens its own, where it reads.
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

#: How long to wait for the database to let us in, s.
CONNECT_TIMEOUT = 10

#: How long one statement may take that looks for positions and ids, s.
PLAN_TIMEOUT = 60

#: How long the rows of one partition may take, s: Spark may be slow to take them.
READ_TIMEOUT = 3600

#: A query walks indexes, in this process of the server alone, and waits for nobody
#: long. Compiling a query takes longer than it saves.
SESSION_SETTINGS: Mapping[str, str] = {
    "lock_timeout": "30s",
    "jit": "off",
    "max_parallel_workers_per_gather": "0",
    "standard_conforming_strings": "on",
}

# A range is read by its index, in its order, whatever the planner thinks of it: what
# looks cheaper reads a whole table for each range, or sorts on disk.
_WALK_INDEXES = ("enable_seqscan", "enable_bitmapscan", "enable_hashagg")


def describe(conninfo: Mapping[str, Any]) -> str:
    """Return which database it is, without its password."""
    shown = [
        f"{key}={conninfo[key]}"
        for key in ("service", "host", "port", "dbname", "user")
        if conninfo.get(key) is not None
    ]
    return " ".join(shown) or "libpq's defaults"


def connect(conninfo: Mapping[str, Any]) -> connection:
    """Open a connection whose transactions only read, each at one moment.

    :raises PipelineError: if the database cannot be reached, or does not let us in.
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
            "running, can this machine reach it, and are name and password right?"
        ) from None
    opened.set_session(isolation_level="REPEATABLE READ", readonly=True)
    return opened


@contextmanager
def reading(
    conninfo: Mapping[str, Any], timeout: float, *, walk_indexes: bool = True
) -> Iterator[cursor]:
    """Return a cursor in one transaction that only reads; it ends with the context.

    :param timeout: how long one statement may take, s.
    :param walk_indexes: scan no table.
    :raises PipelineError: if the database cannot be reached or refuses a statement.
    """
    import psycopg2

    with closing(connect(conninfo)) as opened, opened.cursor() as txn:
        try:
            begin(txn, timeout, walk_indexes=walk_indexes)
            yield txn
        except psycopg2.Error as error:
            reason = " ".join(str(error).split())
            raise PipelineError(
                f"the database ({describe(conninfo)}) did not answer as it should: "
                f"{reason}"
            ) from error


def begin(txn: cursor, timeout: float, *, walk_indexes: bool) -> None:
    """Limit the statements of a transaction."""
    settings = session_settings(timeout, walk_indexes=walk_indexes)
    for name, value in settings.items():
        txn.execute(f"SET LOCAL {name} = '{value}'")


def session_settings(timeout: float, *, walk_indexes: bool) -> dict[str, str]:
    """Return the server's settings for reading.

    :param timeout: how long one statement may take, s.
    """
    return {
        **SESSION_SETTINGS,
        "statement_timeout": str(int(timeout * 1000)),
        **dict.fromkeys(_WALK_INDEXES, "off" if walk_indexes else "on"),
    }
