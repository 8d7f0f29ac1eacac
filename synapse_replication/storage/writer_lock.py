"""A lock in PostgreSQL that only one process with an instance's name can hold.

Theory of operation: two writers with one name lose rows, because readers discard the
rows of one as old. So a process that writes streams in the database holds an advisory
lock for its name in a session of its own. The server releases the lock when the session
ends, at the latest 25 s after the machine of the process has vanished. A second process
with the name waits for a moment, since a restart may overlap, and then refuses to
start. The lock is checked regularly: if the session was lost, the lock is acquired in a
new one; if another process has acquired it in the meantime, this process must stop.

A session is not the process's own behind a pooler in transaction mode, where the lock
protects nothing. This is detected when a later check runs in another session although
the first still holds the lock; it is reported, and the lock is not used any more.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any

import psycopg2
from msgspec import Struct
from twisted.internet.defer import Deferred
from twisted.logger import Logger

from synapse_replication.backoff import Backoff
from synapse_replication.errors import StorageError
from synapse_replication.handlers.timer import Timer
from synapse_replication.storage.transactions import TransactionRunner
from synapse_replication.transport.failures import one_line

if TYPE_CHECKING:
    from synapse_replication.handlers.interfaces import Clock

#: How long to wait for a lock that another process holds, in s.
WAIT = 10.0
#: The interval between two attempts to acquire the lock, in s.
RETRY_EVERY = 0.5
#: The delays between attempts to reach the database.
_BACKOFF = Backoff(0.5, 5.0, 1.5)
#: The interval at which the lock is checked, in s.
CHECK_EVERY = 5.0

_SETTINGS = """
    SELECT set_config('tcp_keepalives_idle', '10', false),
        set_config('tcp_keepalives_interval', '5', false),
        set_config('tcp_keepalives_count', '3', false)
"""
_HOLDER = """
    SELECT lock.pid, coalesce(host(client_addr), 'this machine'), application_name,
        backend_start
    FROM pg_locks AS lock LEFT JOIN pg_stat_activity AS session USING (pid)
    WHERE locktype = 'advisory' AND granted AND classid = %s AND objid = %s
        AND objsubid = 2 AND lock.database = (
            SELECT oid FROM pg_database WHERE datname = current_database()
        )
"""

_log = Logger()


class _Session(Struct, frozen=True):
    """The session that holds the lock, as PostgreSQL shows it."""

    pid: int
    address: str = ""
    application_name: str = ""
    since: datetime | None = None

    def __str__(self) -> str:
        name = f" ({self.application_name})" if self.application_name else ""
        return f"session {self.pid} from {self.address}{name}, open since {self.since}"


def lock_key(server_name: str, instance_name: str) -> tuple[int, ...]:
    """Return the two numbers that identify the lock of a name."""
    name = f"synapse_replication {server_name} {instance_name}".encode()
    digest = hashlib.sha256(name).digest()
    return tuple(
        int.from_bytes(digest[start : start + 4], "big", signed=True)
        for start in (0, 4)
    )


def taken(instance_name: str, holder: _Session, override: str) -> StorageError:
    """Return the error that another process has the lock.

    :param override: how to start without the lock.
    """
    return StorageError(
        f"another process writes as {instance_name}: {holder} holds the lock of this "
        "name. Stop that process; if it does not exist any more, end its session: "
        f"SELECT pg_terminate_backend({holder.pid}). To start without the lock, "
        f"{override}"
    )


def try_lock(txn: Any, key: tuple[int, ...]) -> tuple[int, _Session]:
    """Acquire a lock if it is free.

    :return: the process id of this session, and the session with the lock.
    """
    txn.execute("SELECT pg_backend_pid()")
    ((own,),) = txn.fetchall()
    unsigned = [number % 2**32 for number in key]
    txn.execute(_HOLDER, unsigned)
    found = txn.fetchall()
    if not found:
        txn.execute(_SETTINGS)
        txn.execute("SELECT pg_try_advisory_lock(%s, %s)", key)
        ((is_acquired,),) = txn.fetchall()
        if is_acquired:
            return own, _Session(own)
        txn.execute(_HOLDER, unsigned)
        found = txn.fetchall()
    return own, _Session(*found[0]) if found else _Session(-1, "an unknown address")


class WriterLock:
    """The lock of one instance's name. Use it in the reactor's thread only.

    :param database: runs the queries, all in the same session.
    :param on_lost: called with the reason when another process has the lock.
    """

    def __init__(
        self,
        database: TransactionRunner,
        server_name: str,
        instance_name: str,
        clock: Clock,
        on_lost: Callable[[StorageError], object],
    ) -> None:
        self._database = database
        self._instance_name = instance_name
        self._clock = clock
        self._on_lost = on_lost
        self._key = lock_key(server_name, instance_name)
        # The session that held the lock when it was last checked.
        self._pid: int | None = None
        self._check = Timer(clock)
        self._stopped = False

    async def acquire(self) -> None:
        """Acquire the lock, and begin to check it. Wait until the database answers.

        :raises StorageError: if another process holds it for too long.
        """
        for attempt in itertools.count(1):
            try:
                await self._hold()
            except psycopg2.OperationalError as error:
                delay = _BACKOFF.delay(attempt)
                _log.warn(
                    "Cannot lock the name {name}: {error}; retrying in {delay:.1f} s",
                    name=self._instance_name,
                    error=one_line(error),
                    delay=delay,
                )
                await self._clock.sleep(delay)
            else:
                break
        if not self._stopped:
            self._check_later()

    def stop(self) -> None:
        """Stop checking. Closing the database releases the lock."""
        self._stopped = True
        self._check.stop()

    def _check_later(self) -> None:
        self._check.start(CHECK_EVERY, self._start_check)

    def _start_check(self) -> None:
        Deferred.fromCoroutine(self._check_now())

    async def _check_now(self) -> None:
        try:
            await self._hold()
        except psycopg2.Error as error:
            # Nothing can be written meanwhile, either.
            _log.warn(
                "Cannot check the lock of {name}: {error}",
                name=self._instance_name,
                error=one_line(error),
            )
        except StorageError as error:
            if not self._stopped:
                self._on_lost(error)
            return
        if not self._stopped:
            self._check_later()

    async def _hold(self) -> None:
        """Acquire the lock, unless it is held."""
        waited = 0.0
        while not self._stopped:
            own, holder = await self._database.transact(
                "writer_lock", lambda txn: try_lock(txn, self._key), autocommit=True
            )
            if holder.pid == own:
                self._pid = own
                return
            if holder.pid == self._pid:
                _log.warn(
                    "The lock of {name} is not checked any more: the database is "
                    "reached through a pooler that does not keep a session for this "
                    "process, so a second process with its name is not noticed",
                    name=self._instance_name,
                )
                self.stop()
                return
            if waited >= WAIT:
                raise taken(
                    self._instance_name,
                    holder,
                    "switch writer_lock off",
                )
            await self._clock.sleep(RETRY_EVERY)
            waited += RETRY_EVERY
