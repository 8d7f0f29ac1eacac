"""Records of the ranges over which a position advanced without rows.

A position that proves false is reverted to the start of its range.

Theory of operation: a POSITION, or the end of a catch-up, may advance a reader over
tokens for which it has received no rows. Such an advance is a *move*. If the new
position is false, the rows of these tokens arrive later and look like late rows.
:class:`SilentMoves` stores, for each writer, the last range of consecutive moves. No
row in this range was delivered, so fetching again from its start neither repeats nor
loses a row. There is no cost per row: a range is valid only while the reader's position
is at its end.

A range contains at least the moves of the last :data:`WINDOW_SECONDS`. Older moves are
removed from it, after some delay, when further moves are added. If they were not
removed, the check of a writer that was idle for days would query the tokens of all
these days.
"""

from __future__ import annotations

import attrs

__all__ = ["WINDOW_SECONDS", "SilentMoves"]

#: The minimum time for which a move can be reverted, in s, if no row follows it and its
#: range is not evicted.
WINDOW_SECONDS = 60.0

#: The shortest interval between two queries to the source about a range, in s.
CHECK_SECONDS = 1.0

#: The largest number of tracked writers. Beyond it, the writer whose last recorded move
#: is the oldest is evicted.
MAX_WRITERS = 1000


@attrs.define
class _SkippedRange:
    start: int
    middle: int
    since: float
    end: int
    check_from: float = 0.0


class SilentMoves:
    """For each writer of a stream, the last range of consecutive moves."""

    def __init__(self) -> None:
        self._ranges: dict[str, _SkippedRange] = {}

    def moved(self, instance_name: str, start: int, end: int, now: float) -> None:
        """Record that a position moved from ``start`` to ``end`` without a row.

        :param now: the time of the host's clock, in s.
        """
        skipped = self._ranges.pop(instance_name, None)
        if skipped is None or skipped.end != start:
            skipped = _SkippedRange(start, start, now, end)
            if len(self._ranges) >= MAX_WRITERS:
                del self._ranges[next(iter(self._ranges))]
        elif now - skipped.since > WINDOW_SECONDS:
            skipped.start, skipped.middle, skipped.since = skipped.middle, start, now
        skipped.end = end
        self._ranges[instance_name] = skipped

    def start_of(self, instance_name: str, position: int) -> int:
        """Return the start of the range that ends at ``position``.

        No row above the start, up to ``position``, was delivered. The start is
        ``position`` itself if a row reached it, or if no range is stored.
        """
        skipped = self._ranges.get(instance_name)
        if skipped is None or skipped.end != position:
            return position
        return min(skipped.start, position)

    def start_to_check(self, instance_name: str, position: int, now: float) -> int:
        """Return the token above which to query the source about a position.

        This is the result of :meth:`start_of`, or ``position`` if the range was checked
        within the last :data:`CHECK_SECONDS`.

        :param now: the time of the host's clock, in s.
        """
        skipped = self._ranges.get(instance_name)
        if skipped is None or skipped.end != position or now < skipped.check_from:
            return position
        skipped.check_from = now + CHECK_SECONDS
        return min(skipped.start, position)

    def delivered(self, instance_name: str, token: int) -> None:
        """Record that late rows of a range, up to ``token``, have been delivered."""
        skipped = self._ranges.get(instance_name)
        if skipped is not None:
            skipped.start = max(skipped.start, token)
            skipped.middle = max(skipped.middle, token)

    def forget(self, instance_name: str) -> None:
        """Remove the range of a writer, because its position was reverted."""
        self._ranges.pop(instance_name, None)
