"""The positions of a stream in one process: thread-safe, persisted and verified.

Theory of operation:

:class:`LockedPositions` protects the positions with a lock. Ids must be finished even
where blocking is not allowed. For instance, the garbage collector may close a coroutine
in the thread that holds the lock, and closing the coroutine finishes its ids. So
:meth:`LockedPositions.finish` never waits: it enqueues the ids. They are finished by
the holder of the lock after releasing it, or by the next holder.

:class:`PositionPersister` persists the position of this instance, for many callers at
once (see :mod:`~synapse_replication.storage.round_trips`).

:class:`SequenceCheck` verifies the positions of other instances. A committed id
normally does not exceed its sequence, so the sequence can verify announcements. An
announced id far beyond the known value of the sequence is held back until the sequence
has been read again. It is ignored if it exceeds the new value.

An instance may also announce another writer's id as its own position, but only after it
has read a value of the sequence at or above that id. It reads the sequence at most once
per :data:`CHECK_SECONDS`, apart from reads for implausible ids.

The sequence may be behind announced ids after a failover to a standby, or if an
instance announced an id that was never allocated. If the distance is plausible, a
writer then advances the sequence by allocating ids that it does not use. Every later id
is therefore greater than any position that a reader may have reached.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorFromThreads
from twisted.logger import Logger

from synapse_replication.errors import (
    DatabaseClosedError,
    ImplausiblePositionError,
    NameLostError,
)
from synapse_replication.handlers.events import (
    PositionPersistBegun,
    PositionPersisted,
    PositionPersistFailed,
    PositionWrite,
)
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.storage import queries
from synapse_replication.storage.admission import Admission
from synapse_replication.storage.id_streams import IdStream, read_sequence
from synapse_replication.storage.prepared import Prepared, run
from synapse_replication.storage.round_trips import RoundTripGate, SharedRoundTrip
from synapse_replication.storage.sequences import skip_ids
from synapse_replication.streams.writer_positions import WriterPositions

if TYPE_CHECKING:
    from synapse_replication.handlers.interfaces import Clock
    from synapse_replication.storage.database import TransactionRunner

_log = Logger()

#: The delay before a failed upsert is retried, in s.
UPSERT_RETRY_DELAY = 1.0

#: The errors after which no upsert can succeed.
_FINAL = (DatabaseClosedError, NameLostError)

#: The minimum interval, in s, between two upserts of a position that only follows those
#: of other writers.
FOLLOW_SECONDS = 5.0

#: The minimum interval between two reads of a sequence, in s. It does not apply when an
#: implausible id has been announced.
CHECK_SECONDS = 1.0

#: The interval, in s, at which a sequence is read even if no announced id exceeds its
#: known value: after a failover to a standby, the sequence may be behind that value.
RECHECK_SECONDS = 120.0


class LockedPositions:
    """The positions of one stream, and their lock. All methods are thread-safe.

    As a context manager, it holds the lock and yields the positions.
    """

    def __init__(self, positions: WriterPositions) -> None:
        self._positions = positions
        self._lock = threading.Lock()
        self._to_finish: list[list[int]] = []

    @property
    def max_finished(self) -> int:
        """The greatest finished id; perhaps outdated, because it is read unlocked."""
        return self._positions.max_finished

    def __enter__(self) -> WriterPositions:
        self._lock.acquire()
        # The previous holder may not have finished the enqueued ids yet. A caller that
        # has enqueued an id must not read, and then persist, positions without that id.
        if self._to_finish:
            self._finish_locked()
        return self._positions

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._lock.release()
        self._finish_pending()

    def finish(self, ids: list[int]) -> None:
        """Finish ids without blocking: now, or when the lock is released."""
        self._to_finish.append(ids)
        self._finish_pending()

    def _finish_pending(self) -> None:
        # If another caller holds the lock, it calls this method after releasing it.
        while self._to_finish and self._lock.acquire(blocking=False):
            try:
                self._finish_locked()
            finally:
                self._lock.release()

    def _finish_locked(self) -> None:
        while self._to_finish:
            self._positions.finish(self._to_finish.pop(0))


@attrs.define(eq=False, repr=False)
class PositionPersister:
    """Persists the position up to which this instance's ids of one stream are finished.

    Use it in the reactor's thread only.

    :param clock: schedules retries.
    :param observer: notified of upserts and their failures.
    """

    _database: TransactionRunner
    _stream: IdStream
    _instance_name: str
    _positions: LockedPositions
    _clock: Clock
    _observer: ReplicationObserver
    _gate: RoundTripGate
    _admission: Admission | None
    _upserts: SharedRoundTrip[Deferred[None]] = attrs.field(init=False)
    _statement: Prepared = attrs.field(init=False)
    #: The greatest position that was persisted.
    _persisted: int = attrs.field(default=0, init=False)
    _has_begun: bool = attrs.field(default=False, init=False)
    _retry_is_due: bool = attrs.field(default=False, init=False)
    #: The greatest position that this instance announced without an id of its own, and
    #: when the next one may be persisted.
    _followed: int = attrs.field(default=0, init=False)
    _not_before: float = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._not_before = self._clock.seconds() + FOLLOW_SECONDS
        self._upserts = SharedRoundTrip(self._upsert, self._gate)
        types = {"stream_name": "text", "instance_name": "text", "stream_id": "bigint"}
        if self._admission is not None:
            types |= {"writer": "text", "term": "bigint"}
        self._statement = Prepared(
            queries.upsert_position(
                self._stream.negative, is_admitted=self._admission is not None
            ),
            types,
        )

    def persist(self) -> Deferred[None]:
        """Persist the position.

        :return: fires when the current position, or a later one, has been persisted, or
            when persisting it has failed. A failure is reported, and the upsert is
            retried later.
        """
        waiting: Deferred[None] = Deferred()
        self._has_begun = True
        self._upserts.join(waiting)
        return waiting

    async def drain(self) -> None:
        """Persist the position if it ever was, and repeat that while it fails."""
        if not self._has_begun:
            return
        await self.persist()
        while self._retry_is_due:
            await self._clock.sleep(UPSERT_RETRY_DELAY)
            await self.persist()

    def follow(self, announced: int) -> None:
        """Persist a position that this instance announces, without a row of its own.

        While only other writers write, their ids raise this position. A reader whose
        database is a standby knows by the stored position that the standby has all
        that this instance committed before. At most one is persisted per
        :data:`FOLLOW_SECONDS`.
        """
        now = self._clock.seconds()
        if announced > max(self._persisted, self._followed) and now >= self._not_before:
            self._not_before = now + FOLLOW_SECONDS
            self._followed = announced
            self.persist()

    def _upsert(self, waiting: list[Deferred[None]]) -> None:
        """Upsert the position, and notify all current waiters."""
        with self._positions as positions:
            local = max(positions.local, self._followed)
        if local <= self._persisted:
            self._upserts.end()
            self._fire(waiting)
            return
        Deferred.fromCoroutine(self._write(local, waiting))

    async def _write(self, local: int, waiting: list[Deferred[None]]) -> None:
        stream_name, writer = self._stream.stream_name, self._instance_name
        parameters = {
            "stream_name": stream_name,
            "instance_name": writer,
            "stream_id": self._stream.sign * local,
        }
        if self._admission is not None:
            parameters |= self._admission.parameters
        self._observer.observe(PositionPersistBegun(stream_name, writer, local))
        try:
            with self._observer.span(PositionWrite(stream_name, writer, local)):
                await self._database.transact(
                    "persist_position",
                    lambda txn: run(txn, parameters, self._statement),
                    autocommit=True,
                )
        except Exception as error:  # noqa: BLE001 -- reported to the observer
            # Do not fail the waiters: their rows are committed.
            self._observer.observe(
                PositionPersistFailed(stream_name, writer, local, error)
            )
            self._observer.failure(f"persisting the position of {stream_name}", error)
            # After the end of this process, the next one finds the rows.
            if not self._retry_is_due and not isinstance(error, _FINAL):
                self._retry_is_due = True
                self._clock.call_later(UPSERT_RETRY_DELAY, self._retry)
        else:
            self._observer.observe(PositionPersisted(stream_name, writer, local))
            self._persisted = local
        self._upserts.end()
        self._fire(waiting)

    def _retry(self) -> None:
        self._retry_is_due = False
        self.persist()

    def _fire(self, waiting: list[Deferred[None]]) -> None:
        with self._gate.closed():
            for deferred in waiting:
                deferred.callback(None)


@attrs.define(eq=False, repr=False)
class SequenceCheck:
    """Reads the sequence of one stream when announced positions exceed its known value.

    It also reads the sequence when the last read was :data:`RECHECK_SECONDS` ago.

    Use it in the reactor's thread, except :meth:`hold_back`.

    :param on_checked: called after a read that may have changed the positions.
    """

    _database: TransactionRunner
    _stream: IdStream
    _positions: LockedPositions
    _reactor: IReactorFromThreads
    _clock: Clock
    _observer: ReplicationObserver
    _on_checked: Callable[[], object]
    _admission: Admission | None
    _is_running: bool = attrs.field(default=False, init=False)
    _not_before: float = attrs.field(default=-CHECK_SECONDS, init=False)
    _due: float = attrs.field(init=False)
    #: Announced positions that are far beyond the sequence, by writer.
    _held_back: dict[str, int] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self._due = self._clock.seconds() + RECHECK_SECONDS

    def hold_back(self, instance_name: str, id_: int) -> None:
        """Apply an implausible position once the sequence has confirmed it.

        If the stream declares its writers, the position of any other instance is
        ignored. Thread-safe.
        """
        if not self._stream.writers or instance_name in self._stream.writers:
            self._reactor.callFromThread(self._begin_to_hold_back, instance_name, id_)

    def _begin_to_hold_back(self, instance_name: str, id_: int) -> None:
        self._held_back[instance_name] = max(id_, self._held_back.get(instance_name, 0))
        self.start(immediately=True)

    def start(self, *, immediately: bool = False) -> None:
        """Read the sequence, unless a read is pending or the last one was recent.

        :param immediately: read it even if less than :data:`CHECK_SECONDS` have passed
            since the last read.
        """
        now = self._clock.seconds()
        if self._is_running or (now < self._not_before and not immediately):
            return
        self._is_running = True
        self._not_before = now + CHECK_SECONDS
        self._due = now + RECHECK_SECONDS
        Deferred.fromCoroutine(self._check())

    def start_if_due(self, *, is_needed: bool) -> None:
        """Read the sequence if needed, or if the last read was long ago."""
        if is_needed or self._clock.seconds() >= self._due:
            self.start()

    def _read(self, txn: Any) -> int:
        with self._positions as positions:
            known, is_writer = positions.max_finished, positions.is_writer
        last = read_sequence(txn, self._stream.sequence, self._admission)
        if is_writer and 0 < known - last <= self._stream.plausible_distance:
            behind = last
            last = skip_ids(txn, self._stream.sequence, known - behind)
            _log.warn(
                "{stream} was announced up to {known}, but sequence {sequence} was at "
                "{behind}; the sequence was advanced",
                stream=self._stream.stream_name,
                known=known,
                sequence=self._stream.sequence,
                behind=behind,
            )
        return last

    async def _check(self) -> None:
        # A position that arrives during this read may be newer than its result.
        held_back, self._held_back = self._held_back, {}
        try:
            last = await self._database.transact(
                "check_sequence", self._read, autocommit=True
            )
        except Exception as error:  # noqa: BLE001 -- reported to the observer
            self._is_running = False
            for instance_name, id_ in held_back.items():
                newer = self._held_back.get(instance_name, 0)
                self._held_back[instance_name] = max(id_, newer)
            self._observer.failure(f"reading sequence {self._stream.sequence}", error)
            if self._held_back:
                self._clock.call_later(CHECK_SECONDS, self.start)
            return
        self._is_running = False
        with self._positions as positions:
            is_news = positions.set_allocated(last) or bool(held_back)
            for instance_name, id_ in held_back.items():
                if id_ <= last:
                    positions.advance(instance_name, id_)
        name = self._stream.stream_name
        for instance_name, id_ in held_back.items():
            if id_ > last:
                wrong = ImplausiblePositionError(name, instance_name, id_, last)
                self._observer.failure(f"accepting a position of {name}", wrong)
        if self._held_back:
            self.start(immediately=True)
        if is_news:
            self._on_checked()
