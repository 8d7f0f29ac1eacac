"""The database of a stand-alone process: pool, checks at the start, lock."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.interfaces import IReactorFromThreads
from twisted.logger import Logger

from synapse_replication.app.stop_steps import StopSteps
from synapse_replication.config.replication_options import ReplicationOptions
from synapse_replication.errors import StorageError
from synapse_replication.handlers.host_parts import ReactorClock
from synapse_replication.storage.database import Database, until_available
from synapse_replication.storage.standby import (
    DatabaseRole,
    preferring_writable,
    read_role,
)
from synapse_replication.storage.writer_lock import WriterLock
from synapse_replication.text import process_label
from synapse_replication.transport.reactor import IReactor

_log = Logger()


def make_database(
    options: ReplicationOptions, reactor: IReactorFromThreads
) -> Database | None:
    """Return the pool of connections of a process; ``None`` if it has no database."""
    database = options.database
    if database is None:
        return None
    conninfo, most = database.conninfo, database.max_connections
    if _writes_database(options):
        conninfo = preferring_writable(conninfo)
    return Database(conninfo, reactor, max_connections=most)


def _writes_database(options: ReplicationOptions) -> bool:
    return any(
        options.instance_name in options.writers[name] for name in options.stored
    )


async def wait_for_database(
    options: ReplicationOptions, database: Database, clock: ReactorClock
) -> DatabaseRole:
    """Wait until the database is available; return what kind of server it is.

    :raises ConfigError: if the database is a standby, and this process writes to it, or
        reads a stream without stored positions.
    """
    role = await until_available(
        clock,
        "connect to the database",
        lambda: database.transact("read_role", read_role, autocommit=True),
    )
    if _writes_database(options) and role.is_read_only:
        what = "a standby" if role.is_standby else "read-only"
        raise options.error(
            "database",
            f"{options.instance_name} writes to the database, which is {what}",
            "connect to the primary; if several hosts are listed, set "
            "target_session_attrs to read-write",
        )
    if not role.is_standby:
        return role
    if without := [name for name in options.stored if not options.writers[name]]:
        raise options.error(
            "database",
            "the database is a standby, which may lack rows; whether it has all "
            f"rows of {', '.join(without)} cannot be known, because the positions "
            "of this stream are not stored",
            "connect to the primary, or remove the stream from `streams`",
        )
    _log.info("The database is a standby: rows that it has not replayed are waited for")
    return role


async def lock_name(
    options: ReplicationOptions,
    database: Database,
    reactor: IReactor,
    stops: StopSteps,
    name_lost: Callable[[StorageError], object],
) -> None:
    """Acquire the name of this process, if it writes a stream with declared writers.

    :param database: accepts writes; it refuses those of this process when another
        process has acquired the name.
    :param stops: receives the release of the lock.
    :param name_lost: called when another process has acquired the name.
    :raises StorageError: if another process holds the lock.
    """
    writes = any(options.instance_name in each for each in options.writers.values())
    if not (writes and options.writer_lock):
        return
    assert options.database is not None, "it is used"
    # The lock belongs to a session, so it needs a connection of its own.
    own = Database(
        preferring_writable(options.database.conninfo), reactor, max_connections=1
    )
    stops.add("releasing the lock of this name", own.close)
    lock = WriterLock(
        own,
        database,
        options.server_name,
        options.instance_name,
        process_label(),
        ReactorClock(reactor),
        name_lost,
    )
    stops.add("stopping the checks of the lock", lock.stop)
    admission = await lock.acquire()
    if admission is not None:
        database.admit(admission, name_lost)
