"""Finds ids that stay unfinished, and the database session that holds each of them.

Theory of operation: an id is unfinished while its transaction is open. Until it is
finished, the persisted-up-to position of its stream stays below it, for all writers. An
open transaction is normal for a moment; a stuck one is not. Every few seconds,
:meth:`StuckIdWatch.check` asks each :class:`StreamIds` which id limits its positions,
and notes since when the answer has been the same. This costs nothing when ids are
allocated and finished. Only once an id has been unfinished for :data:`STUCK_AFTER` s is
the database asked which session holds it.

No view of PostgreSQL maps an id to a session. A session that has written to a table of
the stream in a transaction that is still open holds a lock on that table, which
``pg_locks`` shows to every role. If there is no such session, the oldest open
transaction is named: for instance, it may still wait for a lock. If the answer to a
COMMIT of this process was lost, that is the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import attrs
from twisted.internet.defer import Deferred
from twisted.logger import Logger

from synapse_replication.storage.open_transactions import Session, find_session
from synapse_replication.streams.stuck_ids import StuckId

if TYPE_CHECKING:
    from synapse_replication.handlers.interfaces import Clock
    from synapse_replication.storage.database import TransactionRunner
    from synapse_replication.storage.id_streams import IdStream
    from synapse_replication.storage.lost_answers import LostAnswer

_log = Logger()

#: How long an id must be unfinished before it is reported, in s.
STUCK_AFTER = 10.0

#: The minimum interval of queries for the session that holds a stuck id, in s.
ASK_INTERVAL = 30.0


class StreamIds(Protocol):
    """What is known of a stream's ids: that of an id generator, or of a reader."""

    @property
    def instance_name(self) -> str:
        """The name of this process."""

    @property
    def stream(self) -> IdStream:
        """The stream."""

    @property
    def database(self) -> TransactionRunner:
        """Runs transactions."""

    def get_first_unfinished(self) -> tuple[int, str] | None:
        """Return the unfinished id that limits the positions, and its writer."""

    def lost_answers(self) -> Sequence[LostAnswer]:
        """Return the transactions whose COMMIT was not answered, oldest first."""


@attrs.define
class _Unfinished:
    """An id that limits the positions of a stream.

    :ivar stuck: the id; its age is computed later.
    :ivar since: when it was first seen, in s.
    :ivar asked: when the database was last asked for its session, in s.
    :ivar session: the session that holds it, as it was at ``answered``.
    """

    stuck: StuckId
    since: float
    asked: float = float("-inf")
    session: Session | None = None
    answered: float = 0.0

    def describe(self, now: float) -> StuckId:
        """Return the stuck id as it is now."""
        stuck = attrs.evolve(self.stuck, age=now - self.since)
        if self.session is not None:
            session = self.session.after(now - self.answered).describe()
            return attrs.evolve(stuck, session=session, hint=self.session.hint())
        return stuck


@attrs.define(eq=False, repr=False)
class StuckIdWatch:
    """Tracks the unfinished ids that limit the positions of one process's streams.

    Use it in the reactor's thread.

    :param ids: returns what is known of ids, by the name of the stream on the wire.
    """

    _ids: Callable[[], Mapping[str, StreamIds]]
    _clock: Clock
    _unfinished: dict[str, _Unfinished] = attrs.field(factory=dict, init=False)

    def check(self) -> None:
        """Look for unfinished ids. Call this every few seconds."""
        now = self._clock.seconds()
        unfinished = {}
        for name, ids in self._ids().items():
            found = ids.get_first_unfinished()
            if found is None:
                continue
            known = self._unfinished.get(name)
            if known is None or (known.stuck.id, known.stuck.instance_name) != found:
                known = _Unfinished(StuckId(name, *found, age=0.0), since=now)
            unfinished[name] = known
            lost = ids.lost_answers()
            if lost and found[1] == ids.instance_name:
                known.session = None
                known.stuck = attrs.evolve(
                    known.stuck, session=lost[0].describe(), hint=lost[0].hint()
                )
            elif now - known.since >= STUCK_AFTER and now - known.asked >= ASK_INTERVAL:
                known.asked = now
                Deferred.fromCoroutine(self._ask(known, ids))
        self._unfinished = unfinished

    def stuck(self) -> list[StuckId]:
        """Return the stuck ids. Thread-safe."""
        now = self._clock.seconds()
        return [
            each.describe(now)
            for each in self._unfinished.values()
            if now - each.since >= STUCK_AFTER
        ]

    async def _ask(self, unfinished: _Unfinished, ids: StreamIds) -> None:
        stuck = unfinished.stuck
        try:
            session = await ids.database.transact(
                "find_session",
                # The transaction may have begun after the id was allocated.
                lambda txn: find_session(txn, ids.stream, STUCK_AFTER / 2),
                autocommit=True,
            )
        except Exception as error:  # noqa: BLE001 -- shown in the status
            described = "the sessions of the database could not be read"
            hint = "Look for old transactions in pg_stat_activity."
            _log.warn(
                "Cannot find the session that holds id {id}: {error}",
                id=stuck.id,
                error=str(error).strip(),
            )
        else:
            described = "no session of the database has a transaction that old"
            hint = (
                f"Start {stuck.instance_name} if it is down; otherwise restart it, "
                "which releases its ids."
            )
            if stuck.instance_name != ids.instance_name:
                hint += (
                    f" If it does not write {stuck.stream_name} any more, restart this "
                    "process with the current configuration."
                )
            unfinished.session, unfinished.answered = session, self._clock.seconds()
        unfinished.stuck = attrs.evolve(stuck, session=described, hint=hint)
