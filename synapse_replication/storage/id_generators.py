"""Ids for rows, and where each writer stands: :class:`MultiWriterIdGenerator`.

Usage, in a coroutine::

    ids = await load_id_generator(database, stream, "writer1", reactor, clock)
    async with ids.get_next() as stream_id:
        await database.transact("insert", insert_row, stream_id)

Theory of operation: :class:`~synapse_replication.streams.positions.WriterPositions`
decides everything; this class brings it together with the database and with
threads.

*Round trips are shared.* At most one fetch of ids and one upsert of the position
are under way at a time. Who comes meanwhile waits for the next one, which serves
all of them. A lone caller waits for nobody.

The commit of a fetch waits for the disk, though no row is in it. Not to wait was
tried, and given up: after a crash of the server the sequence could give out again
what another process had taken, rolled back and announced as finished.

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
awaited and the callbacks, which belong to the reactor's. A coroutine may be
collected while this very thread holds the lock; so finishing never waits for the
lock: ids are put down, and whoever holds the lock finishes them when letting go.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import Any, Generic, TypeVar

from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IReactorFromThreads
from twisted.python.failure import Failure

from synapse_replication.errors import StreamConfigurationError
from synapse_replication.handlers.interfaces import Clock
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.storage import queries
from synapse_replication.storage.database import TransactionRunner
from synapse_replication.storage.sequence_check import SequenceCheck
from synapse_replication.storage.sequences import (
    IdStream,
    fetch_ids,
    load_positions,
    read_sequence,
)
from synapse_replication.streams.positions import WriterPositions

__all__ = ["RETRY_SECONDS", "MultiWriterIdGenerator", "load_id_generator"]

#: After how many s the upsert of a position is tried again.
RETRY_SECONDS = 1.0

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
        self._positions = positions
        self._settled: Callable[[], Deferred[None]] | None = getattr(
            database, "settled", None
        )
        self._reactor = reactor
        self._clock = clock
        self._on_finished = on_finished
        self._observer = observer or ReplicationObserver()
        self._sign = stream.sign
        self._lock = threading.Lock()
        self._ended: deque[list[int]] = deque()

        # Only in the reactor's thread. Each list is as long as there are callers.
        self._wanted: list[_Request] = []
        self._fetching = False
        self._awaiting_persist: list[Deferred[None]] = []
        self._keeping = False
        self._gathers = False
        self._retry_is_due = False
        self._kept = 0
        self._upsert = queries.upsert_position(stream.negative)
        self._sequence_check = SequenceCheck(
            database, stream, self._locked, reactor, clock, self._observer, on_finished
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
            with self._locked() as positions:
                fetch = positions.begin_fetch()
            try:
                ids = self._fetch_ids(txn, fetch, n)
            finally:
                are_new = self._end_fetch(fetch, ids)
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
        with self._locked() as positions:
            is_plausible = positions.is_plausible(id_)
            if is_plausible:
                positions.advance(instance_name, id_)
        if not is_plausible:
            self._sequence_check.hold_back(instance_name, id_)

    def get_positions(self) -> dict[str, int]:
        """Return each writer's position: of others as heard, of us as written."""
        with self._locked() as positions:
            inside = positions.all_positions()
        return {writer: self._sign * id_ for writer, id_ in inside.items()}

    def get_current_token(self) -> int:
        """Return the token up to which everything is persisted, of every writer."""
        return self.get_persisted_upto_position()

    def get_persisted_upto_position(self) -> int:
        """Return the token up to which everything is persisted, of every writer."""
        with self._locked() as positions:
            return self._sign * positions.persisted_upto

    def get_current_token_for_writer(self, instance_name: str) -> int:
        """Return up to where all ids of a writer are finished.

        For ourselves it is what may be announced. For others it may be ahead of
        what they themselves were heard of, see :meth:`get_writer_position`.
        """
        with self._locked() as positions:
            return self._sign * positions.current_token(instance_name)

    def get_announceable_token(self) -> int:
        """Return what may be sent as our own position. In the reactor's thread.

        It is not beyond the sequence, as far as that is known here.
        """
        with self._locked() as positions:
            token, must_check = positions.announceable, positions.is_beyond_sequence
        self._sequence_check.start_if_due(is_needed=must_check)
        return self._sign * token

    def get_writer_position(self, instance_name: str) -> int:
        """Return up to where a writer itself was heard of: its rows are here."""
        with self._locked() as positions:
            return self._sign * positions.writer_position(instance_name)

    def get_minimal_local_current_token(self) -> int:
        """Return the greatest finished id of ours that may be announced.

        If it is at or below a token, we have written nothing between that and
        :meth:`get_current_token_for_writer` of ourselves, whichever of the two is
        asked for first.
        """
        with self._locked() as positions:
            return self._sign * positions.local

    async def get_max_allocated_token(self) -> int:
        """Ask the sequence how far ids were given out (distance from zero)."""
        return await self._database.transact(
            "get_max_allocated_token",
            lambda txn: read_sequence(txn, self.stream.sequence),
            autocommit=True,
        )

    # -- threads -----------------------------------------------------------------------

    @contextmanager
    def _locked(self) -> Generator[WriterPositions, None, None]:
        try:
            with self._lock:
                yield self._positions
        finally:
            self._finish_ended()

    def _end(self, ids: list[int]) -> None:
        """Finish ids, in any thread, at any point."""
        self._ended.append(ids)
        self._finish_ended()

    def _finish_ended(self) -> None:
        # Whoever holds the lock comes by here after letting go.
        while self._ended and self._lock.acquire(blocking=False):
            try:
                while self._ended:
                    self._positions.finish(self._ended.popleft())
            finally:
                self._lock.release()

    # -- fetching ----------------------------------------------------------------------

    def _check_writer(self) -> None:
        if not self._positions.is_writer:
            raise StreamConfigurationError(
                f"{self.instance_name} is no writer of stream "
                f"{self.stream.stream_name}: its writers are "
                f"{', '.join(self.stream.writers)}; add it to stream_writers, or "
                "write there"
            )

    def _fetch_ids(self, txn: Any, fetch: int, n: int) -> list[int]:
        def usable(ids: list[int]) -> list[int]:
            with self._locked() as positions:
                return [id_ for id_ in ids if positions.is_usable(fetch, id_)]

        known = self._positions.max_finished
        return fetch_ids(txn, self.stream.sequence, n, usable, known)

    def _end_fetch(self, fetch: int, ids: list[int]) -> bool:
        """Take the ids that a fetch brought, or none of them if one is not new.

        Then the sequence is behind, and meanwhile somebody announced what it gave.
        """
        with self._locked() as positions:
            are_new = all(positions.is_usable(fetch, id_) for id_ in ids)
            positions.end_fetch(fetch, ids if are_new else [])
        return are_new

    def ask(self, n: int) -> _Request:
        """Have ``n`` ids fetched, together with what others want. For blocks."""
        self._check_writer()
        request = _Request(n)
        self._wanted.append(request)
        if not self._fetching and not self._gathers:
            self._fetch()
        return request

    def _fetch(self) -> None:
        requests = [request for request in self._wanted if not request.given_up]
        self._wanted = []
        if not requests:
            return
        self._fetching = True
        with self._locked() as positions:
            fetch = positions.begin_fetch()
        count = sum(request.n for request in requests)
        self._database.transact(
            "get_next_ids",
            lambda txn: self._fetch_ids(txn, fetch, count),
            autocommit=True,
        ).addCallbacks(
            self._hand_out,
            self._could_not_fetch,
            callbackArgs=(fetch, requests),
            errbackArgs=(fetch, requests),
        )

    def _hand_out(self, ids: list[int], fetch: int, requests: list[_Request]) -> None:
        if not self._end_fetch(fetch, ids):
            self._wanted = [*requests, *self._wanted]
            self._fetching = False
            self._fetch()
            return
        given_up = False
        start = 0
        # All are given theirs before anybody goes on, and perhaps cancels another.
        for request in requests:
            request.box.append(ids[start : start + request.n])
            start += request.n
            given_up = given_up or request.given_up
            if request.given_up:
                self._end_unclaimed(request)
        self._fetching = False
        with self._batching():
            for request in requests:
                request.wake(None)
            if given_up:
                self._have_finished()

    def _could_not_fetch(
        self, failure: Failure, fetch: int, requests: list[_Request]
    ) -> None:
        self._end_fetch(fetch, [])
        self._fetching = False
        with self._batching():
            for request in requests:
                request.wake(failure)

    def waitable(self, deferred: Deferred[None]) -> Deferred[None]:
        """Return what a block is to wait for; a host may have rules of its own."""
        return deferred

    def give_up(self, request: _Request) -> None:
        """Finish what a request got, or will get. For blocks, in any thread."""
        request.given_up = True
        if self._end_unclaimed(request):
            self._reactor.callFromThread(self._have_finished)

    def _end_unclaimed(self, request: _Request) -> bool:
        # Giving up and handing out may meet, in two threads: one gets the ids.
        ids = request.claim()
        if ids is not None:
            self._end(ids)
        return ids is not None

    # -- finishing ---------------------------------------------------------------------

    def end_block(self, ids: list[int]) -> Deferred[None]:
        """Finish a block's ids; the Deferred fires when the position is kept."""
        self._end(ids)
        return self._have_finished()

    def release_without_waiting(self, ids: list[int]) -> None:
        """Finish a block's ids where nothing can be waited for, in any thread.

        At the latest when what its transaction may be is over.
        """
        if self._settled is None:
            self._end(ids)
            self._reactor.callFromThread(self._have_finished)
        else:
            self._reactor.callFromThread(self._end_when_settled, ids)

    def _end_when_settled(self, ids: list[int]) -> None:
        assert self._settled is not None
        self._settled().addCallback(lambda _: self._end_in_reactor(ids))

    def _end_in_reactor(self, ids: list[int]) -> None:
        self._end(ids)
        self._have_finished()

    def _have_finished(self) -> Deferred[None]:
        """Say that something was finished, and have the position kept."""
        kept = self._keep_later() if self.stream.writers else succeed(None)
        self._on_finished()
        return kept

    def _keep_later(self) -> Deferred[None]:
        waiting: Deferred[None] = Deferred()
        self._awaiting_persist.append(waiting)
        if not self._keeping and not self._gathers:
            self._persist_position()
        return waiting

    def _persist_position(self) -> None:
        """Upsert the position, for all who wait for that now."""
        waiting, self._awaiting_persist = self._awaiting_persist, []
        with self._locked() as positions:
            local = positions.local
        if local <= self._kept:
            self._fire(waiting)
            return
        self._keeping = True
        parameters = {
            "stream_name": self.stream.stream_name,
            "instance_name": self.instance_name,
            "stream_id": self._sign * local,
        }
        writing = ExitStack()
        writing.enter_context(
            self._observer.position_write(
                self.stream.stream_name, self.instance_name, local
            )
        )
        self._database.transact(
            "keep_position",
            lambda txn: txn.execute(self._upsert, parameters),
            autocommit=True,
        ).addCallbacks(
            self._is_kept,
            self._is_not_kept,
            callbackArgs=(local, waiting, writing),
            errbackArgs=(local, waiting, writing),
        )

    def _is_kept(
        self, _: object, local: int, waiting: list[Deferred[None]], writing: ExitStack
    ) -> None:
        writing.close()
        self._observer.position_persisted(
            self.stream.stream_name, self.instance_name, local
        )
        self._kept = local
        self._keeping = False
        self._fire(waiting)

    def _is_not_kept(
        self,
        failure: Failure,
        local: int,
        waiting: list[Deferred[None]],
        writing: ExitStack,
    ) -> None:
        # What they wrote is committed: it is not their failure.
        assert failure.value is not None
        writing.__exit__(
            type(failure.value), failure.value, failure.value.__traceback__
        )
        self._observer.position_persist_failed(
            self.stream.stream_name, self.instance_name, local, failure.value
        )
        self._observer.failure(
            f"keeping the position of {self.stream.stream_name}", failure.value
        )
        if not self._retry_is_due:
            self._retry_is_due = True
            self._clock.call_later(RETRY_SECONDS, self._try_again)
        self._keeping = False
        self._fire(waiting)

    def _try_again(self) -> None:
        self._retry_is_due = False
        self._keep_later()

    def _fire(self, waiting: list[Deferred[None]]) -> None:
        with self._batching():
            for deferred in waiting:
                # Who was cancelled has been told already.
                if not deferred.called:
                    deferred.callback(None)

    @contextmanager
    def _batching(self) -> Generator[None, None, None]:
        """Begin no round trip before all who are woken inside have asked."""
        outer, self._gathers = self._gathers, True
        try:
            yield
        finally:
            self._gathers = outer
            if not outer:
                if self._wanted and not self._fetching:
                    self._fetch()
                if self._awaiting_persist and not self._keeping:
                    self._persist_position()


class _Request:
    """Somebody who wants ``n`` ids."""

    __slots__ = ("_waiting", "box", "given_up", "n")

    def __init__(self, n: int) -> None:
        self.n = n
        self.box: deque[list[int]] = deque()
        self.given_up = False
        self._waiting: Deferred[None] = Deferred()

    def answered(self) -> Deferred[None]:
        """Fire when the ids are there."""
        return self._waiting

    def claim(self) -> list[int] | None:
        """Take the ids, if they are there and nobody else has them. Any thread."""
        try:
            return self.box.pop()
        except IndexError:
            return None

    def wake(self, failure: Failure | None) -> None:
        """Tell whoever still waits."""
        if self._waiting.called or self.given_up:
            return
        if failure is None:
            self._waiting.callback(None)
        else:
            self._waiting.errback(failure)


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
