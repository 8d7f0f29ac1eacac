"""Sorting of a writer's batches: which to deliver, and which to fetch instead.

Theory of operation: a :class:`BatchSorter` receives batches in order of arrival and
decides about each. It only decides: its caller discards, delivers and fetches rows
accordingly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from synapse_replication.handlers.observer import DiscardReason
from synapse_replication.streams.stream import StreamDescription

__all__ = ["BatchSorter"]


@attrs.define
class BatchSorter:
    """Sorter of the complete batches of one writer.

    :ivar position: the token up to which batches are late.
    :ivar missed_above: the token above which no row has been delivered. It is below
        ``position`` if that position was reached without a row.
    :ivar fetch_from: the token above which rows must be fetched before any later rows
        are delivered; ``None`` if no rows must be fetched.
    :ivar deliverable: the batches to deliver, with typed rows.
    :ivar missed: the tokens of late rows that have not been delivered, and of the
        batches after them.
    :ivar has_lost_rows: whether rows of the next batch, or before it, are missing.
    :param is_plausible: see
        :class:`~synapse_replication.handlers.receiving.context.StreamContext`.
    :param decode: returns typed rows; ``None`` if one of them cannot be decoded.
    """

    description: StreamDescription
    is_plausible: Callable[[int], bool]
    decode: Callable[[list[bytes]], list[Any] | None]
    position: int
    missed_above: int
    fetch_from: int | None = None
    has_lost_rows: bool = False
    deliverable: list[tuple[int, list[Any]]] = attrs.field(init=False, factory=list)
    missed: list[int] = attrs.field(init=False, factory=list)

    def add(self, token: int, texts: list[bytes]) -> DiscardReason | None:
        """Decide about the next batch.

        During a catch-up, late rows of an idempotent stream are still delivered; rows
        above the token that the catch-up has reached are not.

        :return: the reason to discard the rows; ``None`` to deliver them.
        """
        is_late = token <= self.position
        has_lost_rows = self.has_lost_rows
        if has_lost_rows and not is_late and self.is_plausible(token):
            # The rows up to this token, including the lost rows, will be fetched. After
            # a late or false token, in contrast, lost rows might still be missing.
            self.has_lost_rows = False
        if self.missed and not is_late:
            # Do not deliver this batch now: fetching the missed rows, which have lower
            # tokens, also fetches this batch, so it would be delivered twice.
            self.missed.append(token)
            return DiscardReason.CATCHING_UP
        if is_late and not self.description.idempotent:
            return self._discard_late(token)
        before = token - 1 if is_late else self.position
        if has_lost_rows:
            # Later batches must not be delivered first, because the position would then
            # pass the lost rows. A false position may have passed these rows already.
            from_token = min(before, self.missed_above)
            return self._fetch(from_token, DiscardReason.CATCHING_UP)
        if not is_late and self.fetch_from is not None:
            return DiscardReason.CATCHING_UP
        if not is_late and not self.is_plausible(token):
            # If the token is false, it may have ended its batch too early: further rows
            # of the batch may follow.
            self.has_lost_rows = len(texts) > 1
            return self._fetch(before, DiscardReason.CATCHING_UP)
        rows = self.decode(texts)
        if rows is None:
            return self._fetch(before, DiscardReason.UNDECODABLE)
        self.deliverable.append((token, rows))
        # If a later batch has the same token, it is late, but it was not missed.
        self.position = self.missed_above = max(self.position, token)
        return None

    def _discard_late(self, token: int) -> DiscardReason:
        # Late rows do not reset a resettable stream: only a POSITION, a report or a new
        # epoch does.
        if token > self.missed_above and not self.description.resettable:
            self.missed.append(token)
            return DiscardReason.CATCHING_UP
        return DiscardReason.OLD_TOKEN

    def _fetch(self, from_token: int, reason: DiscardReason) -> DiscardReason:
        if self.fetch_from is None or from_token < self.fetch_from:
            self.fetch_from = from_token
        return reason
