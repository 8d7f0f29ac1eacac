"""Backlogs: the rows that a writer sent last, retained for readers that missed them.

Theory of operation: a :class:`StreamBacklog` holds, as JSON text, all rows of one
stream that this instance wrote in ``(start, end]``. A reader whose position is at or
above ``start`` can fetch its missing rows from here. The backlog cannot answer any
other reader.

The range never has a hole. Each addition states the token that precedes its first row.
If that token is not ``end``, rows may be missing in between, and the backlog restarts
with the addition. When a bound is exceeded, the oldest rows are removed, a whole token
at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import attrs

from synapse_replication.options import option
from synapse_replication.streams.pages import read_page
from synapse_replication.streams.stream import StreamUpdateResult

#: Approximate memory that a row takes in addition to its text, in bytes.
_ROW_OVERHEAD = 80


@attrs.frozen
class BacklogOptions:
    """The bounds of each stream's backlog.

    :ivar max_rows: the most rows that a writer retains of each stream, for readers that
        missed these rows; 0 for none.
    :ivar max_bytes: the approximate limit, in bytes, on the memory for the rows that a
        writer retains of each stream.
    :ivar page_rows: rows per page, which is also bounded by :data:`.PAGE_BYTES`. The
        rows of one token are never split.
    """

    max_rows: int = attrs.field(
        default=10_000, metadata=option("backlog_rows", minimum=0)
    )
    max_bytes: int = attrs.field(
        default=4 * 1024 * 1024, metadata=option("backlog_bytes", minimum=0)
    )
    page_rows: int = 1000


class StreamBacklog:
    """The rows of one stream that were sent last: those in ``(start, end]``.

    :ivar start: the exclusive lower bound; ``None`` until rows are added or a range is
        skipped.
    :ivar end: the inclusive upper bound; ``None`` as long as ``start`` is.
    :ivar rows: the number of rows.
    :ivar size: the approximate memory that the rows take, in bytes.
    """

    def __init__(self, options: BacklogOptions) -> None:
        self._options = options
        self._entries: deque[tuple[int, Sequence[bytes], int]] = deque()
        self.rows = 0
        self.size = 0
        self.start: int | None = None
        self.end: int | None = None

    def add(
        self, prev_token: int | None, batches: Sequence[tuple[int, Sequence[bytes]]]
    ) -> None:
        """Add rows that were sent.

        :param prev_token: a token such that no row lies between it and the first added
            row; ``None`` if no such token is known.
        :param batches: pairs of a token and the JSON texts of all its rows, in
            ascending order.
        """
        if not batches:
            return
        if prev_token is None or prev_token >= batches[0][0]:
            prev_token = batches[0][0] - 1
        if prev_token != self.end:
            self._begin(prev_token)
        for token, texts in batches:
            size = sum(map(len, texts)) + len(texts) * _ROW_OVERHEAD
            self._entries.append((token, texts, size))
            self.rows += len(texts)
            self.size += size
        self.end = batches[-1][0]
        self._remove_oldest()

    def resize(self, options: BacklogOptions) -> None:
        """Change the bounds. Smaller bounds remove the oldest rows immediately."""
        self._options = options
        self._remove_oldest()

    def _remove_oldest(self) -> None:
        options = self._options
        while self.rows > options.max_rows or self.size > options.max_bytes:
            self.start, texts, size = self._entries.popleft()
            self.rows -= len(texts)
            self.size -= size

    def skip_range(self, prev_token: int, new_token: int) -> None:
        """Record that there are no rows in ``(prev_token, new_token]``."""
        if prev_token != self.end:
            self._begin(prev_token)
        self.end = new_token

    def _begin(self, token: int) -> None:
        self._entries.clear()
        self.rows = self.size = 0
        self.start = self.end = token

    def read(self, from_token: int, upto_token: int) -> StreamUpdateResult | None:
        """Return one page of the rows in ``(from_token, upto_token]``.

        :return: ``None`` if the backlog begins after ``from_token``, or does not extend
            beyond ``from_token``.
        """
        if self.start is None or self.end is None:
            return None
        if not self.start <= from_token < self.end:
            return None
        found = ((at, texts) for at, texts, _ in self._entries if at > from_token)
        end = min(upto_token, self.end)
        page = read_page(found, from_token, end, self._options.page_rows)
        reached = page.upto_token
        return StreamUpdateResult(page.updates, reached, reached < upto_token)


class Backlog:
    """The backlogs of all streams that this instance writes, by name."""

    def __init__(self, options: BacklogOptions) -> None:
        self._options = options
        self._streams: dict[str, StreamBacklog] = {}

    def of(self, stream_name: str) -> StreamBacklog:
        """Return the backlog of a stream; the first call creates it, empty."""
        backlog = self._streams.get(stream_name)
        if backlog is None:
            backlog = self._streams[stream_name] = StreamBacklog(self._options)
        return backlog

    def resize(self, options: BacklogOptions) -> None:
        """Change the bounds of all streams, including those added later."""
        self._options = options
        for backlog in self._streams.values():
            backlog.resize(options)

    def __iter__(self) -> Iterator[tuple[str, StreamBacklog]]:
        """Iterate over pairs of a stream's name and its backlog."""
        return iter(self._streams.items())

    def read(
        self, stream_name: str, from_token: int, upto_token: int
    ) -> StreamUpdateResult | None:
        """Return a page of a stream, or ``None``; see :meth:`StreamBacklog.read`."""
        backlog = self._streams.get(stream_name)
        return None if backlog is None else backlog.read(from_token, upto_token)
