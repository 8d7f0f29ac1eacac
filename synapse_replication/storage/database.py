"""A pool of blocking psycopg2 connections for Twisted: one thread per transaction.

Usage::

    database = Database("postgresql:///synapse", reactor)

    def read(txn: Transaction) -> int:
        txn.execute("SELECT count(*) FROM events")
        return int(txn.fetchone()[0])

    count = await database.transact("count_events", read)
    ...
    await database.close()

Call ``transact`` and ``close`` in the reactor's thread. The function passed to
``transact`` runs in one of the pool's threads, with a cursor of its own connection, and
must not use anything else that is not thread-safe. The function may run more than once:
a transaction is repeated if it failed because of a concurrent transaction (a
serialisation failure or a deadlock), or if its connection broke before the commit was
sent. A transaction is not repeated if the result of its commit was lost. With
``autocommit``, there is no separate commit: a function whose connection broke is
repeated, although the server may have executed its statement.

PostgreSQL answers the COMMIT of a failed transaction with ROLLBACK, which psycopg2 does
not report. So a function that catches the error of a statement, and returns, has not
succeeded: its transaction is rolled back, and ``transact`` raises
:exc:`~synapse_replication.errors.TransactionRolledBackError`. To continue after such an
error, a function rolls back to a savepoint.

To run a callback when a transaction has ended, register it on its :class:`Transaction`
with ``call_after`` or ``call_on_exception``. Cancelling the Deferred does not stop a
transaction that has begun; the Deferred fires after the transaction has ended. If it
fired earlier, the ``async with`` block of an id generator could be left, and its id be
announced as finished, before the transaction commits. A coroutine that is closed cannot
wait for the end of its transaction; use :meth:`Database.settled` to delay the release
of its ids.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypeVar

import psycopg2
import psycopg2.errors
import psycopg2.extensions
from psycopg2.extensions import TRANSACTION_STATUS_IDLE, TRANSACTION_STATUS_INERROR
from twisted.internet import defer
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorFromThreads
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.python.threadpool import ThreadPool

from synapse_replication.errors import (
    NameLostError,
    StorageError,
    TransactionRolledBackError,
)
from synapse_replication.handlers.interfaces import Clock
from synapse_replication.handlers.timer import Backoff
from synapse_replication.storage.admission import Admission
from synapse_replication.transport.error_text import error_text

T = TypeVar("T")

#: The most attempts of one transaction; the caller receives the failure of the last.
MAX_ATTEMPTS = 6

#: The most reconnections within one transaction.
MAX_RECONNECTS = 1

#: The delays between attempts to reach the database at the start of a process.
_BACKOFF = Backoff(0.5, 5.0, 1.5)

_log = Logger()

_RETRYABLE = (
    psycopg2.errors.SerializationFailure,
    psycopg2.errors.DeadlockDetected,
)


class Transaction(psycopg2.extensions.cursor):
    """A cursor with callbacks for the end of its transaction."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.after_callbacks: list[Callable[[], object]] = []
        self.exception_callbacks: list[Callable[[], object]] = []

    def call_after(self, func: Callable[..., object], *args: object) -> None:
        """Call ``func(*args)`` in the reactor's thread after the commit."""
        self.after_callbacks.append(lambda: func(*args))

    def call_on_exception(self, func: Callable[..., object], *args: object) -> None:
        """Call ``func(*args)`` in the reactor's thread after a rollback.

        That includes the rollback of an attempt that is repeated afterwards.
        """
        self.exception_callbacks.append(lambda: func(*args))


def connect(
    conninfo: str | Mapping[str, Any],
) -> psycopg2.extensions.connection:
    """Open one connection.

    :param conninfo: a DSN or URI, or libpq's parameters by name.
    :raises psycopg2.OperationalError: if the server cannot be reached or rejects the
        connection.
    """
    if isinstance(conninfo, str):
        return psycopg2.connect(conninfo)
    connection: psycopg2.extensions.connection = psycopg2.connect(**conninfo)
    return connection


async def until_available(
    clock: Clock, what: str, attempt: Callable[[], Awaitable[T]]
) -> T:
    """Repeat an attempt until the database, and its ``stream_positions``, is available.

    :param what: describes the attempt in the log.
    """
    failures = 0
    while True:
        try:
            return await attempt()
        except (psycopg2.OperationalError, psycopg2.errors.UndefinedTable) as error:
            failures += 1
            delay = _BACKOFF.delay(failures)
            _log.warn(
                "Cannot {what}: {why}; retrying in {delay:.1f} s",
                what=what,
                why=_explain(error),
                delay=delay,
            )
            await clock.sleep(delay)


def first_line(error: psycopg2.Error) -> str:
    """Return the first line of the text of an error."""
    return str(error).strip().partition("\n")[0].strip()


def _explain(error: psycopg2.Error) -> str:
    if not isinstance(error, psycopg2.errors.UndefinedTable):
        # If the server's name has several addresses, each has a reason of its own.
        return error_text(error)
    why = " ".join(first_line(error).split())
    if "stream_positions" in why:
        why += (
            "; start a process that creates it, or run: synapse-replication init-db "
            "-c FILE"
        )
    return why


class TransactionRunner(Protocol):
    """Interface for running transactions: a ``Database``, or a host's adapter.

    A transaction whose result was cancelled, or whose connection was lost, may still
    commit. Its ids are released at once, unless the runner has a method ``settled``
    like that of ``Database``.

    A process of a homeserver runs transactions in its own pool, and does not load this
    module.
    """

    def transact(
        self,
        description: str,
        func: Callable[[Any], T],
        *,
        autocommit: bool = False,
    ) -> Deferred[T]:
        """Run ``func(cursor)`` in a transaction; see ``Database.transact``."""


class Database:
    """A pool of connections and the threads that use them.

    :param conninfo: a DSN or URI, or libpq's parameters by name.
    :param reactor: runs the callbacks of the pool's threads.
    :param max_connections: the most connections (and threads). Further transactions
        are queued; the queue has no bound.
    """

    def __init__(
        self,
        conninfo: str | Mapping[str, Any],
        reactor: IReactorFromThreads,
        *,
        max_connections: int = 5,
    ) -> None:
        self._conninfo = conninfo
        self._reactor = reactor
        self._idle: deque[psycopg2.extensions.connection] = deque()
        self._running: set[Deferred[None]] = set()
        self._admission: Admission | None = None
        self._on_name_lost: Callable[[NameLostError], object] = lambda error: None
        self._closing: Deferred[None] | None = None
        self._pool = ThreadPool(0, max_connections, "synapse_replication.storage")
        # Daemon threads do not block the exit of a process that did not call close();
        # its open transactions are rolled back, as if it had been killed.
        self._pool.threadFactory = partial(threading.Thread, daemon=True)  # type: ignore[assignment]
        self._pool.start()

    @property
    def admission(self) -> Admission | None:
        """The name under which this process writes, if it has acquired one."""
        return self._admission

    def admit(
        self, admission: Admission, on_lost: Callable[[NameLostError], object]
    ) -> None:
        """Let every later commit check that this process still has its name.

        :param on_lost: called in the reactor's thread whenever PostgreSQL refuses a
            transaction, because another process has acquired the name.
        """
        self._admission, self._on_name_lost = admission, on_lost

    def transact(
        self,
        description: str,
        func: Callable[[Transaction], T],
        *,
        autocommit: bool = False,
    ) -> Deferred[T]:
        """Run ``func(txn)`` in a transaction of its own, and commit it.

        :param description: names the transaction in log lines.
        :param func: called in another thread, more than once if the transaction must
            be repeated. If it raises, the transaction is rolled back.
        :param autocommit: run each statement as a transaction of its own: one round
            trip instead of three. Use it for idempotent statements only: if the
            connection breaks, ``func`` is repeated, although the server may have
            executed the statement.
        :return: fires with the result of ``func``, or with the failure of the last
            attempt. If it is cancelled, it fails with ``CancelledError`` after the
            transaction has ended, even if the transaction was committed.
        :raises StorageError: if :meth:`close` was called; in the Deferred.
        :raises NameLostError: if another process has acquired the name under which this
            process writes; in the Deferred.
        :raises TransactionRolledBackError: if ``func`` caught the error of a statement
            and returned, or ended the transaction itself; in the Deferred.
        """
        if self._closing is not None:
            return defer.fail(
                StorageError(f"{description}: the database was closed by close()")
            )
        ended: Deferred[None] = Deferred()
        self._running.add(ended)

        result: Deferred[T] = Deferred(lambda _: _cancel_after(result, ended))

        def done(outcome: T | Failure, callbacks: list[Callable[[], object]]) -> None:
            _call_all(description, callbacks)
            self._running.discard(ended)
            ended.callback(None)
            if not result.called:
                result.callback(outcome)

        def work() -> None:
            outcome: T | Failure
            callbacks: list[Callable[[], object]] = []
            try:
                if result.called:
                    # The transaction was cancelled before it began.
                    raise CancelledError
                outcome = self._run(description, func, autocommit, callbacks)
            except BaseException:  # noqa: BLE001 -- passed to the caller
                outcome = Failure()  # type: ignore[no-untyped-call]
            self._reactor.callFromThread(done, outcome, callbacks)

        self._pool.callInThread(work)
        return result

    def settled(self) -> Deferred[None]:
        """Return a Deferred that fires when all current transactions have ended.

        It does not wait for transactions that are requested later. Call it in the
        reactor's thread.
        """
        ends = defer.DeferredList([_follow(ended) for ended in self._running])
        return ends.addCallback(lambda _: None)

    def close(self) -> Deferred[None]:
        """Wait for queued and running transactions, then close all connections.

        The pool's threads are stopped, too.

        It may be called more than once; each returned Deferred fires when the pool is
        closed.
        """
        if self._closing is None:
            self._closing = Deferred()
            defer.DeferredList(list(self._running)).addCallback(self._close_now)
        return _follow(self._closing)

    def _close_now(self, _: object) -> None:
        assert self._closing is not None
        self._pool.stop()
        self._close_idle()
        self._closing.callback(None)

    # -- in the pool's threads -----------------------------------------------------

    def _run(
        self,
        description: str,
        func: Callable[[Transaction], T],
        autocommit: bool,
        callbacks: list[Callable[[], object]],
    ) -> T:
        """Run the transaction, with retries; add its callbacks to ``callbacks``."""
        attempts = reconnects = 0
        admission = self._admission
        while True:
            attempts += 1
            attempt = _Attempt(self._acquire(), admission)
            try:
                return attempt.run(description, func, autocommit)
            except _RETRYABLE:
                if attempts >= MAX_ATTEMPTS:
                    raise
            except psycopg2.Error as error:
                lost = admission and admission.explain(error)
                if lost:
                    self._reactor.callFromThread(self._on_name_lost, lost)
                    raise lost from error
                if not attempt.broken or attempt.committing:
                    raise
                # The other connections of the pool are probably broken, too.
                self._close_idle()
                reconnects += 1
                if reconnects > MAX_RECONNECTS:
                    raise
                _log.info(
                    "transaction {description} lost its connection and is repeated: "
                    "{error}",
                    description=description,
                    error=error_text(error),
                )
            finally:
                callbacks.extend(attempt.callbacks)
                if attempt.broken:
                    attempt.connection.close()
                else:
                    self._idle.append(attempt.connection)

    def _acquire(self) -> psycopg2.extensions.connection:
        try:
            # Reuse the connection used last, so that a low load opens few connections.
            return self._idle.pop()
        except IndexError:
            connection = connect(self._conninfo)
            # The pool sends BEGIN and COMMIT itself: the latter together with others.
            connection.autocommit = True
            return connection

    def _close_idle(self) -> None:
        while True:
            try:
                self._idle.pop().close()
            except IndexError:
                return


class _Attempt:
    """One run of a function on one connection."""

    def __init__(
        self,
        connection: psycopg2.extensions.connection,
        admission: Admission | None,
    ) -> None:
        self.connection = connection
        self.callbacks: list[Callable[[], object]] = []
        self.committing = False
        self.broken = False
        self._commit = "COMMIT" if admission is None else admission.commit

    def run(
        self, description: str, func: Callable[[Transaction], T], autocommit: bool
    ) -> T:
        cursor: Transaction | None = None
        try:
            # The function may close its cursor.
            own = self.connection.cursor()
            if not autocommit:
                own.execute("BEGIN")
            cursor = self.connection.cursor(cursor_factory=Transaction)
            result = func(cursor)
            if not autocommit:
                _check_alive(description, cursor)
                self.committing = True
                own.execute(self._commit)
        except BaseException:
            if cursor is not None:
                self.callbacks = cursor.exception_callbacks
            self._roll_back()
            raise
        self.callbacks = cursor.after_callbacks
        return result

    def _roll_back(self) -> None:
        info = self.connection.info
        try:
            if info.transaction_status != TRANSACTION_STATUS_IDLE:
                self.connection.cursor().execute("ROLLBACK")
        except psycopg2.Error:
            self.broken = True
        else:
            self.broken = self.connection.closed != 0


def _check_alive(description: str, cursor: Transaction) -> None:
    """Check, without a round trip, that a transaction can still be committed.

    :raises TransactionRolledBackError: if a statement has failed since the last
        savepoint, or the transaction has ended.
    """
    connection = cursor.connection
    status = connection.info.transaction_status
    if status == TRANSACTION_STATUS_INERROR:
        error = " ".join((connection.info.error_message or "").split())
        raise TransactionRolledBackError(
            description,
            f"a statement failed, and the function caught its error ({error}); let "
            "the function raise it, or roll back to a savepoint",
        )
    if status == TRANSACTION_STATUS_IDLE and cursor.statusmessage not in (
        None,
        "COMMIT",
    ):
        raise TransactionRolledBackError(
            description,
            "the function ended the transaction itself; raise an exception instead of "
            "rolling back, and leave the commit to the caller",
        )


def _call_all(description: str, callbacks: list[Callable[[], object]]) -> None:
    for callback in callbacks:
        try:
            callback()
        except Exception:  # noqa: BLE001 -- logged
            # The remaining callbacks must run as well.
            _log.failure(
                "a callback of transaction {description} failed",
                description=description,
            )


def _cancel_after(result: Deferred[T], ended: Deferred[None]) -> None:
    """Fail a Deferred with CancelledError, delivered only after ``ended``."""
    result.pause()
    result.errback(CancelledError())
    ended.addCallback(lambda _: result.unpause())


def _follow(ended: Deferred[None]) -> Deferred[None]:
    """Return a Deferred that fires after ``ended``, for an independent waiter."""
    follower: Deferred[None] = Deferred()
    ended.addCallback(lambda _: follower.callback(None))
    return follower
