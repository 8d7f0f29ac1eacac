"""Tests of a receiver whose queue is full: dropped rows are fetched again."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.receiving.context import ReceiverOptions
from synapse_replication.testing.doubles import SourceStream
from tests.handlers.fixtures import Row, receiving


class OverflowTests(SynchronousTestCase):
    """Rows that arrive faster than the sink handles them."""

    def test_a_full_queue_becomes_a_catch_up(self) -> None:
        """Rows dropped from a full queue are fetched; other streams are not delayed."""
        other = SourceStream("other", Row)
        it = receiving(other, receiver=ReceiverOptions(max_queue_size=1000))
        it.receive("POSITION events w 0 0", "POSITION other w 0 0")
        it.host.rows.is_held = True
        for n in range(1, 101):
            it.stream.persist("w", n, [str(n)])
            it.receive(f'RDATA events w {n} ["{n}"]')
        it.host.rows.is_held = False
        it.receive('RDATA other w 1 ["x"]')
        self.assertEqual(it.host.rows.tokens("w", "other"), [1])
        self.assertLess(max(it.host.observer.queue_lengths["events"]), 15)
        it.host.rows.release()
        self.assertEqual(it.host.rows.tokens("w", "events"), list(range(1, 101)))
        self.assertEqual(len(it.stream.requests), 1)
        it.receive('RDATA events w 101 ["x"]')
        self.assertEqual(it.host.rows.tokens("w", "events")[-1], 101)
        self.assertEqual(len(it.stream.requests), 1)

    def test_what_waits_is_counted(self) -> None:
        """In the queue's length, a POSITION counts as one and each row as one."""
        it = receiving()
        it.receive("POSITION events w 0 0")
        it.host.rows.is_held = True
        it.stream.persist("w", 1, ["1"])
        for line in ('RDATA events w 1 ["1"]', "POSITION events w 1 2"):
            it.receive(line)
        it.receive('RDATA events w 3 ["a"]', 'RDATA events w 4 ["b"]')
        self.assertEqual(it.host.observer.queue_lengths["events"][-2:], [1, 3])

    def test_each_writer_is_caught_up_with(self) -> None:
        """The dropped rows of each writer are fetched up to its own highest token."""
        it = receiving(receiver=ReceiverOptions(max_queue_size=1000))
        it.receive("POSITION events a 0 0", "POSITION events b 0 0")
        it.host.rows.is_held = True
        for n in range(1, 101):
            writer = "ab"[n % 2]
            it.stream.persist(writer, n, [str(n)])
            it.receive(f'RDATA events {writer} {n} ["{n}"]')
        it.host.rows.is_held = False
        it.host.rows.release()
        self.assertEqual(it.host.rows.tokens("a"), list(range(2, 101, 2)))
        self.assertEqual(it.host.rows.tokens("b"), list(range(1, 101, 2)))

    def test_a_batch_that_is_cut_by_it_is_fetched(self) -> None:
        """If the beginning of a batch was dropped, the whole batch is fetched."""
        it = receiving(receiver=ReceiverOptions(max_queue_size=1000))
        it.receive("POSITION events w 0 0")
        it.host.rows.is_held = True
        it.stream.persist("w", 1, ["0"])
        it.stream.persist("w", 50, *([str(n)] for n in range(1, 50)))
        it.receive('RDATA events w 1 ["0"]')
        for n in range(1, 49):
            it.receive(f'RDATA events w batch ["{n}"]')
        it.host.rows.is_held = False
        it.host.rows.release()
        self.assertEqual(it.host.rows.tokens("w"), [1])
        it.receive('RDATA events w 50 ["49"]')
        self.assertEqual(it.texts()[1:], [("w", 50, [str(n) for n in range(1, 50)])])

    def test_a_reset_that_found_no_room(self) -> None:
        """A writer's reset is handled even if its POSITION was dropped."""
        it = receiving(
            receiver=ReceiverOptions(max_queue_size=200),
            resettable=True,
            held_in_memory=True,
        )
        it.receive("POSITION events w 0 90")
        it.host.rows.is_held = True
        it.receive('RDATA events w 91 ["a"]', 'RDATA events w 92 ["b"]')
        it.receive("POSITION events w 0 0")
        it.stream.persist("w", 95, ["new"])
        it.receive('RDATA events w 95 ["new"]', 'RDATA events w 95 ["new"]')
        it.host.rows.is_held = False
        it.host.rows.release()
        self.assertEqual(it.stream.requests, [("w", 0, 95)])
        self.assertEqual(it.texts()[-1], ("w", 95, ["new"]))

    def test_late_rows_of_idempotent_streams_are_fetched(self) -> None:
        """A late row that was dropped is fetched from below the reader's position."""
        it = receiving(receiver=ReceiverOptions(max_queue_size=300), idempotent=True)
        it.receive("POSITION events w 0 90")
        it.host.rows.is_held = True
        it.stream.persist("w", 50, ["late"])
        it.receive('RDATA events w 91 ["a"]')
        it.receive(*['RDATA events w 50 ["late"]'] * 3)
        it.receive(*['RDATA events w 50 ["late"]'] * 3)
        it.host.rows.is_held = False
        it.host.rows.release()
        self.assertIn(("w", 50, ["late"]), it.texts())

    def test_a_stored_stream_that_went_back_is_fetched_from_there(self) -> None:
        """After a dropped lower POSITION, the rows above it are fetched."""
        it = receiving(receiver=ReceiverOptions(max_queue_size=200), resettable=True)
        it.receive("POSITION events w 0 90")
        it.host.rows.is_held = True
        it.stream.persist("w", 6, ["new"])
        it.receive('RDATA events w 91 ["a"]')
        it.receive("POSITION events w 5 5", *['RDATA events w 6 ["new"]'] * 2)
        it.host.rows.is_held = False
        it.host.rows.release()
        self.assertEqual(it.stream.requests, [("w", 5, 6)])
        self.assertEqual(it.texts()[-1], ("w", 6, ["new"]))
        self.assertEqual(it.stream.current_token("w"), 6)

    def test_a_stored_stream_keeps_its_gap(self) -> None:
        """A lower position during a catch-up of a stored stream loses no row."""
        it = receiving(resettable=True, idempotent=True)
        it.stream.persist("w", 3, ["a"])
        it.stream.is_held = True
        it.receive("POSITION events w 9 9", "POSITION events w 5 5")
        it.stream.answer()
        self.assertEqual(it.texts(), [("w", 3, ["a"])])

    def test_announcements_connect_also_when_dropped(self) -> None:
        """A first POSITION that was dropped connects its writer later."""
        it = receiving(receiver=ReceiverOptions(max_queue_size=300))
        it.receive("POSITION events a 0 0")
        it.host.rows.is_held = True
        it.receive('RDATA events a 1 ["a"]')
        it.receive(*(f"POSITION events b {n} {n}" for n in range(5)))
        it.host.rows.is_held = False
        it.host.rows.release()
        it.receive('RDATA events b 7 ["b"]')
        self.assertEqual(it.host.rows.tokens("b"), [7])

    def test_batch_around_what_found_no_room(self) -> None:
        """A batch interrupted by dropped positions is fetched when its end arrives."""
        it = receiving(receiver=ReceiverOptions(max_queue_size=300))
        it.stream.persist("w", 1, ["a"], ["b"])
        it.receive("POSITION events v 0 0", "POSITION events w 0 0")
        it.receive('RDATA events w batch ["a"]')
        it.host.rows.is_held = True
        it.receive('RDATA events v 1 ["v"]')
        it.receive(*["POSITION events w 0 0"] * 5)
        it.host.rows.is_held = False
        it.host.rows.release()
        it.receive('RDATA events w 1 ["b"]')
        self.assertEqual(it.texts(), [("v", 1, ["v"]), ("w", 1, ["a", "b"])])

    def test_rows_of_strangers_stay_dropped(self) -> None:
        """Dropped rows of a writer that was never connected are not fetched."""
        it = receiving(receiver=ReceiverOptions(max_queue_size=300))
        it.receive("POSITION events a 0 0")
        it.host.rows.is_held = True
        it.receive('RDATA events a 1 ["a"]')
        for n in range(1, 10):
            it.receive(f'RDATA events b {n} ["b"]')
        it.host.rows.is_held = False
        it.host.rows.release()
        self.assertEqual(it.stream.requests, [])

    def test_gap_that_waits_on_a_lost_connection(self) -> None:
        """A gap still queued when its connection is lost is fetched on the next one."""
        it = receiving()
        it.stream.persist("w", 2, ["lost"])
        it.receive("POSITION events w 0 0")
        it.host.rows.is_held = True
        it.receive('RDATA events w 1 ["a"]')
        it.receive("POSITION events w 2 2", 'RDATA events w 3 ["c"]')
        it.stream.persist("w", 3, ["c"])
        it.reconnect()
        it.host.rows.is_held = False
        it.host.rows.release()
        it.receive("POSITION events w 3 3")
        self.assertEqual(
            it.texts(), [("w", 1, ["a"]), ("w", 2, ["lost"]), ("w", 3, ["c"])]
        )

    def test_dropped_rows_of_a_lost_connection(self) -> None:
        """Rows that were dropped before a reconnection are fetched after it."""
        it = receiving(receiver=ReceiverOptions(max_queue_size=300))
        it.receive("POSITION events w 0 0")
        it.host.rows.is_held = True
        for n in range(1, 10):
            it.stream.persist("w", n, [str(n)])
            it.receive(f'RDATA events w {n} ["{n}"]')
        it.reconnect()
        it.host.rows.is_held = False
        it.host.rows.release()
        self.assertEqual(it.host.rows.tokens("w"), [1])
        it.receive("POSITION events w 9 9")
        self.assertEqual(it.host.rows.tokens("w"), list(range(1, 10)))
