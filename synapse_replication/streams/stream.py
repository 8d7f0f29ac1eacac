"""The interface of streams: their description, positions and rows.

In this module a *token* is a plain ``int``: one writer's position in one stream. The
position of many writers at once is a
:class:`~synapse_replication.streams.tokens.MultiWriterStreamToken`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeAlias, overload, runtime_checkable

import attrs

from synapse_replication.streams.rows import RowCodec, RowT, decode_json
from synapse_replication.streams.tokens import MultiWriterStreamToken, PersistedPosition

#: A decoded JSON value: ``None``, ``bool``, ``int``, ``float``, ``str``, ``list`` or
#: ``dict`` with ``str`` keys.
JsonValue: TypeAlias = Any


class EncodedUpdates(Sequence[tuple[int, JsonValue]]):
    """Updates whose rows are still JSON text.

    As a sequence they are ``(token, row)`` pairs, where each row is decoded on access.
    To get typed rows, decode the texts of ``encoded`` directly.

    :param encoded: ``(token, text)`` pairs.
    """

    __slots__ = ("encoded",)

    def __init__(self, encoded: Sequence[tuple[int, str | bytes]]) -> None:
        self.encoded = encoded

    def __len__(self) -> int:
        return len(self.encoded)

    def __iter__(self) -> Iterator[tuple[int, JsonValue]]:
        return ((token, decode_json(text)) for token, text in self.encoded)

    @overload
    def __getitem__(self, index: int) -> tuple[int, JsonValue]: ...

    @overload
    def __getitem__(self, index: slice) -> EncodedUpdates: ...

    def __getitem__(self, index: int | slice) -> tuple[int, JsonValue] | EncodedUpdates:
        if isinstance(index, slice):
            return EncodedUpdates(self.encoded[index])
        token, text = self.encoded[index]
        return token, decode_json(text)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Sequence):
            return list(self) == list(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"EncodedUpdates({list(self)!r})"


@attrs.frozen
class StreamUpdateResult:
    """The rows of one writer between two of its tokens.

    :ivar updates: ``(token, row)`` pairs in ascending order of token; tokens on the
        wire always grow, even for streams whose ids count down. Rows are JSON values,
        as on the wire; see :class:`EncodedUpdates`. The rows of one token are never
        split over two results.
    :ivar upto_token: ``updates`` has all rows up to and including this token. It equals
        the requested upper bound unless ``limited`` is true or ``last_token`` is set.
    :ivar limited: whether there may be more rows between ``upto_token`` and the
        requested upper bound.
    :ivar last_token: the last token that exists, if it is below the requested upper
        bound (for a sequence: implausibly far below it). ``None`` otherwise, or if the
        source did not compare the two.
    :ivar epoch: the epoch of the writer in whose memory the rows are; ``None`` if the
        writer did not state it.
    """

    updates: Sequence[tuple[int, JsonValue]]
    upto_token: int
    limited: bool
    last_token: int | None = None
    epoch: str | None = None


#: ``(instance_name, from_token, upto_token, limit) -> rows``. The lower bound is
#: exclusive, the upper bound inclusive. ``limit`` counts rows and is approximate: a
#: page may be longer so as not to split a token.
UpdateFunction: TypeAlias = Callable[
    [str, int, int, int], Awaitable[StreamUpdateResult]
]


@attrs.frozen
class StreamDescription(Generic[RowT]):
    """The properties of a stream that are the same in every process.

    :ivar name: the name on the wire.
    :ivar codec: decodes and encodes typed rows.
    :ivar idempotent: whether applying a row twice, or late, is harmless, so that rows
        at or below the reader's position are delivered, not discarded (``caches``).
    :ivar resettable: whether a POSITION with an earlier token lowers the reader's
        position, for instance after the writer restarted from the beginning.
    :ivar held_in_memory: whether the rows exist only in their writer's memory, so that
        a catch-up requests them from the writer over HTTP.
    :ivar announce_own_moves_only: whether a writer announces a new position only after
        it has written rows. If not, its position also follows those of other writers,
        so that each announcement causes announcements of all others. True for
        ``caches``.
    :ivar id_column: the table and column of the ids, for messages; empty if unknown.
    :ivar negative: whether these ids are negative; tokens on the wire are positive.
    """

    name: str
    codec: RowCodec[RowT]
    idempotent: bool = False
    resettable: bool = False
    held_in_memory: bool = False
    announce_own_moves_only: bool = False
    id_column: str = ""
    negative: bool = False

    def describe_row(self, token: int) -> str:
        """Return where to find the rows of a token, as text for display."""
        if not self.id_column:
            return f"a row of {self.name} at {token}"
        id_ = -token if self.negative else token
        return f"a row of {self.name} with {self.id_column} = {id_}"


class Stream(Protocol):
    """A stream as seen by one process: the position and the rows of each writer.

    All methods are called in the reactor's thread.
    """

    @property
    def description(self) -> StreamDescription:
        """The properties of the stream."""

    def current_token(self, instance_name: str) -> int:
        """Return this process's position in a writer's rows.

        Every row of that writer at or below it has been delivered here, or is
        committed if the writer is this instance.
        """

    def minimal_local_current_token(self) -> int:
        """Return the position that this instance, as a writer, may announce.

        No row at or below it will be committed later: :meth:`get_updates_since` returns
        all rows that this instance has up to there.
        """

    def has_local_updates(self, from_token: int, upto_token: int) -> bool:
        """Return whether this instance may have rows in ``(from_token, upto_token]``.

        ``False`` is certain and saves a query; ``True`` is not certain.
        """

    def get_updates_since(
        self, instance_name: str, from_token: int, upto_token: int
    ) -> Awaitable[StreamUpdateResult]:
        """Fetch one page of a writer's rows in ``(from_token, upto_token]``.

        :raises CatchUpError: if the source did not answer; a retry may succeed.
        """


@runtime_checkable
class CheckedStream(Protocol):
    """Additional interface of a stream that can tell false tokens from true ones.

    Without it, every token that is announced in a writer's name is believed at first,
    also one that a stranger has invented.
    """

    def is_plausible(self, instance_name: str, token: int) -> bool:
        """Return whether a writer may have reached a token, without a query."""


@runtime_checkable
class CombinedStream(Protocol):
    """Additional interface of a stream whose combined token depends on each row.

    :ivar writers: the declared writers.
    """

    writers: Sequence[str]

    def row_delivered(self, token: int) -> None:
        """Record that the rows of a token were delivered here, whoever wrote them."""


@runtime_checkable
class AcknowledgedStream(Protocol):
    """Additional interface of a stream whose readers acknowledge rows."""

    def acknowledge(self, reader: str | None, token: int) -> None:
        """Record that a reader has handled this instance's rows up to ``token``.

        :param reader: the reader; ``None`` if it is not known.
        """


@attrs.frozen
class RemovedWriter:
    """A writer that does not announce its rows any more.

    :ivar upto_token: the token up to which its rows must be fetched. No row at or below
        it can still be committed.
    :ivar is_deleted: whether its stored position was deleted, so that it cannot write.
        ``False`` if it still has a stored position, and is missing only among the
        writers that this process's configuration declares.
    """

    upto_token: int
    is_deleted: bool


@runtime_checkable
class DrainableStream(Protocol):
    """Additional interface of a stream whose rows outlive their writers."""

    def find_removed_writers(self) -> Awaitable[Mapping[str, RemovedWriter]]:
        """Return the removed writers that have rows above :meth:`Stream.current_token`.

        The result includes writers that were removed since the first call, even if
        they have no such rows. Call it in the reactor's thread. The search may wait
        until the transactions that are open in the source have ended.

        :raises CatchUpError: if the source did not answer; a retry may succeed.
        """


@attrs.frozen
class PositionedRow(Generic[RowT]):
    """A row and its position.

    :ivar position: the row's writer and id.
    :ivar row: the row, of the stream's row type.
    """

    position: PersistedPosition
    row: RowT


@attrs.frozen
class RowsBetween(Generic[RowT]):
    """One page of the rows between two tokens.

    :ivar rows: ascending by id; in a stream held in memory, whose writers count
        independently of one another, by writer and id.
    :ivar upto: the token after these rows, which is the next page's lower bound.
    :ivar limited: whether the page's limit was reached, so that more rows may follow.
    """

    rows: Sequence[PositionedRow[RowT]]
    upto: MultiWriterStreamToken
    limited: bool


@runtime_checkable
class TokenStream(Protocol):
    """Additional interface of a stream with a combined token of all its writers.

    It returns the rows between two such tokens, which are vector clocks. The streams
    that the configuration declares, and those held in memory, have this interface.
    """

    def current_stream_token(self) -> MultiWriterStreamToken:
        """Return the token up to which this process has the rows of each writer.

        The token's ``stream`` is the persisted-up-to token: this process has the rows
        of every writer at or below it. For a stream held in memory, ``stream`` is 0,
        because the writers count independently of one another.
        """

    def get_rows_between(
        self,
        low: MultiWriterStreamToken | None,
        high: MultiWriterStreamToken | None,
        *,
        limit: int = ...,
    ) -> Awaitable[RowsBetween]:
        """Fetch one page of all writers' rows after ``low`` and not after ``high``.

        :param low: ``None`` for the rows from the beginning.
        :param high: ``None`` for the rows up to :meth:`current_stream_token`.
        :param limit: the number of rows after which the page ends. It may be exceeded,
            because the rows of one id are not split. A stream held in memory fetches
            whole pages from its writers; it may exceed the limit by one such page.
        :raises CatchUpError: if the source did not answer, or no longer has the rows.
        """
