"""The bookkeeping of a stream's ids: what may be called complete.

Theory of operation. Every id of a stream comes from one sequence, which all
writers share and which only grows. An id is *finished* once its transaction is
committed or never will be. :class:`WriterPositions` is told

- when ids are about to be fetched (:meth:`~WriterPositions.begin_fetch`), which
  they were (:meth:`~WriterPositions.end_fetch`), and when they are finished
  (:meth:`~WriterPositions.finish`);
- what other writers announced (:meth:`~WriterPositions.advance`);

and says, at any moment and from one state,

- *announced*: what this process may announce as its position: each id of its own
  at or below it is finished, ids being fetched included. It is always an id
  that is known to be finished, whoever wrote it: peers count on that, see below;
- *local*: the largest of its own ids that are finished and covered by the
  announced one. If it is at or below a token, nothing of ours lies between that
  token and the announced one;
- *persisted up to*: each id at or below it, of every writer, is finished.

Why ids being fetched count: between the moment at which the sequence gives out
an id and the moment at which that is registered here, others may finish greater
ids and announce them. So a fetch has a *floor*, the greatest id that was
known to be finished when it began. What the sequence gives is greater, and until
it is known, nothing above the floor is called ours and complete.

Persisted-up-to grows in two ways. It is at least the smallest position of any
writer. And if the ids just above it are known to be finished one by one (5, 6,
7), it passes them, even while a writer is behind. This is why only finished ids
are announced: an announced id of another writer that is still open would let
everybody else pass it.

A committed id never exceeds its sequence, so the sequence is the witness of what
others announce. An id of theirs beyond the part of the sequence that is known here
does not count in what may be sent as our own position (*announceable*) until the
sequence was read again. Announcements of instances that are not declared as writers
are ignored where writers are declared.

Ids here are distances from zero: positive also for streams that count down.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush, heapreplace

__all__ = [
    "FIRST_POSITION",
    "PLAUSIBLE_DISTANCE",
    "FinishedIds",
    "WriterPositions",
]

#: Where a stream stands that nobody has written. The first usable id is the next.
FIRST_POSITION = 1

#: A position that is further beyond its sequence than this is not believed before the
#: sequence was read again.
PLAUSIBLE_DISTANCE = 100_000

#: Ranges of finished ids that are remembered at most. Forgetting one delays
#: persisted-up-to until the writers behind it have moved on; it is never wrong.
MAX_RANGES = 10_000


class FinishedIds:
    """A set of ids, kept as ranges: small, as long as there are few gaps.

    :param max_ranges: beyond that, the greatest range is forgotten.
    """

    def __init__(self, max_ranges: int = MAX_RANGES) -> None:
        self._max_ranges = max_ranges
        self._starts: list[int] = []
        self._ends: list[int] = []

    def __contains__(self, id_: int) -> bool:
        index = bisect_right(self._starts, id_) - 1
        return index >= 0 and self._ends[index] >= id_

    def __len__(self) -> int:
        """Return the number of ranges."""
        return len(self._starts)

    def add(self, id_: int) -> None:
        """Put an id in. Again does nothing."""
        starts, ends = self._starts, self._ends
        if not starts:
            starts.append(id_)
            ends.append(id_)
            return
        after = bisect_right(starts, id_)
        before = after - 1
        if before >= 0 and ends[before] >= id_:
            return
        joins_before = before >= 0 and ends[before] == id_ - 1
        joins_after = after < len(starts) and starts[after] == id_ + 1
        if joins_before and joins_after:
            ends[before] = ends.pop(after)
            del starts[after]
        elif joins_before:
            ends[before] = id_
        elif joins_after:
            starts[after] = id_
        else:
            starts.insert(after, id_)
            ends.insert(after, id_)
            if len(starts) > self._max_ranges:
                del starts[-1], ends[-1]

    def run_from(self, id_: int) -> int:
        """Return the last of the ids that follow ``id_`` without a gap, else it."""
        if not self._starts:
            return id_
        index = bisect_right(self._starts, id_ + 1) - 1
        if index >= 0 and self._ends[index] > id_:
            return self._ends[index]
        return id_

    def last_upto(self, limit: int) -> int | None:
        """Return the greatest id at or below ``limit``, if there is one."""
        index = bisect_right(self._starts, limit) - 1
        return min(self._ends[index], limit) if index >= 0 else None

    def forget_upto(self, id_: int) -> None:
        """Take out every range that ends at or below ``id_``."""
        if self._ends and self._ends[0] <= id_:
            count = bisect_right(self._ends, id_)
            del self._starts[:count], self._ends[:count]


class WriterPositions:
    """Where each writer of one stream stands, as one process knows it.

    Not safe from several threads at once: callers hold a lock. No method raises
    except as said.

    :param instance_name: this process.
    :param writers: the declared writers; none if anybody may write.
    :param stored: the positions of writers that were kept from before; others'
        than the declared ones are skipped.
    :param finished: further ids that are known to be finished, of any writer: rows
        that are committed.
    :param complete_upto: each id up to here is known to be finished, by other
        means than the positions; also where a writer begins of whom nothing is
        kept, if nothing is kept of anybody.
    :param allocated: the last id that the sequence is known to have given out;
        ``None`` if there is no sequence to compare with.
    """

    def __init__(
        self,
        instance_name: str,
        writers: Iterable[str] = (),
        stored: Mapping[str, int] | None = None,
        finished: Iterable[int] = (),
        complete_upto: int = FIRST_POSITION,
        allocated: int | None = None,
    ) -> None:
        self.instance_name = instance_name
        self._allocated = allocated
        declared = list(writers)
        self._declared = frozenset(declared)
        self.is_writer = not declared or instance_name in declared
        self._finished = FinishedIds()
        self._fetches: dict[int, int] = {}
        self._last_fetch = 0
        self._in_flight: set[int] = set()
        self._in_flight_heap: list[int] = []
        self._own_finished: list[int] = []

        known = {w: p for w, p in (stored or {}).items() if w in declared}
        for id_ in (*known.values(), *finished):
            self._finished.add(id_)
        upto = max(complete_upto, min(known.values(), default=FIRST_POSITION))
        self._persisted_upto = self._finished.run_from(upto)
        #: The greatest id that is known to be finished, of any writer.
        self.max_finished = max(self._persisted_upto, *known.values(), *finished, 0)
        # A writer of whom nothing is known has written nothing up to here.
        self._others = {
            writer: known.get(writer, self._persisted_upto)
            for writer in declared
            if writer != instance_name
        }
        # One entry for each of them. One that has moved on since is repaired when it
        # is the smallest.
        self._others_heap = [(id_, writer) for writer, id_ in self._others.items()]
        heapify(self._others_heap)
        # Whoever just started has nothing in flight.
        self._announced = self._local = (
            self.max_finished if self.is_writer else self._persisted_upto
        )
        self._announceable = 0
        self._settle()

    # -- what is known ---------------------------------------------------------------

    @property
    def persisted_upto(self) -> int:
        """Each id at or below it, of every writer, is finished. Never falls."""
        return self._persisted_upto

    @property
    def announced(self) -> int:
        """Each of our own ids at or below it is finished. Never falls."""
        return self._announced

    @property
    def announceable(self) -> int:
        """What may be sent as our position. It never falls.

        This is :attr:`announced`, if the sequence is known to have given it out.
        """
        token, allocated = self._announced, self._allocated
        if allocated is not None and token > allocated:
            # What is announced is finished for certain: peers count on that.
            token = self._finished.last_upto(allocated) or 0
            if token < self._persisted_upto <= allocated:
                token = self._persisted_upto
        self._announceable = max(token, self._announceable, self._local)
        return self._announceable

    @property
    def is_beyond_sequence(self) -> bool:
        """Others announced ids beyond the part of the sequence that is known here."""
        return self._allocated is not None and self.max_finished > self._allocated

    def is_plausible(self, id_: int) -> bool:
        """Return whether an announced id is believed without reading the sequence."""
        return self._allocated is None or id_ <= self._allocated + PLAUSIBLE_DISTANCE

    def set_allocated(self, id_: int) -> None:
        """Record that the sequence has given out all ids up to ``id_``."""
        if self._allocated is not None and id_ > self._allocated:
            self._allocated = id_

    @property
    def local(self) -> int:
        """The greatest of our own finished ids that is at or below ``announced``.

        Right after the start: ``announced``, for what we wrote before.
        """
        return self._local

    def lowest_in_flight(self) -> int | None:
        """Return the smallest of our ids that is not finished, if there is one."""
        heap = self._in_flight_heap
        while heap and heap[0] not in self._in_flight:
            heappop(heap)
        return heap[0] if heap else None

    def lowest_floor(self) -> int | None:
        """Return the floor of the oldest fetch that is under way, if there is one."""
        # Fetches are in order of their beginning, and so of their floors.
        return next(iter(self._fetches.values()), None)

    def floor_of(self, fetch: int) -> int:
        """Return the floor of a fetch that is under way.

        :param fetch: what :meth:`begin_fetch` returned.
        """
        return self._fetches[fetch]

    def writer_position(self, instance_name: str) -> int:
        """Return up to where a writer itself was heard of (our own: announced)."""
        if self.is_writer and instance_name == self.instance_name:
            return self._announced
        return self._others.get(instance_name, self._persisted_upto)

    def current_token(self, instance_name: str) -> int:
        """Return up to where a writer's ids are all finished.

        Ahead of :meth:`writer_position` if others' ids without a gap show it.
        """
        position = self.writer_position(instance_name)
        upto = self._persisted_upto
        return position if position > upto else upto

    def all_positions(self) -> dict[str, int]:
        """Return the position of each writer, our own as :attr:`local`."""
        positions = dict(self._others)
        if self.is_writer:
            positions[self.instance_name] = self._local
        return positions

    # -- what happens ------------------------------------------------------------------

    def begin_fetch(self) -> int:
        """Record that ids are about to be asked for.

        :return: a handle for :meth:`end_fetch`, which must follow.
        """
        self._last_fetch += 1
        self._fetches[self._last_fetch] = self.max_finished
        return self._last_fetch

    def is_usable(self, fetch: int, id_: int) -> bool:
        """Return whether an id that was given may be used.

        It may not if it is at or below what was finished when the fetch began, or
        is known already: then the sequence has gone backwards, or it is the
        position at which an unwritten stream stands.
        """
        return (
            id_ > self.floor_of(fetch)
            and id_ > self._persisted_upto
            and id_ not in self._in_flight
            and id_ not in self._finished
        )

    def end_fetch(self, fetch: int, ids: Sequence[int]) -> None:
        """Record which ids a fetch brought, or that it failed (none).

        :raises ValueError: if one of them is not usable, or there are two the same;
            nothing has changed.
        """
        if len(set(ids)) != len(ids) or not all(
            self.is_usable(fetch, id_) for id_ in ids
        ):
            raise ValueError(f"ids {list(ids)} are not new")
        del self._fetches[fetch]
        for id_ in ids:
            self._in_flight.add(id_)
            heappush(self._in_flight_heap, id_)
        if ids:
            self.set_allocated(max(ids))
        self._settle()

    def finish(self, ids: Iterable[int]) -> None:
        """Record that ids of ours are committed, or never will be.

        :raises KeyError: if one is not in flight.
        """
        for id_ in ids:
            self._in_flight.remove(id_)
            self._own_is_finished(id_)
        self._settle()

    def advance(self, instance_name: str, id_: int) -> None:
        """Record what a writer announced: it has nothing open up to ``id_``.

        Positions never fall; a smaller one still tells that ``id_`` is finished. Of an
        instance that is no declared writer it is ignored, where writers are declared.
        """
        if self._declared and instance_name not in self._declared:
            return
        if self.is_writer and instance_name == self.instance_name:
            if id_ > self._announced:
                self._own_is_finished(id_)
        elif id_ > self._others.get(instance_name, 0):
            if instance_name not in self._others:
                heappush(self._others_heap, (id_, instance_name))
            self._others[instance_name] = id_
            if id_ == self._persisted_upto + 1 and not (
                self._finished or self._in_flight_heap or self._fetches
            ):
                # The next id, and nothing else is open or ahead: the usual case.
                self._persisted_upto = id_
                if id_ > self.max_finished:
                    self.max_finished = id_
                if id_ > self._announced:
                    self._announced = id_
                return
        if id_ > self._persisted_upto:
            self._finished.add(id_)
        if id_ > self.max_finished:
            self.max_finished = id_
        self._settle()

    def _own_is_finished(self, id_: int) -> None:
        self._finished.add(id_)
        heappush(self._own_finished, id_)
        self.max_finished = max(self.max_finished, id_)

    def _own_limit(self) -> int | None:
        """Return the greatest id that may be called complete for us, if bounded."""
        lowest, floor = self.lowest_in_flight(), self.lowest_floor()
        if lowest is None:
            return floor
        return lowest - 1 if floor is None else min(lowest - 1, floor)

    def _announceable_upto(self, limit: int) -> int:
        """Return the greatest id to announce while ids above ``limit`` are open."""
        return self._finished.last_upto(limit) or 0

    def _slowest_other(self) -> int | None:
        heap, others = self._others_heap, self._others
        while heap:
            id_, writer = heap[0]
            if others[writer] == id_:
                return id_
            heapreplace(heap, (others[writer], writer))
        return None

    def _settle(self) -> None:
        """Derive everything again from what is in flight, fetched and finished."""
        # Written out rather than with max() and min(): it runs for every token.
        upto, announced = self._persisted_upto, self._announced
        slowest = self._slowest_other()
        limit = None
        if self._in_flight_heap or self._fetches:
            limit = self._own_limit()
        if self.is_writer:
            own = self.max_finished if limit is None else self._announceable_upto(limit)
            if own > announced:
                announced = own
            if slowest is None or announced < slowest:
                slowest = announced
        elif upto > announced:
            announced = upto
        if slowest is not None and slowest > upto:
            upto = slowest
        run = self._finished.run_from(upto)
        if run > upto:
            if self._in_flight_heap:
                # Others may know that our row is committed before we do: a writer
                # that starts finds it in the table. What is not finished here is not
                # passed.
                run = min(run, self._in_flight_heap[0] - 1)
            if run > upto:
                upto = run
        self._persisted_upto = upto
        self._announced = announced = upto if upto > announced else announced
        # What the greatest announced position covers is not looked up again.
        self._finished.forget_upto(upto)

        while self._own_finished and self._own_finished[0] <= announced:
            self._local = max(self._local, heappop(self._own_finished))
