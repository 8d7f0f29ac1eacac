"""A stream that is held in its writer's memory, such as ``typing``.

Theory of operation: the writer keeps its newest rows in a log with a bound on
rows and on bytes; what is over it is forgotten from the old end, a whole token
at a time. Readers take rows as they come, and ask the writer's process for those
that they missed.

A reader that asks for what was forgotten has missed rows for good, and is never
told otherwise:

* If the stream has a ``key`` (for ``typing``, the room), a row says all there is
  to say about its key, and replaces the older rows of the same key. The newest
  forgotten row of each key is kept, and such a reader is brought up to date with
  these: a full resync.
* Else the request fails with :exc:`CatchUpError`, which names what is gone.

A reader at 0 has read nothing yet, and gets what there is; it does not miss what
was before its time.

When the writer starts again, so do its tokens, from 0. Readers
learn of it by a POSITION, go back to 0 and fetch what little the new process has:
:meth:`MemoryStream.advance` accepts a lower token therefore.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import attrs

from synapse_replication.errors import (
    CatchUpError,
    LocalProtocolError,
    StreamConfigurationError,
)
from synapse_replication.streams.between import PositionedRow, RowsBetween
from synapse_replication.streams.catchup import check_page
from synapse_replication.streams.positions import PLAUSIBLE_DISTANCE
from synapse_replication.streams.rows import decode_json
from synapse_replication.streams.stream import (
    JsonValue,
    StreamDescription,
    StreamUpdateResult,
    UpdateFunction,
)
from synapse_replication.streams.tokens import (
    MultiWriterStreamToken,
    PersistedPosition,
)

__all__ = ["MemoryStream"]


@attrs.frozen
class _Entry:
    """The rows of one token, as JSON text, with the key of each."""

    token: int
    texts: tuple[bytes, ...]
    keys: tuple[Hashable, ...]
    size: int


class MemoryStream:
    """A :class:`~synapse_replication.streams.stream.Stream` in memory.

    :param description: the facts about it.
    :param instance_name: this process.
    :param fetch: asks a writer's process for its rows; ``None`` if this process
        is the only writer, or never reads.
    :param key: what a row is about, of a row of the stream's type; ``None`` if a
        row does not replace older ones.
    :param max_rows: rows in the log, and keys beyond it, at most.
    :param max_bytes: JSON text in the log at most. The newest token is kept
        whatever its size.
    :param page_rows: rows in a page of catch-up.
    :param on_write: called after each :meth:`write`, for instance to wake the
        streamer.
    """

    def __init__(
        self,
        description: StreamDescription,
        *,
        instance_name: str,
        fetch: UpdateFunction | None = None,
        key: Callable[[Any], Hashable] | None = None,
        max_rows: int = 10_000,
        max_bytes: int = 8 * 1024 * 1024,
        page_rows: int = 1000,
        on_write: Callable[[], object] | None = None,
    ) -> None:
        for name, value in (
            ("max_rows", max_rows),
            ("max_bytes", max_bytes),
            ("page_rows", page_rows),
        ):
            if value < 1:
                raise StreamConfigurationError(
                    f"stream {description.name}: {name} is {value}; write 1 or more"
                )
        self._description = description
        self._instance_name = instance_name
        self._fetch = fetch
        self._key = key
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._page_rows = page_rows
        self._on_write = on_write

        self._positions: dict[str, int] = {instance_name: 0}
        self._log: deque[_Entry] = deque()
        self._rows = 0
        self._bytes = 0
        # The newest forgotten row of each key, in ascending order of token.
        self._replaced: dict[Hashable, tuple[int, bytes]] = {}
        # Rows at or below it are gone, or only the newest of each key is left.
        self._forgotten = 0
        # Rows at or below it are gone.
        self._lost = 0

    @property
    def description(self) -> StreamDescription:
        """The facts about the stream."""
        return self._description

    def current_token(self, instance_name: str) -> int:
        """Return how far this process has got with a writer's rows; 0 at first."""
        return self._positions.get(instance_name, 0)

    def minimal_local_current_token(self) -> int:
        """Return what this process, as a writer, may announce."""
        return self._positions[self._instance_name]

    def has_local_updates(self, from_token: int, upto_token: int) -> bool:
        """Return whether we wrote rows in the range: every token of ours has some."""
        return from_token < min(upto_token, self._positions[self._instance_name])

    def advance(self, instance_name: str, token: int) -> None:
        """Record a writer's position; a lower one if it started again.

        :raises LocalProtocolError: if it is our own, which moves by :meth:`write`.
        """
        if instance_name == self._instance_name:
            raise LocalProtocolError(
                f"{self._description.name} of {instance_name} is this process's own: "
                "its position moves by writing"
            )
        self._positions[instance_name] = token

    def write(self, rows: Sequence[Any]) -> int:
        """Write rows under one token.

        :param rows: of the stream's row type; at least one.
        :return: their token.
        :raises LocalProtocolError: if there are none, or one holds what JSON cannot
            say; nothing was written.
        """
        if not rows:
            raise LocalProtocolError(
                f"no rows of {self._description.name} were given to write"
            )
        codec = self._description.codec
        texts = tuple(codec.encode(row) for row in rows)
        keys = () if self._key is None else tuple(map(self._key, rows))
        token = self._positions[self._instance_name] + 1
        self._positions[self._instance_name] = token
        entry = _Entry(token, texts, keys, sum(map(len, texts)))
        self._log.append(entry)
        self._rows += len(texts)
        self._bytes += entry.size
        while len(self._log) > 1 and (
            self._rows > self._max_rows or self._bytes > self._max_bytes
        ):
            self._forget(self._log.popleft())
        if self._on_write is not None:
            self._on_write()
        return token

    def _forget(self, entry: _Entry) -> None:
        self._rows -= len(entry.texts)
        self._bytes -= entry.size
        self._forgotten = entry.token
        if self._key is None:
            self._lost = entry.token
            return
        for key, text in zip(entry.keys, entry.texts, strict=True):
            # Taken out first, so that it goes to the end: the order is by token.
            self._replaced.pop(key, None)
            self._replaced[key] = (entry.token, text)
        while len(self._replaced) > self._max_rows:
            oldest = next(iter(self._replaced))
            self._lost = self._replaced.pop(oldest)[0]

    async def get_updates_since(
        self, instance_name: str, from_token: int, upto_token: int
    ) -> StreamUpdateResult:
        """Fetch a writer's rows in ``(from_token, upto_token]``, one page.

        :raises CatchUpError: if they were forgotten, the writer did not answer, or
            nobody can be asked.
        """
        name = self._description.name
        if instance_name != self._instance_name:
            if self._fetch is None:
                raise CatchUpError(
                    f"{name} of {instance_name} is in the memory of that process, and "
                    f"there is no way to ask it; name it in instance_map"
                )
            return await self._fetch(
                instance_name, from_token, upto_token, self._page_rows
            )
        if 0 < from_token < self._lost and from_token < upto_token:
            raise CatchUpError(
                f"rows of {name} in ({from_token}, {self._lost}] are not in the memory "
                f"of {instance_name} any more; keep more of them (max_rows is "
                f"{self._max_rows}, max_bytes {self._max_bytes}), and start the "
                "reader again"
            )
        last_token = self._positions[self._instance_name]
        if last_token >= upto_token:
            return self._read(from_token, upto_token)
        # The reader was told of more than there is.
        return attrs.evolve(self._read(from_token, last_token), last_token=last_token)

    def is_plausible(self, instance_name: str, token: int) -> bool:
        """Return whether a writer may be at a token, as far as is known here."""
        return token <= self.current_token(instance_name) + PLAUSIBLE_DISTANCE

    def current_stream_token(self) -> MultiWriterStreamToken:
        """Return up to where this process has the rows of each writer.

        Writers count by themselves, so that there is no common minimum but 0.
        """
        return MultiWriterStreamToken(0, self._positions)

    async def get_rows_between(
        self,
        low: MultiWriterStreamToken | None,
        high: MultiWriterStreamToken | None,
        *,
        limit: int = 1000,
    ) -> RowsBetween:
        """Fetch rows of all writers after ``low`` and not after ``high``, one page.

        :param low: ``None`` for all that their writers still have.
        :param high: ``None`` for the rows up to :meth:`current_stream_token`.
        :param limit: the most rows of a page; it is longer where rows of one token
            would be split.
        :raises CatchUpError: if rows were forgotten, or their writer did not answer.
        """
        low = MultiWriterStreamToken(0) if low is None else low
        high = self.current_stream_token() if high is None else high
        from_json = self._description.codec.from_json
        rows: list[PositionedRow] = []
        upto = low
        for writer in sorted({*high.instance_map, *low.instance_map}):
            reached = low.get_stream_pos_for_instance(writer)
            end = high.get_stream_pos_for_instance(writer)
            while reached < end:
                if len(rows) >= limit:
                    return RowsBetween(rows, upto, True)
                result = await self.get_updates_since(writer, reached, end)
                page = check_page(result, reached, end)
                rows += [
                    PositionedRow(PersistedPosition(writer, token), from_json(row))
                    for token, row in zip(page.tokens, page.values, strict=True)
                ]
                reached = page.upto_token
                upto = upto.copy_and_advance(
                    MultiWriterStreamToken(0, {writer: reached})
                )
        return RowsBetween(rows, upto.copy_and_advance(high), False)

    def _read(self, from_token: int, upto_token: int) -> StreamUpdateResult:
        updates: list[tuple[int, JsonValue]] = []
        last = from_token
        for token, texts in self._batches(from_token):
            if token > upto_token:
                break
            # Several rows kept of one token follow one another here.
            if len(updates) >= self._page_rows and token != last:
                return StreamUpdateResult(updates, last, True)
            updates += [(token, decode_json(text)) for text in texts]
            last = token
        return StreamUpdateResult(updates, upto_token, False)

    def _batches(self, from_token: int) -> Iterable[tuple[int, Sequence[bytes]]]:
        if from_token < self._forgotten:
            for token, text in self._replaced.values():
                if token > from_token:
                    yield token, (text,)
        if self._log:
            # Every token of ours has rows, so tokens are places in the log.
            start = max(0, from_token + 1 - self._log[0].token)
            for place in range(start, len(self._log)):
                entry = self._log[place]
                yield entry.token, entry.texts
