"""Persistence of an instance's position in ``stream_positions``."""

from __future__ import annotations

from contextlib import AbstractContextManager

from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from synapse_replication.handlers.interfaces import Clock
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.storage import queries
from synapse_replication.storage.database import TransactionRunner
from synapse_replication.storage.id_streams import IdStream
from synapse_replication.storage.locked_positions import LockedPositions
from synapse_replication.storage.round_trips import RoundTripGate, SharedRoundTrip

#: The delay before a failed upsert is retried, in s.
RETRY_SECONDS = 1.0


class PositionPersister:
    """Persists the position up to which this instance's ids of one stream are finished.

    Use it in the reactor's thread only.

    :param clock: schedules retries.
    :param observer: notified of upserts and their failures.
    """

    def __init__(
        self,
        database: TransactionRunner,
        stream: IdStream,
        instance_name: str,
        positions: LockedPositions,
        clock: Clock,
        observer: ReplicationObserver,
        gate: RoundTripGate,
    ) -> None:
        self._database = database
        self._stream = stream
        self._instance_name = instance_name
        self._positions = positions
        self._clock = clock
        self._observer = observer
        self._gate = gate
        self._upserts = SharedRoundTrip(self._upsert, gate)
        self._statement = queries.upsert_position(stream.negative)
        self._persisted = 0
        self._retry_is_due = False

    def persist(self) -> Deferred[None]:
        """Persist the position.

        :return: fires when the current position, or a later one, has been persisted, or
            when persisting it has failed. A failure is reported, and the upsert is
            retried later.
        """
        waiting: Deferred[None] = Deferred()
        self._upserts.join(waiting)
        return waiting

    def _upsert(self, waiting: list[Deferred[None]]) -> None:
        """Upsert the position, and notify all current waiters."""
        with self._positions.locked() as positions:
            local = positions.local
        if local <= self._persisted:
            self._upserts.end()
            self._fire(waiting)
            return
        parameters = {
            "stream_name": self._stream.stream_name,
            "instance_name": self._instance_name,
            "stream_id": self._stream.sign * local,
        }
        writing = self._observer.position_write(
            self._stream.stream_name, self._instance_name, local
        )
        writing.__enter__()
        self._database.transact(
            "persist_position",
            lambda txn: txn.execute(self._statement, parameters),
            autocommit=True,
        ).addCallbacks(
            self._upserted,
            self._failed,
            callbackArgs=(local, waiting, writing),
            errbackArgs=(local, waiting, writing),
        )

    def _upserted(
        self,
        _: object,
        local: int,
        waiting: list[Deferred[None]],
        writing: AbstractContextManager[object],
    ) -> None:
        writing.__exit__(None, None, None)
        self._observer.position_persisted(
            self._stream.stream_name, self._instance_name, local
        )
        self._persisted = local
        self._upserts.end()
        self._fire(waiting)

    def _failed(
        self,
        failure: Failure,
        local: int,
        waiting: list[Deferred[None]],
        writing: AbstractContextManager[object],
    ) -> None:
        # Do not fail the waiters: their rows are committed.
        assert failure.value is not None
        writing.__exit__(
            type(failure.value), failure.value, failure.value.__traceback__
        )
        stream_name = self._stream.stream_name
        self._observer.position_persist_failed(
            stream_name, self._instance_name, local, failure.value
        )
        self._observer.failure(
            f"persisting the position of {stream_name}", failure.value
        )
        if not self._retry_is_due:
            self._retry_is_due = True
            self._clock.call_later(RETRY_SECONDS, self._retry)
        self._upserts.end()
        self._fire(waiting)

    def _retry(self) -> None:
        self._retry_is_due = False
        self.persist()

    def _fire(self, waiting: list[Deferred[None]]) -> None:
        with self._gate.closed():
            for deferred in waiting:
                # A cancelled Deferred has already fired.
                if not deferred.called:
                    deferred.callback(None)
