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
sent. A transaction is not repeated if the answer to its commit was lost: another
connection asks the database what became of it
(:mod:`~synapse_replication.storage.lost_answers`). The caller waits for the answer for
:data:`OUTCOME_WAIT` s, and then gets :exc:`CommitUnknownError`; the question is
repeated until the transaction has ended. With ``autocommit``, there is no separate
commit: a function whose connection broke is repeated, although the server may have
executed its statement.

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
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import attrs
import psycopg2
import psycopg2.errors
import psycopg2.extensions
from twisted.internet import defer
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorFromThreads, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.python.threadpool import ThreadPool

from synapse_replication.errors import (
    CommitUnknownError,
    DatabaseClosedError,
    NameLostError,
)
from synapse_replication.handlers.interfaces import Clock
from synapse_replication.handlers.timer import Backoff
from synapse_replication.handlers.waiters import Waiters, wait_for_all
from synapse_replication.storage.admission import Admission
from synapse_replication.storage.lost_answers import LostAnswer, LostAnswers, identify
from synapse_replication.storage.transactions import (
    Attempt,
    PoolConnection,
    Transaction,
)
from synapse_replication.streams.writer_table import Effect, TransactionState
from synapse_replication.transport.error_text import error_text

T = TypeVar("T")

#: The most attempts of one transaction; the caller receives the failure of the last.
MAX_ATTEMPTS = 6

#: The most reconnections within one transaction.
MAX_RECONNECTS = 1

#: How long the caller waits to learn what became of a transaction whose COMMIT was not
#: answered, in s.
OUTCOME_WAIT = 5.0

#: The delays between attempts to reach the database at the start of a process.
_BACKOFF = Backoff(0.5, 5.0, 1.5)

_log = Logger()

_RETRYABLE = (
    psycopg2.errors.SerializationFailure,
    psycopg2.errors.DeadlockDetected,
)


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


class WriterDatabase(TransactionRunner, Protocol):
    """Interface of a writer's database, which also knows what has ended.

    A transaction whose result was cancelled, or whose connection was lost, may still
    commit, so its ids are not finished until it has ended.
    """

    def mark(self) -> int:
        """Return a mark for :meth:`settled`, before all later transactions."""

    def settled(self, since: int = 0, *, only_lost: bool = False) -> Deferred[None]:
        """Return a Deferred that fires when transactions have ended.

        See ``Database.settled``. It has fired already if none is to be waited for.
        """

    def lost_answers(self) -> Sequence[LostAnswer]:
        """Return the transactions whose COMMIT was not answered, oldest first."""


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
        self._idle: deque[PoolConnection] = deque()
        #: Transactions that are not known to have ended, in the order of the requests.
        self._running: dict[_Request[Any], None] = {}
        self._lost = LostAnswers(
            lambda lost: self.transact("transaction_status", lost.ask, autocommit=True),
            IReactorTime(reactor),
            self._settle,
        )
        #: Those that wait for the end of such a transaction.
        self._waiters: defaultdict[_Request[Any], Waiters] = defaultdict(Waiters)
        self._requested = 0
        #: How many transactions wait for a thread, or run in one.
        self._in_threads = 0
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

    def confirm_name(self) -> Deferred[None]:
        """Check now that this process still has the name that it has acquired.

        :return: fires if it has.
        :raises NameLostError: if another process has acquired it; in the Deferred.
        """
        admission = self._admission
        assert admission is not None, "a name was acquired"
        return self.transact("confirm_name", admission.confirm, autocommit=True)

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
            trip instead of two. Use it for idempotent statements only: if the
            connection breaks, ``func`` is repeated, although the server may have
            executed the statement.
        :return: fires with the result of ``func``, or with the failure of the last
            attempt. If it is cancelled, it fails with ``CancelledError`` after the
            transaction has ended, even if the transaction was committed.
        :raises DatabaseClosedError: if :meth:`close` was called; in the Deferred.
        :raises NameLostError: if another process has acquired the name under which this
            process writes; in the Deferred.
        :raises CommitUnknownError: if the connection was lost during the commit, and it
            is not known whether the transaction was committed; in the Deferred.
        :raises TransactionRolledBackError: if ``func`` caught the error of a statement
            and returned, or ended the transaction itself; in the Deferred.
        """
        if self._closing is not None:
            return defer.fail(DatabaseClosedError(description))
        request = _Request(description, func, autocommit, self._requested)
        self._requested += 1
        self._in_threads += 1
        self._running[request] = None
        self._pool.callInThread(self._work, request)
        return request.result

    def mark(self) -> int:
        """Return a mark for :meth:`settled`, before all later transactions."""
        return self._requested

    def settled(self, since: int = 0, *, only_lost: bool = False) -> Deferred[None]:
        """Return a Deferred that fires when transactions are known to have ended.

        It does not wait for transactions that are requested later. A transaction whose
        COMMIT was not answered counts as running until the database has shown that it
        has ended. Call it in the reactor's thread.

        :param since: a mark; earlier transactions do not count.
        :param only_lost: whether to wait only for those whose answer was lost.
        """
        if only_lost and not self._lost:
            # The usual case at the end of each block.
            return defer.succeed(None)
        ends = [
            self._waiters[each].add()
            for each in self._running
            if each.number >= since and (each.lost is not None or not only_lost)
        ]
        return wait_for_all(ends)

    def lost_answers(self) -> list[LostAnswer]:
        """Return the transactions whose COMMIT was not answered, oldest first."""
        return list(self._lost)

    def close(self) -> Deferred[None]:
        """Wait for queued and running transactions, then close all connections.

        The pool's threads are stopped, too. Transactions whose COMMIT was not answered
        are given up: they fail with :exc:`CommitUnknownError`, and never count as
        ended.

        It may be called more than once; each returned Deferred fires when the pool is
        closed.
        """
        if self._closing is None:
            self._closing = Deferred()
            self._lost.stop()
            if not self._in_threads:
                self._close_now(self._closing)
        return _follow(self._closing)

    def _close_now(self, closing: Deferred[None]) -> None:
        for request in self._running:
            if request.lost is not None:
                how = request.lost.describe()
                _log.warn("The database is closed, but {how}", how=how)
                request.return_unknown(request.lost)
        self._pool.stop()
        self._close_idle()
        closing.callback(None)

    # -- transactions that have left their thread ----------------------------------

    def _end(self, request: _Request[Any], outcome: object) -> None:
        _call_all(request.description, request.callbacks)
        del self._running[request]
        if request in self._waiters:
            self._waiters.pop(request).fire()
        request.return_(outcome)

    def _leave_thread(self, request: _Request[Any], outcome: object) -> None:
        if isinstance(outcome, LostAnswer):
            self._begin_to_ask(request, outcome)
        else:
            self._end(request, outcome)
        self._in_threads -= 1
        if self._closing is not None and not self._in_threads:
            self._close_now(self._closing)

    def _begin_to_ask(self, request: _Request[Any], lost: LostAnswer) -> None:
        request.lost = lost
        self._lost.add(lost)
        if self._closing is None:
            waiting = IReactorTime(self._reactor).callLater(
                OUTCOME_WAIT, request.return_unknown, lost
            )
            request.result.addBoth(_cancel_call, waiting)

    def _settle(self, lost: LostAnswer, effects: Sequence[Effect]) -> None:
        (request,) = (each for each in self._running if each.lost is lost)
        request.callbacks += lost.callbacks(effects)
        self._end(request, request.outcome_of(lost))

    # -- in the pool's threads -----------------------------------------------------

    def _work(self, request: _Request[Any]) -> None:
        outcome: object
        try:
            if request.result.called:
                # The transaction was cancelled before it began.
                raise CancelledError
            outcome = self._run(request)
        except BaseException:  # noqa: BLE001 -- passed to the caller
            outcome = Failure()  # type: ignore[no-untyped-call]
        self._reactor.callFromThread(self._leave_thread, request, outcome)

    def _run(self, request: _Request[T]) -> T | LostAnswer:
        """Run the transaction, with retries; add its callbacks to the request."""
        attempts = reconnects = 0
        admission = self._admission
        while True:
            attempts += 1
            attempt = Attempt(self._acquire(), request.description)
            try:
                return attempt.run(
                    request.func, admission, autocommit=request.autocommit
                )
            except _RETRYABLE:
                if attempts >= MAX_ATTEMPTS:
                    raise
            except psycopg2.Error as error:
                refused = admission and admission.explain(error)
                if refused:
                    self._reactor.callFromThread(self._on_name_lost, refused)
                    raise refused from error
                if not attempt.is_broken:
                    raise
                # The other connections of the pool are probably broken, too.
                self._close_idle()
                if not attempt.outcome.is_settled:
                    request.value = attempt.value
                    return attempt.lost_answer(error)
                reconnects += 1
                if reconnects > MAX_RECONNECTS:
                    raise
                _log.info(
                    "transaction {description} lost its connection and is repeated: "
                    "{error}",
                    description=request.description,
                    error=error_text(error),
                )
            finally:
                request.callbacks += attempt.callbacks
                self._release(attempt.connection, is_broken=attempt.is_broken)

    def _acquire(self) -> PoolConnection:
        try:
            # Reuse the connection used last, so that a low load opens few connections.
            return self._idle.pop()
        except IndexError:
            connection = PoolConnection.open(self._conninfo)
            connection.autocommit = True
            connection.backend = identify(connection)
            connection.prepared = set()
            return connection

    def _release(self, connection: PoolConnection, *, is_broken: bool) -> None:
        if is_broken:
            connection.close()
        else:
            self._idle.append(connection)

    def _close_idle(self) -> None:
        while True:
            try:
                self._idle.pop().close()
            except IndexError:
                return


@attrs.define(eq=False, repr=False)
class _Request(Generic[T]):
    """One call of :meth:`Database.transact`.

    :ivar number: counts the calls.
    :ivar value: what the function returned, if the answer to its COMMIT was lost.
    :ivar lost: the transaction, if the answer to its COMMIT was lost.
    :ivar callbacks: those of the attempts that have ended.
    :ivar result: fires for the caller.
    """

    description: str
    func: Callable[[Transaction], T]
    autocommit: bool
    number: int
    value: Any = None
    lost: LostAnswer | None = None
    callbacks: list[Callable[[], object]] = attrs.field(factory=list)
    result: Deferred[T] = attrs.field(init=False)
    #: Whether the result was cancelled, and is delivered when it is returned.
    _is_held: bool = attrs.field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self.result = Deferred(self._cancel)

    def _cancel(self, result: Deferred[T]) -> None:
        """Fail the result with CancelledError, delivered when it is returned."""
        self._is_held = True
        result.pause()
        result.errback(CancelledError())

    def return_(self, outcome: object) -> None:
        """Return the result or failure to the caller, unless it has returned."""
        if self._is_held:
            self._is_held = False
            self.result.unpause()
        if not self.result.called:
            self.result.callback(outcome)  # type: ignore[arg-type]

    def return_unknown(self, lost: LostAnswer) -> None:
        """Let the caller fail, because the outcome is not known."""
        unknown = CommitUnknownError(self.description, error_text(lost.error))
        unknown.__cause__ = lost.error
        self.return_(Failure(unknown))  # type: ignore[no-untyped-call]

    def outcome_of(self, lost: LostAnswer) -> object:
        """Return the result or failure for the caller, after the outcome was read."""
        if lost.outcome.state is TransactionState.COMMITTED:
            return self.value
        if lost.outcome.state is TransactionState.ROLLED_BACK:
            return Failure(lost.error)  # type: ignore[no-untyped-call]
        return Failure(  # type: ignore[no-untyped-call]
            CommitUnknownError(self.description, "its outcome cannot be read any more")
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


def _cancel_call(result: T, call: IDelayedCall) -> T:
    if call.active():
        call.cancel()
    return result


def _follow(ended: Deferred[None]) -> Deferred[None]:
    """Return a Deferred that fires after ``ended``, for an independent waiter."""
    follower: Deferred[None] = Deferred()
    ended.addCallback(lambda _: follower.callback(None))
    return follower
