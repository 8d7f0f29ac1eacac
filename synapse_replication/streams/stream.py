"""What a stream is: its description, and how a process sees it.

A *token* here is a plain ``int``: one writer's position in one stream. The
position of many writers at once is a
:class:`~synapse_replication.streams.tokens.MultiWriterStreamToken`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, overload, runtime_checkable

import attrs

from synapse_replication.streams.rows import RowCodec, decode_json

__all__ = [
    "DrainableStream",
    "EncodedUpdates",
    "JsonValue",
    "RemovedWriter",
    "Stream",
    "StreamDescription",
    "StreamUpdateResult",
    "UpdateFunction",
]

JsonValue: TypeAlias = Any
"""What JSON can say: ``None``, ``bool``, ``int``, ``float``, ``str``, ``list`` or
``dict`` with ``str`` keys."""


class EncodedUpdates(Sequence[tuple[int, JsonValue]]):
    """Updates that their source has as JSON text.

    They look like ``(token, row)`` pairs, and each row is decoded when it is asked
    for. Who wants typed rows decodes the texts themselves, in one step.

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

    :ivar updates: ``(token, row)`` pairs in ascending order of token (of its
        distance from zero for no stream: tokens on the wire always grow). Rows
        are JSON values, as on the wire; see :class:`EncodedUpdates`. Rows of one
        token are never split over two results.
    :ivar upto_token: everything up to and including this token is in
        ``updates``. Equal to the upper bound asked for, unless ``limited``.
    :ivar limited: there is more between ``upto_token`` and the bound asked for.
    :ivar last_token: the last token that exists, if it is (for a sequence: implausibly
        far) below the bound asked for. ``None`` otherwise, or if the source did not
        compare.
    """

    updates: Sequence[tuple[int, JsonValue]]
    upto_token: int
    limited: bool
    last_token: int | None = None


UpdateFunction: TypeAlias = Callable[
    [str, int, int, int], Awaitable[StreamUpdateResult]
]
"""``(instance_name, from_token, upto_token, limit) -> rows``, lower bound open,
upper bound closed. ``limit`` counts rows and is a wish: a page may be longer so
as not to split a token."""


@attrs.frozen
class StreamDescription:
    """The facts about a stream that are the same in every process.

    :ivar name: the name on the wire.
    :ivar codec: from JSON text to typed rows and back.
    :ivar idempotent: applying a row again, or late, does no harm; so rows at or
        below our position are delivered and not dropped (``caches``).
    :ivar resettable: an earlier token is accepted after a POSITION, since the
        writer may have started again from the beginning.
    :ivar held_in_memory: the rows are only in their writer's memory; catch-up
        goes over HTTP to the writer.
    :ivar announce_own_moves_only: a POSITION that moved only because other
        writers moved is not announced (``caches``: no echo).
    """

    name: str
    codec: RowCodec[Any]
    idempotent: bool = False
    resettable: bool = False
    held_in_memory: bool = False
    announce_own_moves_only: bool = False


class Stream(Protocol):
    """A stream as one process sees it: where each writer stands, and its rows.

    All methods are called in the reactor's thread.
    """

    @property
    def description(self) -> StreamDescription:
        """The facts about the stream."""
        ...

    def current_token(self, instance_name: str) -> int:
        """Return how far this process has got with a writer's rows.

        :return: every row of that writer at or below it has been handled here
            (or, for our own instance, was persisted).
        """
        ...

    def minimal_local_current_token(self) -> int:
        """Return what this process, as a writer, may announce.

        Each row of ours at or below it is committed (or never will be) and is
        returned by :meth:`get_updates_since`.
        """
        ...

    def has_local_updates(self, from_token: int, upto_token: int) -> bool:
        """Return whether we may have written rows in ``(from_token, upto_token]``.

        ``False`` is a promise and spares a query; ``True`` is a guess.
        """
        ...

    def get_updates_since(
        self, instance_name: str, from_token: int, upto_token: int
    ) -> Awaitable[StreamUpdateResult]:
        """Fetch a writer's rows in ``(from_token, upto_token]``, one page.

        :raises CatchUpError: if the source did not answer; a retry may help.
        """
        ...


@attrs.frozen
class RemovedWriter:
    """A writer that does not announce its rows any more.

    :ivar upto_token: its greatest committed row. Nothing at or below it is committed
        later.
    :ivar is_deleted: its position is not stored any more, so it does not write; else
        this process merely does not know it as a writer.
    """

    upto_token: int
    is_deleted: bool


@runtime_checkable
class DrainableStream(Protocol):
    """What a stream offers besides, if its source outlives its writers."""

    def find_removed_writers(self) -> Awaitable[Mapping[str, RemovedWriter]]:
        """Find the removed writers that have rows above :meth:`Stream.current_token`.

        Also those that were removed since the first call and have no such rows.
        Called in the reactor's thread. May take as long as the transactions that are
        open in the source.

        :raises CatchUpError: if the source did not answer; a retry may help.
        """
        ...
