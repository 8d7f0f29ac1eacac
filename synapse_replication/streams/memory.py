"""A stream that is held in its writer's memory, such as ``typing``.

Theory of operation: the writer holds its newest rows in a log that is bounded in rows
and bytes; the oldest rows are evicted, a whole token at a time. Readers receive rows
as they are sent, and request missed rows from the writer.

The answer to a reader that requests evicted rows depends on the stream:

* If the stream has a ``key`` (for ``typing``, the room), each row is the complete state
  of its key and replaces older rows of the same key. The newest evicted row of each
  key is retained, and the reader receives these rows instead: a full resync.
* Otherwise, or if retained rows that the reader needs were evicted, too, the request
  fails with :exc:`RowsLostError`, which names the missing range. The reader reports it,
  and continues with the rows that remain.

A reader at 0 has read nothing yet and receives all rows that remain, without an error.

When the writer restarts, its tokens restart from 0. Readers detect this by its
POSITION, rewind to 0 and fetch the few rows of the new process. Therefore
:meth:`MemoryStream.advance` accepts a lower token.

See docs/failure-modes.rst: failure-typing-reset, failure-pruned-before-reset.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Generic

import attrs
from msgspec import Struct

from synapse_replication.errors import (
    CatchUpError,
    LocalProtocolError,
    RowsLostError,
    StreamClosedError,
    StreamConfigurationError,
)
from synapse_replication.streams.pages import read_page, to_page
from synapse_replication.streams.rows import (
    BYTES_PER_ROW,
    MAX_BATCH_LENGTH,
    MAX_VALUES,
    VALUES_PER_ROW,
    AttrsRowCodec,
    RowT,
    count_values,
)
from synapse_replication.streams.stream import (
    PositionedRow,
    RowsBetween,
    StreamDescription,
    StreamUpdateResult,
    UpdateFunction,
)
from synapse_replication.streams.table import to_names
from synapse_replication.streams.tokens import MultiWriterStreamToken, PersistedPosition
from synapse_replication.streams.writer_positions import PLAUSIBLE_DISTANCE


@attrs.frozen(kw_only=True)
class InMemory(Generic[RowT]):
    """The declaration of a stream that is held in the memory of its writers.

    :ivar name: the name on the wire.
    :ivar row_type: an attrs class whose fields are the elements of a row on the wire.
        Fields with a default may be missing at the end of a peer's row.
    :ivar writers: the instances that may write; each has its own rows.
    :ivar key: returns the key that a row describes; ``None`` if rows do not replace
        older rows.
    :ivar max_rows: see :class:`MemoryStream`, also for ``max_bytes``.
    """

    name: str
    row_type: type[RowT]
    writers: tuple[str, ...] = attrs.field(converter=to_names)
    key: Callable[[RowT], Hashable] | None = None
    max_rows: int = 10_000
    max_bytes: int = 8 * 1024 * 1024
    description: StreamDescription[RowT] = attrs.field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        codec = AttrsRowCodec(self.name, self.row_type)
        description = StreamDescription(
            self.name, codec, resettable=True, held_in_memory=True
        )
        object.__setattr__(self, "description", description)


#: The maximum number of readers whose acknowledgements are stored.
MAX_READERS = 100


class _Entry(Struct, frozen=True):
    """The rows of one token, as JSON text, with the key of each if the stream has keys.

    :ivar size: the length of the texts, in bytes.
    """

    token: int
    texts: tuple[bytes, ...]
    keys: tuple[Hashable, ...]
    size: int


def _at_least_one(
    stream: MemoryStream, attribute: attrs.Attribute[int], value: int
) -> None:
    if value < 1:
        name = attribute.name.removeprefix("_")
        raise StreamConfigurationError(
            f"stream {stream.description.name}: {name} is {value}; write 1 or more"
        )


@attrs.define(eq=False, repr=False, slots=False, on_setattr=attrs.setters.NO_OP)
class MemoryStream(Generic[RowT]):
    """A :class:`~synapse_replication.streams.stream.Stream` in memory.

    :param description: the stream's description.
    :param instance_name: this instance.
    :param fetch: requests rows from another writer; ``None`` if this instance is the
        only writer, or never reads.
    :param key: returns the key that a row describes; ``None`` if rows do not replace
        older rows.
    :param max_rows: the maximum number of rows in the log, and of keys whose newest
        evicted row is retained.
    :param max_bytes: the maximum size of the JSON text in the log, in bytes. The rows
        of the newest token are retained even if they exceed ``max_bytes`` or
        ``max_rows``.
    :param page_rows: the number of rows after which a page of a catch-up ends. It also
        ends after :data:`.PAGE_BYTES`. The rows of one token are not split.
    :param on_write: called after each :meth:`write`, for instance to wake the
        streamer.
    :param plausible_distance: the maximum by which a writer's announced position may
        exceed the writer's known position without a request to the writer.
    :param acknowledged_by: the readers whose acknowledgements free rows: rows that all
        of them have acknowledged are dropped. By default, all readers that have
        acknowledged any rows.
    :param writers: the instances that write the stream; empty if any may.
    :raises StreamConfigurationError: if a bound is below 1.
    """

    # pyright knows only the aliases that are written here.
    description: StreamDescription[RowT]
    _instance_name: str = attrs.field(alias="instance_name")
    _fetch: UpdateFunction | None = attrs.field(default=None, alias="fetch")
    _key: Callable[[RowT], Hashable] | None = attrs.field(default=None, alias="key")
    _max_rows: int = attrs.field(
        default=10_000, alias="max_rows", validator=_at_least_one
    )
    _max_bytes: int = attrs.field(
        default=8 * 1024 * 1024, alias="max_bytes", validator=_at_least_one
    )
    _page_rows: int = attrs.field(
        default=1000, alias="page_rows", validator=_at_least_one
    )
    _on_write: Callable[[], object] | None = attrs.field(default=None, alias="on_write")
    _plausible_distance: int = attrs.field(
        default=PLAUSIBLE_DISTANCE, alias="plausible_distance"
    )
    _acknowledged_by: Iterable[str] = attrs.field(default=(), alias="acknowledged_by")
    _writers: Collection[str] = attrs.field(default=(), alias="writers")

    def __attrs_post_init__(self) -> None:
        self._expected = frozenset(self._acknowledged_by)
        self._acknowledged: dict[str | None, int] = {}
        self._positions: dict[str, int] = {self._instance_name: 0}
        self._log: deque[_Entry] = deque()
        self._rows = 0
        self._bytes = 0
        # The newest evicted row of each key, in ascending order of token.
        self._newest_evicted: dict[Hashable, tuple[int, bytes]] = {}
        # The log has no rows at or below this token; _newest_evicted may have some.
        self._evicted_upto = 0
        # Rows at or below this token may be missing even from _newest_evicted.
        self._lost_upto = 0
        self._is_closed = False

    def current_token(self, instance_name: str) -> int:
        """Return this process's position in a writer's rows, initially 0."""
        return self._positions.get(instance_name, 0)

    def minimal_local_current_token(self) -> int:
        """Return the position that this instance, as a writer, may announce."""
        return self._positions[self._instance_name]

    def has_local_updates(self, from_token: int, upto_token: int) -> bool:
        """Return whether this instance wrote rows in ``(from_token, upto_token]``."""
        return from_token < min(upto_token, self._positions[self._instance_name])

    def advance(self, instance_name: str, token: int) -> None:
        """Record a writer's position, which becomes lower if the writer restarts.

        :raises LocalProtocolError: if the writer is this instance, whose position only
            :meth:`write` advances.
        """
        if instance_name == self._instance_name:
            raise LocalProtocolError(
                f"{self.description.name} of {instance_name} is written by this "
                "process: only write() advances its position"
            )
        self._positions[instance_name] = token

    def write(self, rows: Sequence[RowT]) -> int:
        """Write rows under one token.

        :param rows: of the stream's row type; at least one.
        :return: their token.
        :raises LocalProtocolError: if ``rows`` is empty or has more than 32 MiB as
            JSON, or peers would not accept a row, for instance because a value does not
            have its declared type. In that case, nothing is written.
        :raises StreamConfigurationError: if this instance is not a writer.
        :raises StreamClosedError: if the process stops, so that no reader would receive
            the rows.
        """
        if self._is_closed:
            raise StreamClosedError(self.description.name)
        if self._writers and self._instance_name not in self._writers:
            raise StreamConfigurationError(
                f"{self._instance_name} does not write {self.description.name}; add it "
                "to the writers of the stream"
            )
        if not rows:
            raise LocalProtocolError(
                f"write() of {self.description.name} was called without rows"
            )
        codec = self.description.codec
        texts = tuple(codec.encode_new(row) for row in rows)
        self._check_size(texts)
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
            self._evict()
        if self._on_write is not None:
            self._on_write()
        return token

    def close(self) -> None:
        """Refuse further rows."""
        self._is_closed = True

    def _check_size(self, texts: Sequence[bytes]) -> None:
        """Check that the rows of one token fit into a response to a reader.

        :raises LocalProtocolError: if they do not.
        """
        size = sum(map(len, texts)) + len(texts) * BYTES_PER_ROW
        values = len(texts) * VALUES_PER_ROW
        if size > MAX_VALUES:
            # Fewer bytes have fewer values.
            values += sum(map(count_values, texts))
        if size > MAX_BATCH_LENGTH or values > MAX_VALUES:
            raise LocalProtocolError(
                f"{len(texts)} rows of {self.description.name} have {size} bytes and "
                f"{values} values as JSON, but readers accept at most "
                f"{MAX_BATCH_LENGTH} bytes and {MAX_VALUES} values under one token; "
                "write fewer rows at a time, or smaller rows"
            )

    def acknowledge(self, reader: str | None, token: int) -> None:
        """Drop the rows that all expected readers have acknowledged.

        These rows do not count as lost for a reader that requests them later.

        :param reader: the reader; ``None`` if it is not known. An unexpected reader is
            ignored.
        :param token: the token up to which it has handled the rows.
        """
        expected = self._expected
        if expected and reader is not None and reader not in expected:
            return
        is_full = len(self._acknowledged) >= MAX_READERS
        if reader not in self._acknowledged and is_full:
            return
        self._acknowledged[reader] = max(token, self._acknowledged.get(reader, 0))
        upto = min(self._acknowledged.values())
        if None not in self._acknowledged and not expected <= self._acknowledged.keys():
            return
        while self._log and self._log[0].token <= upto:
            self._drop_oldest()
        for key, (at, _) in list(self._newest_evicted.items()):
            if at <= upto:
                del self._newest_evicted[key]

    def _drop_oldest(self) -> _Entry:
        entry = self._log.popleft()
        self._rows -= len(entry.texts)
        self._bytes -= entry.size
        self._evicted_upto = entry.token
        return entry

    def _evict(self) -> None:
        entry, newest = self._drop_oldest(), self._newest_evicted
        if self._key is None:
            self._lost_upto = entry.token
            return
        for key, text in zip(entry.keys, entry.texts, strict=True):
            # Remove the key first, so that it moves to the end: the order is by token.
            newest.pop(key, None)
            newest[key] = (entry.token, text)
        while len(newest) > self._max_rows:
            oldest = next(iter(newest))
            self._lost_upto = newest.pop(oldest)[0]

    async def get_updates_since(
        self, instance_name: str, from_token: int, upto_token: int
    ) -> StreamUpdateResult:
        """Fetch one page of a writer's rows in ``(from_token, upto_token]``.

        :raises RowsLostError: if rows were evicted.
        :raises CatchUpError: if the writer did not answer, or its address is not known.
        """
        name = self.description.name
        if instance_name != self._instance_name:
            if self._fetch is None:
                raise CatchUpError(
                    f"{name} of {instance_name} is held in memory by that process, "
                    "whose address is not known; add it to the addresses of the "
                    "instances"
                )
            return await self._fetch(
                instance_name, from_token, upto_token, self._page_rows
            )
        if 0 < from_token < self._lost_upto and from_token < upto_token:
            raise RowsLostError(
                f"rows of {name} in ({from_token}, {self._lost_upto}] are not in the "
                f"memory of {instance_name} any more; increase max_rows "
                f"({self._max_rows}) or max_bytes ({self._max_bytes})",
                self._lost_upto,
            )
        last_token = self._positions[self._instance_name]
        reached = min(upto_token, last_token)
        found = self._batches(from_token)
        page = read_page(found, from_token, reached, self._page_rows)
        if last_token < upto_token:
            # The reader requests tokens that do not exist, for instance after a reset.
            return attrs.evolve(page, last_token=last_token)
        return page

    def is_plausible(self, instance_name: str, token: int) -> bool:
        """Return whether a token is not too far above a writer's known position."""
        return token <= self.current_token(instance_name) + self._plausible_distance

    def current_stream_token(self) -> MultiWriterStreamToken:
        """Return the token up to which this process has the rows of each writer.

        Writers count independently of one another, so the common minimum is 0.
        """
        return MultiWriterStreamToken(0, self._positions)

    async def get_rows_between(
        self,
        low: MultiWriterStreamToken | None,
        high: MultiWriterStreamToken | None,
        *,
        limit: int = 1000,
    ) -> RowsBetween[RowT]:
        """Fetch one page of all writers' rows after ``low`` and not after ``high``.

        :param low: ``None`` for all rows that their writers still have.
        :param high: ``None`` for the rows up to :meth:`current_stream_token`.
        :param limit: the number of rows after which nothing more is fetched. The rows
            are fetched in pages, so the result may have more rows than the limit.
        :raises CatchUpError: if rows were evicted, or cannot be fetched from their
            writer.
        """
        low = MultiWriterStreamToken(0) if low is None else low
        high = self.current_stream_token() if high is None else high
        from_json = self.description.codec.from_json
        rows: list[PositionedRow[RowT]] = []
        upto = low
        for writer in sorted({*high.instance_map, *low.instance_map}):
            reached = low.get_stream_pos_for_instance(writer)
            end = high.get_stream_pos_for_instance(writer)
            while reached < end:
                if len(rows) >= limit:
                    return RowsBetween(rows, upto, True)
                result = await self.get_updates_since(writer, reached, end)
                page = to_page(result, reached, end)
                rows += [
                    PositionedRow(PersistedPosition(writer, token), from_json(row))
                    for token, row in zip(page.tokens, page.values, strict=True)
                ]
                reached = page.upto_token
                upto = upto.copy_and_advance(
                    MultiWriterStreamToken(0, {writer: reached})
                )
        return RowsBetween(rows, upto.copy_and_advance(high), False)

    def _batches(self, from_token: int) -> Iterable[tuple[int, Sequence[bytes]]]:
        """Yield tokens and rows; retained rows of one token are yielded one by one."""
        if from_token < self._evicted_upto:
            for token, text in self._newest_evicted.values():
                if token > from_token:
                    yield token, (text,)
        if self._log:
            # Each token has one entry, so the index of an entry is the difference
            # between its token and that of the first entry.
            start = max(0, from_token + 1 - self._log[0].token)
            for index in range(start, len(self._log)):
                entry = self._log[index]
                yield entry.token, entry.texts
