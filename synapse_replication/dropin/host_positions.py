"""Positions of writers, with the host's rules where they differ from this package's.

The rules were determined by driving an installed Synapse with a real sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop

from synapse_replication.streams.writer_positions import FIRST_POSITION, WriterPositions


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
