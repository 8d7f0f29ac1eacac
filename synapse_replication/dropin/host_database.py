"""The host's connection pool: its transactions, lost answers, and replaced processes.

Theory of operation: the host runs its own transactions in its own pool. They are not
changed, and nothing is sent with them. Only the connections are this package's
(:class:`HostConnection`), so that

- a commit whose answer was lost is noticed. Until the database has shown that the
  transaction has ended (:mod:`~synapse_replication.storage.lost_answers`), no id is
  finished that may belong to it: any id that was allocated before the answer was lost,
  because a connection does not know for which ids it is used.
- when a connection is opened, its session *joins* the name of the process: it shares an
  advisory lock of the name until it ends, and then checks the term. A process that
  acquires the name afterwards finds the sessions of its predecessor by this lock, and
  ends them (:func:`end_predecessors`); the predecessor cannot open others. So none of
  its transactions can be committed any more, although none carries the term.

Behind a pooler, which lends sessions to several clients, neither is possible; this is
logged. With SQLite there is one process, and no lost answer.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import psycopg2
import psycopg2.extensions
from twisted.internet.defer import Deferred, succeed
from twisted.logger import Logger
from twisted.python.failure import Failure

from synapse_replication.dropin.homeserver import DatabaseConnection, DatabasePool
from synapse_replication.errors import NameLostError
from synapse_replication.handlers.waiters import Waiters, wait_for_all
from synapse_replication.storage import name_lock
from synapse_replication.storage.admission import Admission
from synapse_replication.storage.lost_answers import (
    Backend,
    LostAnswer,
    LostAnswers,
    identify,
)
from synapse_replication.storage.open_transactions import POLL_SECONDS, end_session
from synapse_replication.streams.writer import TransactionOutcome
from synapse_replication.streams.writer_table import Effect, TransactionEvent
from synapse_replication.transport.reactor import IReactor

T = TypeVar("T")

#: The host's names for this package's transactions: the host's metrics and tests use
#: them.
_HOST_DESCRIPTIONS = {
    "get_next_ids": "_load_next_mult_id",
    "persist_position": "MultiWriterIdGenerator._update_table",
}

#: Why the host is being stopped.
_stopping: list[NameLostError] = []

_log = Logger()

_NAMED_PARAMETER = re.compile(r"%\((\w+)\)s")


class HostConnection(psycopg2.extensions.connection):
    """A connection of the host's pool.

    :ivar on_lost: called in a thread of the pool if the answer to a COMMIT was lost,
        with the session and the reason.
    :ivar backend: the session; ``None`` until the connection is open.
    """

    on_lost: Callable[[Backend, psycopg2.Error], object]
    backend: Backend | None = None

    def commit(self) -> None:
        """Commit the transaction."""
        try:
            super().commit()
        except psycopg2.Error as error:
            if self.closed and self.backend is not None:
                self.on_lost(self.backend, error)
            raise


class HostConnections:
    """The connections of one pool of the host.

    Use it in the reactor's thread, except as stated.

    :param pool: the host's ``twisted.enterprise.adbapi.ConnectionPool``, which has not
        opened a connection yet.
    :param database: runs transactions in the pool.
    :param reactor: the host's reactor.
    :ivar admission: the name that this process has acquired, if any.
    """

    def __init__(self, pool: Any, database: HostDatabase, reactor: IReactor) -> None:
        self.admission: Admission | None = None
        self._database = database
        self._reactor = reactor
        self._open_by_host: Callable[[Any], object] | None = pool.openfun
        self._waiters: dict[LostAnswer, tuple[int, Waiters]] = {}
        self._count = 0
        self._has_warned = False
        self._lost = LostAnswers(
            lambda lost: database.transact(
                "transaction_status", lost.ask, autocommit=True
            ),
            reactor,
            self._settle,
        )
        pool.connkw = {**pool.connkw, "connection_factory": self._connect}
        pool.openfun = self._open

    def mark(self) -> int:
        """Return a mark before all answers that are lost later. Thread-safe."""
        return self._count

    def settled(self, since: int) -> Deferred[None]:
        """Return a Deferred that fires when transactions are known to have ended.

        :param since: a mark; transactions whose answer was lost earlier do not count.
        """
        if not self._waiters:
            return succeed(None)
        return wait_for_all(
            waiters.add()
            for number, waiters in self._waiters.values()
            if number >= since
        )

    def lost_answers(self) -> list[LostAnswer]:
        """Return the transactions whose COMMIT was not answered, oldest first."""
        return list(self._lost)

    def confirm_name(self) -> Deferred[None]:
        """Check now that this process still has the name that it has acquired.

        If it has not, stop the process.

        :return: fires if it has.
        :raises NameLostError: if another process has acquired it; in the Deferred.
        """
        admission = self.admission
        assert admission is not None, "a name was acquired"
        return self._database.transact(
            "confirm_name", admission.confirm, autocommit=True
        )

    def explain(self, error: Exception) -> Exception:
        """Return the error, or that another process has the name of this one.

        In that case, stop the process. Thread-safe.
        """
        if self.admission is None or not isinstance(error, psycopg2.Error):
            return error
        lost = self.admission.explain(error)
        if lost is None:
            return error
        lost.__cause__ = error
        self._stop(lost)
        return lost

    def _stop(self, lost: NameLostError) -> None:
        self._reactor.callFromThread(_stop_process, self._reactor, lost)

    # -- in the pool's threads -----------------------------------------------------

    def _connect(self, dsn: str, **options: Any) -> HostConnection:
        connection = HostConnection(dsn, **options)
        connection.on_lost = self._lose
        return connection

    def _open(self, connection: Any) -> None:
        """Identify the session of a new connection, and let it join the name.

        :raises NameLostError: if another process has acquired the name.
        """
        try:
            connection.autocommit = True
            backend = identify(connection)
            if backend.pid == 0:
                self._warn_of_pooler()
            else:
                connection.backend = backend
                if self.admission is not None:
                    with connection.cursor() as cursor:
                        name_lock.join(cursor, self.admission)
            connection.autocommit = False
        except NameLostError as lost:
            connection.close()
            self._stop(lost)
            raise
        if self._open_by_host is not None:
            self._open_by_host(connection)

    def _warn_of_pooler(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warn(
                "The database is reached through a pooler: a commit of the homeserver "
                "whose answer is lost is not noticed, and its sessions cannot be ended "
                "if this process is suspended and replaced"
            )

    def _lose(self, backend: Backend, error: psycopg2.Error) -> None:
        # This is called in the reactor's thread before the host learns of the error.
        self._reactor.callFromThread(self._begin_to_ask, backend, error)

    # -- in the reactor's thread ---------------------------------------------------

    def _begin_to_ask(self, backend: Backend, error: psycopg2.Error) -> None:
        outcome = TransactionOutcome()
        for event in (TransactionEvent.COMMIT_SENT, TransactionEvent.DISCONNECTED):
            outcome.handle(event)
        lost = LostAnswer(
            "a transaction of the homeserver",
            backend,
            # The host's statements do not return its number.
            None,
            error,
            outcome,
            lambda effects: [],
        )
        self._waiters[lost] = self._count, Waiters()
        self._count += 1
        self._lost.add(lost)

    def _settle(self, lost: LostAnswer, effects: Sequence[Effect]) -> None:
        _, waiters = self._waiters.pop(lost)
        waiters.fire()


class HostDatabase:
    """The host's connection pool, as a :class:`TransactionRunner`.

    :ivar is_postgres: whether the database is PostgreSQL, and not SQLite.
    :ivar connections: those of the pool, if this package opens them.
    """

    def __init__(self, db: DatabasePool, server_name: str) -> None:
        self._db = db
        self._context = importlib.import_module("synapse.logging.context")
        #: The log context of all transactions. A caller's log context cannot be used,
        #: because a transaction may serve several callers.
        self._own = self._context.LoggingContext(
            name="replication_ids", server_name=server_name
        )
        engines = importlib.import_module("synapse.storage.engines")
        self.is_postgres = isinstance(db.engine, engines.PostgresEngine)
        self.connections: HostConnections | None = None

    def open_connections(self, admission: Admission | None) -> None:
        """Open the connections of the pool from now on, unless this is so already.

        :param admission: the name that this process has acquired, if any.
        """
        pool = getattr(self._db, "_db_pool", None)
        if pool is None:
            _log.warn(
                "This version of the homeserver has no pool of connections that is "
                "known: a commit whose answer is lost is not noticed, and its sessions "
                "cannot be ended if this process is suspended and replaced"
            )
            return
        self.connections = _connections_of(pool) or HostConnections(
            pool, self, self._db.hs.get_reactor()
        )
        if admission is not None:
            self.connections.admission = admission

    def mark(self) -> int:
        """Return a mark for :meth:`settled`, before all later transactions."""
        return 0 if self.connections is None else self.connections.mark()

    def settled(self, since: int = 0, *, only_lost: bool = False) -> Deferred[None]:
        """Return a Deferred that fires when transactions are known to have ended.

        Only those count whose COMMIT was not answered: the host's own functions return
        when their transactions have ended.
        """
        if self.connections is None:
            return succeed(None)
        return self.connections.settled(since)

    def lost_answers(self) -> list[LostAnswer]:
        """Return the transactions whose COMMIT was not answered, oldest first."""
        return [] if self.connections is None else self.connections.lost_answers()

    def explain(self, error: Exception) -> Exception:
        """See :meth:`HostConnections.explain`."""
        return error if self.connections is None else self.connections.explain(error)

    def transact(
        self, description: str, func: Callable[[Any], T], *, autocommit: bool = False
    ) -> Deferred[T]:
        """Run ``func(cursor)`` in a transaction of the host."""
        call = func if self.is_postgres else lambda txn: func(_SqliteCursor(txn))
        description = _HOST_DESCRIPTIONS.get(description, description)
        result: Deferred[T] = Deferred()

        async def interact() -> None:
            outcome: Any
            try:
                outcome = await self._db.runInteraction(
                    description, call, db_autocommit=autocommit
                )
            except Exception as error:  # noqa: BLE001 -- passed to the caller
                outcome = Failure(self.explain(error))  # type: ignore[no-untyped-call]
            # Clear the log context: the caller restores its own when it resumes.
            self._context.set_current_context(self._context.SENTINEL_CONTEXT)
            result.callback(outcome)

        # Do not start a background process of the host: it would cost as much as the
        # transaction.
        previous = self._context.set_current_context(self._own)
        try:
            Deferred.fromCoroutine(interact())
        finally:
            self._context.set_current_context(previous)
        return result


class _SqliteCursor:
    """A cursor that accepts the named parameters of PostgreSQL's driver."""

    def __init__(self, txn: Any) -> None:
        self._txn = txn
        self.fetchall = txn.fetchall
        self.fetchone = txn.fetchone

    def execute(self, sql: str, parameters: Any = ()) -> None:
        """Run a statement."""
        self._txn.execute(_NAMED_PARAMETER.sub(r":\1", sql), parameters)


def _connections_of(pool: Any) -> HostConnections | None:
    """Return the connections of a pool, if this package opens them.

    Only the pool refers to them: they refer to the host, which would never be freed if
    anything else kept them.
    """
    owner = getattr(pool.openfun, "__self__", None)
    return owner if isinstance(owner, HostConnections) else None


def find_name_check(db: DatabasePool) -> Callable[[], Deferred[None]] | None:
    """Return the check that this process has its name, if it has acquired one.

    :param db: the host's connection pool.
    """
    pool = getattr(db, "_db_pool", None)
    connections = None if pool is None else _connections_of(pool)
    if connections is None or connections.admission is None:
        return None
    return connections.confirm_name


def end_predecessors(db_conn: DatabaseConnection, instance_name: str) -> None:
    """End the sessions that have joined a name, of which another process has the term.

    Sessions that are idle are ended immediately, others after
    :data:`~synapse_replication.storage.name_lock.WAIT` s; those of another role are
    waited for.

    Blocks until all have ended. This process has no session with the name yet.

    :param db_conn: a connection of the host to the database.
    """
    due = time.monotonic() + name_lock.WAIT
    while True:
        with db_conn.cursor(txn_name="end_predecessors") as cursor:
            sessions = name_lock.joined_sessions(cursor, instance_name)
            is_due = time.monotonic() > due
            if is_due:
                due += name_lock.WAIT
            for session in sessions:
                if (session.state == "idle" or is_due) and not end_session(
                    cursor, session, instance_name
                ):
                    name_lock.warn_of_predecessor(session, instance_name)
        db_conn.commit()
        if not sessions:
            return
        time.sleep(POLL_SECONDS)


def _stop_process(reactor: IReactor, lost: NameLostError) -> None:
    """Stop the host, and let it exit with status 1."""
    if not _stopping:
        _stopping.append(lost)
        _log.critical("Stopping, so as to write no more: {error}", error=lost)
        print(f"synapse-replication: {lost}", file=sys.stderr, flush=True)  # noqa: T201
        # The host would exit with 0.
        reactor.addSystemEventTrigger("after", "shutdown", os._exit, 1)
        reactor.stop()
