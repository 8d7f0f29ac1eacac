"""Positions that any thread may use: :class:`LockedPositions`.

Theory of operation: whoever uses the positions holds a lock. Ids must be finished even
where waiting is not allowed: a coroutine may be collected while this very thread holds
the lock. So finishing never waits for it: ids are put down, and whoever holds the lock
finishes them after letting go.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager

from synapse_replication.streams.positions import WriterPositions

__all__ = ["LockedPositions"]


class LockedPositions:
    """The positions of one stream, and their lock.

    Every method may be called in any thread.
    """

    def __init__(self, positions: WriterPositions) -> None:
        self._positions = positions
        self._lock = threading.Lock()
        self._put_down: deque[list[int]] = deque()

    @property
    def max_finished(self) -> int:
        """The greatest finished id, as far as this thread knows without the lock."""
        return self._positions.max_finished

    @contextmanager
    def locked(self) -> Generator[WriterPositions, None, None]:
        """Hold the lock while the context lasts."""
        try:
            with self._lock:
                yield self._positions
        finally:
            self._finish_put_down()

    def finish(self, ids: list[int]) -> None:
        """Finish ids, without waiting; at the latest when the lock is let go."""
        self._put_down.append(ids)
        self._finish_put_down()

    def _finish_put_down(self) -> None:
        # Whoever holds the lock comes by here after letting go.
        while self._put_down and self._lock.acquire(blocking=False):
            try:
                while self._put_down:
                    self._positions.finish(self._put_down.popleft())
            finally:
                self._lock.release()
