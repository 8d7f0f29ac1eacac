"""Whether Redis is behind with what was published.

Theory of operation: rows may come faster than Redis takes them, and what waits there
delays all that is published after it. So a sender is *behind* from
:data:`HIGH_WATERMARK` publishes that were not answered, or when the transport is full,
until few are left: then it says so, while Redis still has work to do. It is behind
sooner while there is something that would be delayed.

:class:`Pacing` has no effects and no clock: it is told what happened, and when.
"""

from __future__ import annotations

import math

__all__ = [
    "HIGH_WATERMARK",
    "LOW_WATERMARK",
    "SHARED_HIGH_WATERMARK",
    "SHARED_LOW_WATERMARK",
    "SHARED_WINDOW",
    "SHORT_LINES",
    "Pacing",
]

#: So many publishes without an answer are much, and so many are few: 3 ms of Redis's
#: work, more when processors are short. Fewer cost a fifth of the rows a second there.
HIGH_WATERMARK, LOW_WATERMARK = 1_000, 500
#: The same while other things are published between the long pages: those are to wait
#: for less than 1 ms.
SHARED_HIGH_WATERMARK, SHARED_LOW_WATERMARK = 250, 100
#: Fewer lines at once are no part of a long page; then there is other traffic for so
#: long, s.
SHORT_LINES = 10
SHARED_WINDOW = 0.5


class Pacing:
    """The pace of one sender. All times are monotonic, in s.

    :ivar is_paused: the transport is full.
    :ivar was_behind: it was behind, and who waits is still to be notified that it is
        so no more.
    """

    def __init__(self) -> None:
        self.is_paused = False
        self.was_behind = False
        self._shared_until = -math.inf

    def is_behind(self, unacknowledged: int, now: float) -> bool:
        """Return whether so much is unacknowledged that more would only wait."""
        much = SHARED_HIGH_WATERMARK if now < self._shared_until else HIGH_WATERMARK
        return self.is_paused or unacknowledged >= much

    def observe(self, unacknowledged: int, now: float) -> None:
        """Remember whether it is behind now."""
        self.was_behind = self.was_behind or self.is_behind(unacknowledged, now)

    def share(self, unacknowledged: int, now: float) -> None:
        """Record something short, which long pages must not delay for a while."""
        self._shared_until = now + SHARED_WINDOW
        # Who looks now may find it behind where it was not.
        if unacknowledged >= SHARED_HIGH_WATERMARK:
            self.was_behind = True

    def pause(self) -> None:
        """Record that the transport is full."""
        self.is_paused = self.was_behind = True

    def resume(self) -> None:
        """Record that the transport takes more, or is gone."""
        self.is_paused = False

    def becomes_ready(self, unacknowledged: int, now: float) -> bool:
        """Return, once each time, whether it was behind and is so no more."""
        few = SHARED_LOW_WATERMARK if now < self._shared_until else LOW_WATERMARK
        if self.was_behind and not self.is_paused and unacknowledged <= few:
            self.was_behind = False
            return True
        return False
