"""One transaction on one connection: its cursor, and one attempt to run and commit it.

The functions run in a thread. PostgreSQL answers the COMMIT of a failed transaction
with ROLLBACK, which psycopg2 does not report. So a function that catches the error of a
statement, and returns, has not succeeded: its transaction is rolled back, and the
attempt raises :exc:`~synapse_replication.errors.TransactionRolledBackError`. To
continue after such an error, a function rolls back to a savepoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import psycopg2
import psycopg2.errors
import psycopg2.extensions
from psycopg2.extensions import TRANSACTION_STATUS_IDLE, TRANSACTION_STATUS_INERROR

from synapse_replication.errors import TransactionRolledBackError
from synapse_replication.storage.admission import Admission
from synapse_replication.storage.lost_answers import Backend, LostAnswer
from synapse_replication.storage.prepared import Prepared
from synapse_replication.streams.writer import TransactionOutcome
from synapse_replication.streams.writer_table import Effect, TransactionEvent

T = TypeVar("T")
_C = TypeVar("_C", bound=psycopg2.extensions.connection)


class Transaction(psycopg2.extensions.cursor):
    """A cursor with callbacks for the end of its transaction.

    :ivar xid: the number of the transaction, once a statement has returned it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.xid: str | None = None
        self.settled_callbacks: list[Callable[[], object]] = []
        self.after_callbacks: list[Callable[[], object]] = []
        self.exception_callbacks: list[Callable[[], object]] = []

    def execute(self, query: Any, vars: Any = None) -> None:
        """Execute a statement; BEGIN is sent with the first one of a transaction."""
        connection = self.connection
        if not isinstance(connection, PoolConnection) or not connection.must_begin:
            super().execute(query, vars)
        elif isinstance(query, str):
            try:
                super().execute(f"BEGIN; {query}", vars)
            except psycopg2.Error:
                if connection.get_transaction_status() != TRANSACTION_STATUS_IDLE:
                    raise
                # PostgreSQL parsed the message and executed no part of it. The
                # transaction has to fail, even if the caller catches the error.
                connection.begin()
                super().execute(query, vars)
            finally:
                connection.must_begin = (
                    connection.get_transaction_status() == TRANSACTION_STATUS_IDLE
                    and self.statusmessage is None
                )
        else:
            connection.begin()
            super().execute(query, vars)

    def executemany(self, query: Any, vars_list: Any) -> None:
        """Execute a statement with each of several sequences of parameters."""
        self._begin()
        super().executemany(query, vars_list)

    def callproc(self, *args: Any) -> None:
        """Call a function of the database."""
        self._begin()
        super().callproc(*args)

    def copy_from(self, *args: Any, **kwargs: Any) -> None:
        """Copy a file to a table."""
        self._begin()
        super().copy_from(*args, **kwargs)

    def copy_to(self, *args: Any, **kwargs: Any) -> None:
        """Copy a table to a file."""
        self._begin()
        super().copy_to(*args, **kwargs)

    def copy_expert(self, *args: Any, **kwargs: Any) -> None:
        """Execute a COPY."""
        self._begin()
        super().copy_expert(*args, **kwargs)

    def _begin(self) -> None:
        if isinstance(self.connection, PoolConnection):
            self.connection.begin()

    def execute_prepared(
        self, parameters: Mapping[str, Any], *statements: Prepared
    ) -> None:
        """Execute statements, planned once for each connection of the pool.

        Behind a pooler, they are planned each time.
        """
        connection = self.connection
        if not isinstance(connection, PoolConnection) or connection.backend.pid == 0:
            self.execute("; ".join(each.sql for each in statements), parameters)
            return
        for statement in statements:
            if statement.name not in connection.prepared:
                self.execute(statement.prepare)
                connection.prepared.add(statement.name)
        self.execute("; ".join([each.execute for each in statements]), parameters)

    def call_after(self, func: Callable[..., object], *args: object) -> None:
        """Call ``func(*args)`` in the reactor's thread after the commit."""
        self.after_callbacks.append(lambda: func(*args))

    def call_when_settled(self, func: Callable[..., object], *args: object) -> None:
        """Call ``func(*args)`` in the reactor's thread when the transaction has ended.

        It is called before the callbacks for the commit or rollback. If the answer to
        the commit was lost, it is called once the database has shown that the
        transaction has ended, even if its outcome cannot be read any more.
        """
        self.settled_callbacks.append(lambda: func(*args))

    def call_on_exception(self, func: Callable[..., object], *args: object) -> None:
        """Call ``func(*args)`` in the reactor's thread after a rollback.

        That includes the rollback of an attempt that is repeated afterwards.
        """
        self.exception_callbacks.append(lambda: func(*args))


class PoolConnection(psycopg2.extensions.connection):
    """A connection of the pool, which sends BEGIN and COMMIT itself.

    psycopg2 would send each of them alone. BEGIN is sent with the first statement. A
    function may end its transaction by the methods of its connection nevertheless, as
    with psycopg2's own transactions.

    :ivar backend: the session, for the case that it breaks.
    :ivar prepared: the names of the statements that it has prepared.
    :ivar ended: the server's answer, if the function has ended its transaction by
        these methods.
    :ivar must_begin: whether BEGIN has to be sent before the next statement.
    """

    backend: Backend
    prepared: set[str]
    ended: str | None = None
    must_begin = False

    @classmethod
    def open(cls, conninfo: str | Mapping[str, Any]) -> PoolConnection:
        """Open a connection; see :func:`connect`."""
        return _connect(conninfo, cls)

    def begin(self) -> None:
        """Send BEGIN, if it has to be sent."""
        if self.must_begin:
            self.must_begin = False
            super().cursor().execute("BEGIN")

    def cursor(self, *args: Any, **kwargs: Any) -> Any:
        """Return a further cursor in the current transaction."""
        self.begin()
        return super().cursor(*args, **kwargs)

    def commit(self) -> None:
        """Commit the current transaction, if there is one."""
        self._end("COMMIT")

    def rollback(self) -> None:
        """Roll back the current transaction, if there is one."""
        self._end("ROLLBACK")

    def _end(self, statement: str) -> None:
        self.begin()
        if self.get_transaction_status() != TRANSACTION_STATUS_IDLE:
            cursor = self.cursor()
            cursor.execute(statement)
            self.ended = cursor.statusmessage


def connect(
    conninfo: str | Mapping[str, Any],
) -> psycopg2.extensions.connection:
    """Open one connection.

    :param conninfo: a DSN or URI, or libpq's parameters by name.
    :raises psycopg2.OperationalError: if the server cannot be reached or rejects the
        connection.
    """
    return _connect(conninfo, psycopg2.extensions.connection)


def _connect(conninfo: str | Mapping[str, Any], factory: type[_C]) -> _C:
    parameters = {"dsn": conninfo} if isinstance(conninfo, str) else conninfo
    connection: _C = psycopg2.connect(**parameters, connection_factory=factory)
    return connection


class Attempt:
    """One run of a function on one connection.

    :ivar outcome: what is known about its transaction.
    :ivar value: what the function returned.
    :ivar callbacks: those to call, once the outcome is known.
    :ivar is_broken: whether the connection cannot be used any more.
    """

    def __init__(self, connection: PoolConnection, description: str) -> None:
        self.connection = connection
        self.outcome = TransactionOutcome()
        self.value: Any = None
        self.callbacks: list[Callable[[], object]] = []
        self.is_broken = False
        self._description = description
        self._cursor: Transaction | None = None

    def run(
        self,
        func: Callable[[Transaction], T],
        admission: Admission | None,
        *,
        autocommit: bool,
    ) -> T:
        """Run the function, and commit its transaction."""
        try:
            self.connection.ended = None
            # Its method cursor() would begin the transaction.
            cursor = self._cursor = Transaction(self.connection)
            self.connection.must_begin = not autocommit
            result = self.value = func(cursor)
            if autocommit:
                self._handle(TransactionEvent.COMMIT_SENT)
            else:
                self._commit(cursor, admission)
        except BaseException:
            self._roll_back()
            self._handle(
                TransactionEvent.DISCONNECTED
                if self.is_broken
                else TransactionEvent.REFUSED
            )
            raise
        self._handle(TransactionEvent.ACKNOWLEDGED)
        return result

    def _commit(self, cursor: Transaction, admission: Admission | None) -> None:
        _check_alive(self._description, cursor, self.connection.ended)
        # The function may have closed its cursor.
        own = self.connection.cursor() if cursor.closed else cursor
        is_known = self.connection.backend.pid != 0
        if cursor.xid is None and (cursor.after_callbacks or not is_known):
            # The callbacks need the outcome, even if the answer is lost.
            own.execute("SELECT pg_current_xact_id_if_assigned()::text")
            ((cursor.xid,),) = own.fetchall()
        commit = self._commit_statement(admission)
        self._handle(TransactionEvent.COMMIT_SENT)
        own.execute(commit)

    def _commit_statement(self, admission: Admission | None) -> str:
        """Return the statements that commit; prepare what they execute."""
        if admission is None:
            return "COMMIT"
        connection, check = self.connection, admission.check
        if connection.backend.pid == 0:
            return f"{check.sql % ()}; COMMIT"
        if check.name not in connection.prepared:
            connection.cursor().execute(check.prepare)
            connection.prepared.add(check.name)
        return f"{check.execute}; COMMIT"

    def lost_answer(self, error: psycopg2.Error) -> LostAnswer:
        """Return the question what became of the transaction."""
        assert self._cursor is not None
        return LostAnswer(
            f"transaction {self._description}",
            self.connection.backend,
            self._cursor.xid,
            error,
            self.outcome,
            self._callbacks_of,
        )

    def _handle(self, event: TransactionEvent) -> None:
        if effects := self.outcome.handle(event):
            self.callbacks = self._callbacks_of(effects)

    def _callbacks_of(self, effects: Sequence[Effect]) -> list[Callable[[], object]]:
        found: list[Callable[[], object]] = []
        if self._cursor is not None:
            for effect in effects:
                if effect is Effect.SETTLE:
                    found += self._cursor.settled_callbacks
                elif effect is Effect.CALL_AFTER:
                    found += self._cursor.after_callbacks
                elif effect is Effect.CALL_ON_EXCEPTION:
                    found += self._cursor.exception_callbacks
        return found

    def _roll_back(self) -> None:
        self.connection.must_begin = False
        try:
            self.connection.rollback()
        except psycopg2.Error:
            self.is_broken = True
        else:
            self.is_broken = self.connection.closed != 0


def _check_alive(description: str, cursor: Transaction, ended: str | None) -> None:
    """Check, without a round trip, that a transaction can still be committed.

    :param ended: the server's answer, if a method of the connection has ended it.
    :raises TransactionRolledBackError: if a statement has failed since the last
        savepoint, or the transaction has ended.
    """
    connection = cursor.connection
    status = connection.get_transaction_status()
    if status == TRANSACTION_STATUS_INERROR:
        error = " ".join((connection.info.error_message or "").split())
        raise TransactionRolledBackError(
            description,
            f"a statement failed, and the function caught its error ({error}); let "
            "the function raise it, or roll back to a savepoint",
        )
    ended = ended or cursor.statusmessage
    if status == TRANSACTION_STATUS_IDLE and ended not in (None, "COMMIT"):
        raise TransactionRolledBackError(
            description,
            "the function ended the transaction itself; raise an exception instead of "
            "rolling back, and leave the commit to the caller",
        )
