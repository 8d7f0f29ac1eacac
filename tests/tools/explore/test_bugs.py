"""Deliberate bugs of the reader: the exploration finds each, by its shortest way.

They are those of the bugs of the simulation that can be made in the machine, and those
of earlier releases. Two others can only be made around it: rows of several writers in
one batch, and a POSITION that drops the batch of another writer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.explore.search import Search
from scripts.tools.explore.world import Bounds, Kind
from synapse_replication.streams.reader import Reader
from synapse_replication.streams.reader_decisions import Finding, Verdict
from synapse_replication.streams.reader_state import LinkPhase


def _rows_during_catch_up(original: Any) -> Callable[..., Verdict]:
    def batch(self: Reader, link: Hashable, token: int, size: int) -> Verdict:
        if token > self.position:
            return Verdict.DELIVER
        found: Verdict = original(self, link, token, size)
        return found

    return batch


def _live_without_position(original: Any) -> Callable[..., None]:
    def link_up(self: Reader, link: Hashable) -> None:
        original(self, link)
        self._links[link].phase = LinkPhase.COMPLETE

    return link_up


def _skips_lost_rows(original: Any) -> Callable[..., int]:
    return lambda *_args: 0


def _drops_batches_silently(original: Any) -> Callable[..., int]:
    def drop_unfinished(self: Reader, link: Hashable) -> int:
        state = self._links[link]
        dropped, state.pending = len(state.pending), []
        return dropped

    return drop_unfinished


def _ignores_epochs(original: Any) -> Callable[..., Finding]:
    return lambda *_args, **_kwargs: Finding.NOTHING


def _trusts_first_epoch(original: Any) -> Callable[..., Finding]:
    def epoch_reported(
        self: Reader, link: Hashable, token: int, epoch: str, **options: Any
    ) -> Finding:
        if self._epoch is None:
            self._epoch = epoch
        found: Finding = original(self, link, token, epoch, **options)
        return found

    return epoch_reported


def _delays_each_fetch_again(original: Any) -> Callable[..., float]:
    def wait(self: Reader, now: float) -> float:
        self._start = None
        found: float = original(self, now)
        return found

    return wait


class BugTests(SynchronousTestCase):
    """Each bug breaks a promise in a small world."""

    def check(
        self,
        name: str,
        bug: Callable[[Any], Any],
        reason: str,
        steps: int,
        bounds: Bounds,
        kind: Kind = Kind.DATABASE,
    ) -> None:
        """
        Check the promise that a bug breaks, and the number of events until then; they
        are the same if the search is not reduced.
        """
        self.patch(Reader, name, bug(getattr(Reader, name)))
        for is_reduced in (True, False):
            broken = Search(kind, bounds, is_reduced=is_reduced).run(120).broken
            assert broken is not None
            self.assertEqual((broken.reason, len(broken.events)), (reason, steps))

    def test_rows_during_catch_up(self) -> None:
        self.check(
            "batch",
            _rows_during_catch_up,
            "the position 2 passed row 1, which was not delivered",
            11,
            Bounds(ids=2, failures=1),
        )

    def test_gap_per_writer(self) -> None:
        self.check(
            "link_up",
            _live_without_position,
            "the position 3 passed row 2, which was not delivered",
            16,
            Bounds(ids=3, breaks=1),
        )

    def test_unreadable_row(self) -> None:
        self.check(
            "lost_rows",
            _skips_lost_rows,
            "not all rows of token 2 are delivered",
            12,
            Bounds(ids=2, losses=1),
        )

    def test_position_during_batch(self) -> None:
        self.check(
            "drop_unfinished",
            _drops_batches_silently,
            "not all rows of token 2 are delivered",
            13,
            Bounds(ids=2, overflows=1),
        )

    def test_typing_reset(self) -> None:
        self.check(
            "epoch_reported",
            _ignores_epochs,
            "never at rest: row 1 was not delivered",
            6,
            Bounds(ids=1, writer_crashes=1, breaks=1),
            Kind.MEMORY,
        )

    def test_typing_reset_saved(self) -> None:
        self.check(
            "epoch_reported",
            _trusts_first_epoch,
            "never at rest: the position is 1, not 0",
            5,
            Bounds(ids=1, writer_crashes=1, reader_crashes=1),
            Kind.MEMORY,
        )

    def test_claims(self) -> None:
        self.check(
            "_wait",
            _delays_each_fetch_again,
            "a fetch that waits is delayed once more",
            6,
            Bounds(ids=1, lies=1, burst=1),
        )
