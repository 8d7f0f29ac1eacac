"""Pages of fetched rows: checked against their request, and grouped by token."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import TypeVar

from msgspec import Struct

from synapse_replication.errors import CatchUpError
from synapse_replication.streams.rows import MAX_VALUES, count_values, decode_json
from synapse_replication.streams.stream import (
    EncodedUpdates,
    JsonValue,
    StreamUpdateResult,
)

T = TypeVar("T")

#: The size of a page's rows as JSON text, in bytes. A larger token has its own page.
PAGE_BYTES = 4 * 1024 * 1024


class Page(Struct, frozen=True):
    """Fetched rows, checked and in order.

    It has two parallel lists instead of a list of pairs, so that the garbage collector
    does not have to traverse a container per row.

    :ivar tokens: the token of each row, ascending.
    :ivar values: the rows.
    :ivar upto_token: the page has all rows up to and including this token.
    :ivar is_encoded: whether the rows are JSON text instead of JSON values.
    """

    tokens: list[int]
    values: list[JsonValue]
    upto_token: int
    is_encoded: bool = False

    def cut(self, upto_token: int) -> Page:
        """Return the part of the page up to a token."""
        end = bisect_right(self.tokens, upto_token)
        return Page(self.tokens[:end], self.values[:end], upto_token, self.is_encoded)

    def batches(self) -> Iterator[tuple[int, list[JsonValue]]]:
        """Iterate over pairs of a token and its rows."""
        return gather_batches(self.tokens, self.values)


def gather_batches(
    tokens: Iterable[int], rows: Iterable[T]
) -> Iterator[tuple[int, list[T]]]:
    """Iterate over pairs of a token and its rows.

    :param tokens: the token of each row; equal tokens are adjacent.
    :param rows: the row of each token.
    """
    batch: list[T] = []
    batch_token = 0
    for token, row in zip(tokens, rows, strict=True):
        if batch and token == batch_token:
            batch.append(row)
            continue
        if batch:
            yield batch_token, batch
        batch_token, batch = token, [row]
    if batch:
        yield batch_token, batch


def read_page(
    batches: Iterable[tuple[int, Sequence[bytes]]],
    from_token: int,
    upto_token: int,
    page_rows: int,
) -> StreamUpdateResult:
    """Return the first page of the rows in ``(from_token, upto_token]``.

    The rows of one token are not split, even if they exceed the bounds. A page ends
    after ``page_rows`` rows, and before its texts have more than :data:`PAGE_BYTES`
    bytes, or more than half of :data:`.MAX_VALUES` JSON values.

    :param batches: pairs of a token above ``from_token`` and JSON texts of its rows,
        in ascending order. A token may have several pairs.
    """
    updates: list[tuple[int, JsonValue]] = []
    last = from_token
    size = values = 0
    for token, texts in batches:
        if token > upto_token:
            break
        size += sum(map(len, texts))
        values += sum(map(count_values, texts))
        is_full = (
            len(updates) >= page_rows or size > PAGE_BYTES or values > MAX_VALUES // 2
        )
        if is_full and updates and token != last:
            return StreamUpdateResult(updates, last, True)
        updates += [(token, decode_json(text)) for text in texts]
        last = token
    return StreamUpdateResult(updates, upto_token, False)


def to_page(
    result: StreamUpdateResult,
    from_token: int,
    upto_token: int,
    *,
    allow_encoded: bool = False,
) -> Page:
    """Return the rows in ``(from_token, upto_token]`` of a source's result.

    A result may contain rows beyond the requested range. They are omitted, since rows
    with lower tokens may not have been committed yet.

    :param allow_encoded: whether to leave rows encoded if the source returned text.
    :raises CatchUpError: if the result does not advance beyond ``from_token``.
    """
    reached = min(result.upto_token, upto_token)
    if reached <= from_token:
        raise CatchUpError(
            f"the source returned rows up to {result.upto_token}, but rows "
            f"in ({from_token}, {upto_token}] were requested: it does not have them yet"
        )
    updates = result.updates
    is_encoded = False
    if allow_encoded and isinstance(updates, EncodedUpdates):
        updates = updates.encoded
        is_encoded = True
    wanted = [update for update in updates if from_token < update[0] <= reached]
    wanted.sort(key=itemgetter(0))
    tokens = [token for token, _ in wanted]
    return Page(tokens, [row for _, row in wanted], reached, is_encoded)
