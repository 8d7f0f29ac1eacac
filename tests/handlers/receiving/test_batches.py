"""Tests of which batches are delivered and which are fetched."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.observer import DiscardReason
from synapse_replication.handlers.receiving.batches import BatchSorter
from synapse_replication.testing.doubles import SourceStream
from tests.handlers.fixtures import Row

_DELIVERED = None
_CATCHING_UP = DiscardReason.CATCHING_UP
_OLD_TOKEN = DiscardReason.OLD_TOKEN
_UNDECODABLE = DiscardReason.UNDECODABLE


def sorter(
    position: int = 10,
    missed_above: int = 10,
    fetch_from: int | None = None,
    *,
    idempotent: bool = False,
    resettable: bool = False,
) -> BatchSorter:
    """Make a sorter that accepts tokens up to 99 and cannot decode b"?"."""
    stream = SourceStream("events", Row, idempotent=idempotent, resettable=resettable)
    return BatchSorter(
        stream.description,
        lambda token: token < 100,
        lambda texts: None if b"?" in texts else [text.decode() for text in texts],
        position,
        missed_above,
        fetch_from,
    )


class BatchSorterTests(SynchronousTestCase):
    """Each case lists batches with their expected discard reasons."""

    def check(
        self,
        batches: BatchSorter,
        *cases: tuple[int, bytes, DiscardReason | None],
        deliverable: list[int],
        fetch_from: int | None = None,
        missed: tuple[int, ...] = (),
    ) -> None:
        """Add batches of one row; b"!" stands for a batch that lost another row.

        After a late or implausible token, the loss still applies to the next batch.
        """
        for token, text, reason in cases:
            batches.has_lost_rows = text == b"!"
            is_next = batches.position < token < 100
            self.assertEqual(batches.add(token, [text]), reason, token)
            self.assertEqual(batches.has_lost_rows, text == b"!" and not is_next)
        delivered: list[tuple[int, list[Any]]] = [
            (token, ["r"]) for token in deliverable
        ]
        self.assertEqual(batches.deliverable, delivered)
        self.assertEqual(batches.fetch_from, fetch_from)
        self.assertEqual(batches.missed, list(missed))

    def test_ascending(self) -> None:
        """Complete batches above the position are delivered."""
        cases = ((11, b"r", _DELIVERED), (13, b"r", _DELIVERED))
        self.check(sorter(), *cases, deliverable=[11, 13])

    def test_late(self) -> None:
        """
        Late rows, including those at the token just delivered, are discarded as old.
        """
        self.check(
            sorter(),
            (10, b"r", _OLD_TOKEN),
            (12, b"r", _DELIVERED),
            (12, b"r", _OLD_TOKEN),
            (11, b"r", _OLD_TOKEN),
            deliverable=[12],
        )

    def test_late_and_idempotent(self) -> None:
        """
        Late rows of an idempotent stream are delivered; the position does not change.
        """
        self.check(
            sorter(idempotent=True),
            (9, b"r", _DELIVERED),
            (10, b"r", _DELIVERED),
            (11, b"r", _DELIVERED),
            deliverable=[9, 10, 11],
        )

    def test_missed(self) -> None:
        """
        Late rows above the last delivered row were never delivered and are therefore
        fetched.
        """
        self.check(
            sorter(missed_above=7),
            (7, b"r", _OLD_TOKEN),
            (8, b"r", _CATCHING_UP),
            (11, b"r", _CATCHING_UP),
            deliverable=[],
            missed=(8, 11),
        )
        self.check(
            sorter(missed_above=7),
            (11, b"r", _DELIVERED),
            (8, b"r", _OLD_TOKEN),
            deliverable=[11],
        )
        self.check(
            sorter(missed_above=7, resettable=True),
            (8, b"r", _OLD_TOKEN),
            deliverable=[],
        )
        self.check(
            sorter(missed_above=7, idempotent=True),
            (8, b"r", _DELIVERED),
            deliverable=[8],
        )

    def test_lost_rows(self) -> None:
        """A batch with a lost row is fetched, and later rows are fetched with it."""
        self.check(
            sorter(),
            (11, b"r", _DELIVERED),
            (12, b"!", _CATCHING_UP),
            (13, b"r", _CATCHING_UP),
            deliverable=[11],
            fetch_from=11,
        )

    def test_lost_rows_and_other_tokens(self) -> None:
        """A loss stays pending until a token that is neither late nor implausible."""
        for token in (100, 10, 9):
            batches = sorter()
            batches.has_lost_rows = True
            batches.add(token, [b"r"])
            self.assertTrue(batches.has_lost_rows, token)
            self.assertEqual(batches.add(12, [b"r"]), _CATCHING_UP, token)
            self.assertFalse(batches.has_lost_rows, token)
            self.assertEqual(batches.fetch_from, 10, token)

    def test_lost_rows_in_skipped_range(self) -> None:
        """
        If the position advanced without rows, lost rows are fetched from the position
        before that advance.
        """
        self.check(
            sorter(missed_above=7),
            (11, b"!", _CATCHING_UP),
            deliverable=[],
            fetch_from=7,
        )

    def test_undecodable(self) -> None:
        """A batch with an undecodable row is fetched."""
        self.check(
            sorter(),
            (12, b"?", _UNDECODABLE),
            (13, b"?", _CATCHING_UP),
            deliverable=[],
            fetch_from=10,
        )

    def test_implausible(self) -> None:
        """A batch whose token is implausibly far ahead is fetched."""
        self.check(
            sorter(),
            (11, b"r", _DELIVERED),
            (100, b"r", _CATCHING_UP),
            (12, b"r", _CATCHING_UP),
            deliverable=[11],
            fetch_from=11,
        )

    def test_batch_after_an_implausible_token(self) -> None:
        """
        After a batch with an implausible token, the next batch counts as incomplete.
        """
        batches = sorter()
        self.assertEqual(batches.add(100, [b"r", b"r"]), _CATCHING_UP)
        self.assertTrue(batches.has_lost_rows)
        self.assertEqual(batches.add(11, [b"r"]), _CATCHING_UP)
        self.assertFalse(batches.has_lost_rows)
        self.assertEqual(batches.fetch_from, 10)

    def test_late_rows_to_be_fetched(self) -> None:
        """
        Late rows of an idempotent stream are fetched from just below the lowest late
        token.
        """
        self.check(
            sorter(idempotent=True),
            (8, b"?", _UNDECODABLE),
            (6, b"!", _CATCHING_UP),
            (7, b"?", _UNDECODABLE),
            (9, b"r", _DELIVERED),
            (11, b"r", _CATCHING_UP),
            deliverable=[9],
            fetch_from=5,
        )

    def test_catching_up(self) -> None:
        """Rows above the position of a running catch-up are not delivered."""
        self.check(
            sorter(fetch_from=10, idempotent=True),
            (11, b"r", _CATCHING_UP),
            (10, b"r", _DELIVERED),
            (12, b"!", _CATCHING_UP),
            deliverable=[10],
            fetch_from=10,
        )
