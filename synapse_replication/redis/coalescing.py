"""Gathering what is published within a turn of the reactor into one write.

Theory of operation: what is published after a moment of silence is written at once;
what follows soon is gathered until the end of the turn of the reactor, and written
together: it leaves no later than if the socket had been given it at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from twisted.internet.interfaces import IDelayedCall, IReactorTime

from synapse_replication.redis.ledger import Publish

__all__ = ["COALESCE_WINDOW", "Coalescer"]

#: What is published within so many s after a write is gathered until the turn's end.
COALESCE_WINDOW = 0.0005


class Coalescer:
    """What waits to be written.

    :param flush: called at the end of the turn, if anything was left for then.
    :ivar pending: what waits, in order.
    :ivar size: the bytes of its lines.
    """

    def __init__(self, clock: IReactorTime, flush: Callable[[], object]) -> None:
        self._clock = clock
        self._flush = flush
        self._call: IDelayedCall | None = None
        self._last_write = -math.inf
        self.pending: list[Publish] = []
        self.size = 0

    def add(self, publish: Publish) -> None:
        """Put lines behind those that wait."""
        self.pending.append(publish)
        self.size += sum(map(len, publish.lines))

    def is_quiet(self) -> bool:
        """Return whether nothing was written just now."""
        return self._clock.seconds() - self._last_write > COALESCE_WINDOW

    def record_write(self) -> None:
        """Gather from now on: something is about to be written."""
        self._last_write = self._clock.seconds()

    def flush_later(self) -> None:
        """Have what waits flushed at the end of this turn of the reactor."""
        if self._call is None:
            self._call = self._clock.callLater(0, self._flush_now)

    def _flush_now(self) -> None:
        self._call = None
        self._flush()

    def take(self) -> list[Publish]:
        """Take out all that waits: it is written, or lost with its connection."""
        self._last_write = self._clock.seconds()
        if self._call is not None:
            self._call.cancel()
            self._call = None
        pending, self.pending, self.size = self.pending, [], 0
        return pending
