"""Ids for rows, and where each writer stands: :class:`MultiWriterIdGenerator`.

Usage, in a coroutine::

    ids = await load_id_generator(database, stream, "writer1", reactor, clock)
    async with ids.get_next() as stream_id:
        await database.transact("insert", insert_row, stream_id)

Theory of operation: :class:`~synapse_replication.streams.positions.WriterPositions`
decides everything; this class brings it together with the database and with
threads.

*Round trips are shared.* At most one fetch of ids
(:mod:`~synapse_replication.storage.id_fetcher`) and one upsert of the position
(:mod:`~synapse_replication.storage.position_persister`) are under way at a time. Who
comes meanwhile waits for the next one, which serves all of them.

*Nothing holds a position up.* An id is finished as soon as its block is left,
whatever the reason; a caller who gives up before it got its ids (cancelled, or
its coroutine was closed or forgotten) leaves them finished. Neither waits for
the database, so both work where waiting is not allowed. One case apart: the coroutine
was closed, or forgotten, *inside* its block. Its transaction may be under way in its
thread, and be committed yet; so the ids are kept open until all transactions that the
database was asked for by then have ended, if it tells (a :class:`Database` does, a
host's own does not). A block that was left without an exception waits until a position
that covers what it covers is kept in ``stream_positions``; if that fails, the row is
committed all the same: the failure is reported, and tried again later.

*Threads.* Every method may be called in any thread, except those that are
awaited and the callbacks, which belong to the reactor's. Finishing never waits for a
lock; see :mod:`~synapse_replication.storage.locked_positions`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Generic, TypeVar

from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IReactorFromThreads

from synapse_replication.errors import StreamConfigurationError
from synapse_replication.handlers.interfaces import Clock
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.storage.database import TransactionRunner
from synapse_replication.storage.id_fetcher import IdFetcher, IdRequest
from synapse_replication.storage.locked_positions import LockedPositions
from synapse_replication.storage.position_persister import PositionPersister
from synapse_replication.storage.round_trips import Gathering
from synapse_replication.storage.sequence_check import SequenceCheck
from synapse_replication.storage.sequences import (
    IdStream,
    fetch_ids,
    load_positions,
    read_sequence,
)
from synapse_replication.streams.positions import WriterPositions

__all__ = ["MultiWriterIdGenerator", "load_id_generator"]

T = TypeVar("T")


def _do_nothing() -> None: ...


class MultiWriterIdGenerator:
    """Returns out a stream's ids and knows what is complete, as one process sees it.

    Ids and tokens are below zero if the stream's are.

    :param database: what runs transactions.
    :param stream: the stream.
    :param positions: where it stands; see
        :func:`~synapse_replication.storage.sequences.load_positions`.
    :param reactor: for blocks that end in another thread.
    :param clock: for trying again.
    :param on_finished: called in the reactor's thread after ids of ours were
        finished, for instance to wake the streamer.
    :param observer: is told of upserts that failed.
    """

    def __init__(
        self,
        database: TransactionRunner,
        stream: IdStream,
        positions: WriterPositions,
        reactor: IReactorFromThreads,
        clock: Clock,
        *,
        on_finished: Callable[[], None] = _do_nothing,
        observer: ReplicationObserver | None = None,
    ) -> None:
        self.stream = stream
        self.instance_name = positions.instance_name
        self._database = database
        self._positions = LockedPositions(positions)
        self._is_writer = positions.is_writer
        self._settled: Callable[[], Deferred[None]] | None = getattr(
            database, "settled", None
        )
        self._reactor = reactor
        self._on_finished = on_finished
        self._sign = stream.sign
        observer = observer or ReplicationObserver()
        gathering = Gathering()
        self._fetcher = IdFetcher(
            database,
            self._positions,
            self._fetch_ids,
            self._have_finished,
            gathering,
        )
        self._persister = PositionPersister(
            database,
            stream,
            self.instance_name,
            self._positions,
            clock,
            observer,
            gathering,
        )
        self._sequence_check = SequenceCheck(
            database,
            stream,
            self._positions.locked,
            reactor,
            clock,
            observer,
            on_finished,
        )

    # -- ids ---------------------------------------------------------------------------

    def get_next(self) -> AbstractAsyncContextManager[int]:
        """Return an id; it is finished when the block is left, however.

        :raises StreamConfigurationError: (on entering) we are no writer.
        :raises SequenceBehindError: (on entering) the sequence went backwards.
        """
        return _Block(self, 1, lambda ids: ids[0])

    def get_next_mult(self, n: int) -> AbstractAsyncContextManager[list[int]]:
        """Return ``n`` ids in ascending order of distance from zero.

        They are finished together, when the block is left.
        """
        return _Block(self, n, lambda ids: ids)

    def get_next_txn(self, txn: Any) -> int:
        """Return an id that is finished when a transaction ends, however.

        :param txn: a :class:`~synapse_replication.storage.database.Transaction`,
            or a cursor of the host with ``call_after`` and ``call_on_exception``.
        """
        return self.get_next_mult_txn(txn, 1)[0]

    def get_next_mult_txn(self, txn: Any, n: int) -> list[int]:
        """Return ``n`` ids that are finished when a transaction ends, however."""
        self._check_writer()
        are_new = False
        while not are_new:
            ids: list[int] = []
            with self._positions.locked() as positions:
                fetch = positions.begin_fetch()
            try:
                ids = self._fetch_ids(txn, fetch, n)
            finally:
                are_new = self._fetcher.end_fetch(fetch, ids)
        txn.call_after(self._end_in_reactor, ids)
        txn.call_on_exception(self._end_in_reactor, ids)
        return [self._sign * id_ for id_ in ids]

    # -- positions ---------------------------------------------------------------------

    def advance(self, instance_name: str, new_id: int) -> None:
        """Record that a writer has nothing open up to ``new_id``.

        What is far beyond the sequence takes effect once the sequence was read again,
        if it turns out to be there.
        """
        id_ = self._sign * new_id
        with self._positions.locked() as positions:
            is_plausible = positions.is_plausible(id_)
            if is_plausible:
                positions.advance(instance_name, id_)
        if not is_plausible:
            self._sequence_check.hold_back(instance_name, id_)

    def get_positions(self) -> dict[str, int]:
        """Return each writer's position: of others as heard, of us as written."""
        with self._positions.locked() as positions:
            inside = positions.all_positions()
        return {writer: self._sign * id_ for writer, id_ in inside.items()}

    def get_current_token(self) -> int:
        """Return the token up to which everything is persisted, of every writer."""
        return self.get_persisted_upto_position()

    def get_persisted_upto_position(self) -> int:
        """Return the token up to which everything is persisted, of every writer."""
        with self._positions.locked() as positions:
            return self._sign * positions.persisted_upto

    def get_current_token_for_writer(self, instance_name: str) -> int:
        """Return up to where all ids of a writer are finished.

        For ourselves it is what may be announced. For others it may be ahead of
        what they themselves were heard of, see :meth:`get_writer_position`.
        """
        with self._positions.locked() as positions:
            return self._sign * positions.current_token(instance_name)

    def get_announceable_token(self) -> int:
        """Return what may be sent as our own position. In the reactor's thread.

        It is not beyond the sequence, as far as that is known here.
        """
        with self._positions.locked() as positions:
            token, must_check = positions.announceable, positions.is_beyond_sequence
        self._sequence_check.start_if_due(is_needed=must_check)
        return self._sign * token

    def get_writer_position(self, instance_name: str) -> int:
        """Return up to where a writer itself was heard of: its rows are here."""
        with self._positions.locked() as positions:
            return self._sign * positions.writer_position(instance_name)

    def get_minimal_local_current_token(self) -> int:
        """Return the greatest finished id of ours that may be announced.

        If it is at or below a token, we have written nothing between that and
        :meth:`get_current_token_for_writer` of ourselves, whichever of the two is
        asked for first.
        """
        with self._positions.locked() as positions:
            return self._sign * positions.local

    async def get_max_allocated_token(self) -> int:
        """Ask the sequence how far ids were given out (distance from zero)."""
        return await self._database.transact(
            "get_max_allocated_token",
            lambda txn: read_sequence(txn, self.stream.sequence),
            autocommit=True,
        )

    # -- fetching ----------------------------------------------------------------------

    def _check_writer(self) -> None:
        if not self._is_writer:
            raise StreamConfigurationError(
                f"{self.instance_name} is no writer of stream "
                f"{self.stream.stream_name}: its writers are "
                f"{', '.join(self.stream.writers)}; add it to stream_writers, or "
                "write there"
            )

    def _fetch_ids(self, txn: Any, fetch: int, n: int) -> list[int]:
        def usable(ids: list[int]) -> list[int]:
            with self._positions.locked() as positions:
                return [id_ for id_ in ids if positions.is_usable(fetch, id_)]

        known = self._positions.max_finished
        stream = self.stream
        return fetch_ids(
            txn, stream.sequence, n, usable, known, stream.plausible_distance
        )

    def ask(self, n: int) -> IdRequest:
        """Have ``n`` ids fetched, together with what others want. For blocks."""
        self._check_writer()
        return self._fetcher.ask(n)

    def waitable(self, deferred: Deferred[None]) -> Deferred[None]:
        """Return what a block is to wait for; a host may have rules of its own."""
        return deferred

    def give_up(self, request: IdRequest) -> None:
        """Finish what a request got, or will get. For blocks, in any thread."""
        request.given_up = True
        if self._fetcher.end_unclaimed(request):
            self._reactor.callFromThread(self._have_finished)

    # -- finishing ---------------------------------------------------------------------

    def end_block(self, ids: list[int]) -> Deferred[None]:
        """Finish a block's ids; the Deferred fires when the position is kept."""
        self._positions.finish(ids)
        return self._have_finished()

    def release_without_waiting(self, ids: list[int]) -> None:
        """Finish a block's ids where nothing can be waited for, in any thread.

        At the latest when what its transaction may be is over.
        """
        if self._settled is None:
            self._positions.finish(ids)
            self._reactor.callFromThread(self._have_finished)
        else:
            self._reactor.callFromThread(self._end_when_settled, ids)

    def _end_when_settled(self, ids: list[int]) -> None:
        assert self._settled is not None
        self._settled().addCallback(lambda _: self._end_in_reactor(ids))

    def _end_in_reactor(self, ids: list[int]) -> None:
        self._positions.finish(ids)
        self._have_finished()

    def _have_finished(self) -> Deferred[None]:
        """Say that something was finished, and have the position kept."""
        kept = self._persister.persist() if self.stream.writers else succeed(None)
        self._on_finished()
        return kept


class _Block(AbstractAsyncContextManager[T], Generic[T]):
    """One ``async with``. Entered once."""

    __slots__ = ("_generator", "_ids", "_n", "_view")

    def __init__(
        self,
        generator: MultiWriterIdGenerator,
        n: int,
        view: Callable[[list[int]], T],
    ) -> None:
        self._generator = generator
        self._n = n
        self._view = view
        self._ids: list[int] = []

    async def __aenter__(self) -> T:
        request = self._generator.ask(self._n)
        try:
            await self._generator.waitable(request.answered())
        except BaseException:
            self._generator.give_up(request)
            raise
        ids = request.claim()
        assert ids is not None
        self._ids = ids
        sign = self._generator.stream.sign
        return self._view([sign * id_ for id_ in ids])

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None and issubclass(kind, GeneratorExit):
            # Nothing may be waited for, and this may be any thread.
            self._generator.release_without_waiting(self._ids)
            return
        kept = self._generator.end_block(self._ids)
        if kind is None:
            await self._generator.waitable(kept)


async def load_id_generator(
    database: TransactionRunner,
    stream: IdStream,
    instance_name: str,
    reactor: IReactorFromThreads,
    clock: Clock,
    *,
    on_finished: Callable[[], None] = _do_nothing,
    observer: ReplicationObserver | None = None,
) -> MultiWriterIdGenerator:
    """Read where a stream stands, and make its id generator.

    :raises SequenceBehindError: if the sequence is behind a table; the error says
        what to do.
    """
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
    )
