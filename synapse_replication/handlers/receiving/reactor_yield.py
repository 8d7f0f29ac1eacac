"""Limits how long rows are handled before yielding to the reactor."""

from __future__ import annotations

from synapse_replication.handlers.interfaces import Clock

#: If no work was counted for this time, in s, the reactor has probably run in the
#: meantime, so no break is due.
_IDLE = 0.0005


class ReactorYielder:
    """Limiter of the work that is done on rows before yielding to the reactor.

    All streams of a process share this object: the data of one socket read often
    belongs to many streams, none of which would exceed the limits by itself.

    :param max_rows: the number of rows after which a break is due.
    :param max_seconds: the time of continuous work after which a break is due, in s.
    """

    def __init__(self, clock: Clock, max_rows: int, max_seconds: float) -> None:
        self._clock = clock
        self._max_rows = max_rows
        self._max_seconds = max_seconds
        self._breaks = 0
        self._reset()

    def _reset(self) -> None:
        self._rows = 0
        self._started = self._last_work = self._clock.seconds()

    def count(self, rows: int) -> None:
        """Count rows, or other items, that were handled since the last break."""
        self._rows += rows
        self._last_work = self._clock.seconds()

    def is_due(self) -> bool:
        """Return whether a break is due. Call it before each piece of work."""
        now = self._clock.seconds()
        if now - self._last_work > _IDLE:
            self._reset()
        return self._rows >= self._max_rows or now - self._started >= self._max_seconds

    async def take_break(self) -> None:
        """Yield to the reactor once, and reset the counts."""
        breaks = self._breaks
        await self._clock.sleep(0)
        # Several queues may wait in the same break; only the first one that resumes
        # resets the counts.
        if self._breaks == breaks:
            self._breaks += 1
            self._reset()
