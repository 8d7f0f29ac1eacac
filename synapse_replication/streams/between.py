"""Rows of all writers of a stream between two of its tokens.

A :class:`TokenStream` has a combined token of all its writers (a vector clock) and
returns the rows between two such tokens. The streams that the configuration declares,
and those held in memory, have this interface.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, Protocol, runtime_checkable

from msgspec import Struct

from synapse_replication.streams.tokens import (
    MultiWriterStreamToken,
    PersistedPosition,
)


class PositionedRow(Struct, frozen=True):
    """A row and its position.

    :ivar position: the row's writer and id.
    :ivar row: the row, of the stream's row type.
    """

    position: PersistedPosition
    row: Any


class RowsBetween(Struct, frozen=True):
    """One page of the rows between two tokens.

    :ivar rows: ascending by id; in a stream held in memory, whose writers count
        independently of one another, by writer and id.
    :ivar upto: the token after these rows, which is the next page's lower bound.
    :ivar limited: whether the page's limit was reached, so that more rows may follow.
    """

    rows: Sequence[PositionedRow]
    upto: MultiWriterStreamToken
    limited: bool


@runtime_checkable
class TokenStream(Protocol):
    """A stream with a combined token of all its writers."""

    def current_stream_token(self) -> MultiWriterStreamToken:
        """Return the token up to which this process has the rows of each writer.

        The token's ``stream`` is the persisted-up-to token: this process has the rows
        of every writer at or below it. For a stream held in memory, ``stream`` is 0,
        because the writers count independently of one another.
        """
        ...

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
        ...
