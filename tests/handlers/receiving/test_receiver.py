"""Tests of received rows and positions."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import RowDecodeError
from synapse_replication.handlers.events import DiscardReason
from synapse_replication.handlers.receiving.context import ReceiverOptions
from synapse_replication.testing.doubles import SourceStream
from tests.handlers.fixtures import Row, receiving


class LiveRowTests(SynchronousTestCase):
    """Rows of writers that are live."""

    def test_rows_are_typed_and_in_order(self) -> None:
        """Rows of a live writer are decoded and delivered, each with its token."""
        fixture = receiving()
        fixture.receive(
            "POSITION events w 0 0", 'RDATA events w 1 ["a"]', 'RDATA events w 3 ["b"]'
        )
        self.assertEqual(
            fixture.host.rows.rows,
            [("events", "w", 1, [Row("a")]), ("events", "w", 3, [Row("b")])],
        )
        self.assertEqual(fixture.stream.requests, [])
        self.assertEqual(fixture.host.observer.positions, {("events", "w"): 3})

    def test_announcements_are_reported(self) -> None:
        """
        An announced position is reported immediately; that of a batch, when it is
        complete.
        """
        fixture = receiving()
        fixture.receive("POSITION events w 0 7")
        self.assertEqual(fixture.host.observer.announced, {("events", "w"): 7})
        fixture.receive('RDATA events w batch ["a"]')
        self.assertEqual(fixture.host.observer.announced, {("events", "w"): 7})
        fixture.receive('RDATA events w 9 ["b"]')
        self.assertEqual(fixture.host.observer.announced, {("events", "w"): 9})
        fixture.receive('RDATA events w 10 ["c"]', 'RDATA events w 11 ["d"]')
        self.assertEqual(fixture.host.observer.announced, {("events", "w"): 11})

    def test_redundant_position_reports_own_position(self) -> None:
        """A redundant POSITION still reports the reader's own position."""
        fixture = receiving()
        fixture.stream.advance("w", 9)
        fixture.receive("POSITION events w 5 5")
        self.assertEqual(fixture.host.observer.positions, {("events", "w"): 9})

    def test_rows_before_a_position_are_dropped(self) -> None:
        """Rows of a writer that sent no POSITION on this connection are discarded."""
        fixture = receiving()
        fixture.receive('RDATA events w 1 ["a"]')
        self.assertEqual(fixture.texts(), [])
        self.assertEqual(
            fixture.host.observer.discards["events", "w", DiscardReason.NOT_CONNECTED],
            1,
        )

    def test_old_tokens_are_dropped(self) -> None:
        """A token at or below the writer's position is discarded."""
        fixture = receiving()
        fixture.receive("POSITION events w 0 0", 'RDATA events w 5 ["a"]')
        fixture.receive('RDATA events w 4 ["b"]', 'RDATA events w 5 ["c"]')
        self.assertEqual(fixture.texts(), [("w", 5, ["a"])])
        self.assertEqual(
            fixture.host.observer.discards["events", "w", DiscardReason.OLD_TOKEN], 2
        )

    def test_row_repeated_in_one_chunk(self) -> None:
        """A row that arrives twice in one chunk is delivered once, and not fetched."""
        fixture = receiving()
        fixture.receive("POSITION events w 0 0")
        fixture.stream.requests.clear()
        fixture.receive('RDATA events w 5 ["a"]', 'RDATA events w 5 ["a"]')
        self.assertEqual(fixture.texts(), [("w", 5, ["a"])])
        self.assertEqual(fixture.stream.requests, [])

    def test_late_rows_of_idempotent_streams_are_delivered(self) -> None:
        """
        A late row of an idempotent stream is delivered; the position does not change.
        """
        fixture = receiving(idempotent=True)
        fixture.receive("POSITION events w 0 0", 'RDATA events w 5 ["a"]')
        fixture.receive('RDATA events w 4 ["b"]', 'RDATA events w 5 ["c"]')
        self.assertEqual(
            fixture.texts(), [("w", 5, ["a"]), ("w", 4, ["b"]), ("w", 5, ["c"])]
        )
        self.assertEqual(fixture.stream.current_token("w"), 5)

    def test_extra_fields_are_counted(self) -> None:
        """A row of a newer peer is delivered without its unknown fields."""
        fixture = receiving()
        fixture.receive("POSITION events w 0 0", 'RDATA events w 1 ["a",7]')
        self.assertEqual(fixture.texts(), [("w", 1, ["a"])])
        self.assertEqual(fixture.host.observer.extra["events"], 1)

    def test_waits_for_the_sink(self) -> None:
        """The next token is delivered once the sink has handled the previous one."""
        fixture = receiving()
        fixture.receive("POSITION events w 0 0")
        fixture.host.rows.is_held = True
        fixture.receive('RDATA events w 1 ["a"]', 'RDATA events w 2 ["b"]')
        fixture.receive('RDATA events w 3 ["c"]')
        self.assertEqual(fixture.texts(), [])
        fixture.host.rows.release()
        self.assertEqual(fixture.host.rows.tokens("w"), [1])
        fixture.host.rows.release()
        fixture.host.rows.release()
        self.assertEqual(fixture.host.rows.tokens("w"), [1, 2, 3])

    def test_waits_for_the_sink_in_a_long_run(self) -> None:
        """Rows of a long run, too, are delivered one after another."""
        fixture = receiving()
        fixture.receive("POSITION events w 0 0")
        fixture.host.rows.is_held = True
        fixture.receive(*(f'RDATA events w {n} ["a"]' for n in range(1, 251)))
        for _ in range(250):
            fixture.host.rows.release()
        self.assertEqual(fixture.host.rows.tokens("w"), list(range(1, 251)))

    def test_yields_to_the_reactor(self) -> None:
        """While handling a long run of rows, the receiver yields to the reactor."""
        fixture = receiving(receiver=ReceiverOptions(break_after_rows=100))
        fixture.receive("POSITION events w 0 0")
        fixture.receive(*(f'RDATA events w {n} ["a"]' for n in range(1, 251)))
        self.assertEqual(fixture.stream.current_token("w"), 100)
        seen: list[int] = []
        fixture.host.reactor.callLater(
            0, lambda: seen.append(fixture.stream.current_token("w"))
        )
        fixture.run_pending_calls()
        self.assertEqual(seen, [200])
        self.assertEqual(fixture.stream.current_token("w"), 250)

    def test_yields_between_short_runs(self) -> None:
        """
        Short runs in one chunk add up to the limit after which the receiver yields.
        """
        fixture = receiving(receiver=ReceiverOptions(break_after_rows=100))
        fixture.receive("POSITION events w 0 0")
        lines = [f'RDATA events w {n} ["a"]' for n in range(1, 501)]
        for part in range(450, 0, -50):
            lines.insert(part, "REMOTE_SERVER_UP example.org")
        fixture.receive(*lines)
        self.assertEqual(fixture.stream.current_token("w"), 100)
        fixture.run_pending_calls()
        self.assertEqual(fixture.stream.current_token("w"), 500)

    def test_yields_within_a_chunk(self) -> None:
        """With a slow sink, the receiver yields to the reactor within a chunk."""
        other = SourceStream("receipts", Row)
        fixture = receiving(other)
        fixture.receive("POSITION events w 0 0", "POSITION receipts w 0 0")
        take = fixture.host.rows.on_rdata

        def fire_later(*args: Any) -> Any:
            fixture.host.reactor.rightNow += 0.0002
            return take(*args)

        self.patch(fixture.host.rows, "on_rdata", fire_later)
        lines = [
            f'RDATA {name} w {10 * part + n} ["a"]'
            for part in range(1, 101)
            for name in ("events", "receipts")
            for n in range(10)
        ]
        for part in range(20, len(lines), 21):
            lines.insert(part, "REMOTE_SERVER_UP example.org")
        fixture.receive(*lines)
        self.assertLess(len(fixture.host.rows.rows), 120, "yields after 0.01 s")
        while fixture.host.reactor.getDelayedCalls():
            fixture.run_pending_calls()
        self.assertEqual(len(fixture.host.rows.rows), 2000)


class BatchTests(SynchronousTestCase):
    """Several rows with one token."""

    def test_batch_is_delivered_whole(self) -> None:
        """The rows of a batch are delivered together when it is complete."""
        fixture = receiving()
        fixture.receive("POSITION events w 0 0", 'RDATA events w batch ["a"]')
        self.assertEqual(fixture.texts(), [])
        fixture.receive('RDATA events w batch ["b"]', 'RDATA events w 7 ["c"]')
        self.assertEqual(fixture.texts(), [("w", 7, ["a", "b", "c"])])

    def test_interleaved_batches(self) -> None:
        """
        Interleaved batches of two writers are delivered with their own rows and tokens.
        """
        fixture = receiving()
        fixture.receive("POSITION events a 0 0", "POSITION events b 0 0")
        fixture.receive(
            'RDATA events a batch ["a1"]',
            'RDATA events b batch ["b1"]',
            'RDATA events b 5 ["b2"]',
            'RDATA events a 6 ["a2"]',
        )
        self.assertEqual(
            fixture.texts(), [("b", 5, ["b1", "b2"]), ("a", 6, ["a1", "a2"])]
        )

    def test_position_of_another_writer_does_not_end_batch(self) -> None:
        """A POSITION of one writer does not end the unfinished batch of another."""
        fixture = receiving()
        fixture.receive("POSITION events a 0 0", 'RDATA events a batch ["a1"]')
        fixture.receive("POSITION events b 0 0", 'RDATA events a 6 ["a2"]')
        self.assertEqual(fixture.texts(), [("a", 6, ["a1", "a2"])])

    def test_batches_of_two_connections(self) -> None:
        """A batch that arrives on two connections is delivered once."""
        fixture = receiving()
        other = fixture.connect()
        fixture.receive("POSITION events w 0 0", 'RDATA events w batch ["a"]')
        fixture.receive(
            "POSITION events w 0 0", 'RDATA events w batch ["a"]', connection=other
        )
        fixture.receive('RDATA events w 6 ["b"]')
        fixture.receive('RDATA events w 6 ["b"]', connection=other)
        self.assertEqual(fixture.texts(), [("w", 6, ["a", "b"])])

    def test_range_of_unreadable_row_is_fetched(self) -> None:
        """A batch with an undecodable row is fetched, and no row is lost."""
        fixture = receiving()
        fixture.stream.persist("w", 6, ["a"], ["b"])
        fixture.stream.persist("w", 7, ["c"])
        fixture.receive(
            "POSITION events w 0 0",
            'RDATA events w 2 ["z"]',
            'RDATA events w batch ["a"]',
            "RDATA events w 6 nonsense",
            'RDATA events w 7 ["c"]',
        )
        self.assertEqual(
            fixture.texts(), [("w", 2, ["z"]), ("w", 6, ["a", "b"]), ("w", 7, ["c"])]
        )
        self.assertEqual(fixture.stream.requests, [("w", 2, 7)])
        self.assertEqual(
            fixture.host.observer.discards["events", "w", DiscardReason.UNDECODABLE], 2
        )
        fixture.receive('RDATA events w 8 ["d"]')
        self.assertEqual(fixture.texts()[-1], ("w", 8, ["d"]))

    def test_unreadable_rows_are_reported_once(self) -> None:
        """Each undecodable row among live rows is reported as one failure."""
        fixture = receiving()
        fixture.stream.persist("w", 2, ["a"])
        fixture.receive(
            "POSITION events w 0 0",
            'RDATA events w 1 ["z"]',
            "RDATA events w 2 nonsense",
        )
        self.assertEqual(fixture.texts(), [("w", 1, ["z"]), ("w", 2, ["a"])])
        ((what, error),) = fixture.host.observer.failures
        self.assertEqual(what, "decoding rows of events")
        self.assertIsInstance(error, RowDecodeError)

    def test_position_interrupts_batch(self) -> None:
        """A batch that its writer's own POSITION interrupts is fetched completely."""
        fixture = receiving()
        fixture.stream.persist("w", 6, ["a"], ["b"])
        fixture.receive("POSITION events w 0 0", 'RDATA events w batch ["a"]')
        fixture.receive("POSITION events w 0 2", 'RDATA events w 6 ["b"]')
        self.assertEqual(fixture.texts(), [("w", 6, ["a", "b"])])
        self.assertEqual(
            fixture.host.observer.discards[
                "events", "w", DiscardReason.SUPERSEDED_BY_POSITION
            ],
            1,
        )

    def test_range_of_refused_line_is_fetched(self) -> None:
        """A malformed RDATA line causes the next token's range to be fetched."""
        fixture = receiving()
        fixture.stream.persist("w", 1, ["a"])
        fixture.stream.persist("w", 2, ["b"])
        fixture.receive(
            "POSITION events w 0 0",
            'RDATA events w 1x ["a"]',
            'RDATA events w 2 ["b"]',
        )
        self.assertEqual(fixture.texts(), [("w", 1, ["a"]), ("w", 2, ["b"])])

    def test_batch_with_too_many_rows(self) -> None:
        """A batch with too many rows is fetched when its end arrives."""
        fixture = receiving(receiver=ReceiverOptions(max_batch_rows=2))
        fixture.stream.persist("w", 9, *([str(n)] for n in range(5)))
        fixture.receive("POSITION events w 0 0")
        for n in range(4):
            fixture.receive(f'RDATA events w batch ["{n}"]')
        fixture.receive('RDATA events w 9 ["4"]')
        self.assertEqual(fixture.texts(), [("w", 9, ["0", "1", "2", "3", "4"])])
        self.assertEqual(fixture.stream.requests, [("w", 0, 9)])

    def test_batch_with_too_many_bytes(self) -> None:
        """A batch with too many bytes is fetched when its end arrives."""
        fixture = receiving(receiver=ReceiverOptions(max_queue_size=1000))
        texts = [str(n) * 400 for n in range(4)]
        fixture.stream.persist("w", 9, *([text] for text in texts))
        fixture.receive("POSITION events w 0 0")
        for text in texts[:3]:
            fixture.receive(f'RDATA events w batch ["{text}"]')
        self.assertEqual(
            fixture.host.observer.discards["events", "w", DiscardReason.CATCHING_UP], 3
        )
        fixture.receive(f'RDATA events w 9 ["{texts[3]}"]')
        self.assertEqual(fixture.texts(), [("w", 9, texts)])
        self.assertEqual(fixture.stream.requests, [("w", 0, 9)])

    def test_oversized_batch_after_complete_one(self) -> None:
        """Only the batch that is too large is fetched, not the previous one."""
        fixture = receiving(receiver=ReceiverOptions(max_batch_rows=2))
        fixture.stream.persist("w", 9, *([str(n)] for n in range(4)))
        fixture.receive("POSITION events w 0 0")
        batch = [f'RDATA events w batch ["{n}"]' for n in range(3)]
        fixture.receive('RDATA events w 8 ["a"]', *batch)
        fixture.receive('RDATA events w 9 ["3"]')
        self.assertEqual(
            fixture.texts(), [("w", 8, ["a"]), ("w", 9, ["0", "1", "2", "3"])]
        )
        self.assertEqual(fixture.stream.requests, [("w", 8, 9)])

    def test_unreadable_late_row_of_an_idempotent_stream(self) -> None:
        """An undecodable late row of an idempotent stream is fetched."""
        fixture = receiving(idempotent=True)
        fixture.stream.persist("w", 4, ["late"])
        fixture.receive("POSITION events w 0 0", 'RDATA events w 5 ["a"]')
        fixture.receive("RDATA events w 4 nonsense")
        self.assertEqual(fixture.texts()[-1], ("w", 4, ["late"]))
        self.assertEqual(fixture.stream.requests, [("w", 3, 4)])
        self.assertEqual(fixture.stream.current_token("w"), 5)
