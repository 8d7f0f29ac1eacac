"""Read-only connections of Spark's driver, with time limits and short error messages.

The tasks that read rows open their own connections, and apply the same settings
(:func:`settings_sql`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, Final

import psycopg2
from psycopg2.extensions import connection, cursor

from synapse_replication.errors import PipelineError
from synapse_replication.storage.queries import literal

#: libpq's parameters that apply unless a configuration has others.
DEFAULTS: Mapping[str, Any] = {
    "connect_timeout": 10,
    "application_name": "synapse-replication pipeline",
}

#: The default timeout of a statement, in s: that of queries for positions and ids.
_PLAN_TIMEOUT = 60

#: The timeout, in s, of a query with which a Spark task reads one span of a stream. It
#: is long, because Spark may read slowly.
READ_TIMEOUT = 3600

#: libpq's parameters that apply to tasks, too, if they come from the environment, a
#: service file or a URI. Others, such as those of newer versions, are used only if a
#: configuration has them: they may be unknown to the libpq in the tasks' driver.
_INHERITED: Final = frozenset(
    {
        "options",
        "sslmode",
        "sslcert",
        "sslkey",
        "sslrootcert",
        "sslcrl",
        "channel_binding",
        "gssencmode",
        "krbsrvname",
    }
)

#: The parameters that are replaced by what the connection uses.
_RESOLVED: Final = frozenset(
    {
        "service",
        "passfile",
        "host",
        "hostaddr",
        "port",
        "dbname",
        "user",
        "password",
    }
)


def describe(conninfo: Mapping[str, Any]) -> str:
    """Describe a database for messages, without its password."""
    shown = [
        f"{key}={conninfo[key]}"
        for key in ("service", "host", "port", "dbname", "user")
        if conninfo.get(key) is not None
    ]
    return " ".join(shown) or "libpq's defaults"


def resolved_conninfo(
    conninfo: Mapping[str, Any], opened: connection
) -> dict[str, Any]:
    """Return parameters with which another process reaches the server of a connection.

    Tasks use another copy of libpq, perhaps on another machine. Its default folder of
    sockets, its environment, service file and password file may differ. If several
    hosts are configured, tasks must read from the one that the plan was made with:
    another one may lag behind.

    :param conninfo: the parameters with which the connection was opened.
    """
    info = opened.info
    used = info.dsn_parameters
    found = {
        **{n: v for n, v in used.items() if v and n in _INHERITED},
        **{n: v for n, v in conninfo.items() if n not in _RESOLVED},
        "host": info.host,
        "port": str(info.port),
        "dbname": info.dbname,
        "user": info.user,
    }
    if address := _address(used, info.host, info.port):
        found["hostaddr"] = address
    if info.password:
        found["password"] = info.password
    return found


def _address(used: Mapping[str, str], host: str, port: int) -> str | None:
    """Return the parameter ``hostaddr`` of a host in libpq's lists of hosts."""
    hosts = used.get("host", "").split(",")
    addresses = used.get("hostaddr", "").split(",")
    ports = used.get("port", "").split(",")
    if len(hosts) != len(addresses):
        return None
    if len(ports) != len(hosts):
        ports = [str(port)] * len(hosts)
    for each in zip(hosts, ports, addresses, strict=True):
        if each[:2] == (host, str(port)) and each[2]:
            return each[2]
    return None


def connect(conninfo: Mapping[str, Any]) -> connection:
    """Open a connection whose transactions are read-only, each with one snapshot.

    :raises PipelineError: if the database cannot be reached, or refuses the connection.
    """
    try:
        opened: connection = psycopg2.connect(**{**DEFAULTS, **conninfo})
    except psycopg2.OperationalError as error:
        raise unreachable(conninfo, error) from None
    opened.set_session(isolation_level="REPEATABLE READ", readonly=True)
    return opened


def unreachable(conninfo: Mapping[str, Any], error: Exception) -> PipelineError:
    """Return the error for a connection that failed."""
    return PipelineError(
        f"the database ({describe(conninfo)}) cannot be reached: {in_one_line(error)}; "
        "is it running, can this machine reach it, and are user and password right?"
    )


def in_one_line(error: Exception) -> str:
    """Return the text of an error without line ends."""
    return " ".join(str(error).split())


@contextmanager
def read_transaction(
    conninfo: Mapping[str, Any],
    timeout: float = _PLAN_TIMEOUT,
    *,
    walk_indexes: bool = True,
) -> Iterator[cursor]:
    """Yield a cursor in a read-only transaction, which ends with the context.

    :param timeout: the statement timeout, in s.
    :param walk_indexes: whether the planner must use index scans where possible.
    :raises PipelineError: if the database cannot be reached or a statement fails.
    """
    with (
        closing(connect(conninfo)) as opened,
        opened.cursor() as txn,
        explained(conninfo),
    ):
        txn.execute(settings_sql(timeout, walk_indexes=walk_indexes))
        yield txn


@contextmanager
def explained(
    conninfo: Mapping[str, Any], errors: tuple[type[Exception], ...] = (psycopg2.Error,)
) -> Iterator[None]:
    """Name the database in the errors of statements within the context.

    :param errors: the exceptions of a statement that fails.
    :raises PipelineError: if a statement fails.
    """
    try:
        yield
    except errors as error:
        raise PipelineError(
            f"a query to the database ({describe(conninfo)}) failed: "
            f"{in_one_line(error)}"
        ) from error


def settings_sql(timeout: float, *, walk_indexes: bool) -> str:
    """Return one statement that applies the settings for reading to a transaction.

    :param timeout: the statement timeout, in s.
    :param walk_indexes: see :func:`read_transaction`.
    """
    other_plans = "off" if walk_indexes else "on"
    settings = {
        # Nothing is written.
        "transaction_read_only": "on",
        "statement_timeout": str(int(timeout * 1000)),
        "lock_timeout": "30s",
        # Usually enough to sort the rows of a part and their joined details in memory.
        "work_mem": "128MB",
        # Most queries are index scans, for which these would cost more than they save.
        "jit": "off",
        "max_parallel_workers_per_gather": "0",
        # Literals are quoted for it.
        "standard_conforming_strings": "on",
        # Without these plans, the server reads a range in the order of an index. The
        # planner may estimate that they are cheaper, but they read the whole table for
        # each range, or sort on disk.
        "enable_seqscan": other_plans,
        "enable_bitmapscan": other_plans,
        "enable_hashagg": other_plans,
    }
    calls = (
        f"set_config({literal(name)}, {literal(value)}, true)"
        for name, value in settings.items()
    )
    return f"SELECT {', '.join(calls)}"
