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

from collections.abc import Callable

import attrs
import psycopg2
from twisted.internet.defer import Deferred
from twisted.logger import Logger

from synapse_replication.errors import StorageError
from synapse_replication.handlers.interfaces import Clock
from synapse_replication.handlers.timer import Timer
from synapse_replication.storage.database import TransactionRunner, until_available
from synapse_replication.storage.name_lock import (
    RETRY_INTERVAL,
    WAIT,
    lock_key,
    taken,
    try_lock,
)
from synapse_replication.transport.error_text import error_text

#: The interval at which the lock is checked, in s.
LOCK_CHECK_INTERVAL = 5.0

_log = Logger()


@attrs.define(eq=False, repr=False, slots=False)
class WriterLock:
    """The lock of one instance's name. Use it in the reactor's thread only.

    :param database: runs the queries, all in the same session.
    :param on_lost: called with the reason when another process has the lock.
    """

    _database: TransactionRunner
    _server_name: str
    _instance_name: str
    _clock: Clock
    _on_lost: Callable[[StorageError], object]

    def __attrs_post_init__(self) -> None:
        self._key = lock_key(self._server_name, self._instance_name)
        # The session that held the lock when it was last checked.
        self._pid: int | None = None
        self._check = Timer(self._clock)
        self._stopped = False

    async def acquire(self) -> None:
        """Acquire the lock, and begin to check it. Wait until the database answers.

        :raises StorageError: if another process holds it for too long.
        """
        what = f"lock the name {self._instance_name}"
        await until_available(self._clock, what, self._hold)
        self._check_later()

    def stop(self) -> None:
        """Stop checking. Closing the database releases the lock."""
        self._stopped = True
        self._check.stop()

    def _check_later(self) -> None:
        if not self._stopped:
            self._check.start(
                LOCK_CHECK_INTERVAL,
                lambda: Deferred.fromCoroutine(self._check_now()),
            )

    async def _check_now(self) -> None:
        try:
            await self._hold()
        except psycopg2.Error as error:
            # Nothing can be written meanwhile, either.
            _log.warn(
                "Cannot check the lock of {name}: {error}",
                name=self._instance_name,
                error=error_text(error),
            )
        except StorageError as error:
            if not self._stopped:
                self._on_lost(error)
            return
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
                raise taken(self._instance_name, holder, "switch writer_lock off")
            await self._clock.sleep(RETRY_INTERVAL)
            waited += RETRY_INTERVAL
