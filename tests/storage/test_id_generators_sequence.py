"""Tests for id generators that compare positions with the sequence."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any

from twisted.internet import defer
from twisted.logger import capturedLogs, formatEvent

from synapse_replication.errors import SequenceBehindError, StreamConfigurationError
from synapse_replication.storage.local_positions import (
    CHECK_SECONDS,
    FOLLOW_SECONDS,
    RECHECK_SECONDS,
)
from synapse_replication.streams.writer_positions import WriterPositions
from tests.storage.doubles import FakeCursor
from tests.storage.id_generator_case import SteppedTestCase


class SequenceTests(SteppedTestCase):
    """Tests for positions that are compared with the sequence."""

    def test_sequence_was_set_back(self) -> None:
        """Ids at or below the position are skipped, even a few thousand of them."""
        self.database.sequence = 2
        done, _ = self.start()
        self.database.settle()
        self.assertEqual(self.successResultOf(done), 8)
        self.ids.advance("master", 5000)
        self.assertEqual(self.ids.get_next_txn(FakeCursor(self.database)), 5001)

    def test_sequence_set_back_is_logged_once(self) -> None:
        """A sequence set back under a running writer is logged once."""
        self.database.sequence = 2
        with capturedLogs() as logged:
            for id_ in (8, 9, 10):
                done, _ = self.start()
                self.database.settle()
                self.assertEqual(self.successResultOf(done), id_)
        (line,) = [formatEvent(event) for event in logged]
        self.assertRegex(line, r"Sequence foobar_seq went back to \d+, below 7,")
        self.assertIn("positions check", line)

    def test_sequence_far_behind_memory(self) -> None:
        """The error names the source of the number, and no ids are used up."""
        self.ids.advance("master", 2**62)
        with self.assertRaises(SequenceBehindError) as caught:
            self.ids.get_next_txn(FakeCursor(self.database))
        self.assertIn("the memory of this process", str(caught.exception))
        self.assertNotIn("setval", str(caught.exception))
        self.assertEqual(caught.exception.hint, "")
        self.assertEqual(self.database.sequence, 8)

    def test_another_plausible_distance(self) -> None:
        """The plausible distance can be configured."""
        stored = {"master": 7, "other": 7}
        positions = WriterPositions("master", ["master", "other"], stored, (), 1, 7, 10)
        self.assertTrue(positions.is_plausible(17))
        self.assertFalse(positions.is_plausible(18))

    def test_implausible_position_is_ignored(self) -> None:
        """A position far beyond the sequence is ignored and reported."""
        self.with_sequence()
        self.ids.advance("other", 2**62)
        self.reactor.run_thread_calls()
        self.database.settle()
        self.assertEqual(self.ids.get_positions(), {"master": 7, "other": 7})
        self.assertEqual(self.ids.get_announceable_token(), 7)
        ((_, error),) = self.observer.failures
        self.assertIn("other was announced at 4611686018427387904", str(error))
        self.assert_position_advances()

    def test_far_position_that_is_real(self) -> None:
        """
        A far position is believed once the sequence has been read and confirms it.
        """
        self.with_sequence()
        self.database.sequence = 500_000
        self.ids.advance("other", 500_000)
        self.assertEqual(self.ids.get_positions()["other"], 7)
        self.reactor.run_thread_calls()
        self.database.settle()
        self.assertEqual(self.ids.get_positions()["other"], 500_000)
        self.assertEqual(self.ids.get_announceable_token(), 500_000)
        self.assertEqual(self.observer.failures, [])

    def test_far_position_during_a_read(self) -> None:
        """A far position that arrives during a read is compared with a later read."""
        self.with_sequence()
        self.ids.advance("other", 9)
        self.ids.get_announceable_token()
        self.database.run()
        self.database.sequence = 500_000
        self.ids.advance("other", 500_000)
        self.reactor.run_thread_calls()
        self.database.answer()
        self.assertEqual(self.observer.failures, [])
        self.database.settle()
        self.assertEqual(self.ids.get_positions()["other"], 500_000)
        self.assertEqual(self.ids.get_announceable_token(), 500_000)

    def test_position_is_announced_once_confirmed(self) -> None:
        """
        Our announced position covers ids of other writers once the sequence confirms
        them.
        """
        self.with_sequence()
        self.database.sequence = 9
        self.ids.advance("other", 9)
        self.assertEqual(self.ids.get_announceable_token(), 7)
        self.assertEqual(self.database.descriptions, ["check_sequence"])
        self.assertEqual(self.ids.get_announceable_token(), 7)
        self.database.settle()
        self.assertEqual((self.ids.get_announceable_token(), self.poked), (9, 1))
        self.assertEqual(self.database.descriptions, ["check_sequence"])

    def test_position_need_not_follow_others(self) -> None:
        """
        If the position need not follow other writers, the sequence is read only when
        that is due anyway, and nobody is notified unless it has advanced.
        """
        self.with_sequence()
        token = partial(self.ids.get_announceable_token, follows_others=False)
        self.database.sequence = 9
        self.ids.advance("other", 9)
        self.assertEqual((token(), self.database.descriptions), (7, []))
        for _ in range(2):
            self.reactor.advance(RECHECK_SECONDS)
            token()
            self.database.settle()
        self.assertEqual((token(), self.poked), (9, 1))
        self.assertEqual(self.database.descriptions, ["check_sequence"] * 2)

    def test_idle_writer(self) -> None:
        """
        A position that follows those of other writers is persisted, too, from time to
        time.
        """
        self.ids = self.make(["master", "other"], {"master": 7, "other": 7})
        self.reactor.advance(FOLLOW_SECONDS)
        for token in (8, 9):
            self.ids.advance("other", token)
            self.assertEqual(self.ids.get_announceable_token(), token)
        self.database.settle()
        self.assertEqual(self.database.descriptions, ["persist_position"])
        self.assertEqual(self.database.persisted, [8])
        self.reactor.advance(FOLLOW_SECONDS)
        self.ids.get_announceable_token()
        self.database.settle()
        self.ids.get_announceable_token()
        self.assertEqual(self.database.persisted, [8, 9])

    def test_mark(self) -> None:
        """The mark changes when an own id can be announced, and not by itself."""
        self.with_sequence()
        before = self.ids.get_mark()
        self.assertEqual(self.ids.get_mark(), before)
        self.assert_position_advances()
        self.assertNotEqual(self.ids.get_mark(), before)

    def test_near_position_that_is_made_up(self) -> None:
        """
        If a near position is beyond the sequence, ids up to it are skipped, and the
        position is believed.
        """
        self.with_sequence()
        self.ids.advance("other", 50)
        self.assertEqual(self.ids.get_announceable_token(), 7)
        self.database.settle()
        self.assertEqual(self.database.sequence, 50)
        self.assertEqual(self.ids.get_announceable_token(), 50)
        self.assert_position_advances()
        self.assertEqual(self.ids.get_announceable_token(), 51)

    def test_sequence_that_cannot_be_read(self) -> None:
        """A failed check of the sequence is retried while a position waits for it."""
        self.with_sequence()
        self.database.sequence = 500_000
        self.ids.advance("other", 500_000)
        self.reactor.run_thread_calls()
        self.database.failing = True
        self.database.settle()
        self.assertEqual(len(self.observer.failures), 1)
        self.database.failing = False
        self.reactor.advance(CHECK_SECONDS)
        self.database.settle()
        self.assertEqual(self.ids.get_positions()["other"], 500_000)

    def test_undeclared_writer(self) -> None:
        """The position of an undeclared writer is ignored, near or far."""
        self.with_sequence()
        for token in (9, 2**62):
            self.ids.advance("zz", token)
        self.reactor.run_thread_calls()
        self.assertEqual(self.ids.get_positions(), {"master": 7, "other": 7})
        self.assertEqual(self.database.descriptions, [])
        self.assert_position_advances()

    def test_id_announced_during_fetch(self) -> None:
        """An id that another writer announces during the fetch is not used."""
        self.ids = self.make(["master", "other"], {"master": 7, "other": 7})
        first, _ = self.start()
        second, _ = self.start()
        self.database.run()
        self.ids.advance("other", 8)
        self.database.answer()
        self.database.settle()
        self.assertEqual(self.successResultOf(first), 9)
        self.assertEqual(self.successResultOf(second), 10)
        self.assert_position_advances()

    def test_id_announced_during_transaction(self) -> None:
        """
        An id that another writer announces while a transaction fetches ids is not used.
        """
        self.ids = self.make(["master", "other"], {"master": 7, "other": 7})
        announced = iter([9, 8])
        generator = self.ids

        class SlowCursor(FakeCursor):
            def execute(self, sql: str, parameters: Mapping[str, Any] = {}) -> None:
                super().execute(sql, parameters)
                for id_ in itertools.islice(announced, 1):
                    generator.advance("other", id_)

        cursor = SlowCursor(self.database)
        # 9 is skipped immediately, 8 only after it was fetched.
        self.assertEqual(self.ids.get_next_mult_txn(cursor, 2), [11, 12])
        for callback in cursor.after:
            callback()
        self.ids.advance("other", 100)
        self.database.sequence = 100
        self.assert_position_advances()

    def test_caller_cancelled_before_announcement(self) -> None:
        """
        If the caller cancelled before its id was announced, later callers are served.
        """
        self.ids = self.make(["master", "other"], {"master": 7, "other": 7})
        first, _ = self.start()
        self.database.run()
        self.ids.advance("other", 8)
        first.cancel()
        self.failureResultOf(first, defer.CancelledError)
        self.database.answer()
        self.database.settle()
        self.assert_position_advances()

    def test_negative(self) -> None:
        """In a stream that counts down, ids and positions are negative."""
        self.ids = self.make(["master"], {"master": 7}, negative=True)
        done, _ = self.start()
        self.database.settle()
        self.assertEqual(self.successResultOf(done), -8)
        self.assertEqual(self.database.persisted, [-8])
        self.assertEqual(self.ids.get_positions(), {"master": -8})
        self.assertEqual(self.ids.get_current_token(), -8)

    def test_without_declared_writers(self) -> None:
        """
        Without declared writers, any instance may write, and no position is persisted.
        """
        self.ids = self.make([], {})
        done, _ = self.start()
        self.database.settle()
        self.assertEqual(self.successResultOf(done), 8)
        self.assertEqual(self.database.persisted, [])

    def test_no_writer(self) -> None:
        """
        An instance that is not a declared writer gets an error that lists the writers.
        """
        self.ids = self.make(["a", "b"], {})
        done, _ = self.start()
        failure = self.failureResultOf(done, StreamConfigurationError)
        self.assertIn("whose writers are a, b", str(failure.value))
