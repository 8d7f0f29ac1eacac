"""Pure decisions about catching up: what a writer's claims mean for a reader.

Theory of operation: a writer that announces ``POSITION stream writer prev new``
promises that it wrote nothing in ``(prev, new]``. A reader whose position is between
``prev`` and ``new``, inclusively, has missed nothing. A reader below ``prev`` may have
missed rows. A reader *above* ``new`` either has newer rows from another source (its
database), or reads a stream that was reset to an earlier token.

A reported position and a range of discarded rows are compared with the reader's
position in the same way. Positions are reported through the extension, or with a
POSITION below the reader's position. Each ``plan_*`` function returns one of the plans
below, and the caller carries it out.

See docs/failure-modes.rst: failure-old-tokens, failure-gap-per-writer.
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
    "AheadOfWriter",
    "Check",
    "Extend",
    "Gap",
    "InSync",
    "Page",
    "Plan",
    "ReaderPosition",
    "Redundant",
    "Reset",
    "check_page",
    "gather_batches",
    "plan_catch_up",
    "plan_dropped_range",
    "plan_position",
    "plan_reported_position",
]

T = TypeVar("T")


@attrs.frozen
class InSync:
    """Nothing was missed: advance to the new position without fetching."""

    upto_token: int


@attrs.frozen
class Check:
    """The writer announced exactly the reader's position, and no empty range below it.

    If the reader had advanced to this position without receiving rows, the caller must
    fetch the range over which it advanced: an earlier announcement may have been false,
    and rows in that range may have been committed since.
    """

    upto_token: int


@attrs.frozen
class Gap:
    """The rows in ``(from_token, upto_token]`` may have been missed: fetch them."""

    from_token: int
    upto_token: int


@attrs.frozen
class Reset:
    """Rewind to ``restart_token``, then fetch.

    Either the stream was (or may have been) reset, or the reader's position has proved
    false.

    :ivar restart_token: the position to rewind to. The rows in
        ``(restart_token, upto_token]`` are fetched; none if the two are equal.
    """

    restart_token: int
    upto_token: int


@attrs.frozen
class Extend:
    """A catch-up is already running: let it fetch up to ``upto_token`` or beyond.

    :ivar from_token: the position to rewind to if the cursor is beyond it; ``None``
        leaves the cursor unchanged.
    """

    upto_token: int
    from_token: int | None = None


@attrs.frozen
class Redundant:
    """The reader has reached or passed the token, and no rewind is needed."""


@attrs.frozen
class AheadOfWriter:
    """Rows beyond the writer's own position were delivered: report the conflict."""


Plan: TypeAlias = InSync | Check | Gap | Reset | Extend | Redundant | AheadOfWriter


@attrs.frozen
class ReaderPosition:
    """A reader's position for one writer of a stream.

    :ivar current: the reader's position.
    :ivar undelivered_from: no row above this token was delivered. It is less than
        ``current`` if the reader advanced to ``current`` without a row.
    :ivar cursor: the position of the running catch-up; ``None`` if none is running.
    :ivar target: the token up to which the catch-up fetches.
    """

    current: int
    undelivered_from: int
    cursor: int | None = None
    target: int = 0


def plan_catch_up(
    current: int,
    prev_token: int,
    new_token: int,
    *,
    resettable: bool = False,
    held_in_memory: bool = False,
    is_range_believed: bool = True,
) -> InSync | Gap | Reset | Redundant:
    """Compare a reader's position with a writer's announcement.

    :param current: the reader's position for this writer.
    :param prev_token: the lower bound of the range announced as empty.
    :param new_token: the writer's announced position.
    :param resettable: whether the stream may be reset to an earlier token.
    :param held_in_memory: whether rows exist only in the writer's memory. After a reset
        of such a stream, its earlier rows are lost, and the few rows that the writer
        has now are all fetched, from zero. After a reset of any other stream, the rows
        still exist, and only the position changes.
    :param is_range_believed: ``False`` to fetch the range although the writer announced
        it as empty.
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


def plan_position(
    reader: ReaderPosition,
    prev_token: int,
    new_token: int,
    *,
    resettable: bool = False,
    held_in_memory: bool = False,
    is_range_believed: bool = True,
) -> Plan:
    """Return the plan for a POSITION, whether or not a catch-up is running.

    The other parameters are those of :func:`plan_catch_up`.
    """
    if reader.cursor is not None:
        if held_in_memory and new_token < reader.target:
            # The writer restarted, so the rows still to be fetched are lost.
            return Reset(min(0, new_token), new_token)
        return Extend(new_token)
    plan = plan_catch_up(
        reader.current,
        prev_token,
        new_token,
        resettable=resettable,
        held_in_memory=held_in_memory,
        is_range_believed=is_range_believed,
    )
    if isinstance(plan, Gap):
        # The reader may have advanced without rows because of a false position. Fetch
        # that range as well: none of its rows was delivered.
        return Gap(reader.undelivered_from, plan.upto_token)
    if isinstance(plan, InSync) and prev_token >= new_token:
        return Check(new_token)
    return plan


def plan_reported_position(
    reader: ReaderPosition,
    token: int,
    *,
    was_below: bool,
    idempotent: bool = False,
    held_in_memory: bool = False,
) -> Plan:
    """Return the plan for a report of a connected writer.

    :param token: the token up to which the writer has sent all rows.
    :param was_below: whether ``token`` was below the reader's position when the report
        arrived. Only in that case does the report contradict the position.
    :param idempotent: whether rows may be committed below a position, so that a lower
        token is no contradiction.
    :param held_in_memory: as for :func:`plan_catch_up`.
    """
    if reader.cursor is not None:
        return Extend(token)
    if token > reader.current:
        return Gap(reader.undelivered_from, token)
    if token == reader.current or not was_below or idempotent:
        return Redundant()
    start = reader.undelivered_from
    if held_in_memory:
        # The writer has few rows, and delivering them again is harmless.
        return Reset(min(0, token), token) if start < reader.current else Redundant()
    if start == reader.current:
        # Rewinding would deliver rows twice.
        return AheadOfWriter()
    return Reset(start, max(start, token))


def plan_dropped_range(
    reader: ReaderPosition,
    lowest: int | None,
    upto_token: int,
    lowest_position: int | None,
    *,
    was_reset: bool,
    resettable: bool = False,
    held_in_memory: bool = False,
    idempotent: bool = False,
) -> Gap | Reset | Extend:
    """Return the plan that replaces rows and positions dropped from a full queue.

    The other parameters are those of :func:`plan_catch_up`.

    :param lowest: the lowest plausible token of the rows dropped since the last reset;
        ``None`` if no such token was dropped.
    :param upto_token: the token up to which rows must be fetched: the greatest
        plausible token dropped since the last reset or, without such a token, the
        greatest implausible one.
    :param lowest_position: the lowest dropped position; ``None`` if none was dropped.
    :param was_reset: whether a dropped position reset the stream.
    :param idempotent: whether rows below the reader's position are delivered, too.
    """
    start = reader.current if reader.cursor is None else reader.cursor
    rewinds = (
        resettable
        and lowest_position is not None
        and (was_reset or lowest_position < start)
    )
    # Rows in a database still exist, so unless the stream ends below the reader's
    # position, there is no need to rewind.
    if rewinds and (held_in_memory or upto_token < start):
        assert lowest_position is not None
        restart = min(0, lowest_position) if held_in_memory else lowest_position
        return Reset(restart, upto_token)
    if reader.undelivered_from < reader.current:
        # The dropped rows may be in the range over which the reader advanced without
        # receiving rows.
        start = min(start, reader.undelivered_from)
    if idempotent and lowest is not None:
        # Rows below the reader's position must be delivered as well.
        start = min(start, lowest - 1)
    if reader.cursor is not None:
        return Extend(upto_token, start)
    return Gap(min(start, upto_token), upto_token)


@attrs.frozen
class Page:
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


def check_page(
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
