"""Transactions whose COMMIT was not answered: asking the database what became of them.

Theory of operation: each connection of the pool is identified by its *backend*: the
process id and start of its session, and the history (timeline) of the server. If a
connection breaks after COMMIT was sent, another one asks for the state of that session,
and for the status that PostgreSQL stores for the transaction's number, until
:class:`~synapse_replication.streams.writer.TransactionOutcome` is settled. Until then,
the ids of the transaction stay unfinished.

The number costs no round trip: the statements that allocate ids in a transaction, and
those that insert rows of a stream, return it. If it is not known, the end of the
session proves that the transaction has ended, but not how. Behind a pooler, where the
session is not known, the number is always asked for, with one more round trip.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import psycopg2
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from synapse_replication.errors import ReplicationError
from synapse_replication.storage import queries
from synapse_replication.streams.writer import (
    Evidence,
    TransactionOutcome,
    read_evidence,
)
from synapse_replication.streams.writer_table import Effect, TransactionEvent
from synapse_replication.transport.error_text import error_text

_log = Logger()

#: The interval at which the database is asked, in s.
ASK_INTERVAL = 0.5


@attrs.frozen
class Backend:
    """The session of one connection.

    :ivar pid: its process at the server; 0 behind a pooler, which may use another
        session for each transaction.
    :ivar started: when it started, in us since 1970; ``None`` if the role of the
        session may not see it. Then the process alone identifies the session.
    :ivar history: the timeline of the server; empty for a standby, ``None`` if it
        cannot be read, as on some services.
    """

    pid: int
    started: str | None
    history: str | None


def identify(connection: Any) -> Backend:
    """Return the backend of a new connection, with one round trip.

    :param connection: with autocommit.
    """
    with connection.cursor() as cursor:
        try:
            cursor.execute(queries.SQL["backend"], {"has_history": True})
        except (psycopg2.NotSupportedError, psycopg2.ProgrammingError):
            # Some services do not support the functions for the timeline.
            cursor.execute(queries.SQL["backend"], {"has_history": False})
        backend = Backend(*cursor.fetchone())
    if backend.pid != connection.info.backend_pid:
        return attrs.evolve(backend, pid=0)
    return backend


@attrs.define(eq=False)
class LostAnswer:
    """One transaction whose COMMIT was not answered.

    :ivar description: names the transaction in log lines.
    :ivar backend: the session that executes it.
    :ivar xid: its number; ``None`` if it is not known.
    :ivar error: why the answer was lost.
    :ivar outcome: what is known about the transaction.
    :ivar callbacks: returns the callbacks of its function for the effects of an event.
    :ivar since: when the answer was lost, by ``time.monotonic()``.
    :ivar session: the state of its session when the database was last asked.
    """

    description: str
    backend: Backend
    xid: str | None
    error: psycopg2.Error
    outcome: TransactionOutcome
    callbacks: Callable[[Sequence[Effect]], list[Callable[[], object]]]
    since: float = attrs.field(factory=time.monotonic)
    session: str = "not known yet"

    def ask(self, txn: Any) -> TransactionEvent:
        """Ask the database what became of the transaction.

        :param txn: a cursor of another session, with autocommit.
        """
        backend = self.backend
        txn.execute(
            queries.SQL["transaction_status"],
            {
                "pid": backend.pid,
                "started": backend.started,
                "history": backend.history,
                "xid": self.xid,
            },
        )
        evidence = Evidence(*txn.fetchone())
        self.session = evidence.session or "ended"
        event = read_evidence(evidence)
        if event is TransactionEvent.FOUND_IDLE:
            txn.execute(
                queries.SQL["end_backend"],
                {"pid": backend.pid, "started": backend.started},
            )
        return event

    def handle(self, event: TransactionEvent) -> Sequence[Effect]:
        """Record what the database said.

        :return: the effects; see ``callbacks``.
        """
        effects = self.outcome.handle(event)
        if self.outcome.is_settled:
            _log.warn(
                "What became of {description}, whose COMMIT was not answered: "
                "{finding}",
                description=self.description,
                finding=event.value,
            )
        return effects

    def describe(self) -> str:
        """Return a description in one line."""
        return (
            f"the answer to COMMIT of {self.description} was lost "
            f"{time.monotonic() - self.since:.0f} s ago, and it is not known to have "
            f"ended (session {self.backend.pid} is {self.session})"
        )

    def hint(self) -> str:
        """Return what settles the transaction."""
        return (
            "It ends when PostgreSQL answers and has completed the commit. If that "
            "waits for a synchronous standby, start it; or end the session with "
            f"SELECT pg_terminate_backend({self.backend.pid})."
        )


class LostAnswers:
    """Those of one pool of connections: asks until each transaction has ended.

    Use it in the reactor's thread.

    :param ask: asks about one transaction, in another session.
    :param reactor: schedules the questions.
    :param on_settled: called when a transaction is known to have ended, with the
        effects of that.
    """

    def __init__(
        self,
        ask: Callable[[LostAnswer], Deferred[TransactionEvent]],
        reactor: IReactorTime,
        on_settled: Callable[[LostAnswer, Sequence[Effect]], object],
    ) -> None:
        self._ask_about = ask
        self._reactor = reactor
        self._on_settled = on_settled
        self._lost: list[LostAnswer] = []
        self._next: IDelayedCall | None = None
        self._is_asking = False
        self._has_stopped = False

    def __iter__(self) -> Iterator[LostAnswer]:
        """Iterate over the transactions, oldest first."""
        return iter(self._lost)

    def __len__(self) -> int:
        """Return the number of transactions that are not known to have ended."""
        return len(self._lost)

    def add(self, lost: LostAnswer) -> None:
        """Ask from now on what became of a transaction."""
        _log.warn(
            "The connection was lost during COMMIT of {description}: {error}. Its ids "
            "are not finished before the database has shown whether it was committed",
            description=lost.description,
            error=error_text(lost.error),
        )
        self._lost.append(lost)
        if self._next is None and not self._is_asking:
            self._ask_after(0)

    def stop(self) -> None:
        """Ask no more."""
        self._has_stopped = True
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def _ask_after(self, delay: float) -> None:
        if not self._has_stopped:
            self._next = self._reactor.callLater(delay, self._begin)

    def _begin(self) -> None:
        self._next = None
        self._is_asking = True
        Deferred.fromCoroutine(self._ask())

    async def _ask(self) -> None:
        for lost in list(self._lost):
            try:
                event = await self._ask_about(lost)
            except (psycopg2.Error, ReplicationError) as error:
                lost.session = f"not known: {error_text(error)}"
                event = TransactionEvent.NOT_FOUND_OUT
            except Exception as error:  # noqa: BLE001 -- logged, and asked again
                _log.failure(
                    "Cannot find out what became of {description}",
                    description=lost.description,
                )
                lost.session = f"not known: {error_text(error)}"
                event = TransactionEvent.NOT_FOUND_OUT
            effects = lost.handle(event)
            if lost.outcome.is_settled:
                self._lost.remove(lost)
                try:
                    self._on_settled(lost, effects)
                except Exception:  # noqa: BLE001 -- logged; it has been settled
                    _log.failure(
                        "Cannot complete {description}", description=lost.description
                    )
        self._is_asking = False
        if self._lost:
            self._ask_after(ASK_INTERVAL)
