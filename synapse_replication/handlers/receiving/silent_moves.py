"""Tracks ranges that a position skipped without rows, so that it can be reverted.

Theory of operation: a POSITION, or the end of a catch-up, advances a reader over tokens
without rows. If that position was false, the rows of these tokens arrive later and look
like late rows. :class:`SilentMoves` stores, for each writer, the last range that was
skipped without a row (a *stretch*). No row in it was delivered, so fetching again from
its start neither repeats nor loses a row. There is no cost per row: a stretch is valid
only while the reader's position is at its end.

A stretch covers between one and two :data:`WINDOW_SECONDS`, so that checking a writer
that was idle for days does not query the range of all those days.
"""

from __future__ import annotations

import attrs

__all__ = ["WINDOW_SECONDS", "SilentMoves"]

#: The least time in s for which a move can be reverted.
WINDOW_SECONDS = 60.0

#: The least time between two checks of a stretch with the source, in s.
CHECK_SECONDS = 1.0

#: The most writers that are tracked; beyond it, the least recent one is evicted.
MAX_WRITERS = 1000


@attrs.define
class _Stretch:
    start: int
    middle: int
    since: float
    end: int
    check_from: float = 0.0


class SilentMoves:
    """The last range that each writer of one stream skipped without a row."""

    def __init__(self) -> None:
        self._stretches: dict[str, _Stretch] = {}

    def moved(self, instance_name: str, start: int, end: int, now: float) -> None:
        """Record that a position moved from ``start`` to ``end`` without a row.

        :param now: monotonic time in s.
        """
        stretch = self._stretches.pop(instance_name, None)
        if stretch is None or stretch.end != start:
            stretch = _Stretch(start, start, now, end)
            if len(self._stretches) >= MAX_WRITERS:
                del self._stretches[next(iter(self._stretches))]
        elif now - stretch.since > WINDOW_SECONDS:
            stretch.start, stretch.middle, stretch.since = stretch.middle, start, now
        stretch.end = end
        self._stretches[instance_name] = stretch

    def start_of(self, instance_name: str, position: int) -> int:
        """Return the token above which no row up to ``position`` was delivered.

        This is ``position`` itself if a row reached it, or if its stretch is unknown.
        """
        stretch = self._stretches.get(instance_name)
        if stretch is None or stretch.end != position:
            return position
        return min(stretch.start, position)

    def start_to_check(self, instance_name: str, position: int, now: float) -> int:
        """Return the same as :meth:`start_of`, or ``position`` if it was just checked.

        :param now: monotonic time in s.
        """
        stretch = self._stretches.get(instance_name)
        if stretch is None or stretch.end != position or now < stretch.check_from:
            return position
        stretch.check_from = now + CHECK_SECONDS
        return min(stretch.start, position)

    def delivered(self, instance_name: str, token: int) -> None:
        """Record that late rows of a stretch, up to ``token``, have been delivered."""
        stretch = self._stretches.get(instance_name)
        if stretch is not None:
            stretch.start = max(stretch.start, token)
            stretch.middle = max(stretch.middle, token)

    def forget(self, instance_name: str) -> None:
        """Remove the stretch of a writer, because its position was reverted."""
        self._stretches.pop(instance_name, None)
