"""Comparison of announced positions with the sequence: :class:`SequenceCheck`.

Theory of operation: a committed id normally does not exceed its sequence, so the
sequence can verify announcements. An announced id far beyond the known value of the
sequence is held back until the sequence has been read again. It is ignored if it
exceeds the new value.

An instance may also announce another writer's id as its own position, but only after it
has read a value of the sequence at or above that id. It reads the sequence at most once
per :data:`CHECK_SECONDS`, apart from reads for implausible ids.

The sequence may be behind announced ids after a failover to a standby, or if an
instance announced an id that was never allocated. If the distance is plausible, a
writer then advances the sequence by allocating ids that it does not use. Every later id
is therefore greater than any position that a reader may have reached.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorFromThreads
from twisted.logger import Logger

from synapse_replication.errors import ImplausiblePositionError
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.storage.id_streams import IdStream, read_sequence
from synapse_replication.storage.locked_positions import LockedPositions
from synapse_replication.storage.sequences import skip_ids

if TYPE_CHECKING:
    from synapse_replication.handlers.interfaces import Clock
    from synapse_replication.storage.database import TransactionRunner

_log = Logger()

#: The minimum interval between two reads of a sequence, in s. It does not apply when an
#: implausible id has been announced.
CHECK_SECONDS = 1.0

#: The interval, in s, at which a sequence is read even if no announced id exceeds its
#: known value: after a failover to a standby, the sequence may be behind that value.
RECHECK_SECONDS = 120.0


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
        last = read_sequence(txn, self._stream.sequence)
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
