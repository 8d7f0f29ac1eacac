"""Tests of a receiver whose queue is full: dropped rows are fetched again."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.receiving.context import ReceiverOptions
from synapse_replication.handlers.receiving.writer_receiver import SLICE
from synapse_replication.testing.doubles import SourceStream
from tests.handlers.fixtures import Receiving, Row, receiving


class OverflowTests(SynchronousTestCase):
    """Rows that arrive faster than the sink handles them."""

    def test_a_full_queue_becomes_a_catch_up(self) -> None:
        """Rows dropped from a full queue are fetched; other streams are not delayed."""
        other = SourceStream("other", Row)
        fixture = receiving(other, receiver=ReceiverOptions(max_queue_size=1000))
        fixture.receive("POSITION events w 0 0", "POSITION other w 0 0")
        fixture.host.rows.is_held = True
        for n in range(1, 101):
            fixture.stream.persist("w", n, [str(n)])
            fixture.receive(f'RDATA events w {n} ["{n}"]')
        fixture.host.rows.is_held = False
        fixture.receive('RDATA other w 1 ["x"]')
        self.assertEqual(fixture.host.rows.tokens("w", "other"), [1])
        self.assertLess(max(fixture.host.observer.queue_lengths["events"]), 15)
        fixture.host.rows.release()
        self.assertEqual(fixture.host.rows.tokens("w", "events"), list(range(1, 101)))
        self.assertEqual(len(fixture.stream.requests), 1)
        fixture.receive('RDATA events w 101 ["x"]')
        self.assertEqual(fixture.host.rows.tokens("w", "events")[-1], 101)
        self.assertEqual(len(fixture.stream.requests), 1)

    def test_queue_length(self) -> None:
        """In the queue's length, a POSITION counts as one and each row as one."""
        fixture = receiving()
        fixture.receive("POSITION events w 0 0")
        fixture.host.rows.is_held = True
        fixture.stream.persist("w", 1, ["1"])
        for line in ('RDATA events w 1 ["1"]', "POSITION events w 1 2"):
            fixture.receive(line)
        fixture.receive('RDATA events w 3 ["a"]', 'RDATA events w 4 ["b"]')
        self.assertEqual(fixture.host.observer.queue_lengths["events"][-2:], [1, 3])

    def test_each_writer_catches_up(self) -> None:
        """The dropped rows of each writer are fetched up to its own highest token."""
        fixture = receiving(receiver=ReceiverOptions(max_queue_size=1000))
        fixture.receive("POSITION events a 0 0", "POSITION events b 0 0")
        fixture.host.rows.is_held = True
        for n in range(1, 101):
            writer = "ab"[n % 2]
            fixture.stream.persist(writer, n, [str(n)])
            fixture.receive(f'RDATA events {writer} {n} ["{n}"]')
        fixture.host.rows.is_held = False
        fixture.host.rows.release()
        self.assertEqual(fixture.host.rows.tokens("a"), list(range(2, 101, 2)))
        self.assertEqual(fixture.host.rows.tokens("b"), list(range(1, 101, 2)))

    def test_batch_without_its_beginning_is_fetched(self) -> None:
        """If the beginning of a batch was dropped, the whole batch is fetched."""
        fixture = receiving(receiver=ReceiverOptions(max_queue_size=1000))
        fixture.receive("POSITION events w 0 0")
        fixture.host.rows.is_held = True
        fixture.stream.persist("w", 1, ["0"])
        fixture.stream.persist("w", 50, *([str(n)] for n in range(1, 50)))
        fixture.receive('RDATA events w 1 ["0"]')
        for n in range(1, 49):
            fixture.receive(f'RDATA events w batch ["{n}"]')
        fixture.host.rows.is_held = False
        fixture.host.rows.release()
        self.assertEqual(fixture.host.rows.tokens("w"), [1])
        fixture.receive('RDATA events w 50 ["49"]')
        self.assertEqual(
            fixture.texts()[1:], [("w", 50, [str(n) for n in range(1, 50)])]
        )

    def test_beginning_of_a_batch_dropped_before_earlier_rows_were_handled(
        self,
    ) -> None:
        """
        The same, if rows before the batch, which arrived together, were still to be
        handled.
        """
        texts = [str(n) for n in range(9)]
        stored = [("w", 1, ["a", "b"]), ("w", 2, ["c"]), ("w", 3, texts)]
        for count in (1, SLICE):
            fixture = self.connected(stored)
            fixture.host.rows.is_held = True
            # With many rows, the later ones are in another slice.
            begin = ['RDATA events w batch ["a"]', 'RDATA events w 1 ["b"]'] * count
            fixture.receive(*begin, 'RDATA events w 2 ["c"]')
            for text in texts[:-1]:
                fixture.receive(f'RDATA events w batch ["{text}"]')
            fixture.host.rows.is_held = False
            fixture.host.rows.release()
            fixture.receive(f'RDATA events w 3 ["{texts[-1]}"]')
            delivered = fixture.texts()
            self.assertIn(stored[-1], delivered)
            self.assertEqual([each for each in delivered if each not in stored], [])

    def test_batch_without_its_end_is_fetched(self) -> None:
        """If the end of a batch was dropped, its beginning joins no later batch."""
        fixture = receiving(receiver=ReceiverOptions(max_queue_size=1000))
        fixture.receive("POSITION events a 0 0", "POSITION events w 0 0")
        texts = [str(n) for n in range(50)]
        fixture.stream.persist("a", 1, ["a"])
        for token, rows in ((2, texts), (3, ["3"]), (4, ["4"])):
            fixture.stream.persist("w", token, *([text] for text in rows))
        fixture.host.rows.is_held = True
        fixture.receive('RDATA events a 1 ["a"]', 'RDATA events w batch ["0"]')
        batch = [f'RDATA events w batch ["{text}"]' for text in texts[1:-1]]
        fixture.receive(*batch, 'RDATA events w 2 ["49"]')
        fixture.receive('RDATA events w 3 ["3"]')
        fixture.host.rows.is_held = False
        fixture.host.rows.release()
        fixture.receive('RDATA events w 4 ["4"]')
        self.assertEqual(
            fixture.texts(),
            [("a", 1, ["a"]), ("w", 2, texts), ("w", 3, ["3"]), ("w", 4, ["4"])],
        )

    def test_rest_of_a_batch_behind_another_writer_is_fetched(self) -> None:
        """
        If rows after it are dropped meanwhile, the end of a batch that arrived with
        rows of another writer is not delivered without its beginning.
        """
        stored = [("a", 1, ["a"]), ("w", 2, ["0", "1"]), ("w", 3, ["2", "3"])]
        fixture = self.connected(stored)
        fixture.receive('RDATA events w batch ["0"]', 'RDATA events w 2 ["1"]')
        fixture.receive('RDATA events w batch ["0"]')
        fixture.host.rows.is_held = True
        fixture.receive(
            'RDATA events a 1 ["a"]',
            'RDATA events w 2 ["1"]',
            'RDATA events w batch ["2"]',
        )
        fixture.receive(*['RDATA events w 3 ["3"]'] * 2)
        fixture.receive(*['RDATA events w 3 ["3"]'] * 2)
        self.check(fixture, stored)

    def test_rest_of_a_slice_is_fetched(self) -> None:
        """
        The same, if the batch began in an earlier slice of the same rows, and the sink
        failed.
        """
        texts = [str(n) for n in range(SLICE)]
        stored = [("w", 1, ["a"]), ("w", 2, texts), ("w", 3, ["3"] * 4)]
        fixture = self.connected(stored)
        whole = [f'RDATA events w batch ["{text}"]' for text in texts]
        whole[-1] = f'RDATA events w 2 ["{texts[-1]}"]'
        fixture.receive(*whole)
        fixture.host.rows.is_held = True
        fixture.receive('RDATA events w 1 ["a"]', *whole)
        for _ in range(3):
            fixture.receive('RDATA events w batch ["3"]')
        for _ in range(3):
            fixture.receive('RDATA events w 3 ["3"]')
        self.check(fixture, stored, RuntimeError())

    def connected(self, stored: list[tuple[str, int, list[str]]]) -> Receiving:
        """Make a reader with a small queue, of a stream that has these rows."""
        fixture = receiving(
            receiver=ReceiverOptions(max_queue_size=200), idempotent=True
        )
        fixture.receive("POSITION events a 0 0", "POSITION events w 0 0")
        for writer, token, texts in stored:
            fixture.stream.persist(writer, token, *([text] for text in texts))
        return fixture

    def check(
        self,
        fixture: Receiving,
        stored: list[tuple[str, int, list[str]]],
        error: Exception | None = None,
    ) -> None:
        """Check that all rows of each token are delivered together, if several times.

        :param error: the failure of the sink that handles rows.
        """
        fixture.host.rows.is_held = False
        fixture.host.rows.release(error)
        fixture.host.reactor.advance(5)
        delivered = fixture.texts()
        self.assertEqual([each for each in delivered if each not in stored], [])
        self.assertEqual([each for each in stored if each not in delivered], [])

    def test_dropped_reset(self) -> None:
        """A writer's reset is handled even if its POSITION was dropped."""
        fixture = receiving(
            receiver=ReceiverOptions(max_queue_size=200),
            resettable=True,
            held_in_memory=True,
        )
        fixture.receive("POSITION events w 0 90")
        fixture.host.rows.is_held = True
        fixture.receive('RDATA events w 91 ["a"]', 'RDATA events w 92 ["b"]')
        fixture.receive("POSITION events w 0 0")
        fixture.stream.persist("w", 95, ["new"])
        fixture.receive('RDATA events w 95 ["new"]', 'RDATA events w 95 ["new"]')
        fixture.host.rows.is_held = False
        fixture.host.rows.release()
        self.assertEqual(fixture.stream.requests, [("w", 0, 95)])
        self.assertEqual(fixture.texts()[-1], ("w", 95, ["new"]))

    def test_late_rows_of_idempotent_streams_are_fetched(self) -> None:
        """A late row that was dropped is fetched from below the reader's position."""
        fixture = receiving(
            receiver=ReceiverOptions(max_queue_size=300), idempotent=True
        )
        fixture.receive("POSITION events w 0 90")
        fixture.host.rows.is_held = True
        fixture.stream.persist("w", 50, ["late"])
        fixture.receive('RDATA events w 91 ["a"]')
        fixture.receive(*['RDATA events w 50 ["late"]'] * 3)
        fixture.receive(*['RDATA events w 50 ["late"]'] * 3)
        fixture.host.rows.is_held = False
        fixture.host.rows.release()
        self.assertIn(("w", 50, ["late"]), fixture.texts())

    def test_dropped_lower_position_of_stored_stream(self) -> None:
        """After a dropped lower POSITION, the rows above it are fetched."""
        fixture = receiving(
            receiver=ReceiverOptions(max_queue_size=200), resettable=True
        )
        fixture.receive("POSITION events w 0 90")
        fixture.host.rows.is_held = True
        fixture.stream.persist("w", 6, ["new"])
        fixture.receive('RDATA events w 91 ["a"]')
        fixture.receive("POSITION events w 5 5", *['RDATA events w 6 ["new"]'] * 2)
        fixture.host.rows.is_held = False
        fixture.host.rows.release()
        self.assertEqual(fixture.stream.requests, [("w", 5, 6)])
        self.assertEqual(fixture.texts()[-1], ("w", 6, ["new"]))
        self.assertEqual(fixture.stream.current_token("w"), 6)

    def test_lower_position_during_catch_up_loses_no_row(self) -> None:
        """A lower position during a catch-up of a stored stream loses no row."""
        fixture = receiving(resettable=True, idempotent=True)
        fixture.stream.persist("w", 3, ["a"])
        fixture.stream.is_held = True
        fixture.receive("POSITION events w 9 9", "POSITION events w 5 5")
        fixture.stream.answer()
        self.assertEqual(fixture.texts(), [("w", 3, ["a"])])

    def test_dropped_first_position_connects_its_writer(self) -> None:
        """A first POSITION that was dropped makes its writer live later."""
        fixture = receiving(receiver=ReceiverOptions(max_queue_size=300))
        fixture.receive("POSITION events a 0 0")
        fixture.host.rows.is_held = True
        fixture.receive('RDATA events a 1 ["a"]')
        fixture.receive(*(f"POSITION events b {n} {n}" for n in range(5)))
        fixture.host.rows.is_held = False
        fixture.host.rows.release()
        fixture.receive('RDATA events b 7 ["b"]')
        self.assertEqual(fixture.host.rows.tokens("b"), [7])

    def test_batch_around_dropped_positions(self) -> None:
        """A batch interrupted by dropped positions is fetched when its end arrives."""
        fixture = receiving(receiver=ReceiverOptions(max_queue_size=300))
        fixture.stream.persist("w", 1, ["a"], ["b"])
        fixture.receive("POSITION events v 0 0", "POSITION events w 0 0")
        fixture.receive('RDATA events w batch ["a"]')
        fixture.host.rows.is_held = True
        fixture.receive('RDATA events v 1 ["v"]')
        fixture.receive(*["POSITION events w 0 0"] * 5)
        fixture.host.rows.is_held = False
        fixture.host.rows.release()
        fixture.receive('RDATA events w 1 ["b"]')
        self.assertEqual(fixture.texts(), [("v", 1, ["v"]), ("w", 1, ["a", "b"])])

    def test_dropped_rows_of_unconnected_writer(self) -> None:
        """Dropped rows of a writer without a POSITION on the link are not fetched."""
        fixture = receiving(receiver=ReceiverOptions(max_queue_size=300))
        fixture.receive("POSITION events a 0 0")
        fixture.host.rows.is_held = True
        fixture.receive('RDATA events a 1 ["a"]')
        for n in range(1, 10):
            fixture.receive(f'RDATA events b {n} ["b"]')
        fixture.host.rows.is_held = False
        fixture.host.rows.release()
        self.assertEqual(fixture.stream.requests, [])

    def test_queued_gap_of_lost_connection(self) -> None:
        """A gap still queued when its connection is lost is fetched on the next one."""
        fixture = receiving()
        fixture.stream.persist("w", 2, ["lost"])
        fixture.receive("POSITION events w 0 0")
        fixture.host.rows.is_held = True
        fixture.receive('RDATA events w 1 ["a"]')
        fixture.receive("POSITION events w 2 2", 'RDATA events w 3 ["c"]')
        fixture.stream.persist("w", 3, ["c"])
        fixture.reconnect()
        fixture.host.rows.is_held = False
        fixture.host.rows.release()
        fixture.receive("POSITION events w 3 3")
        self.assertEqual(
            fixture.texts(), [("w", 1, ["a"]), ("w", 2, ["lost"]), ("w", 3, ["c"])]
        )

    def test_dropped_rows_of_a_lost_connection(self) -> None:
        """Rows that were given up before a reconnection are fetched after it."""
        fixture = receiving(receiver=ReceiverOptions(max_queue_size=300))
        fixture.receive("POSITION events w 0 0")
        fixture.host.rows.is_held = True
        for n in range(1, 10):
            fixture.stream.persist("w", n, [str(n)])
            fixture.receive(f'RDATA events w {n} ["{n}"]')
        fixture.reconnect()
        fixture.host.rows.is_held = False
        fixture.host.rows.release()
        self.assertEqual(fixture.host.rows.tokens("w"), list(range(1, 10)))
        self.assertEqual(len(fixture.stream.requests), 1)
