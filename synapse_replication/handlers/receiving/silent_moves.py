"""Where positions moved without a row: what may be taken back.

Theory of operation: a POSITION, or the end of a catch-up, moves a reader past tokens
without rows. If it was false, the rows of these tokens arrive later, and look old.
:class:`SilentMoves` remembers, of each writer, the last stretch that was passed without
a row. No row in it was delivered, so to go back to its beginning doubles none, and
fetching from there loses none. It costs nothing per row: a stretch counts only while
the reader stands at its end.

A stretch reaches back for one to two :data:`WINDOW_SECONDS`; a writer that has been
idle for days is not searched for days.
"""

from __future__ import annotations

import attrs

__all__ = ["WINDOW_SECONDS", "SilentMoves"]

#: Moves that were made longer ago, in s, are not taken back.
WINDOW_SECONDS = 60.0

#: A stretch is checked no more often than once in so many s.
CHECK_SECONDS = 1.0

#: Writers that are remembered; beyond, the one that moved longest ago is forgotten.
MAX_WRITERS = 1000


@attrs.define
class _Stretch:
    start: int
    middle: int
    since: float
    end: int
    check_from: float = 0.0


class SilentMoves:
    """The last silent stretch of each writer of one stream."""

    def __init__(self) -> None:
        self._stretches: dict[str, _Stretch] = {}

    def moved(self, instance_name: str, start: int, end: int, now: float) -> None:
        """Record a move without a row.

        :param now: monotonic, in s.
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
        """Return the token above which nothing was delivered, up to ``position``.

        It is ``position`` itself if that was reached by a row, or is not known.
        """
        stretch = self._stretches.get(instance_name)
        if stretch is None or stretch.end != position:
            return position
        return min(stretch.start, position)

    def start_to_check(self, instance_name: str, position: int, now: float) -> int:
        """Return what :meth:`start_of` does, or ``position`` if it was asked just now.

        :param now: monotonic, in s.
        """
        stretch = self._stretches.get(instance_name)
        if stretch is None or stretch.end != position or now < stretch.check_from:
            return position
        stretch.check_from = now + CHECK_SECONDS
        return min(stretch.start, position)

    def delivered(self, instance_name: str, token: int) -> None:
        """Record that the rows of a stretch up to ``token`` were delivered late."""
        stretch = self._stretches.get(instance_name)
        if stretch is not None:
            stretch.start = max(stretch.start, token)
            stretch.middle = max(stretch.middle, token)

    def forget(self, instance_name: str) -> None:
        """Forget the stretch of a writer: it was taken back."""
        self._stretches.pop(instance_name, None)
