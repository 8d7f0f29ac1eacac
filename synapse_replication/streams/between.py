"""Rows of all writers of a stream, between two tokens of the stream.

A :class:`TokenStream` is a stream that has a combined token, a vector clock, and
returns rows between two of them. Streams that are declared by a table and streams in
memory do.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs

from synapse_replication.streams.tokens import (
    MultiWriterStreamToken,
    PersistedPosition,
)

__all__ = ["PositionedRow", "RowsBetween", "TokenStream"]


@attrs.frozen
class PositionedRow:
    """A row, and where it is.

    :ivar position: its writer and its id.
    :ivar row: of the stream's row type.
    """

    position: PersistedPosition
    row: Any


@attrs.frozen
class RowsBetween:
    """One page of the rows between two tokens.

    :ivar rows: in ascending order of id; of a stream in memory, whose writers count
        by themselves, of writer and id.
    :ivar upto: the token after these rows: the lower bound of the next page.
    :ivar limited: there are more.
    """

    rows: Sequence[PositionedRow]
    upto: MultiWriterStreamToken
    limited: bool


@runtime_checkable
class TokenStream(Protocol):
    """A stream with a token for all its writers together."""

    def current_stream_token(self) -> MultiWriterStreamToken:
        """Return up to where this process has the rows of each writer.

        Its ``stream`` is the persisted-up-to token: the rows of every writer at or
        below it were delivered here. 0 for a stream in memory, whose writers count
        by themselves.
        """
        ...

    def get_rows_between(
        self,
        low: MultiWriterStreamToken | None,
        high: MultiWriterStreamToken | None,
        *,
        limit: int = ...,
    ) -> Awaitable[RowsBetween]:
        """Fetch rows of all writers after ``low`` and not after ``high``, one page.

        :param low: ``None`` for the rows from the beginning.
        :param high: ``None`` for the rows up to :meth:`current_stream_token`.
        :param limit: the most rows of a page; it is longer where rows of one id
            would be split.
        :raises CatchUpError: if the source did not answer.
        """
        ...
