"""What a writer sent last, kept for readers that missed it.

Theory of operation: a :class:`StreamBacklog` holds the rows of one stream that this
process sent, as JSON text, in ``(start, end]``, and knows that there were no others of
it in that range. A reader that lacks rows after ``start`` gets them from here; one that
lacks more asks the database.

The range never has a hole. Each addition says from which token it goes on; if that is
not where the backlog ends, something was skipped unseen, and it begins anew. What
is over the bound is forgotten from the old end, a whole token at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import attrs

from synapse_replication.streams.rows import decode_json
from synapse_replication.streams.stream import JsonValue, StreamUpdateResult

__all__ = ["Backlog", "BacklogOptions", "StreamBacklog"]

#: What a row costs in memory besides its text, bytes, about.
_ROW_OVERHEAD = 80


@attrs.frozen
class BacklogOptions:
    """The bounds of each stream's backlog.

    :ivar max_rows: rows at most; 0 keeps nothing.
    :ivar max_bytes: memory at most, about.
    :ivar page_rows: rows in one answer. A token with more is answered whole.
    """

    max_rows: int = 10_000
    max_bytes: int = 4 * 1024 * 1024
    page_rows: int = 1000


class StreamBacklog:
    """The rows of one stream that were sent last.

    :ivar start: rows above it are here; ``None`` before the first addition.
    :ivar end: rows up to it are here.
    """

    def __init__(self, options: BacklogOptions) -> None:
        self._options = options
        self._entries: deque[tuple[int, Sequence[bytes], int]] = deque()
        self._rows = 0
        self._bytes = 0
        self.start: int | None = None
        self.end: int | None = None

    @property
    def rows(self) -> int:
        """How many there are."""
        return self._rows

    @property
    def size(self) -> int:
        """How much memory they take, in bytes, about."""
        return self._bytes

    def add(
        self, prev_token: int | None, batches: Sequence[tuple[int, Sequence[bytes]]]
    ) -> None:
        """Take rows that were sent.

        :param prev_token: there is no other row between it and the first of these;
            ``None`` if that is not known.
        :param batches: a token and the JSON texts of all its rows, ascending.
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
            self._rows += len(texts)
            self._bytes += size
        self.end = batches[-1][0]
        self._forget_the_oldest()

    def resize(self, options: BacklogOptions) -> None:
        """Have other bounds from now on. Less room forgets the oldest rows."""
        self._options = options
        self._forget_the_oldest()

    def _forget_the_oldest(self) -> None:
        options = self._options
        while self._rows > options.max_rows or self._bytes > options.max_bytes:
            self.start, texts, size = self._entries.popleft()
            self._rows -= len(texts)
            self._bytes -= size

    def skip_range(self, prev_token: int, new_token: int) -> None:
        """Record that there are no rows in ``(prev_token, new_token]``."""
        if prev_token != self.end:
            self._begin(prev_token)
        self.end = new_token

    def _begin(self, token: int) -> None:
        self._entries.clear()
        self._rows = self._bytes = 0
        self.start = self.end = token

    def read(self, from_token: int, upto_token: int) -> StreamUpdateResult | None:
        """Return the rows in ``(from_token, upto_token]``, one page.

        :return: ``None`` if they are not all here, up to where this process got.
        """
        if self.start is None or self.end is None:
            return None
        if not self.start <= from_token < self.end:
            return None
        reached = min(upto_token, self.end)
        updates: list[tuple[int, JsonValue]] = []
        last = from_token
        for token, texts, _ in self._entries:
            if token <= from_token:
                continue
            if token > reached:
                break
            if len(updates) >= self._options.page_rows:
                return StreamUpdateResult(updates, last, True)
            updates += [(token, decode_json(text)) for text in texts]
            last = token
        return StreamUpdateResult(updates, reached, reached < upto_token)


class Backlog:
    """The backlogs of all streams that a process writes, by name."""

    def __init__(self, options: BacklogOptions) -> None:
        self._options = options
        self._streams: dict[str, StreamBacklog] = {}

    def of(self, stream_name: str) -> StreamBacklog:
        """Return the backlog of a stream; an empty one at first."""
        backlog = self._streams.get(stream_name)
        if backlog is None:
            backlog = self._streams[stream_name] = StreamBacklog(self._options)
        return backlog

    def resize(self, options: BacklogOptions) -> None:
        """Return all streams other bounds, those that come later too."""
        self._options = options
        for backlog in self._streams.values():
            backlog.resize(options)

    def __iter__(self) -> Iterator[tuple[str, StreamBacklog]]:
        """Return each stream's name and backlog."""
        return iter(self._streams.items())

    def read(
        self, stream_name: str, from_token: int, upto_token: int
    ) -> StreamUpdateResult | None:
        """Return a page of a stream, or ``None``; see :meth:`StreamBacklog.read`."""
        backlog = self._streams.get(stream_name)
        return None if backlog is None else backlog.read(from_token, upto_token)
