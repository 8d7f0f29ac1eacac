"""Which of a writer's batches are delivered, and which are fetched instead.

Theory of operation: a :class:`BatchSorter` is given batches in the order in which they
arrived. It decides about one after the other, and has no effects: its caller discards,
delivers and fetches what it says.
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
    """Sorts the whole batches of one writer.

    :ivar position: tokens up to here are late.
    :ivar missed_above: late rows above this token were never delivered.
    :ivar fetch_from: the token before the first that must be fetched; ``None`` if
        none must. Later rows are not delivered before it.
    :ivar deliverable: the batches to be delivered, with typed rows.
    :ivar missed: the tokens of late rows that were never delivered, and of those
        behind them.
    :ivar has_lost_rows: rows of the next batch are missing.
    :param is_plausible: see
        :class:`~synapse_replication.handlers.receiving.context.StreamContext`.
    :param decode: makes typed rows; ``None`` if one of them is no row.
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

        Late rows of an idempotent stream are delivered even in a catch-up that has
        passed them; nothing above what a catch-up has reached is.

        :return: why its rows are discarded; ``None`` if they are to be delivered.
        """
        is_late = token <= self.position
        has_lost_rows, self.has_lost_rows = self.has_lost_rows, False
        if self.missed and not is_late:
            # It would be delivered twice: what was missed lies before it.
            self.missed.append(token)
            return DiscardReason.CATCHING_UP
        if is_late and not self.description.idempotent:
            return self._discard_late(token)
        before = token - 1 if is_late else self.position
        if has_lost_rows:
            # None of the later ones may overtake it, or it would be passed.
            return self._fetch(before, DiscardReason.CATCHING_UP)
        if not is_late and self.fetch_from is not None:
            return DiscardReason.CATCHING_UP
        if not is_late and not self.is_plausible(token):
            # A false row may have ended a batch of which more is to come.
            self.has_lost_rows = len(texts) > 1
            return self._fetch(before, DiscardReason.CATCHING_UP)
        rows = self.decode(texts)
        if rows is None:
            return self._fetch(before, DiscardReason.UNDECODABLE)
        self.deliverable.append((token, rows))
        # What comes behind it and repeats it was not missed.
        self.position = self.missed_above = max(self.position, token)
        return None

    def _discard_late(self, token: int) -> DiscardReason:
        # Rows alone never reset a stream that may begin again.
        if token > self.missed_above and not self.description.resettable:
            self.missed.append(token)
            return DiscardReason.CATCHING_UP
        return DiscardReason.OLD_TOKEN

    def _fetch(self, from_token: int, reason: DiscardReason) -> DiscardReason:
        if self.fetch_from is None or from_token < self.fetch_from:
            self.fetch_from = from_token
        return reason
