"""The name of a process in PostgreSQL, which only one process can hold.

Theory of operation: two writers with one name lose rows, because readers discard the
rows of one as old. So a process that writes streams in the database holds an advisory
lock for its name in a session of its own. The server releases the lock when the session
ends, at the latest 25 s after the machine of the process has vanished. A second process
with the name waits for a moment, since a restart may overlap, and then refuses to
start. The lock is checked regularly: if the session was lost, the lock is acquired in a
new one; if another process has acquired it in the meantime, this process must stop.

The lock only shows which process is alive: its session may end while the process runs
on. So a process that has the lock then acquires the *term* of the name, after which
PostgreSQL refuses whatever its predecessor tries to commit (see
:mod:`~synapse_replication.storage.admission`). That waits for the predecessor's commits
in progress, and ends their sessions if they last longer than :data:`WAIT`.

Behind a pooler, a session is not the process's own: it may be another one in each
transaction, and it outlives the process. There, the lock belongs to a transaction that
stays open, idle, and which the pooler ends together with the session if the process
disappears.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import psycopg2
from twisted.internet.defer import Deferred
from twisted.logger import Logger

from synapse_replication.errors import StorageError
from synapse_replication.handlers.interfaces import Clock
from synapse_replication.handlers.timer import Timer
from synapse_replication.storage.admission import Admission
from synapse_replication.storage.database import TransactionRunner, until_available
from synapse_replication.storage.name_lock import (
    RETRY_INTERVAL,
    WAIT,
    LockSession,
    acquire_name,
    check_term,
    end_predecessor,
    hold_lock,
    is_pooled,
    lock_key,
    own_pid,
    prepare_terms,
    taken,
    try_lock,
)
from synapse_replication.transport.error_text import error_text

#: The interval at which the lock is checked, in s.
LOCK_CHECK_INTERVAL = 5.0

#: How soon it is first seen whether the term was acquired, in s. Normally, it was.
FIRST_POLL = 0.02

_log = Logger()


@attrs.define(eq=False, repr=False, slots=False)
class WriterLock:
    """The lock of one instance's name. Use it in the reactor's thread only.

    :param database: runs the queries, all in the same session.
    :param others: runs the queries about other sessions.
    :param holder: describes this process, for the messages of others.
    :param on_lost: called with the reason when another process has the lock.
    """

    _database: TransactionRunner
    _others: TransactionRunner
    _server_name: str
    _instance_name: str
    _holder: str
    _clock: Clock
    _on_lost: Callable[[StorageError], object]

    def __attrs_post_init__(self) -> None:
        self._key = lock_key(self._server_name, self._instance_name)
        self._admission: Admission | None = None
        self._is_pooled = False
        # The session that waits for the term.
        self._waiting: int | None = None
        self._check = Timer(self._clock)
        self._stopped = False

    async def acquire(self) -> Admission | None:
        """Acquire the lock and the term, and begin to check them.

        Wait until the database answers, and until no transaction of a predecessor can
        be committed any more.

        :return: the name with its term; ``None`` if this role lacks the rights, which
            is logged.
        :raises StorageError: if another process holds the lock for too long.
        """
        what = f"lock the name {self._instance_name}"
        self._is_pooled = await until_available(self._clock, what, self._find_pooler)
        if self._is_pooled:
            _log.info(
                "The database is reached through a pooler: a transaction stays open, "
                "idle, for the lock of {name}",
                name=self._instance_name,
            )
        await until_available(self._clock, what, self._hold)
        if await until_available(self._clock, what, self._prepare):
            self._admission = await until_available(
                self._clock, what, self._acquire_term
            )
        self._check_later()
        return self._admission

    def _find_pooler(self) -> Deferred[bool]:
        return self._database.transact("find_pooler", is_pooled, autocommit=True)

    def _prepare(self) -> Deferred[bool]:
        def prepare(txn: Any) -> bool:
            txn.execute("SAVEPOINT prepare")
            is_prepared = prepare_terms(txn, self._instance_name)
            if not is_prepared:
                txn.execute("ROLLBACK TO SAVEPOINT prepare")
            return is_prepared

        return self._others.transact("prepare_terms", prepare)

    async def _acquire_term(self) -> Admission:
        acquirer, helper = self._database, self._others
        if self._is_pooled:
            # A transaction is open in the other session.
            acquirer, helper = helper, acquirer
        acquiring = acquirer.transact("acquire_name", self._acquire)
        began = self._clock.seconds()
        interval = FIRST_POLL
        while not acquiring.called:
            await self._clock.sleep(interval)
            interval = RETRY_INTERVAL
            if not acquiring.called and self._clock.seconds() - began >= WAIT:
                await helper.transact(
                    "end_predecessor", self._end_predecessor, autocommit=True
                )
                began = self._clock.seconds()
        return await acquiring

    def _acquire(self, txn: Any) -> Admission:
        self._waiting = own_pid(txn)
        return acquire_name(txn, self._instance_name, self._holder)

    def _end_predecessor(self, txn: Any) -> None:
        if self._waiting is not None:
            end_predecessor(txn, self._waiting, self._instance_name)

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
        except Exception:  # noqa: BLE001 -- logged; the lock is checked again
            _log.failure("Cannot check the lock of {name}", name=self._instance_name)
        self._check_later()

    def _try_lock(self, txn: Any) -> tuple[int, LockSession]:
        if self._is_pooled:
            return hold_lock(txn, self._key)
        if self._admission is not None:
            check_term(txn, self._admission)
        return try_lock(txn, self._key)

    async def _check_pooled_term(self) -> None:
        """Check the term outside of the open transaction, which must read no table."""
        admission = self._admission
        if self._is_pooled and admission is not None:
            await self._others.transact(
                "check_term", lambda txn: check_term(txn, admission), autocommit=True
            )

    async def _hold(self) -> None:
        """Acquire the lock, unless it is held."""
        await self._check_pooled_term()
        waited = 0.0
        while not self._stopped:
            own, holder = await self._database.transact(
                "writer_lock", self._try_lock, autocommit=True
            )
            if holder.pid == own:
                return
            if waited >= WAIT:
                raise taken(
                    self._instance_name,
                    holder,
                    "switch writer_lock off",
                    is_pooled=self._is_pooled,
                )
            await self._clock.sleep(RETRY_INTERVAL)
            waited += RETRY_INTERVAL
