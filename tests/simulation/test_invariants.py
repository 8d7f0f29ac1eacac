"""Tests that the ledger reports violations and accepts correct runs."""

from __future__ import annotations

from collections.abc import Callable

from twisted.trial.unittest import SynchronousTestCase

from tests.simulation.invariants import Ledger, Reader, SimulatedRow, ViolationError


def _rows(*ids: int, epoch: int = 1) -> list[SimulatedRow]:
    return [SimulatedRow(id_, f"{epoch}:k") for id_ in ids]


class LedgerTests(SynchronousTestCase):
    """Writer w committed row 20 as token 2, and rows 50 and 51 as token 5."""

    def setUp(self) -> None:
        self.ledger = Ledger(
            frozenset(["caches"]), frozenset(["typing"]), lambda text: None
        )
        for stream in ("events", "caches"):
            self.ledger.committed(stream, "w", 2, [(20, "k")])
            self.ledger.committed(stream, "w", 5, [(50, "k"), (51, "k")])
        self.reader = self.ledger.begin_epoch(
            "r", {("events", "w"): 1, ("caches", "w"): 1}, None
        )

    def refused(self, act: Callable[..., object], *args: object) -> str:
        error = self.assertRaises(ViolationError, act, *args)
        self.assertEqual(self.ledger.violations, [str(error)])
        return str(error)

    def deliver(self, token: int, *ids: int, stream: str = "events") -> None:
        self.ledger.delivered(self.reader, stream, "w", token, _rows(*ids))

    def test_accepted(self) -> None:
        """Whole tokens in order, then a position, are accepted."""
        self.deliver(2, 20)
        self.deliver(5, 50, 51)
        self.ledger.position(self.reader, "events", "w", 9)
        self.ledger.announced("events", "w", 5, 9)
        self.assertEqual(self.ledger.violations, [])
        lacks = self.ledger.missing()
        self.assertEqual(lacks, ["r lacks 2 of caches of w; it is at 1"])

    def test_lost(self) -> None:
        """A skipped token is a violation."""
        self.assertIn("got 5 and not 2", self.refused(self.deliver, 5, 50, 51))

    def test_lost_by_position(self) -> None:
        """A position that passes undelivered rows is a violation."""
        self.assertIn(
            "passes 2",
            self.refused(self.ledger.position, self.reader, "events", "w", 3),
        )

    def test_doubled(self) -> None:
        """A token delivered twice is a violation."""
        self.deliver(2, 20)
        self.assertIn("got 2 and not 5", self.refused(self.deliver, 2, 20))

    def test_doubled_idempotent(self) -> None:
        """A stream with idempotent rows may repeat a token, but not skip one."""
        self.deliver(2, 20, stream="caches")
        self.deliver(2, 20, stream="caches")
        self.assertIn(
            "passes 5",
            self.refused(self.ledger.position, self.reader, "caches", "w", 5),
        )

    def test_torn(self) -> None:
        """A batch without its first row is a violation."""
        self.deliver(2, 20)
        self.assertIn("got rows [51] as 5", self.refused(self.deliver, 5, 51))

    def test_covered(self) -> None:
        """A POSITION whose range contains a committed row is a violation."""
        self.assertIn(
            "covers", self.refused(self.ledger.announced, "events", "w", 2, 5)
        )

    def test_overtaken(self) -> None:
        """A commit at or below a delivered token is a violation."""
        self.deliver(2, 20)
        self.deliver(5, 50, 51)
        self.assertIn(
            "now commits 4", self.refused(self.ledger.committed, "events", "w", 4, [])
        )

    def test_announced_before_commit(self) -> None:
        """A commit at or below the writer's announced position is a violation."""
        self.ledger.announced("events", "w", 7, 7)
        self.assertIn(
            "before it committed",
            self.refused(self.ledger.committed, "events", "w", 6, []),
        )

    def test_rewind_without_reset(self) -> None:
        """A position that decreases in a stream that is never reset is a violation."""
        self.deliver(2, 20)
        self.assertIn(
            "goes back",
            self.refused(self.ledger.position, self.reader, "events", "w", 1),
        )

    def test_hidden(self) -> None:
        """Rows that a false position hid are delivered in order.

        Those that were committed after a greater one need not be.
        """
        self.ledger.doubted.add(("r", "events", "w"))
        self.ledger.position(self.reader, "events", "w", 10)
        for token in (8, 7, 9):
            self.ledger.committed("events", "w", token, [(token, "k")])
        self.deliver(2, 20)
        self.deliver(5, 50, 51)
        self.deliver(8, 8)
        self.assertEqual(self.reader.excused["events", "w"], {7})
        self.assertEqual(self.reader.owed["events", "w"], {9})
        self.ledger.committed("events", "w", 10, [(10, "k")])
        self.assertIn("got 10 and not None", self.refused(self.deliver, 10, 10))

    def test_hidden_in_idempotent_stream(self) -> None:
        """A row that a false position hid is no longer owed once it is delivered."""
        key = "caches", "w"
        self.ledger.doubted.add(("r", *key))
        self.ledger.committed(*key, 2, [(2, "k")])
        self.ledger.delivered(self.reader, *key, 2, _rows(2))
        self.ledger.position(self.reader, *key, 7)
        self.ledger.committed(*key, 7, [(7, "k")])
        self.assertIn(7, self.reader.owed[key])
        self.ledger.delivered(self.reader, *key, 7, _rows(7))
        self.assertNotIn(7, self.reader.owed[key])

    def test_final_on_standby(self) -> None:
        """On a standby, a false position is final for a reader that starts at it."""
        self.ledger.on_standby.add("s")
        for name, is_owed in ("r", True), ("s", False):
            self.ledger.doubted.add((name, "events", "w"))
            reader = self.ledger.begin_epoch(name, {("events", "w"): 10}, None)
            self.ledger.committed("events", "w", 7 + is_owed, [(7, "k")])
            self.assertEqual(bool(reader.owed), is_owed)
            self.ledger.end_epoch(name)

    def test_in_memory(self) -> None:
        """
        A stream in memory keeps the newest row of each key, and may be reset, openly or
        unnoticed.
        """
        self.ledger.delivered(self.reader, "typing", "w", 1, _rows(7))
        self.ledger.position(self.reader, "typing", "w", 0)
        self.assertEqual(self.reader.views["typing"], {})
        self.ledger.delivered(self.reader, "typing", "w", 1, _rows(8, epoch=2))
        self.assertEqual(self.reader.views["typing"], {"k": 8})
        self.assertEqual(self.reader.hidden_resets, set())
        self.ledger.delivered(self.reader, "typing", "w", 2, _rows(9, epoch=3))
        self.assertEqual(self.reader.hidden_resets, {"typing"})
        self.assertIn(
            "after a newer one",
            self.refused(
                self.ledger.delivered, self.reader, "typing", "w", 3, _rows(8, epoch=3)
            ),
        )

    def repeat_earlier_epoch(self) -> None:
        """Deliver a row in memory again after one of the next epoch."""
        for row_id, epoch in (7, 1), (8, 2), (7, 1):
            self.ledger.delivered(
                self.reader, "typing", "w", row_id, _rows(row_id, epoch=epoch)
            )

    def test_earlier_epoch_in_memory(self) -> None:
        """A row of an earlier epoch that is delivered again is a violation."""
        self.assertIn("twice", self.refused(self.repeat_earlier_epoch))

    def test_resumed_writer_in_memory(self) -> None:
        """A replaced process that resumes may repeat rows if it states no epoch."""
        self.ledger.resumed["w"] += 1
        self.repeat_earlier_epoch()
        self.assertEqual(self.reader.views["typing"], {"k": 7})
        self.assertEqual(self.reader.hidden_resets, {"typing"})
        self.reader.epoch_of = lambda _: 2
        self.assertIn("twice", self.refused(self.repeat_earlier_epoch))

    def move_back(self, stream: str, token: int, to: int, epoch: int = 1) -> None:
        """Deliver a row, and let the position move back."""
        self.ledger.delivered(
            self.reader, stream, "w", token, _rows(token, epoch=epoch)
        )
        self.ledger.position(self.reader, stream, "w", to)
        self.ledger.reset("r", stream, "w")

    def test_resets(self) -> None:
        """A slow link shows the starts of a writer long after they happened."""
        self.ledger.begin_epoch("w", {}, None, 1)
        self.reader = self.ledger.begin_epoch("r", {("typing", "w"): 0}, None, 2)
        self.ledger.begin_epoch("w", {}, None, 3)
        self.ledger.begin_epoch("w", {}, None, 4)
        self.move_back("typing", 7, 0, epoch=1)
        self.move_back("typing", 4, 0, epoch=3)
        self.assertIn(
            "did not start anew", self.refused(self.move_back, "typing", 2, 0, 4)
        )

    def test_reset_by_the_first_epoch(self) -> None:
        """A reader that learns the epoch later cannot know of which its rows are."""
        self.ledger.begin_epoch("w", {}, None, 1)
        self.reader = self.ledger.begin_epoch("r", {("typing", "w"): 0}, None, 2)
        self.ledger.delivered(self.reader, "typing", "w", 7, _rows(7))
        self.ledger.cut_off("r")
        self.ledger.position(self.reader, "typing", "w", 0)
        self.reader.epoch_of = lambda _: 1
        self.ledger.reset("r", "typing", "w")
        self.ledger.delivered(self.reader, "typing", "w", 7, _rows(7))
        self.ledger.cut_off("r")
        self.ledger.position(self.reader, "typing", "w", 0)
        self.assertIn(
            "did not start anew", self.refused(self.ledger.reset, "r", "typing", "w")
        )

    def test_reset_by_each_epoch(self) -> None:
        """A reader that learns of an earlier epoch learns of the last one later."""
        self.ledger.begin_epoch("w", {}, None, 3)
        self.reader = self.ledger.begin_epoch("r", {("typing", "w"): 0}, None, 2)
        for epoch in (4, 1):
            self.ledger.begin_epoch("w", {}, None, epoch)
        for epoch in (4, 1):
            self.reader.epoch_of = lambda _, known=epoch: known  # type: ignore[misc]
            self.ledger.delivered(self.reader, "typing", "w", 7, _rows(7))
            self.ledger.position(self.reader, "typing", "w", 0)
            self.ledger.reset("r", "typing", "w")
        self.ledger.delivered(self.reader, "typing", "w", 7, _rows(7))
        self.ledger.position(self.reader, "typing", "w", 0)
        self.assertIn(
            "did not start anew", self.refused(self.ledger.reset, "r", "typing", "w")
        )

    def test_reset_by_a_resumed_process(self) -> None:
        """A reader may follow a replaced process that resumes to its epoch and back."""
        self.ledger.begin_epoch("w", {}, None, 1)
        self.ledger.begin_epoch("w", {}, None, 2)
        self.reader = self.ledger.begin_epoch("r", {("typing", "w"): 0}, None, 3)
        self.ledger.resumed["w"] += 1
        for epoch in (1, 2):
            self.reader.epoch_of = lambda _, known=epoch: known  # type: ignore[misc]
            self.move_back("typing", 7, 0, epoch=3 - epoch)
        self.assertIn(
            "did not start anew", self.refused(self.move_back, "typing", 7, 0, 2)
        )

    def test_reset_by_a_late_position(self) -> None:
        """
        After a link was lost, one lower POSITION may be that of a restarted writer,
        unless the reader knows the writer's epoch.
        """
        self.ledger.begin_epoch("w", {}, None, 1)
        positions = {("typing", "w"): 7, ("events", "w"): 7}
        self.reader = self.ledger.begin_epoch("r", positions, None, 2)
        self.ledger.cut_off("r", is_lost=True)
        self.ledger.position(self.reader, "typing", "w", 0)
        self.ledger.reset("r", "typing", "w")
        self.ledger.position(self.reader, "events", "w", 1)
        self.ledger.moved_back("r", "events", "w", 7)
        self.assertEqual(self.ledger.excused_resets, 2)
        for stream, is_lost, knows_epoch in (
            ("events", False, False),
            ("typing", False, False),
            ("typing", True, True),
        ):
            self.ledger.violations.clear()
            known = 1 if knows_epoch else None
            self.reader.epoch_of = lambda _, known=known: known  # type: ignore[misc]
            self.reader.positions[stream, "w"] = 7
            self.ledger.cut_off("r", is_lost=is_lost)
            self.reader.positions[stream, "w"] = 0
            self.reader.unsure.clear()
            self.assertIn(
                "did not start anew",
                self.refused(self.ledger.moved_back, "r", stream, "w", 7),
            )

    def test_moved_back_from_an_id_without_rows(self) -> None:
        """
        A restarted writer may announce less than the id of a refused transaction, once.
        """
        self.ledger.begin_epoch("w", {}, None)
        self.reader = self.ledger.begin_epoch("r", {("events", "w"): 9}, None)
        self.assertIn(
            "did not start anew",
            self.refused(self.ledger.moved_back, "r", "events", "w", 9),
        )
        self.ledger.violations.clear()
        self.ledger.begin_epoch("w", {}, None)
        self.ledger.moved_back("r", "events", "w", 9)
        self.assertIn(
            "did not start anew",
            self.refused(self.ledger.moved_back, "r", "events", "w", 9),
        )

    def test_moved_back_from_an_id_with_rows(self) -> None:
        """A restarted writer knows the rows of all writers."""
        self.ledger.committed("events", "v", 9, [(90, "k")])
        self.ledger.begin_epoch("w", {}, None)
        self.reader = self.ledger.begin_epoch("r", {("events", "w"): 9}, None)
        self.ledger.begin_epoch("w", {}, None)
        self.assertIn(
            "did not start anew",
            self.refused(self.ledger.moved_back, "r", "events", "w", 9),
        )

    def test_reset_of_tables(self) -> None:
        """The rows of a stream in tables never become void."""
        self.assertIn(
            "resets events", self.refused(self.ledger.reset, "r", "events", "w")
        )

    def test_shown_before_it_was_delivered(self) -> None:
        """A homeserver that shows a stream past an undelivered row is a violation."""
        self.ledger.committed("events", "w", 7, [(70, "k")])
        # Rows in the table at the start count as delivered.
        self.ledger.shown(self.reader, "events", 6)
        self.assertIn(
            "did not get 7 of w",
            self.refused(self.ledger.shown, self.reader, "events", 7),
        )

    def test_persisted_across_a_crash(self) -> None:
        """A reader that persists its rows resumes with them."""
        self.ledger.delivered(self.reader, "typing", "w", 1, _rows(7))
        self.ledger.end_epoch("r")
        again = self.ledger.begin_epoch("r", {}, self.reader)
        self.assertEqual(again.views["typing"], {"k": 7})
        self.assertEqual(Reader("r").views, {})
