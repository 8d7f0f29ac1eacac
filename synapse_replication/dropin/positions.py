"""Positions of writers, where a host's rules differ from ours.

Found by driving the installed package from outside, with ids on a real sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop

from synapse_replication.streams.positions import FIRST_POSITION, WriterPositions

__all__ = ["HostPositions"]


class HostPositions(WriterPositions):
    """Where each writer stands, as a host expects it.

    - An unwritten stream stands at 1, and 1 is usable: a host's own sequences begin
      at 2, so that one that gives 1 is not used for replication.
    - While ids of ours are in flight, what others finish does not move what we
      announce; once none is, it does. Slower than our own rule, and as safe.
    """

    _first_is_taken = False

    def is_usable(self, fetch: int, id_: int) -> bool:
        """Return whether an id that was given may be used."""
        if id_ != FIRST_POSITION or self._first_is_taken:
            return super().is_usable(fetch, id_)
        return self._fetches[fetch] <= FIRST_POSITION and id_ not in self._in_flight

    def end_fetch(self, fetch: int, ids: Sequence[int]) -> None:
        """Record which ids a fetch brought, or that it failed (none)."""
        super().end_fetch(fetch, ids)
        self._first_is_taken = self._first_is_taken or FIRST_POSITION in ids

    def _announceable_upto(self, limit: int) -> int:
        while self._own_finished and self._own_finished[0] <= limit:
            self._local = max(self._local, heappop(self._own_finished))
        return self._local
