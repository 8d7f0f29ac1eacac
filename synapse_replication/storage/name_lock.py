"""The queries for an instance's name in PostgreSQL: its advisory lock and its term.

:mod:`~synapse_replication.storage.writer_lock` acquires and checks them, and so does
the drop-in. The lock, which a session holds, shows whether the process with the name is
alive; the term (:mod:`~synapse_replication.storage.admission`) decides which process
may write.
"""

from __future__ import annotations

import hashlib
import struct
from datetime import datetime
from typing import Any, Final

import attrs
import psycopg2.errors
from psycopg2.extensions import (
    TRANSACTION_STATUS_INERROR,
    TRANSACTION_STATUS_INTRANS,
)
from twisted.logger import Logger

from synapse_replication.errors import NameLostError, StorageError
from synapse_replication.storage import queries
from synapse_replication.storage.admission import Admission
from synapse_replication.storage.id_streams import exists
from synapse_replication.storage.open_transactions import (
    Session,
    end_session,
    read_sessions,
)
from synapse_replication.storage.schema import prepare_database

#: How long to wait for a lock that another process holds, in s.
WAIT = 10.0
#: The interval between two attempts to acquire the lock, in s.
RETRY_INTERVAL = 0.5


_log = Logger()


@attrs.frozen
class LockSession:
    """The session that holds the lock, as PostgreSQL shows it."""

    pid: int
    address: str = ""
    application_name: str = ""
    since: datetime | None = None

    def __str__(self) -> str:
        name = f" ({self.application_name})" if self.application_name else ""
        return f"session {self.pid} from {self.address}{name}, open since {self.since}"


#: Holds a lock that was released before its session could be read.
_UNKNOWN_SESSION: Final = LockSession(-1, "an unknown address")


def lock_key(server_name: str, instance_name: str) -> tuple[int, ...]:
    """Return the two numbers that identify the lock of a name."""
    name = f"synapse_replication {server_name} {instance_name}".encode()
    return struct.unpack(">ii", hashlib.sha256(name).digest()[:8])


def taken(
    instance_name: str, holder: LockSession, override: str, *, is_pooled: bool = False
) -> StorageError:
    """Return the error that another process has the lock.

    :param override: how to start without the lock.
    :param is_pooled: whether the database is reached through a pooler. Then other
        processes may use the session of the holder, and it must not be ended.
    """
    hint = (
        "Its session belongs to a pooler, so others may use it: do not end it. If that "
        "process does not exist any more, have the pooler replace its connections "
        "(RECONNECT, or a restart)"
        if is_pooled
        else "If it does not exist any more, end its session: "
        f"SELECT pg_terminate_backend({holder.pid})"
    )
    return StorageError(
        f"another process writes as {instance_name}: {holder} holds the lock of this "
        f"name. Stop that process. {hint}. To start without the lock, {override}"
    )


def try_lock(txn: Any, key: tuple[int, ...]) -> tuple[int, LockSession]:
    """Acquire a lock if it is free.

    :return: the process id of this session, and the session with the lock.
    """
    own = own_pid(txn)
    holder = _read_holder(txn, key)
    if holder is None:
        txn.execute(queries.SQL["lock_settings"])
        txn.execute("SELECT pg_try_advisory_lock(%s, %s)", key)
        ((is_acquired,),) = txn.fetchall()
        if is_acquired:
            return own, LockSession(own)
        holder = _read_holder(txn, key) or _UNKNOWN_SESSION
    return own, holder


def own_pid(txn: Any) -> int:
    """Return the process id of this session, at the server."""
    txn.execute(queries.SQL["own_pid"])
    ((pid,),) = txn.fetchall()
    return int(pid)


def _read_holder(txn: Any, key: tuple[int, ...]) -> LockSession | None:
    """Return the session that holds a lock; ``None`` if no session does."""
    classid, objid = (number % 2**32 for number in key)
    txn.execute(queries.SQL["lock_holder"], {"classid": classid, "objid": objid})
    found = txn.fetchone()
    return None if found is None else LockSession(*found)


def is_pooled(txn: Any) -> bool:
    """Return whether a pooler is between this process and PostgreSQL.

    A pooler presents an id of its own for the session, because cancel requests come to
    it; the session itself may be another one in each transaction.

    :param txn: a cursor of psycopg2.
    """
    return bool(txn.connection.info.backend_pid != own_pid(txn))


def hold_lock(txn: Any, key: tuple[int, ...]) -> tuple[int, LockSession]:
    """Acquire a lock if it is free, for as long as a transaction is open.

    A pooler must not lend a session to others while a transaction is open in it, and
    must end the session if the client disappears. So, unlike :func:`try_lock`, this
    never leaves the lock in a session of the pooler. The open transaction reads no
    table and has no snapshot, so it does not delay vacuum.

    :param txn: a cursor with autocommit, of the connection that keeps the lock. If it
        has the lock already, this only makes sure of it.
    :return: the process id of this session, and the session with the lock.
    """
    state = txn.connection.info.transaction_status
    if state == TRANSACTION_STATUS_INTRANS:
        txn.execute(queries.SQL["lock_pid"])
        ((own,),) = txn.fetchall()
        return own, LockSession(own)
    if state == TRANSACTION_STATUS_INERROR:
        txn.execute("ROLLBACK")
    txn.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
    txn.execute(queries.SQL["no_timeouts"])
    txn.execute("SELECT pg_try_advisory_xact_lock(%s, %s)", key)
    ((is_acquired,),) = txn.fetchall()
    holder = None if is_acquired else _read_holder(txn, key)
    txn.execute(queries.SQL["lock_pid"])
    ((own,),) = txn.fetchall()
    if is_acquired:
        return own, LockSession(own)
    txn.execute("ROLLBACK")
    return own, holder or _UNKNOWN_SESSION


def prepare_terms(txn: Any, instance_name: str) -> bool:
    """Create what the terms of names need, if it is missing.

    :param txn: a cursor; the caller commits, or rolls back if the result is false.
    :return: whether it exists; if this role may not create it, a warning is logged.
    """
    table = "synapse_replication_writers"
    advice = "run: synapse-replication init-db -c FILE"
    try:
        if not exists(txn, table):
            prepare_database(txn)
        txn.execute(queries.SQL["may_acquire_names"])
        ((is_allowed,),) = txn.fetchall()
        problem = f"this role may not change {table}"
        advice = f"GRANT SELECT, INSERT, UPDATE ON {table} TO this role"
    except psycopg2.errors.InsufficientPrivilege as error:
        is_allowed, problem = False, str(error).partition("\n")[0]
    if not is_allowed:
        _log.warn(
            "PostgreSQL cannot check whether another process has acquired the name "
            "{name}: {problem}. If this process is suspended and replaced, rows that "
            "it writes afterwards are lost to readers. To prevent this, {advice}",
            name=instance_name,
            problem=problem,
            advice=advice,
        )
    return bool(is_allowed)


def acquire_name(txn: Any, instance_name: str, holder: str) -> Admission:
    """Acquire a name; its former holder can commit nothing afterwards.

    Blocks until the former holder's commits in progress have ended. The caller must
    hold the lock of the name, and call :func:`end_predecessor` in another thread if
    that takes long. The timeouts of the role do not end the wait.

    :param txn: a cursor; the caller commits its transaction, which does nothing else.
    :param holder: describes this process.
    """
    txn.execute(queries.SQL["no_timeouts"])
    txn.execute(
        queries.SQL["acquire_name"], {"instance_name": instance_name, "holder": holder}
    )
    ((term,),) = txn.fetchall()
    return Admission(instance_name, term)


def end_predecessor(txn: Any, pid: int, instance_name: str) -> None:
    """End the sessions for which :func:`acquire_name` waits in the session ``pid``.

    Those of another role are logged instead.

    :param txn: a cursor, with autocommit.
    """
    for session in read_sessions(txn, "blocking_pids", {"pid": pid}):
        if not end_session(txn, session, instance_name):
            warn_of_predecessor(session, instance_name)


def warn_of_predecessor(session: Session, instance_name: str) -> None:
    """Log that a session of a predecessor is of another role, so it is not ended."""
    _log.warn(
        "{name} cannot start before a transaction of its predecessor has ended, and "
        "this role may not end it: {session}. {hint}",
        name=instance_name,
        session=session.describe(),
        hint=session.hint(),
    )


def join(txn: Any, admission: Admission) -> None:
    """Let a session join a name, until it ends: see :func:`joined_sessions`.

    It joins before the term is checked, so a process that acquires the name either is
    found by the check, or finds the session.

    :param txn: a cursor, with autocommit.
    :raises NameLostError: if another process has acquired the name.
    """
    name = {"instance_name": admission.instance_name}
    txn.execute(queries.SQL["join_name"], name)
    check_term(txn, admission)


def joined_sessions(txn: Any, instance_name: str) -> list[Session]:
    """Return the sessions that have joined a name, and have not ended.

    :param txn: a cursor.
    """
    return read_sessions(txn, "joined_pids", {"instance_name": instance_name})


def check_term(txn: Any, admission: Admission) -> None:
    """Check that no other process has acquired the name.

    :raises NameLostError: if one has.
    """
    txn.execute(queries.SQL["name_holder"], {"instance_name": admission.instance_name})
    term, holder = txn.fetchone() or (0, "an unknown process")
    if term != admission.term:
        raise NameLostError(admission.instance_name, holder)
