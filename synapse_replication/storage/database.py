"""Blocking psycopg2 connections, used from Twisted: one transaction, one thread.

Usage::

    database = Database("postgresql:///synapse", reactor)

    def read(txn: Transaction) -> int:
        txn.execute("SELECT count(*) FROM events")
        return int(txn.fetchone()[0])

    count = await database.transact("count_events", read)
    ...
    await database.close()

``transact`` and ``close`` are called in the reactor's thread; the function given
to ``transact`` runs in one of the pool's threads, with a cursor of its own
connection, and must touch nothing else that is not safe there. It may run more
than once: PostgreSQL asks to repeat a transaction that met another one (a
serialization failure or a deadlock), and a connection that broke before the
commit was sent is replaced. A commit whose answer was lost is never repeated.

What belongs to a transaction's end, whatever that is, is said to its
:class:`Transaction`: ``call_after`` and ``call_on_exception``. A transaction that
has begun is not stopped by cancelling its Deferred, and whoever waits learns of
the cancellation when it has ended, not before: else a block that holds an id would
be left, and its position announced, ahead of a commit that is still to come. A
coroutine that is closed cannot wait; what it holds is kept by :meth:`Database.settled`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import psycopg2
import psycopg2.errors
import psycopg2.extensions
from twisted.internet import defer
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorFromThreads
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.python.threadpool import ThreadPool

from synapse_replication.errors import StorageError
from synapse_replication.transport.failures import one_line

__all__ = ["Database", "Transaction", "TransactionRunner", "connect"]

T = TypeVar("T")

#: How often one transaction is tried before its failure is the caller's.
MAX_ATTEMPTS = 6

#: How often a broken connection is replaced under one transaction.
MAX_RECONNECTS = 1

_log = Logger()

_TRY_AGAIN = (
    psycopg2.errors.SerializationFailure,
    psycopg2.errors.DeadlockDetected,
)


class Transaction(psycopg2.extensions.cursor):
    """A cursor that knows what is to be done when its transaction has ended."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.after_callbacks: list[Callable[[], object]] = []
        self.exception_callbacks: list[Callable[[], object]] = []

    def call_after(self, func: Callable[..., object], *args: object) -> None:
        """Call ``func(*args)`` in the reactor's thread once this is committed."""
        self.after_callbacks.append(lambda: func(*args))

    def call_on_exception(self, func: Callable[..., object], *args: object) -> None:
        """Call ``func(*args)`` in the reactor's thread if this is not committed.

        Also called for an attempt that is repeated: it was rolled back.
        """
        self.exception_callbacks.append(lambda: func(*args))


class TransactionRunner(Protocol):
    """What runs transactions: a :class:`Database`, or a host's own."""

    def transact(
        self,
        description: str,
        func: Callable[[Any], T],
        *,
        autocommit: bool = False,
    ) -> Deferred[T]:
        """Run ``func(cursor)`` in a transaction; see :meth:`Database.transact`."""
        ...


def connect(
    conninfo: str | Mapping[str, Any],
) -> psycopg2.extensions.connection:
    """Open one connection.

    :param conninfo: a DSN or URI, or libpq's parameters by name.
    :raises psycopg2.OperationalError: if nothing answers there, or it refuses.
    """
    if isinstance(conninfo, str):
        return psycopg2.connect(conninfo)
    connection: psycopg2.extensions.connection = psycopg2.connect(**conninfo)
    return connection


class _DaemonThread(threading.Thread):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.daemon = True


class Database:
    """A pool of connections and the threads that use them.

    :param conninfo: a DSN or URI, or libpq's parameters by name.
    :param reactor: to come back from the threads.
    :param max_connections: connections (and threads) at most. Transactions beyond
        that wait for their turn; the callers that wait for them are the bound of
        that queue.
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
        self._closing: Deferred[None] | None = None
        self._pool = ThreadPool(0, max_connections, "synapse_replication.storage")
        # A process that ends without close() is not held up: what it had open is
        # rolled back, as if it had been killed.
        self._pool.threadFactory = _DaemonThread
        self._pool.start()

    def transact(
        self,
        description: str,
        func: Callable[[Transaction], T],
        *,
        autocommit: bool = False,
    ) -> Deferred[T]:
        """Run ``func(txn)`` in a transaction of its own, and commit it.

        :param description: what it is for, in log lines.
        :param func: called in another thread, more than once if PostgreSQL asks
            for that. If it raises, the transaction is rolled back.
        :param autocommit: let each statement be a transaction of its own: one
            round trip instead of three. Only for what does no harm if it is done
            twice: a connection that broke may have broken after the statement.
        :return: what ``func`` returned, or the failure of the last attempt. If it is
            cancelled, it fails as soon as the transaction has ended, however it did.
        :raises StorageError: (in the Deferred) :meth:`close` was called.
        """
        if self._closing is not None:
            return defer.fail(
                StorageError(f"{description}: the database was closed by close()")
            )
        ended: Deferred[None] = Deferred()
        self._running.add(ended)

        def cancel(cancelled: Deferred[T]) -> None:
            cancelled.pause()
            cancelled.errback(CancelledError())
            ended.addCallback(lambda _: cancelled.unpause())

        result: Deferred[T] = Deferred(cancel)

        def done(outcome: T | Failure, callbacks: list[Callable[[], object]]) -> None:
            self._call_all(description, callbacks)
            self._running.discard(ended)
            ended.callback(None)
            if result.called:
                return
            if isinstance(outcome, Failure):
                result.errback(outcome)
            else:
                result.callback(outcome)

        def work() -> None:
            outcome: T | Failure
            callbacks: list[Callable[[], object]] = []
            try:
                if result.called:
                    # Cancelled before it began.
                    raise CancelledError
                outcome = self._run(description, func, autocommit, callbacks)
            except BaseException:  # noqa: BLE001 -- the caller's, whatever it is
                outcome = Failure()  # type: ignore[no-untyped-call]
            self._reactor.callFromThread(done, outcome, callbacks)

        self._pool.callInThread(work)
        return result

    def settled(self) -> Deferred[None]:
        """Fire when every transaction that was asked for by now has ended.

        Those that are asked for later are not waited for. Called in the reactor's
        thread.
        """
        settled: Deferred[None] = Deferred()
        ends = defer.DeferredList([_follow(ended) for ended in self._running])
        ends.addCallback(lambda _: settled.callback(None))
        return settled

    def close(self) -> Deferred[None]:
        """Wait for what is running, close the connections, end the threads.

        May be called more than once; every call waits for the same end.
        """
        if self._closing is None:
            self._closing = Deferred()
            defer.DeferredList(list(self._running)).addCallback(self._close_now)
        waiting: Deferred[None] = Deferred()
        self._closing.addCallback(lambda _: waiting.callback(None))
        return waiting

    def _close_now(self, _: object) -> None:
        assert self._closing is not None
        self._pool.stop()
        while self._idle:
            self._idle.pop().close()
        self._closing.callback(None)

    def _call_all(
        self, description: str, callbacks: list[Callable[[], object]]
    ) -> None:
        for callback in callbacks:
            try:
                callback()
            except Exception:  # noqa: BLE001 -- logged
                # The transaction has ended: the others must hear of it too.
                _log.failure(
                    "what {description} asked to be called failed",
                    description=description,
                )

    # -- in the pool's threads -----------------------------------------------------

    def _run(
        self,
        description: str,
        func: Callable[[Transaction], T],
        autocommit: bool,
        callbacks: list[Callable[[], object]],
    ) -> T:
        """Try until it works or the failure is final; fill in ``callbacks``."""
        attempts = reconnects = 0
        while True:
            attempts += 1
            attempt = _Attempt(self._take())
            try:
                return attempt.run(func, autocommit)
            except _TRY_AGAIN:
                if attempts >= MAX_ATTEMPTS:
                    raise
            except psycopg2.Error as error:
                if not attempt.broken or attempt.committing:
                    raise
                # The others in the pool are likely to be as dead.
                self._forget_idle()
                reconnects += 1
                if reconnects > MAX_RECONNECTS:
                    raise
                _log.info(
                    "{description} lost its connection, and is run again: {error}",
                    description=description,
                    error=one_line(error),
                )
            finally:
                callbacks.extend(attempt.callbacks)
                if attempt.broken:
                    attempt.connection.close()
                else:
                    self._idle.append(attempt.connection)

    def _take(self) -> psycopg2.extensions.connection:
        try:
            # The one used last: with little to do, the others stay unused.
            return self._idle.pop()
        except IndexError:
            return connect(self._conninfo)

    def _forget_idle(self) -> None:
        while True:
            try:
                self._idle.pop().close()
            except IndexError:
                return


class _Attempt:
    """One run of a function on one connection."""

    def __init__(self, connection: psycopg2.extensions.connection) -> None:
        self.connection = connection
        self.callbacks: list[Callable[[], object]] = []
        self.committing = False
        self.broken = False

    def run(self, func: Callable[[Transaction], T], autocommit: bool) -> T:
        connection = self.connection
        cursor: Transaction | None = None
        try:
            if connection.autocommit != autocommit:
                connection.autocommit = autocommit
            cursor = connection.cursor(cursor_factory=Transaction)
            result = func(cursor)
            cursor.close()
            if not autocommit:
                self.committing = True
                connection.commit()
        except BaseException:
            if cursor is not None:
                self.callbacks = cursor.exception_callbacks
            self._roll_back()
            raise
        self.callbacks = cursor.after_callbacks
        return result

    def _roll_back(self) -> None:
        try:
            self.connection.rollback()
        except psycopg2.Error:
            self.broken = True
        else:
            self.broken = self.connection.closed != 0


def _follow(ended: Deferred[None]) -> Deferred[None]:
    """Return one that fires with another, for somebody else to wait for."""
    follower: Deferred[None] = Deferred()
    ended.addCallback(lambda _: follower.callback(None))
    return follower
