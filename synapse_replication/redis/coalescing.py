"""A buffer of messages that are published in quick succession.

Theory of operation: after an idle period, the sender writes a message immediately,
unless the message belongs to the extension. The sender buffers messages of the
extension, and all messages published within :data:`COALESCE_WINDOW` after a write, and
writes them together in the reactor's next turn. On a transport without a socket, the
sender writes every message immediately. While the transport is paused, all messages
remain buffered.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from twisted.internet.interfaces import IDelayedCall, IReactorTime

from synapse_replication.redis.ledger import Publish

#: Messages published within this time after a write, in s, are coalesced.
COALESCE_WINDOW = 0.0005


class Coalescer:
    """A buffer of messages to be written.

    :param flush: called in the reactor turn after :meth:`flush_later`; it calls
        :meth:`take`.
    :ivar pending: the buffered messages, in order.
    :ivar size: their total size in bytes.
    """

    def __init__(self, clock: IReactorTime, flush: Callable[[], object]) -> None:
        self._clock = clock
        self._flush = flush
        self._call: IDelayedCall | None = None
        self._last_write = -math.inf
        self.pending: list[Publish] = []
        self.size = 0

    def add(self, publish: Publish) -> None:
        """Append messages to the buffer."""
        self.pending.append(publish)
        self.size += sum(map(len, publish.lines))

    def is_quiet(self) -> bool:
        """Return whether the window after the last write has elapsed."""
        return self._clock.seconds() - self._last_write > COALESCE_WINDOW

    def record_write(self) -> None:
        """Restart the window, as after a write."""
        self._last_write = self._clock.seconds()

    def flush_later(self) -> None:
        """Schedule a flush in the reactor's next turn, unless one is scheduled."""
        if self._call is None:
            self._call = self._clock.callLater(0, self._flush_now)

    def _flush_now(self) -> None:
        self._call = None
        self._flush()

    def take(self) -> list[Publish]:
        """Empty the buffer, return its messages, and restart the window."""
        self._last_write = self._clock.seconds()
        if self._call is not None:
            self._call.cancel()
            self._call = None
        pending, self.pending, self.size = self.pending, [], 0
        return pending
