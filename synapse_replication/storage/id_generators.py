"""Ids for rows, and the position of each writer: :class:`MultiWriterIdGenerator`.

Usage, in a coroutine::

    ids = await load_id_generator(database, stream, "writer1", reactor, clock)
    async with ids.get_next() as stream_id:
        await database.transact("insert", lambda txn: insert_row(txn, stream_id))

Theory of operation:
:class:`~synapse_replication.streams.writer_positions.WriterPositions` makes all
decisions. :class:`MultiWriterIdGenerator` connects it to the database and makes it
thread-safe.

*Shared round trips.* At most one fetch of ids and one upsert of the position are in
progress at a time (:mod:`~synapse_replication.storage.round_trips`). Further callers
wait for the next one, which serves all of them. Only
:meth:`~MultiWriterIdGenerator.get_next_txn` and
:meth:`~MultiWriterIdGenerator.get_next_mult_txn` fetch ids separately, in the caller's
transaction.

*Only proof settles an id.* The ids of a block are finished when it is left, once the
transactions that it requested are known to have ended: if it failed, one of them may
still run; and if the connection was lost during a COMMIT, the database is asked what
became of it. If a caller abandons its request (by cancellation, or because its
coroutine was closed or garbage-collected), the requested ids are finished. Finishing an
id does not wait for the database, so it is possible where waiting is not allowed: the
ids of a coroutine that is closed or collected *inside* its block are finished later.

A block that is left without an exception waits until ``stream_positions`` has this
instance's position, which covers the block's ids unless lower ids are unfinished. If
storing the position fails, the block does not fail: its row is committed. The
failure is reported, and the position is stored later. A stream without declared writers
has no stored positions, so its blocks do not wait.

*The end.* :meth:`MultiWriterIdGenerator.close` refuses further ids, and waits until the
others are finished and the position that covers them is persisted. Otherwise, the rows
that were committed last would be announced only after the next start.

*Threads.* Coroutines, callbacks, ``get_announceable_token`` and the methods that blocks
call belong to the reactor's thread, unless a docstring says "Thread-safe". All other
methods are thread-safe. Finishing never waits for a lock; see
:mod:`~synapse_replication.storage.local_positions`.

See docs/failure-modes.rst: failure-cancelled-id, failure-out-of-order-finish,
failure-unregistered-id.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import attrs
from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IReactorFromThreads

from synapse_replication.errors import StreamClosedError, StreamConfigurationError
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.handlers.waiters import Waiters
from synapse_replication.storage.admission import Admission
from synapse_replication.storage.id_streams import IdStream, read_sequence
from synapse_replication.storage.local_positions import (
    LockedPositions,
    PositionPersister,
    SequenceCheck,
)
from synapse_replication.storage.open_transactions import POLL_SECONDS, PredecessorWait
from synapse_replication.storage.round_trips import (
    IdRequest,
    RoundTripGate,
    SharedRoundTrip,
)
from synapse_replication.storage.sequences import fetch_ids, load_positions
from synapse_replication.streams.writer_positions import WriterPositions

if TYPE_CHECKING:
    from synapse_replication.handlers.interfaces import Clock
    from synapse_replication.storage.database import WriterDatabase
    from synapse_replication.storage.lost_answers import LostAnswer

T = TypeVar("T")


def _do_nothing() -> None: ...


class MultiWriterIdGenerator:
    """Allocates a stream's ids and tracks its positions, for one process.

    Ids and tokens are negative if the stream counts down.

    :param database: runs transactions, and knows which of them have ended.
    :param stream: the stream.
    :param positions: the initial positions; see
        :func:`~synapse_replication.storage.sequences.load_positions`.
    :param reactor: schedules calls from blocks that end in another thread.
    :param clock: schedules retries.
    :param on_finished: called in the reactor's thread after ids of this process were
        finished, and after a read of the sequence that may have raised the announceable
        position. For instance, the function wakes the streamer.
    :param observer: notified of upserts and their failures, of failed reads of the
        sequence, and of implausible positions.
    :param admission: the name of this process, which is checked when ids are allocated
        and positions stored; ``None`` if it has acquired none.
    :ivar database: runs transactions.
    """

    def __init__(
        self,
        database: WriterDatabase,
        stream: IdStream,
        positions: WriterPositions,
        reactor: IReactorFromThreads,
        clock: Clock,
        *,
        on_finished: Callable[[], None] = _do_nothing,
        observer: ReplicationObserver | None = None,
        admission: Admission | None = None,
    ) -> None:
        self.stream = stream
        self.instance_name = positions.instance_name
        self.database = database
        self._admission = admission
        self._positions = LockedPositions(positions)
        #: Returns a value that changes whenever an id of this instance becomes
        #: announceable.
        self.get_mark: Callable[[], tuple[int | None, ...]] = positions.get_mark
        self._is_writer = positions.is_writer
        #: Returns a mark before all transactions that are requested later.
        self.mark: Callable[[], int] = database.mark
        self._reactor = reactor
        self._on_finished = on_finished
        self._sign = stream.sign
        observer = observer or ReplicationObserver()
        self._is_closed = False
        #: Fires when ids may have been finished; only while :meth:`close` waits.
        self._progress = Waiters()
        self._gate = gate = RoundTripGate()
        self._fetches = SharedRoundTrip(self._fetch, gate)
        self._persister = PositionPersister(
            database,
            stream,
            self.instance_name,
            self._positions,
            clock,
            observer,
            gate,
            admission,
        )
        self._sequence_check = SequenceCheck(
            database,
            stream,
            self._positions,
            reactor,
            clock,
            observer,
            on_finished,
            admission,
        )

    # -- ids ---------------------------------------------------------------------------

    def get_next(self) -> AbstractAsyncContextManager[int]:
        """Return a context manager that allocates an id and finishes it on exit.

        The id is finished even if the block raises an exception.

        :raises StreamConfigurationError: on entering, if this instance is not a writer.
        :raises StreamClosedError: on entering, if :meth:`close` was called.
        :raises SequenceBehindError: on entering, if the sequence is far behind the ids
            that this process knows.
        """
        return _Block(self, 1, lambda ids: ids[0])

    def get_next_mult(self, n: int) -> AbstractAsyncContextManager[list[int]]:
        """Return a context manager that allocates ``n`` ids and finishes them on exit.

        The ids are in ascending order of distance from zero.
        """
        return _Block(self, n, lambda ids: ids)

    def get_next_txn(self, txn: Any) -> int:
        """Allocate an id that is finished when ``txn`` is committed or rolled back.

        :param txn: a :class:`~synapse_replication.storage.transactions.Transaction`,
            or a cursor of the host with ``call_after`` and ``call_on_exception``.
        """
        return self.get_next_mult_txn(txn, 1)[0]

    def get_next_mult_txn(self, txn: Any, n: int) -> list[int]:
        """Allocate ``n`` ids that are finished when ``txn`` commits or rolls back."""
        self._check_open()
        since = self.mark()
        are_new = False
        while not are_new:
            ids: list[int] = []
            with self._positions as positions:
                fetch = positions.begin_fetch()
            try:
                ids = self._fetch_ids(txn, fetch, n, in_use=True)
            finally:
                are_new = self._end_fetch(fetch, ids)
        if hasattr(txn, "call_when_settled"):
            txn.call_when_settled(self._end_in_reactor, ids)
        else:
            # A host may call back although the answer to the COMMIT was lost.
            txn.call_after(self._end_when_settled, ids, since)
            txn.call_on_exception(self._end_when_settled, ids, since)
        return [self._sign * id_ for id_ in ids]

    # -- positions ---------------------------------------------------------------------

    def advance(self, instance_name: str, new_id: int) -> None:
        """Record that a writer's ids up to ``new_id`` are finished.

        An id far beyond the sequence is recorded only after the sequence has been read
        again, and only if the sequence has allocated that id. If the stream declares
        its writers, ids of undeclared instances are ignored.
        """
        id_ = self._sign * new_id
        with self._positions as positions:
            is_plausible = positions.is_plausible(id_)
            if is_plausible:
                positions.advance(instance_name, id_)
        if not is_plausible:
            self._sequence_check.hold_back(instance_name, id_)

    def get_positions(self) -> dict[str, int]:
        """Return each writer's announced position.

        For this instance, it is :meth:`get_minimal_local_current_token`.
        """
        with self._positions as positions:
            inside = positions.all_positions()
        return {writer: self._sign * id_ for writer, id_ in inside.items()}

    def get_current_token(self) -> int:
        """Return the token up to which the ids of all writers are finished."""
        return self.get_persisted_upto_position()

    def get_persisted_upto_position(self) -> int:
        """Return the token up to which the ids of all writers are finished."""
        with self._positions as positions:
            return self._sign * positions.persisted_upto

    def get_current_token_for_writer(self, instance_name: str) -> int:
        """Return the token up to which all ids of a writer are finished.

        For this instance, the position that may be announced can be behind this token;
        see :meth:`get_announceable_token`. For another instance, the position that it
        announced can be behind this token.
        """
        with self._positions as positions:
            return self._sign * positions.current_token(instance_name)

    def get_announceable_token(self, *, follows_others: bool = True) -> int:
        """Return the position that this instance may announce.

        The position does not exceed the known value of the sequence. Call this method
        in the reactor's thread.

        :param follows_others: whether to read the sequence if another writer announced
            an id beyond the sequence's known value. The position then soon follows that
            id.
        """
        with self._positions as positions:
            token, is_beyond = positions.announceable, positions.is_beyond_sequence
        self._sequence_check.start_if_due(is_needed=is_beyond and follows_others)
        if follows_others and self._is_writer and self.stream.writers:
            self._persister.follow(token)
        return self._sign * token

    def get_minimal_local_current_token(self) -> int:
        """Return this instance's greatest finished id that may be announced.

        Before this instance has finished an id, return its initial position.

        If the result is at or below a token ``t``, this instance has no rows in
        ``(t, current]``, where ``current`` is its own current token. Read ``current``
        first, with :meth:`get_current_token_for_writer`: otherwise, an id that is
        finished between the two calls can be in that range.
        """
        with self._positions as positions:
            return self._sign * positions.local

    def get_first_unfinished(self) -> tuple[int, str] | None:
        """Return the unfinished id that limits the positions, and its writer.

        See ``first_unfinished`` of
        :class:`~synapse_replication.streams.writer_positions.WriterPositions`.
        Thread-safe.
        """
        with self._positions as positions:
            found = positions.first_unfinished()
        return None if found is None else (self._sign * found[0], found[1])

    def lost_answers(self) -> Sequence[LostAnswer]:
        """Return the transactions whose COMMIT was not answered, oldest first."""
        return self.database.lost_answers()

    async def get_max_allocated_token(self) -> int:
        """Return the sequence's last allocated id (distance from zero)."""
        return await self.database.transact(
            "get_max_allocated_token",
            lambda txn: read_sequence(txn, self.stream.sequence),
            autocommit=True,
        )

    # -- fetching ----------------------------------------------------------------------

    def _check_open(self) -> None:
        if not self._is_writer:
            raise StreamConfigurationError(
                f"{self.instance_name} is not a writer of stream "
                f"{self.stream.stream_name}, whose writers are "
                f"{', '.join(self.stream.writers)}; add it to them, or "
                "write from one of these"
            )
        if self._is_closed:
            raise StreamClosedError(self.stream.stream_name)

    def _fetch_ids(
        self, txn: Any, fetch: int, n: int, *, in_use: bool = False
    ) -> list[int]:
        def usable(ids: list[int]) -> list[int]:
            with self._positions as positions:
                return [id_ for id_ in ids if positions.is_usable(fetch, id_)]

        return fetch_ids(
            txn,
            self.stream,
            n,
            usable,
            self._positions.max_finished,
            self._admission,
            in_use=in_use,
        )

    def _end_fetch(self, fetch: int, ids: list[int]) -> bool:
        """Register the ids that a fetch returned, unless any of them is not new.

        An id is new if
        :meth:`~synapse_replication.streams.writer_positions.WriterPositions.is_usable`
        is true for it. It is not new, for instance, if the sequence went backwards.
        Thread-safe.

        :return: whether all ids were new.
        """
        with self._positions as positions:
            are_new = all(positions.is_usable(fetch, id_) for id_ in ids)
            positions.end_fetch(fetch, ids if are_new else [])
        return are_new

    def request(self, n: int) -> IdRequest:
        """Request ``n`` ids, to be fetched together with those of other requests.

        Called by blocks.

        :raises StreamConfigurationError: if this instance is not a writer.
        :raises StreamClosedError: if :meth:`close` was called.
        """
        self._check_open()
        request = IdRequest(n)
        self._fetches.join(request)
        return request

    def waitable(self, deferred: Deferred[None]) -> Deferred[None]:
        """Return the Deferred that a block awaits; a host may override this method."""
        return deferred

    def give_up(self, request: IdRequest) -> None:
        """Abandon a request: finish its ids now or once they are fetched.

        Called by blocks. Thread-safe.
        """
        request.given_up = True
        if self._end_unclaimed(request):
            self._reactor.callFromThread(self._handle_finished)

    def _end_unclaimed(self, request: IdRequest) -> bool:
        """Finish the ids of an abandoned request, if they have been fetched.

        Thread-safe.

        :return: whether it finished any.
        """
        # One thread may abandon a request while another thread assigns its ids;
        # claim() returns the ids to only one of the threads.
        ids = request.claim()
        if ids is not None:
            self._positions.finish(ids)
        return ids is not None

    def _fetch(self, wanted: list[IdRequest]) -> None:
        requests = [request for request in wanted if not request.given_up]
        if not requests:
            self._fetches.end()
            return
        Deferred.fromCoroutine(self._fetch_for(requests))

    async def _fetch_for(self, requests: list[IdRequest]) -> None:
        with self._positions as positions:
            fetch = positions.begin_fetch()
        count = sum(request.n for request in requests)
        try:
            ids = await self.database.transact(
                "get_next_ids",
                lambda txn: self._fetch_ids(txn, fetch, count),
                autocommit=True,
            )
        except Exception as error:  # noqa: BLE001 -- the callers of the requests get it
            self._end_fetch(fetch, [])
            self._fetches.end()
            with self._gate.closed():
                for request in requests:
                    request.wake(error)
            self._progress.fire()
            return
        if not self._end_fetch(fetch, ids):
            self._fetches.repeat(requests)
            return
        given_up = False
        start = 0
        # Assign all ids before waking any waiter: a waiter may cancel another request.
        for request in requests:
            request.fetched.append(ids[start : start + request.n])
            start += request.n
            given_up = given_up or request.given_up
            if request.given_up:
                self._end_unclaimed(request)
        self._fetches.end()
        with self._gate.closed():
            for request in requests:
                request.wake(None)
            if given_up:
                self._handle_finished()

    # -- finishing ---------------------------------------------------------------------

    def end_block(self, ids: list[int], since: int, *, failed: bool) -> Deferred[None]:
        """Finish a block's ids, once its transactions are known to have ended.

        If the block failed, a transaction that it requested may still run. If it did
        not, only transactions whose COMMIT was not answered count.

        :param since: the mark before the block's first transaction.
        :return: fires when the position is persisted, or when persisting it has failed;
            immediately if the stream has no declared writers, or if the ids are not
            finished yet.
        """
        settled = self.database.settled(since, only_lost=not failed)
        if not settled.called:
            settled.addCallback(lambda _: self._end_in_reactor(ids))
            return succeed(None)
        self._positions.finish(ids)
        return self._handle_finished()

    def release_without_waiting(self, ids: list[int], since: int) -> None:
        """Finish a block's ids where waiting is not allowed. Thread-safe.

        They are finished once every transaction that may belong to the block has ended.
        """
        self._reactor.callFromThread(self._end_when_settled, ids, since)

    def _end_when_settled(self, ids: list[int], since: int) -> None:
        settled = self.database.settled(since)
        settled.addCallback(lambda _: self._end_in_reactor(ids))

    def _end_in_reactor(self, ids: list[int]) -> None:
        self._positions.finish(ids)
        self._handle_finished()

    def _handle_finished(self) -> Deferred[None]:
        """Persist the position and call ``on_finished``, after ids were finished."""
        persisted = self._persister.persist() if self.stream.writers else succeed(None)
        self._on_finished()
        self._progress.fire()
        return persisted

    # -- the end -----------------------------------------------------------------------

    async def close(self) -> None:
        """Refuse further ids, and wait until the position covers all earlier ones.

        That is, until their blocks are left and their transactions are known to have
        ended, and the position is persisted; that is repeated if it fails. There is no
        bound: an application may never leave a block. It may be called more than once.
        """
        self._is_closed = True
        # The fetches in transactions notify nobody if they fail.
        await self.database.settled()
        while self._has_unfinished():
            await self._progress.add()
        await self._persister.drain()

    def _has_unfinished(self) -> bool:
        with self._positions as positions:
            return positions.has_unfinished


@attrs.define(eq=False, repr=False)
class _Block(AbstractAsyncContextManager[T], Generic[T]):
    """The context manager of one block; it can be entered once."""

    _generator: MultiWriterIdGenerator
    _n: int
    _view: Callable[[list[int]], T]
    _ids: list[int] = attrs.field(factory=list, init=False)
    _since: int = attrs.field(default=0, init=False)

    async def __aenter__(self) -> T:
        request = self._generator.request(self._n)
        try:
            await self._generator.waitable(request.answered)
        except BaseException:
            self._generator.give_up(request)
            raise
        ids = request.claim()
        assert ids is not None
        self._ids, self._since = ids, self._generator.mark()
        sign = self._generator.stream.sign
        return self._view([sign * id_ for id_ in ids])

    async def __aexit__(
        self, kind: type[BaseException] | None, error: object, traceback: object
    ) -> None:
        if kind is not None and issubclass(kind, GeneratorExit):
            # A coroutine that is being closed must not await anything, and the garbage
            # collector may close it in any thread.
            self._generator.release_without_waiting(self._ids, self._since)
            return
        persisted = self._generator.end_block(
            self._ids, self._since, failed=kind is not None
        )
        if kind is None:
            await self._generator.waitable(persisted)


async def load_id_generator(
    database: WriterDatabase,
    stream: IdStream,
    instance_name: str,
    reactor: IReactorFromThreads,
    clock: Clock,
    *,
    on_finished: Callable[[], None] = _do_nothing,
    observer: ReplicationObserver | None = None,
    admission: Admission | None = None,
    first_seen: dict[str, float] | None = None,
) -> MultiWriterIdGenerator:
    """Load a stream's positions and return its id generator.

    It first waits for transactions that an earlier process with this one's name, or a
    removed writer, may have left, and ends their sessions after 10 s.

    :param admission: see :class:`MultiWriterIdGenerator`.
    :param first_seen: when these transactions were first seen; pass one dictionary for
        all streams of a process, so that it waits once for each transaction.
    :raises SequenceBehindError: if the sequence is behind a table or, for a declared
        writer, far behind a stored position; the error says what to do.
    """
    wait = PredecessorWait(
        stream,
        instance_name,
        clock.seconds,
        {} if first_seen is None else first_seen,
        is_admitted=admission is not None and admission.term > 1,
    )
    while not await database.transact(
        "wait_for_predecessor", wait.is_over, autocommit=True
    ):
        await clock.sleep(POLL_SECONDS)
    positions = await database.transact(
        "load_positions", lambda txn: load_positions(txn, stream, instance_name)
    )
    return MultiWriterIdGenerator(
        database,
        stream,
        positions,
        reactor,
        clock,
        on_finished=on_finished,
        observer=observer,
        admission=admission,
    )
