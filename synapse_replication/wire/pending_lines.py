"""A connection's buffer of lines to be written: :class:`PendingLines`."""

from __future__ import annotations

from collections import deque
from typing import Final

import attrs

from synapse_replication.options import option

#: The approximate size of one write, in bytes.
WRITE_SIZE: Final = 65536


@attrs.frozen
class PendingLimit:
    """Limit of the lines that are buffered for a peer that reads too slowly.

    :ivar lines: the most commands queued for a peer that reads too slowly; if there are
        more, the connection is closed.
    :ivar bytes: the most bytes queued for a peer that reads too slowly, line ends
        included; if there are more, the connection is closed.
    """

    lines: int = attrs.field(
        default=10_000, metadata=option("max_pending_commands", minimum=100)
    )
    # The minimum suffices for four lines of the maximum length.
    bytes: int = attrs.field(
        default=16 * 1024 * 1024,
        metadata=option("max_pending_bytes", minimum=64 * 1024),
    )


class PendingLines:
    """The lines of one connection that have not been written yet, in order.

    :ivar lines: their number.
    :ivar bytes: their total size in bytes, line ends included.
    """

    def __init__(self, limit: PendingLimit) -> None:
        self._limit = limit
        # Each item is a number of lines, and these lines with their ends.
        self._chunks: deque[tuple[int, bytes]] = deque()
        self.lines = self.bytes = 0

    def has_room(self, count: int, size: int) -> bool:
        """Return whether ``count`` more lines, of ``size`` bytes in total, fit."""
        return (
            self.lines + count <= self._limit.lines
            and self.bytes + size <= self._limit.bytes
        )

    def add(self, count: int, data: bytes) -> None:
        """Append ``count`` lines.

        :param data: the lines with their ends.
        """
        self._chunks.append((count, data))
        self.lines += count
        self.bytes += len(data)

    def take(self, *, everything: bool) -> bytes:
        """Remove and return lines, without splitting the lines of one :meth:`add`.

        :param everything: whether to return all lines; otherwise, stop when they have
            at least 64 KiB.
        """
        chunks = []
        size = 0
        while self._chunks and (size < WRITE_SIZE or everything):
            count, data = self._chunks.popleft()
            self.lines -= count
            self.bytes -= len(data)
            chunks.append(data)
            size += len(data)
        return b"".join(chunks)

    def clear(self) -> None:
        """Drop all lines."""
        self._chunks.clear()
        self.lines = self.bytes = 0
