"""Open transactions of other sessions: which ones write to a stream, and their end.

Theory of operation: the database may complete a transaction after its process was
killed: a commit that is in progress, or a statement that waits for a lock. Its ids are
below the position at which a new process with the same name would start. If this
process announced that position too early, it would declare ids without a row that
receive one later, and no reader would fetch these rows. So a writer waits, before it
loads its positions, for the end of all transactions that write to the stream's tables
at this moment (:class:`PredecessorWait`). It does not wait for later ones: they do not
belong to a process that has ended.

A process that only reads waits, too, if a removed writer still has a stored position:
nobody announces the rows of its last transactions. The writers delete that position
when they start, after they have waited themselves.

A transaction that has written to a table holds a lock on it until the transaction ends,
and its rows are visible before the lock is released. ``pg_locks`` shows these locks to
every role. It does not show to which writer a row belongs, so the wait includes
transactions of other writers, which normally end within milliseconds, and excludes
readers and autovacuum, which hold other locks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import attrs
from twisted.logger import Logger

from synapse_replication.storage import queries
from synapse_replication.storage.id_streams import IdStream
from synapse_replication.storage.sequences import read_stored_positions

_log = Logger()

#: The interval at which open transactions are polled, in s.
POLL_SECONDS = 0.1

#: How long the start of a process waits for a transaction of one that has ended before
#: it ends the session, in s, even if that transaction writes to several streams. The
#: server ends the transaction of a killed process immediately, unless a statement or a
#: commit is in progress.
MAX_WAIT = 10.0

#: Where the first words of a query end: before its first value, whose text may be
#: private, and before a list of columns.
_END_OF_FIRST_WORDS = re.compile(r"['\"($0-9\x00-\x1f]|E'")
_MAX_FIRST_WORDS = 60


def _first_words(query: str | None) -> str:
    """Return the beginning of a query, without values, which may be private."""
    text = " ".join((query or "").split())
    if text.startswith("<"):  # <insufficient privilege>
        return ""
    return _END_OF_FIRST_WORDS.split(text, maxsplit=1)[0][:_MAX_FIRST_WORDS].strip()


@attrs.frozen
class Session:
    """A database session with an open transaction.

    :ivar open_for: the age of the transaction in s; ``None`` if this role may not see
        it.
    :ivar query: the first words of its last query; empty if this role may not see them.
    :ivar writes_stream: whether the transaction has written to a table of the stream.
    :ivar blocked_by: the process ids of the sessions whose locks it waits for.
    :ivar blocker: the first of these that waits for no other one, if it was read.
    """

    pid: int
    user: str
    application: str
    address: str
    state: str
    open_for: float | None
    query: str = attrs.field(converter=_first_words)
    writes_stream: bool
    blocked_by: Sequence[int]
    blocker: Session | None = None

    def after(self, seconds: float) -> Session:
        """Return the session as it is some time later, if it goes on."""
        if self.open_for is None:
            return self
        blocker = None if self.blocker is None else self.blocker.after(seconds)
        return attrs.evolve(self, open_for=self.open_for + seconds, blocker=blocker)

    def describe(self) -> str:
        """Return a description in one line."""
        parts = [f"session {self.pid} of {self.user or 'unknown user'}"]
        if self.application:
            parts.append(f"application {self.application}")
        parts.append(f"from {self.address or 'a Unix socket'}")
        if self.open_for is None:
            parts.append("details need the role pg_read_all_stats")
        else:
            parts.append(f"{self.state}, transaction open for {self.open_for:.0f} s")
        if self.query:
            parts.append(f"query {self.query} ...")
        if not self.writes_stream:
            parts.append("the oldest transaction; it has not written to the stream")
        if self.blocker is not None:
            parts.append(f"waits for {self.blocker.describe()}")
        elif self.blocked_by:
            parts.append(f"waits for session {', '.join(map(str, self.blocked_by))}")
        return ", ".join(parts)

    def hint(self) -> str:
        """Return how to end the session, or the session that blocks it."""
        if self.blocker is not None:
            return self.blocker.hint()
        pid = self.blocked_by[0] if self.blocked_by else self.pid
        return (
            f"End the session with SELECT pg_terminate_backend({pid}); its transaction "
            "is rolled back."
        )


def find_session(
    txn: Any,
    stream: IdStream,
    open_for: float,
    transactions: Collection[str] | None = None,
) -> Session | None:
    """Return the session that most likely holds an unfinished id of a stream.

    It is the one with the oldest transaction that has written to a table of the stream;
    if there is none, the one with the oldest transaction.

    :param txn: a cursor.
    :param open_for: the minimum age of its transaction, in s.
    :param transactions: the only ones that count as having written to the stream, as
        :func:`read_open_transactions` returns them; ``None`` for all that have.
    :return: ``None`` if no transaction has been open for that long.
    """
    txn.execute(
        queries.SQL["open_transactions"],
        {
            "tables": _tables(stream),
            "open_for": open_for,
            "transactions": None if transactions is None else list(transactions),
        },
    )
    row = txn.fetchone()
    if row is None:
        return None
    return _with_blocker(txn, Session(*row), set())


def _with_blocker(txn: Any, session: Session, seen: set[int]) -> Session:
    """Return a session with the one that must end before it can go on."""
    seen.add(session.pid)
    if not session.blocked_by:
        return session
    for blocker in read_sessions(txn, "blocking_pids", {"pid": session.pid}):
        # In a deadlock, they wait for each other until PostgreSQL ends one of them.
        if blocker.pid not in seen:
            found = _with_blocker(txn, blocker, seen)
            return attrs.evolve(session, blocker=found.blocker or found)
    return session


def read_sessions(txn: Any, pids: str, parameters: Mapping[str, Any]) -> list[Session]:
    """Return sessions, none of them with its blocker.

    :param txn: a cursor.
    :param pids: the name of the query for their process ids.
    :param parameters: the parameters of that query.
    """
    txn.execute(queries.SQL["sessions"].format(pids=queries.SQL[pids]), parameters)
    return [Session(*row) for row in txn.fetchall()]


def end_session(txn: Any, session: Session, instance_name: str) -> bool:
    """End the session of a predecessor, and log that.

    :param txn: a cursor.
    :param instance_name: the name of this process.
    :return: false if the session is not of this role, and was not ended.
    """
    txn.execute(queries.SQL["end_own_session"], {"pid": session.pid})
    is_own = bool(txn.fetchall())
    if is_own:
        _log.warn(
            "Ended a session that an earlier process of {name} may have left, because "
            "its transaction did not end by itself: {session}",
            name=instance_name,
            session=session.describe(),
        )
    return is_own


def read_open_transactions(txn: Any, stream: IdStream) -> frozenset[str]:
    """Return the open transactions that write, or have written, to the tables."""
    txn.execute(queries.SQL["inserting_transactions"], {"tables": _tables(stream)})
    return frozenset(transaction for (transaction,) in txn.fetchall())


def _tables(stream: IdStream) -> list[str]:
    return [queries.identifier(column.table) for column in stream.tables]


@attrs.define(eq=False, repr=False)
class PredecessorWait:
    """Waits for the transactions that processes which have ended may have left.

    These are an earlier process with this one's name, and removed writers.

    Call :meth:`is_over` every :data:`POLL_SECONDS` until it returns true, with
    autocommit or in a transaction of its own. Then load the positions, in a later
    transaction.

    :param instance_name: the name of this process.
    :param seconds: returns the time in s.
    :param first_seen: when each transaction was first seen, in s. All streams of a
        process share it.
    :param is_admitted: whether PostgreSQL refuses the commits of an earlier process
        with this one's name (see :mod:`~synapse_replication.storage.admission`).
    """

    _stream: IdStream
    _instance_name: str
    _seconds: Callable[[], float]
    _first_seen: dict[str, float]
    _is_admitted: bool = False
    _open: frozenset[str] | None = attrs.field(default=None, init=False)
    _only_reads: bool = attrs.field(default=False, init=False)
    _has_removed: bool = attrs.field(default=False, init=False)
    _due: float = attrs.field(default=0.0, init=False)

    def is_over(self, txn: Any) -> bool:
        """Return whether all transactions that the first call found have ended.

        A writer ends the sessions of those that have not, if they were first seen
        :data:`MAX_WAIT` ago, and logs it. A process that only reads, or whose role may
        not end them, logs what to do, and waits. If none of them can be of a
        predecessor, a warning is logged, and the result is true.

        :param txn: a cursor.
        """
        if self._open is None:
            self._open = self._find(txn)
        else:
            self._open &= read_open_transactions(txn, self._stream)
        if not self._open:
            return True
        now = self._seconds()
        newest = max(self._first_seen.setdefault(each, now) for each in self._open)
        if now < max(newest + MAX_WAIT, self._due):
            return False
        self._due = now + MAX_WAIT
        is_other = self._is_admitted and not self._has_removed
        if is_other or self._only_reads:
            self._warn(find_session(txn, self._stream, 0, self._open), is_other)
        else:
            self._end_sessions(txn)
        return is_other

    def _find(self, txn: Any) -> frozenset[str]:
        stream, writers = self._stream, set(self._stream.writers)
        self._only_reads = bool(writers) and self._instance_name not in writers
        if writers:
            stored = read_stored_positions(txn, stream).keys()
            self._has_removed = not stored <= writers
        if self._only_reads and not self._has_removed:
            return frozenset()
        return read_open_transactions(txn, stream)

    def _end_sessions(self, txn: Any) -> None:
        assert self._open is not None
        sessions = read_sessions(
            txn, "pids_of_transactions", {"transactions": list(self._open)}
        )
        for session in sessions:
            if not end_session(txn, session, self._instance_name):
                self._warn(session, False)
        if not sessions:
            self._warn(None, False)

    def _warn(self, session: Session | None, continues: bool) -> None:
        if session is None or not session.writes_stream:
            description = "No session has it: see pg_prepared_xacts"
        else:
            description = f"{session.describe()}. {session.hint()}"
        _log.warn(
            "A transaction that writes to stream {stream} was open when {instance} "
            "started, and has not ended within {seconds:.0f} s; {consequence}. "
            "{description}",
            stream=self._stream.stream_name,
            instance=self._instance_name,
            seconds=MAX_WAIT,
            consequence=(
                f"it is not of an earlier process of {self._instance_name}, so the "
                "start continues"
                if continues
                else f"an earlier process of {self._instance_name} or a removed writer "
                "may have left it, so the start waits"
            ),
            description=description,
        )
