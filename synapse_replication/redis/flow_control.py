"""Flow control of publishes: decides whether Redis is behind.

Theory of operation: rows may be produced faster than Redis processes them, and queued
publishes delay everything that is published after them. A sender is therefore *behind*
while the transport's buffer is full or :data:`HIGH_WATERMARK` publishes or more are
unacknowledged. If a producer of rows finds that the sender is behind, the producer
waits. It is notified when the buffer is not full and at most :data:`LOW_WATERMARK`
publishes are unacknowledged: at that number, Redis still has work to do while the next
page of rows is read. While there is other traffic that would be delayed, lower limits
apply.

:class:`PublishFlowControl` is pure and has no clock: events and times are passed to its
methods.
"""

from __future__ import annotations

import math

#: Limits of unacknowledged publishes. 1,000 publishes are 3 ms of work for Redis, or
#: more on a busy machine, where lower limits would reduce the throughput by a fifth.
HIGH_WATERMARK, LOW_WATERMARK = 1_000, 500
#: The limits while there is traffic other than pages of rows: pages should delay this
#: traffic by less than 1 ms.
SHARED_HIGH_WATERMARK, SHARED_LOW_WATERMARK = 250, 100
#: A publish of fewer lines than this counts as other traffic, not as a page of rows,
#: unless the lines belong to the extension.
SHORT_LINES = 10
#: The time for which the lower limits apply after other traffic, in s.
SHARED_WINDOW = 0.5


class PublishFlowControl:
    """The flow control of one sender. All times are those of the reactor, in s.

    :ivar is_paused: whether the transport's buffer is full.
    :ivar was_behind: whether the sender was behind and its waiters have not been
        notified since.
    """

    def __init__(self) -> None:
        self.is_paused = False
        self.was_behind = False
        self._shared_until = -math.inf

    def is_behind(self, unacknowledged: int, now: float) -> bool:
        """Return whether the sender is behind, so that pages of rows must wait."""
        limit = SHARED_HIGH_WATERMARK if now < self._shared_until else HIGH_WATERMARK
        return self.is_paused or unacknowledged >= limit

    def update(self, unacknowledged: int, now: float) -> None:
        """Set :attr:`was_behind` if the sender is behind."""
        self.was_behind = self.was_behind or self.is_behind(unacknowledged, now)

    def record_other_traffic(self, unacknowledged: int, now: float) -> None:
        """Record other traffic, which lowers the limits for a while."""
        self._shared_until = now + SHARED_WINDOW
        # The sender may exceed the lower limit already.
        if unacknowledged >= SHARED_HIGH_WATERMARK:
            self.was_behind = True

    def pause(self) -> None:
        """Record that the transport's buffer is full."""
        self.is_paused = self.was_behind = True

    def resume(self) -> None:
        """Record that the transport accepts data again, or was closed or replaced."""
        self.is_paused = False

    def take_ready(self, unacknowledged: int, now: float) -> bool:
        """Return whether waiters must be notified that the sender is ready for a page.

        The result is true once after each period in which the sender was behind: when
        the buffer is not full, and at most :data:`LOW_WATERMARK` publishes (or
        :data:`SHARED_LOW_WATERMARK`, while it applies) are unacknowledged.
        """
        limit = SHARED_LOW_WATERMARK if now < self._shared_until else LOW_WATERMARK
        if self.was_behind and not self.is_paused and unacknowledged <= limit:
            self.was_behind = False
            return True
        return False
