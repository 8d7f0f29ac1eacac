"""The replacement for ``synapse.storage.util.id_generators``.

Theory of operation: the host supplies an open connection for the constructor, and its
connection pool for later transactions. With PostgreSQL, this package's generator is
used, with the host's rules for positions, which were determined by driving an installed
Synapse with a real sequence. With SQLite there is one process and no sequence, so ids
are counted from the last id in the tables.

A writer acquires the lock of its name before it allocates an id, in a session of its
own that stays open until the process ends. Unlike the lock of a process of this
package, it is not acquired again if the database ends the session. With the lock, it
acquires the term of the name, and ends the sessions of an earlier process with the name
(:mod:`~synapse_replication.dropin.host_database`). The term is checked whenever a
session is opened, ids are allocated, by themselves or in a transaction of the host, and
a position is stored. If another process has acquired the name, the process stops with
exit status 1.

All transactions of a generator share one log context, because a transaction may serve
several callers, and may outlive the request that started it.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from heapq import heappop
from typing import Any

import psycopg2
from psycopg2.extensions import connection
from twisted.internet.defer import Deferred

from synapse_replication.dropin.homeserver import (
    DatabaseConnection,
    DatabasePool,
    ReplicationNotifier,
)
from synapse_replication.dropin.host_code import make_yieldable
from synapse_replication.dropin.host_database import HostDatabase, end_predecessors
from synapse_replication.dropin.host_streams import declared_writers, generators
from synapse_replication.dropin.observer import observer_of
from synapse_replication.dropin.settings import own_settings, variable
from synapse_replication.dropin.synapse_host import HostClock
from synapse_replication.errors import StorageError
from synapse_replication.storage import id_generators, name_lock
from synapse_replication.storage.admission import Admission
from synapse_replication.storage.id_streams import IdStream
from synapse_replication.storage.open_transactions import POLL_SECONDS, PredecessorWait
from synapse_replication.storage.sequences import load_positions
from synapse_replication.streams.id_column import IdColumn
from synapse_replication.streams.writer_positions import FIRST_POSITION, WriterPositions
from synapse_replication.text import process_label

#: When each transaction that an earlier process may have left was first seen, in s.
_first_seen: dict[str, float] = {}

#: The sessions that hold the locks of this process, and the terms of their names, by
#: database and lock.
_held_names: dict[
    tuple[str, tuple[int, ...]], tuple[contextlib.ExitStack, Admission | None]
] = {}


def _position_gauge(stream_name: str, server_name: str) -> Any:
    """Return the host's gauge of a stream's position.

    :return: ``None`` if the host is an older one that lacks the metric. The observer
        then updates this package's metric of the same name.
    """
    module = importlib.import_module("synapse.storage.util.id_generators")
    gauge = getattr(module, "stream_current_position_gauge", None)
    return gauge and gauge.labels(stream_name=stream_name, server_name=server_name)


class HostPositions(WriterPositions):
    """The position of each writer, as a host expects it.

    - A stream without rows is at position 1, and the id 1 is usable. The sequences of
      the host's replicated streams begin at 2, so only other sequences return 1.
    - While this process has ids in flight, its announced position advances only to one
      of its own finished ids or to the persisted-up-to position. This package's own
      rule announces positions earlier, and is equally safe.
    """

    _first_is_taken = False

    def is_usable(self, fetch: int, id_: int) -> bool:
        """Return whether an allocated id may be used."""
        if id_ != FIRST_POSITION or self._first_is_taken:
            return super().is_usable(fetch, id_)
        return self._fetches[fetch] <= FIRST_POSITION and id_ not in self._in_flight

    def end_fetch(self, fetch: int, ids: Sequence[int]) -> None:
        """Record the ids that a fetch returned; no ids if the fetch failed."""
        super().end_fetch(fetch, ids)
        self._first_is_taken = self._first_is_taken or FIRST_POSITION in ids

    def _announceable_upto(self, limit: int) -> int:
        while self._own_finished and self._own_finished[0] <= limit:
            self.local = max(self.local, heappop(self._own_finished))
        return self.local


class DropInIdGenerator(id_generators.MultiWriterIdGenerator):
    """Allocates a stream's ids, and tracks which of them are finished.

    :param db_conn: an open connection, used only by the constructor.
    :param db: the host's connection pool.
    :param notifier: notified when ids are finished.
    :param tables: for each table: its name, the column of the writer, and the column of
        the id.
    :param positive: ``False`` for a stream that counts down.
    """

    def __init__(
        self,
        *,
        db_conn: DatabaseConnection,
        db: DatabasePool,
        notifier: ReplicationNotifier,
        stream_name: str,
        server_name: str,
        instance_name: str,
        tables: Sequence[tuple[str, str, str]],
        sequence_name: str,
        writers: Sequence[str],
        positive: bool = True,
    ) -> None:
        # The host checks its generators with isinstance().
        module = importlib.import_module("synapse.storage.util.id_generators")
        module.AbstractStreamIdGenerator.register(DropInIdGenerator)
        hs = db.hs
        stream = IdStream(
            stream_name=stream_name,
            sequence=sequence_name,
            tables=tuple(IdColumn(table, id_, writer) for table, writer, id_ in tables),
            writers=tuple(writers),
            negative=not positive,
            plausible_distance=own_settings().receiving.plausible_distance,
        )
        database = HostDatabase(db, server_name)
        if database.is_postgres:
            # A stream that is held in memory has no ids.
            holds_name = own_settings().writer_lock and (
                instance_name in writers
                or instance_name in declared_writers(hs.config.worker, "typing")
            )
            positions, admission = _start_on_postgres(
                db_conn, stream, server_name, instance_name, holds_name=holds_name
            )
            database.open_connections(admission)
        else:
            admission = None
            positions = _start_on_sqlite(db_conn, stream, instance_name)
        db_conn.commit()
        # The host's tests use this attribute.
        self._db = db
        self._gauge = _position_gauge(stream_name, server_name)
        self._is_shared = instance_name in writers and len(writers) > 1
        self._next_local_id = itertools.count(positions.max_finished + 1)
        super().__init__(
            database,
            stream,
            positions,
            hs.get_reactor(),
            HostClock(hs.get_clock(), hs.get_reactor()),
            on_finished=notifier.notify_replication,
            observer=observer_of(hs),
            admission=admission,
        )
        self._report_position()
        self._is_postgres = database.is_postgres
        self._host_database = database
        if self._is_postgres:
            generators[instance_name, sequence_name] = self

    def advance(self, instance_name: str, new_id: int) -> None:
        """Record that all ids of a writer up to ``new_id`` are finished.

        The host is notified if this process shares the stream with other writers, and
        its own position follows: the host itself does not notify of all rows.
        """
        before = self.get_mark()
        super().advance(instance_name, new_id)
        if self._is_shared and self.get_mark() != before:
            self._on_finished()
        self._report_position()

    def _handle_finished(self) -> Deferred[None]:
        persisted = super()._handle_finished()
        self._report_position()
        return persisted

    def _report_position(self) -> None:
        # The metric is positive even for streams that count down.
        if self._gauge is not None:
            self._gauge.set(abs(self.get_current_token()))

    def waitable(self, deferred: Deferred[None]) -> Deferred[None]:
        """Return a Deferred whose awaiting caller resumes in its own log context."""
        return make_yieldable(deferred)

    def _fetch_ids(
        self, txn: Any, fetch: int, n: int, *, in_use: bool = False
    ) -> list[int]:
        if self._is_postgres:
            try:
                return super()._fetch_ids(txn, fetch, n, in_use=in_use)
            except psycopg2.Error as error:
                if not in_use:
                    raise
                # It is raised in a transaction of the host.
                raise self._host_database.explain(error) from None
        return list(itertools.islice(self._next_local_id, n))

    async def get_max_allocated_token(self) -> int:
        """Return the last allocated id, as a distance from zero.

        With SQLite, return the current token.
        """
        if self._is_postgres:
            return await super().get_max_allocated_token()
        return self.get_current_token()


def _wait_for_predecessor(
    db_conn: DatabaseConnection, stream: IdStream, instance_name: str
) -> None:
    """Wait for transactions that processes which have ended may have left.

    It ends their sessions after 10 s. Transactions of the host are not refused when its
    name is acquired, so those of an earlier process with this name are among them.

    The host has not begun to serve requests. Its connection is left without an open
    transaction, so that the next one sees the rows of those that have ended.
    """
    predecessor = PredecessorWait(stream, instance_name, time.monotonic, _first_seen)
    with closing(db_conn.cursor(txn_name="wait_for_predecessor")) as cursor:
        while not predecessor.is_over(cursor):
            db_conn.commit()
            time.sleep(POLL_SECONDS)
    db_conn.commit()


def _hold_name(
    db_conn: DatabaseConnection, server_name: str, instance_name: str
) -> Admission | None:
    """Acquire the lock and the term of a name, unless this process has them.

    Blocks up to 10 s for the lock, and until no transaction of a predecessor that holds
    the name can be committed any more.

    :param db_conn: a connection of the host to the database.
    :return: ``None`` if the term cannot be acquired, which is logged.
    :raises StorageError: if another process holds the lock for too long.
    """
    info = db_conn.conn.info
    key = name_lock.lock_key(server_name, instance_name)
    held = (f"{info.host}:{info.port}/{info.dbname}", key)
    if held in _held_names:
        return _held_names[held][1]
    with contextlib.ExitStack() as closed_on_error:
        session = closed_on_error.enter_context(closing(_connect(db_conn)))
        session.autocommit = True
        deadline = time.monotonic() + name_lock.WAIT
        cursor = session.cursor()
        is_pooled = name_lock.is_pooled(cursor)
        lock = name_lock.hold_lock if is_pooled else name_lock.try_lock
        while True:
            own, holder = lock(cursor, key)
            if holder.pid == own:
                admission = _acquire_term(db_conn, instance_name)
                _held_names[held] = closed_on_error.pop_all(), admission
                return admission
            if time.monotonic() > deadline:
                raise name_lock.taken(
                    instance_name,
                    holder,
                    "start it with exec --no-writer-lock, or with "
                    f"{variable('writer_lock')}=false",
                    is_pooled=is_pooled,
                )
            time.sleep(name_lock.RETRY_INTERVAL)


def _acquire_term(db_conn: DatabaseConnection, instance_name: str) -> Admission | None:
    """Acquire the term of a name, in a session of its own.

    Behind a pooler, a transaction stays open in the session of the lock.
    """
    with closing(db_conn.cursor(txn_name="acquire_name")) as others:
        if not name_lock.prepare_terms(others, instance_name):
            db_conn.rollback()
            return None
        db_conn.commit()
        with closing(_connect(db_conn)) as session, ThreadPoolExecutor(1) as executor:
            cursor = session.cursor()
            pid = name_lock.own_pid(cursor)
            acquiring = executor.submit(
                name_lock.acquire_name, cursor, instance_name, process_label()
            )
            while not wait([acquiring], name_lock.WAIT).done:
                name_lock.end_predecessor(others, pid, instance_name)
                db_conn.commit()
            admission = acquiring.result()
            session.commit()
        end_predecessors(db_conn, instance_name)
        return admission


def _connect(db_conn: DatabaseConnection) -> connection:
    """Open a connection of our own to the database of a connection of the host."""
    info = db_conn.conn.info
    parameters: dict[str, Any] = {**info.dsn_parameters, "password": info.password}
    session: connection = psycopg2.connect(**parameters)
    return session


def _start_on_postgres(
    db_conn: DatabaseConnection,
    stream: IdStream,
    server_name: str,
    instance_name: str,
    *,
    holds_name: bool,
) -> tuple[WriterPositions, Admission | None]:
    """Load the positions of a stream's writers with the host's connection.

    :param holds_name: whether to make sure first that no other process writes with the
        name of this one.
    :return: the positions, and the name that this process has acquired, if any.
    :raises IncorrectDatabaseSetup: which the host reports at startup, and exits.
    """
    try:
        admission = None
        if holds_name:
            admission = _hold_name(db_conn, server_name, instance_name)
        _wait_for_predecessor(db_conn, stream, instance_name)
        name = f"load_positions_{stream.stream_name}"
        with closing(db_conn.cursor(txn_name=name)) as cursor:
            positions = load_positions(
                cursor,
                stream,
                instance_name,
                # The host's own generator also advances a sequence that is behind a
                # table.
                raise_to_tables=True,
                positions_type=HostPositions,
            )
        return positions, admission
    except StorageError as error:
        engines = importlib.import_module("synapse.storage.engines")
        raise engines.IncorrectDatabaseSetup(str(error)) from error


def _start_on_sqlite(
    db_conn: DatabaseConnection, stream: IdStream, instance_name: str
) -> WriterPositions:
    """Return the positions of a stream with one writer, from its tables."""
    farthest = FIRST_POSITION
    name = f"load_positions_{stream.stream_name}"
    with closing(db_conn.cursor(txn_name=name)) as txn:
        for column in stream.tables:
            function = "min" if stream.negative else "max"
            txn.execute(f"SELECT {function}({column.id_column}) FROM {column.table}")
            (id_,) = txn.fetchone()
            farthest = max(farthest, stream.sign * (id_ or 0))
    return HostPositions(instance_name, stream.writers, complete_upto=farthest)
