"""What a POSITION means for a reader: a decision, without its effects.

Theory of operation: a writer that announces ``POSITION stream writer prev new``
promises that it wrote nothing in ``(prev, new]``. A reader that stands anywhere
from ``prev`` to ``new`` has missed nothing. One that stands below ``prev`` may
have. One that stands *above* ``new`` has either asked somebody who knows more
(its database), or reads a stream that began again from an earlier token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import TypeAlias, TypeVar

import attrs

from synapse_replication.errors import CatchUpError
from synapse_replication.streams.stream import (
    EncodedUpdates,
    JsonValue,
    StreamUpdateResult,
)

__all__ = [
    "Gap",
    "InSync",
    "Page",
    "PositionPlan",
    "Redundant",
    "Reset",
    "check_page",
    "gather_batches",
    "plan_catch_up",
]

T = TypeVar("T")


@attrs.frozen
class InSync:
    """Nothing was missed: take the new position, ask nobody."""

    upto_token: int


@attrs.frozen
class Gap:
    """The rows in ``(from_token, upto_token]`` may have been missed: fetch them."""

    from_token: int
    upto_token: int


@attrs.frozen
class Reset:
    """The stream began again: go back to ``restart_token``, then fetch.

    :ivar restart_token: where to go back to. The rows in
        ``(restart_token, upto_token]`` are fetched; none if they are equal.
    """

    restart_token: int
    upto_token: int


@attrs.frozen
class Redundant:
    """We know of more than was announced: nothing to do."""


PositionPlan: TypeAlias = InSync | Gap | Reset | Redundant


def plan_catch_up(
    current: int,
    prev_token: int,
    new_token: int,
    *,
    resettable: bool = False,
    held_in_memory: bool = False,
    is_range_believed: bool = True,
) -> PositionPlan:
    """Compare a reader's position with what a writer announced.

    :param current: where the reader stands with this writer.
    :param resettable: the stream may begin again at an earlier token.
    :param held_in_memory: the writer's rows were lost with its process, so what
        it has now is all that there is, and little; it is fetched from zero.
        Rows of other streams are still where they were: only the position moves.
    :param is_range_believed: ``False`` if the range is fetched although the writer says
        that it is empty.
    """
    if current == new_token or (
        is_range_believed and prev_token <= current <= new_token
    ):
        return InSync(new_token)
    if current < new_token:
        return Gap(current, new_token)
    if not resettable:
        return Redundant()
    return Reset(min(0, new_token) if held_in_memory else new_token, new_token)


@attrs.frozen
class Page:
    """Fetched rows, checked and in order.

    Two lists rather than pairs or batches: what the garbage collector need not look
    at costs it nothing.

    :ivar tokens: of each row, ascending.
    :ivar values: the rows.
    :ivar upto_token: all rows up to and including this token are here.
    :ivar is_encoded: the rows are JSON text, not values.
    """

    tokens: list[int]
    values: list[JsonValue]
    upto_token: int
    is_encoded: bool = False

    def batches(self) -> Iterator[tuple[int, list[JsonValue]]]:
        """Return each token with its rows."""
        return gather_batches(self.tokens, self.values)


def gather_batches(
    tokens: Iterable[int], rows: Iterable[T]
) -> Iterator[tuple[int, list[T]]]:
    """Return each token with its rows.

    :param tokens: of each row; the same ones stand together.
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


def check_page(
    result: StreamUpdateResult,
    from_token: int,
    upto_token: int,
    *,
    take_encoded: bool = False,
) -> Page:
    """Take from a source's answer what was asked for: ``(from_token, upto_token]``.

    A source may answer more than that; what is beyond is left out, since rows
    before it may still be on their way.

    :param take_encoded: leave rows that the source has as text as they are.
    :raises CatchUpError: if the answer does not bring us on.
    """
    reached = min(result.upto_token, upto_token)
    if reached <= from_token:
        raise CatchUpError(
            f"the source answered up to {result.upto_token} when asked for the rows "
            f"in ({from_token}, {upto_token}]: it does not have them yet"
        )
    updates = result.updates
    is_encoded = False
    if take_encoded and isinstance(updates, EncodedUpdates):
        updates = updates.encoded
        is_encoded = True
    wanted = [update for update in updates if from_token < update[0] <= reached]
    wanted.sort(key=itemgetter(0))
    tokens = [token for token, _ in wanted]
    return Page(tokens, [row for _, row in wanted], reached, is_encoded)
