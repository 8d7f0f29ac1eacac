"""Bookkeeping of a stream's ids: the positions up to which it is complete.

Theory of operation. Every id of a stream comes from one sequence, which all writers
share and which only grows. An id is *finished* when its transaction has committed or
can never commit. :class:`WriterPositions` is notified

- before ids are fetched (:meth:`~WriterPositions.begin_fetch`), after they were fetched
  (:meth:`~WriterPositions.end_fetch`), and when they are finished
  (:meth:`~WriterPositions.finish`);
- when another writer announces a position (:meth:`~WriterPositions.advance`);

and derives from one consistent state

- *announced*: the position that this instance announces, unless it exceeds the
  sequence's known value (see below). At or below it, this instance has no unfinished
  id, and is not fetching any. The position is always an id that is known to be
  finished, of any writer, because peers rely on that (see below);
- *local*: the largest of this instance's finished ids at or below *announced*. If
  *local* is at or below a token, this instance has no rows between that token and
  *announced*;
- *persisted up to*: each id at or below it, of every writer, is finished.

Ids being fetched matter because, between the moment at which the sequence allocates an
id and the moment at which it is registered here, other writers may finish and announce
greater ids. Therefore each fetch has a *floor*: the greatest id that was known to be
finished when the fetch began. The ids that the fetch returns are greater; until they
are known, this instance announces at most the floor, or persisted-up-to if greater.

Persisted-up-to advances in two ways. It is at least the smallest of all writers'
positions. In addition, it advances over the ids directly above it that are known to be
finished (from 4 over 5, 6 and 7), even if a writer is behind. Therefore only finished
ids are announced: if one instance announced another writer's unfinished id, all other
instances would advance over that id.

Except after a failover to a standby, a committed id does not exceed the sequence's
value, so the sequence can verify announcements. If a writer announces an id beyond the
known value, the id does not count towards the position that this instance sends
(*announceable*) until the known value has reached the id. If a stream declares its
writers, announcements of undeclared instances are ignored.

Ids in this module are distances from zero: positive even for streams that count down.

See docs/failure-modes.rst: failure-first-id, failure-open-ids-at-restart.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush, heapreplace

#: The position of a stream without rows. The first usable id is the next one.
FIRST_POSITION = 1

#: The default plausible distance, in ids. A position that exceeds the known value of
#: its sequence by more is not accepted until the sequence has been read again.
PLAUSIBLE_DISTANCE = 100_000

#: The most ranges of finished ids that are stored. Dropping a range is safe: it only
#: delays persisted-up-to until every writer has advanced beyond the range.
MAX_RANGES = 10_000


class FinishedIds:
    """A set of ids, stored as ranges: compact if there are few gaps.

    If there are more than :data:`MAX_RANGES`, the greatest is dropped.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def __contains__(self, id_: int) -> bool:
        index = bisect_right(self._starts, id_) - 1
        return index >= 0 and self._ends[index] >= id_

    def __len__(self) -> int:
        """Return the number of ranges."""
        return len(self._starts)

    def add(self, id_: int) -> None:
        """Add an id; no effect if it is present."""
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
            if len(starts) > MAX_RANGES:
                del starts[-1], ends[-1]

    def end_of_gapless_range(self, id_: int) -> int:
        """Return the end of the ids without gaps after ``id_``; ``id_`` if none."""
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
        """Remove every range that ends at or below ``id_``."""
        if self._ends and self._ends[0] <= id_:
            count = bisect_right(self._ends, id_)
            del self._starts[:count], self._ends[:count]


class WriterPositions:
    """The positions of one stream's writers, as known to one instance.

    Not thread-safe: callers hold a lock, except for :meth:`get_mark`.

    :param instance_name: this instance.
    :param writers: the declared writers; empty if every instance may write.
    :param stored: the persisted positions of writers; those of undeclared writers are
        ignored.
    :param finished: further ids that are known to be finished, of any writer: the ids
        of committed rows.
    :param complete_upto: the id up to which all ids are known to be finished,
        independently of the stored positions. The initial position of a writer without
        a stored position is at least this id.
    :param allocated: the last id that the sequence is known to have allocated;
        ``None`` if there is no sequence to compare with.
    :param plausible_distance: the most by which an announced id may exceed
        ``allocated`` to be accepted without reading the sequence.
    :ivar persisted_upto: the token at or below which all writers' ids are finished; it
        never falls.
    :ivar announced: the token up to which this instance's ids are finished; it never
        falls.
    :ivar local: the greatest of this instance's finished ids at or below
        :attr:`announced`. Right after the start, it equals :attr:`announced` and covers
        all earlier rows.
    """

    def __init__(
        self,
        instance_name: str,
        writers: Iterable[str] = (),
        stored: Mapping[str, int] | None = None,
        finished: Iterable[int] = (),
        complete_upto: int = FIRST_POSITION,
        allocated: int | None = None,
        plausible_distance: int = PLAUSIBLE_DISTANCE,
    ) -> None:
        self.instance_name = instance_name
        self._plausible_distance = plausible_distance
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
        self.persisted_upto = self._finished.end_of_gapless_range(upto)
        #: The greatest id that is known to be finished, of any writer.
        self.max_finished = max(self.persisted_upto, *known.values(), *finished, 0)
        # A writer without a stored position has no unfinished id at or below
        # persisted-up-to.
        self._others = {
            writer: known.get(writer, self.persisted_upto)
            for writer in declared
            if writer != instance_name
        }
        # One entry per writer; an outdated entry is replaced when it is the smallest.
        self._others_heap = [(id_, writer) for writer, id_ in self._others.items()]
        heapify(self._others_heap)
        # An instance that has just started has no ids in flight.
        self.announced = self.local = (
            self.max_finished if self.is_writer else self.persisted_upto
        )
        self._announceable = 0
        self._recompute()

    # -- state ------------------------------------------------------------------------

    @property
    def announceable(self) -> int:
        """The position that this instance may send; it never falls.

        It is :attr:`announced`, unless that id exceeds the sequence's known value.
        """
        token, allocated = self.announced, self._allocated
        if allocated is not None and token > allocated:
            # Fall back to an id that is certainly finished, because peers rely on it.
            token = self._finished.last_upto(allocated) or 0
            if token < self.persisted_upto <= allocated:
                token = self.persisted_upto
        self._announceable = max(token, self._announceable, self.local)
        return self._announceable

    @property
    def is_beyond_sequence(self) -> bool:
        """Whether a finished id exceeds the known value of the sequence."""
        return self._allocated is not None and self.max_finished > self._allocated

    def is_plausible(self, id_: int) -> bool:
        """Return whether an announced id is accepted without reading the sequence."""
        return (
            self._allocated is None or id_ <= self._allocated + self._plausible_distance
        )

    def get_mark(self) -> tuple[int | None, ...]:
        """Return a mark that changes if an id of this instance becomes announceable."""
        return (self.announced, self.persisted_upto, self.local, self._allocated)

    def set_allocated(self, id_: int) -> bool:
        """Record that the sequence has allocated all ids up to ``id_``.

        :return: whether the known value has grown; false if there is no sequence.
        """
        is_greater = self._allocated is not None and id_ > self._allocated
        if is_greater:
            self._allocated = id_
        return is_greater

    @property
    def has_unfinished(self) -> bool:
        """Whether this instance has unfinished ids, or is fetching ids."""
        return bool(self._in_flight or self._fetches)

    def lowest_in_flight(self) -> int | None:
        """Return this instance's smallest unfinished id, if there is one."""
        heap = self._in_flight_heap
        while heap and heap[0] not in self._in_flight:
            heappop(heap)
        return heap[0] if heap else None

    def first_unfinished(self) -> tuple[int, str] | None:
        """Return the id that limits persisted-up-to, and the id's writer.

        It is the lowest id that this instance has not finished, or may be fetching. If
        there is none, it is the lowest id that is not known to be finished below one
        that is; its writer is then the writer with the lowest position.

        :return: ``None`` if all known ids are finished, and in streams without declared
            writers, whose positions say nothing about unfinished ids.
        """
        limit = self._own_limit()
        if limit is not None:
            return limit + 1, self.instance_name
        slowest = self._slowest_other()
        upto = self.persisted_upto
        if not self._declared or slowest is None or self.max_finished <= upto:
            return None
        return upto + 1, self._others_heap[0][1]

    def lowest_floor(self) -> int | None:
        """Return the floor of the oldest pending fetch, if there is one."""
        # Fetches are ordered by their start, and therefore by their floors.
        return next(iter(self._fetches.values()), None)

    def floor_of(self, fetch: int) -> int:
        """Return the floor of a pending fetch.

        :param fetch: the handle that :meth:`begin_fetch` returned.
        """
        return self._fetches[fetch]

    def writer_position(self, instance_name: str) -> int:
        """Return a writer's announced position.

        It is :attr:`announced` for this instance, persisted-up-to for unknown writers.
        """
        if self.is_writer and instance_name == self.instance_name:
            return self.announced
        return self._others.get(instance_name, self.persisted_upto)

    def current_token(self, instance_name: str) -> int:
        """Return the greatest known position up to which a writer's ids are finished.

        It is the greater of :meth:`writer_position` and :attr:`persisted_upto`.
        """
        position = self.writer_position(instance_name)
        upto = self.persisted_upto
        return position if position > upto else upto

    def all_positions(self) -> dict[str, int]:
        """Return the position of each writer; this instance's is :attr:`local`."""
        positions = dict(self._others)
        if self.is_writer:
            positions[self.instance_name] = self.local
        return positions

    # -- events -----------------------------------------------------------------------

    def begin_fetch(self) -> int:
        """Record that ids are about to be fetched from the sequence.

        :return: a handle for :meth:`end_fetch`, which must be called afterwards.
        """
        self._last_fetch += 1
        self._fetches[self._last_fetch] = self.max_finished
        return self._last_fetch

    def is_usable(self, fetch: int, id_: int) -> bool:
        """Return whether a fetched id may be used.

        It may not be used if it is at or below the fetch's floor, or already known. In
        that case, either the sequence went backwards, or the id is the position of a
        stream without rows.
        """
        return (
            id_ > self.floor_of(fetch)
            and id_ > self.persisted_upto
            and id_ not in self._in_flight
            and id_ not in self._finished
        )

    def end_fetch(self, fetch: int, ids: Sequence[int]) -> None:
        """Record the ids that a fetch returned; none if it failed.

        :raises ValueError: if an id is not usable or occurs twice. In that case, the
            state is unchanged.
        """
        if len(set(ids)) != len(ids) or not all(
            self.is_usable(fetch, id_) for id_ in ids
        ):
            raise ValueError(f"ids {list(ids)} are duplicates or already known")
        del self._fetches[fetch]
        for id_ in ids:
            self._in_flight.add(id_)
            heappush(self._in_flight_heap, id_)
        if ids:
            self.set_allocated(max(ids))
        self._recompute()

    def finish(self, ids: Iterable[int]) -> None:
        """Record that ids of this instance are finished.

        :raises KeyError: if an id is not in flight.
        """
        for id_ in ids:
            self._in_flight.remove(id_)
            self._finish_own(id_)
        self._recompute()

    def advance(self, instance_name: str, id_: int) -> None:
        """Record a writer's announcement: the writer's ids up to ``id_`` are finished.

        Positions never fall. A smaller ``id_`` is only recorded as finished. If the
        stream declares its writers, announcements of undeclared instances are ignored.
        """
        if self._declared and instance_name not in self._declared:
            return
        if self.is_writer and instance_name == self.instance_name:
            if id_ > self.announced:
                self._finish_own(id_)
        elif id_ > self._others.get(instance_name, 0):
            if instance_name not in self._others:
                heappush(self._others_heap, (id_, instance_name))
            self._others[instance_name] = id_
            if id_ == self.persisted_upto + 1 and not (
                self._finished or self._in_flight_heap
            ):
                # Fast path: the next id, while no other id is finished or in flight.
                # Ids that are being fetched are greater.
                self.persisted_upto = id_
                if id_ > self.max_finished:
                    self.max_finished = id_
                if id_ > self.announced:
                    self.announced = id_
                return
        if id_ > self.persisted_upto:
            self._finished.add(id_)
        if id_ > self.max_finished:
            self.max_finished = id_
        self._recompute()

    def _finish_own(self, id_: int) -> None:
        self._finished.add(id_)
        heappush(self._own_finished, id_)
        self.max_finished = max(self.max_finished, id_)

    def _own_limit(self) -> int | None:
        """Return the id above which only persisted-up-to may be announced, if any."""
        lowest, floor = self.lowest_in_flight(), self.lowest_floor()
        if lowest is None:
            return floor
        return lowest - 1 if floor is None else min(lowest - 1, floor)

    def _announceable_upto(self, limit: int) -> int:
        """Return the greatest id of ``_finished`` up to ``limit``, or 0."""
        return self._finished.last_upto(limit) or 0

    def _slowest_other(self) -> int | None:
        heap, others = self._others_heap, self._others
        while heap:
            id_, writer = heap[0]
            if others[writer] == id_:
                return id_
            heapreplace(heap, (others[writer], writer))
        return None

    def _recompute(self) -> None:
        """Recompute this instance's positions and persisted-up-to."""
        # Comparisons instead of max() and min(), because this runs for every token.
        upto, announced = self.persisted_upto, self.announced
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
        if slowest is not None and slowest > upto:
            upto = slowest
        end = self._finished.end_of_gapless_range(upto)
        if end > upto:
            if self._in_flight_heap:
                # Another instance may learn that an id of this instance is committed
                # before this instance does, for instance by reading the table when it
                # starts. Do not advance over an id that is not finished here.
                end = min(end, self._in_flight_heap[0] - 1)
            if end > upto:
                upto = end
        self.persisted_upto = upto
        self.announced = announced = upto if upto > announced else announced
        # Ids at or below persisted-up-to are never looked up again.
        self._finished.forget_upto(upto)

        while self._own_finished and self._own_finished[0] <= announced:
            self.local = max(self.local, heappop(self._own_finished))
