"""Thread-safe access to a stream's positions: :class:`LockedPositions`.

Theory of operation: a lock protects the positions. Ids must be finished even where
blocking is not allowed. For instance, the garbage collector may close a coroutine in
the thread that holds the lock, and closing the coroutine finishes its ids. So
:meth:`LockedPositions.finish` never waits: it enqueues the ids. They are finished by
the holder of the lock after releasing it, or by the next holder.
"""

from __future__ import annotations

import threading

from synapse_replication.streams.writer_positions import WriterPositions


class LockedPositions:
    """The positions of one stream, and their lock. All methods are thread-safe.

    As a context manager, it holds the lock and yields the positions.
    """

    def __init__(self, positions: WriterPositions) -> None:
        self._positions = positions
        self._lock = threading.Lock()
        self._to_finish: list[list[int]] = []

    @property
    def max_finished(self) -> int:
        """The greatest finished id; perhaps outdated, because it is read unlocked."""
        return self._positions.max_finished

    def __enter__(self) -> WriterPositions:
        self._lock.acquire()
        # The previous holder may not have finished the enqueued ids yet. A caller that
        # has enqueued an id must not read, and then persist, positions without that id.
        if self._to_finish:
            self._finish_locked()
        return self._positions

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._lock.release()
        self._finish_pending()

    def finish(self, ids: list[int]) -> None:
        """Finish ids without blocking: now, or when the lock is released."""
        self._to_finish.append(ids)
        self._finish_pending()

    def _finish_pending(self) -> None:
        # If another caller holds the lock, it calls this method after releasing it.
        while self._to_finish and self._lock.acquire(blocking=False):
            try:
                self._finish_locked()
            finally:
                self._lock.release()

    def _finish_locked(self) -> None:
        while self._to_finish:
            self._positions.finish(self._to_finish.pop(0))
