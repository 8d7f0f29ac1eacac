"""Tests of received rows and positions."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.observer import DiscardReason
from synapse_replication.handlers.receiving.context import ReceiverOptions
from synapse_replication.testing.doubles import SourceStream
from tests.handlers.fixtures import Receiving, Row, receiving


class LiveRowTests(SynchronousTestCase):
    """Rows of writers that were heard without a break."""

    def test_rows_are_typed_and_in_order(self) -> None:
        """Rows of a connected writer are delivered, typed, each with its token."""
        it = receiving()
        it.receive(
            "POSITION events w 0 0", 'RDATA events w 1 ["a"]', 'RDATA events w 3 ["b"]'
        )
        self.assertEqual(
            it.host.rows.rows,
            [("events", "w", 1, [Row("a")]), ("events", "w", 3, [Row("b")])],
        )
        self.assertEqual(it.stream.requests, [])
        self.assertEqual(it.host.observer.positions, {("events", "w"): 3})

    def test_announcements_are_told(self) -> None:
        """How far a writer is, is told before it is handled; batches when whole."""
        it = receiving()
        it.receive("POSITION events w 0 7")
        self.assertEqual(it.host.observer.announced, {("events", "w"): 7})
        it.receive('RDATA events w batch ["a"]')
        self.assertEqual(it.host.observer.announced, {("events", "w"): 7})
        it.receive('RDATA events w 9 ["b"]')
        self.assertEqual(it.host.observer.announced, {("events", "w"): 9})

    def test_a_redundant_position_tells_where_we_are(self) -> None:
        """A POSITION that brings nothing new still tells how far we have got."""
        it = receiving()
        it.stream.advance("w", 9)
        it.receive("POSITION events w 5 5")
        self.assertEqual(it.host.observer.positions, {("events", "w"): 9})

    def test_rows_before_a_position_are_dropped(self) -> None:
        """Rows of a writer that announced nothing on this connection are dropped."""
        it = receiving()
        it.receive('RDATA events w 1 ["a"]')
        self.assertEqual(it.texts(), [])
        self.assertEqual(
            it.host.observer.discards["events", "w", DiscardReason.NOT_CONNECTED], 1
        )

    def test_old_tokens_are_dropped(self) -> None:
        """A token at or below the writer's position is dropped."""
        it = receiving()
        it.receive("POSITION events w 0 0", 'RDATA events w 5 ["a"]')
        it.receive('RDATA events w 4 ["b"]', 'RDATA events w 5 ["c"]')
        self.assertEqual(it.texts(), [("w", 5, ["a"])])
        self.assertEqual(
            it.host.observer.discards["events", "w", DiscardReason.OLD_TOKEN], 2
        )

    def test_a_row_that_is_repeated_at_once(self) -> None:
        """A row that arrives twice in one chunk is delivered once, and not fetched."""
        it = receiving()
        it.receive("POSITION events w 0 0")
        it.stream.requests.clear()
        it.receive('RDATA events w 5 ["a"]', 'RDATA events w 5 ["a"]')
        self.assertEqual(it.texts(), [("w", 5, ["a"])])
        self.assertEqual(it.stream.requests, [])

    def test_late_rows_of_idempotent_streams_are_handed_on(self) -> None:
        """A late row of an idempotent stream arrives; the position stays."""
        it = receiving(idempotent=True)
        it.receive("POSITION events w 0 0", 'RDATA events w 5 ["a"]')
        it.receive('RDATA events w 4 ["b"]', 'RDATA events w 5 ["c"]')
        self.assertEqual(
            it.texts(), [("w", 5, ["a"]), ("w", 4, ["b"]), ("w", 5, ["c"])]
        )
        self.assertEqual(it.stream.current_token("w"), 5)

    def test_extra_fields_are_counted(self) -> None:
        """A row of a newer peer is delivered without what we do not know."""
        it = receiving()
        it.receive("POSITION events w 0 0", 'RDATA events w 1 ["a",7]')
        self.assertEqual(it.texts(), [("w", 1, ["a"])])
        self.assertEqual(it.host.observer.extra["events"], 1)

    def test_waits_for_the_host(self) -> None:
        """The next token is delivered when the host is done with the one before."""
        it = receiving()
        it.receive("POSITION events w 0 0")
        it.host.rows.is_held = True
        it.receive('RDATA events w 1 ["a"]', 'RDATA events w 2 ["b"]')
        it.receive('RDATA events w 3 ["c"]')
        self.assertEqual(it.texts(), [])
        it.host.rows.release()
        self.assertEqual(it.host.rows.tokens("w"), [1])
        it.host.rows.release()
        it.host.rows.release()
        self.assertEqual(it.host.rows.tokens("w"), [1, 2, 3])

    def test_gives_way_to_the_reactor(self) -> None:
        """A long run of rows lets the reactor do other work in between."""
        it = receiving(receiver=ReceiverOptions(break_after_rows=100))
        it.receive("POSITION events w 0 0")
        it.receive(*(f'RDATA events w {n} ["a"]' for n in range(1, 251)))
        self.assertEqual(it.stream.current_token("w"), 100)
        seen: list[int] = []
        it.host.reactor.callLater(0, lambda: seen.append(it.stream.current_token("w")))
        it.break_time()
        self.assertEqual(seen, [200])
        self.assertEqual(it.stream.current_token("w"), 250)

    def test_gives_way_between_short_runs(self) -> None:
        """Many short runs in one read count as the rows that they have."""
        it = receiving(receiver=ReceiverOptions(break_after_rows=100))
        it.receive("POSITION events w 0 0")
        lines = [f'RDATA events w {n} ["a"]' for n in range(1, 501)]
        for part in range(450, 0, -50):
            lines.insert(part, "REMOTE_SERVER_UP example.org")
        it.receive(*lines)
        self.assertEqual(it.stream.current_token("w"), 100)
        it.break_time()
        self.assertEqual(it.stream.current_token("w"), 500)

    def test_gives_way_within_a_read(self) -> None:
        """A slow host does not keep the reactor from its turn for a whole read."""
        other = SourceStream("receipts", Row)
        it = receiving(other)
        it.receive("POSITION events w 0 0", "POSITION receipts w 0 0")
        take = it.host.rows.on_rdata

        def take_long(*args: Any) -> Any:
            it.host.reactor.rightNow += 0.0002
            return take(*args)

        self.patch(it.host.rows, "on_rdata", take_long)
        lines = [
            f'RDATA {name} w {10 * part + n} ["a"]'
            for part in range(1, 101)
            for name in ("events", "receipts")
            for n in range(10)
        ]
        for part in range(20, len(lines), 21):
            lines.insert(part, "REMOTE_SERVER_UP example.org")
        it.receive(*lines)
        self.assertLess(len(it.host.rows.rows), 120, "0.01 s, and what was begun")
        while it.host.reactor.getDelayedCalls():
            it.break_time()
        self.assertEqual(len(it.host.rows.rows), 2000)


class BatchTests(SynchronousTestCase):
    """Several rows of one token."""

    def test_a_batch_is_handed_on_whole(self) -> None:
        """The rows of a token are delivered together, at its end."""
        it = receiving()
        it.receive("POSITION events w 0 0", 'RDATA events w batch ["a"]')
        self.assertEqual(it.texts(), [])
        it.receive('RDATA events w batch ["b"]', 'RDATA events w 7 ["c"]')
        self.assertEqual(it.texts(), [("w", 7, ["a", "b", "c"])])

    def test_interleaved_batches(self) -> None:
        """Batches of two writers that interleave keep their rows and tokens."""
        it = receiving()
        it.receive("POSITION events a 0 0", "POSITION events b 0 0")
        it.receive(
            'RDATA events a batch ["a1"]',
            'RDATA events b batch ["b1"]',
            'RDATA events b 5 ["b2"]',
            'RDATA events a 6 ["a2"]',
        )
        self.assertEqual(it.texts(), [("b", 5, ["b1", "b2"]), ("a", 6, ["a1", "a2"])])

    def test_the_position_of_another_writer_leaves_a_batch(self) -> None:
        """A POSITION of one writer leaves the unfinished batch of another."""
        it = receiving()
        it.receive("POSITION events a 0 0", 'RDATA events a batch ["a1"]')
        it.receive("POSITION events b 0 0", 'RDATA events a 6 ["a2"]')
        self.assertEqual(it.texts(), [("a", 6, ["a1", "a2"])])

    def test_batches_of_two_connections(self) -> None:
        """A batch that arrives on two connections is not mixed up."""
        it = receiving()
        other = it.connect()
        it.receive("POSITION events w 0 0", 'RDATA events w batch ["a"]')
        it.receive(
            "POSITION events w 0 0", 'RDATA events w batch ["a"]', connection=other
        )
        it.receive('RDATA events w 6 ["b"]')
        it.receive('RDATA events w 6 ["b"]', connection=other)
        self.assertEqual(it.texts(), [("w", 6, ["a", "b"])])

    def test_an_unreadable_row_makes_the_range_be_fetched(self) -> None:
        """A batch with a row that is none is fetched, and nothing is lost."""
        it = receiving()
        it.stream.persist("w", 6, ["a"], ["b"])
        it.stream.persist("w", 7, ["c"])
        it.receive(
            "POSITION events w 0 0",
            'RDATA events w 2 ["z"]',
            'RDATA events w batch ["a"]',
            "RDATA events w 6 nonsense",
            'RDATA events w 7 ["c"]',
        )
        self.assertEqual(
            it.texts(), [("w", 2, ["z"]), ("w", 6, ["a", "b"]), ("w", 7, ["c"])]
        )
        self.assertEqual(it.stream.requests, [("w", 2, 7)])
        self.assertEqual(
            it.host.observer.discards["events", "w", DiscardReason.UNDECODABLE], 2
        )
        it.receive('RDATA events w 8 ["d"]')
        self.assertEqual(it.texts()[-1], ("w", 8, ["d"]))

    def test_a_position_amid_a_batch(self) -> None:
        """A batch that its writer's own POSITION breaks is fetched, not halved."""
        it = receiving()
        it.stream.persist("w", 6, ["a"], ["b"])
        it.receive("POSITION events w 0 0", 'RDATA events w batch ["a"]')
        it.receive("POSITION events w 0 2", 'RDATA events w 6 ["b"]')
        self.assertEqual(it.texts(), [("w", 6, ["a", "b"])])
        self.assertEqual(
            it.host.observer.discards[
                "events", "w", DiscardReason.SUPERSEDED_BY_POSITION
            ],
            1,
        )

    def test_a_refused_line_makes_the_range_be_fetched(self) -> None:
        """A line of a writer that is no RDATA costs no row."""
        it = receiving()
        it.stream.persist("w", 1, ["a"])
        it.stream.persist("w", 2, ["b"])
        it.receive(
            "POSITION events w 0 0",
            'RDATA events w 1x ["a"]',
            'RDATA events w 2 ["b"]',
        )
        self.assertEqual(it.texts(), [("w", 1, ["a"]), ("w", 2, ["b"])])

    def test_a_batch_has_a_greatest_size(self) -> None:
        """A batch that is too large to keep is fetched at its end."""
        it = receiving(receiver=ReceiverOptions(max_batch_rows=2))
        it.stream.persist("w", 9, *([str(n)] for n in range(5)))
        it.receive("POSITION events w 0 0")
        for n in range(4):
            it.receive(f'RDATA events w batch ["{n}"]')
        it.receive('RDATA events w 9 ["4"]')
        self.assertEqual(it.texts(), [("w", 9, ["0", "1", "2", "3", "4"])])
        self.assertEqual(it.stream.requests, [("w", 0, 9)])

    def test_a_batch_has_a_greatest_size_in_bytes(self) -> None:
        """A batch of few long rows is fetched at its end, too."""
        it = receiving(receiver=ReceiverOptions(max_queue_size=1000))
        texts = [str(n) * 400 for n in range(4)]
        it.stream.persist("w", 9, *([text] for text in texts))
        it.receive("POSITION events w 0 0")
        for text in texts[:3]:
            it.receive(f'RDATA events w batch ["{text}"]')
        self.assertEqual(
            it.host.observer.discards["events", "w", DiscardReason.CATCHING_UP], 3
        )
        it.receive(f'RDATA events w 9 ["{texts[3]}"]')
        self.assertEqual(it.texts(), [("w", 9, texts)])
        self.assertEqual(it.stream.requests, [("w", 0, 9)])

    def test_batch_too_large_behind_a_whole_one(self) -> None:
        """The batch that is too large is fetched, not the one before it."""
        it = receiving(receiver=ReceiverOptions(max_batch_rows=2))
        it.stream.persist("w", 9, *([str(n)] for n in range(4)))
        it.receive("POSITION events w 0 0")
        batch = [f'RDATA events w batch ["{n}"]' for n in range(3)]
        it.receive('RDATA events w 8 ["a"]', *batch)
        it.receive('RDATA events w 9 ["3"]')
        self.assertEqual(it.texts(), [("w", 8, ["a"]), ("w", 9, ["0", "1", "2", "3"])])
        self.assertEqual(it.stream.requests, [("w", 8, 9)])

    def test_unreadable_late_row_of_an_idempotent_stream(self) -> None:
        """A late row that cannot be read is fetched too."""
        it = receiving(idempotent=True)
        it.stream.persist("w", 4, ["late"])
        it.receive("POSITION events w 0 0", 'RDATA events w 5 ["a"]')
        it.receive("RDATA events w 4 nonsense")
        self.assertEqual(it.texts()[-1], ("w", 4, ["late"]))
        self.assertEqual(it.stream.requests, [("w", 3, 4)])
        self.assertEqual(it.stream.current_token("w"), 5)


class PositionTests(SynchronousTestCase):
    """What a POSITION brings about."""

    def test_in_sync_asks_nobody(self) -> None:
        """From prev to new nothing is fetched; the position moves."""
        it = receiving()
        it.stream.advance("w", 5)
        it.receive("POSITION events w 3 9")
        self.assertEqual(it.stream.requests, [])
        self.assertEqual(it.host.rows.positions, [("events", "w", 9)])
        self.assertEqual(it.host.observer.connected, [("memory", "events", "w")])

    def test_a_gap_is_fetched(self) -> None:
        """Rows before an announced position are fetched before newer ones."""
        it = receiving()
        it.stream.persist("w", 4, ["a"])
        it.receive("POSITION events w 7 7", 'RDATA events w 8 ["b"]')
        self.assertEqual(it.texts(), [("w", 4, ["a"]), ("w", 8, ["b"])])
        self.assertEqual(it.stream.requests, [("w", 0, 7)])
        self.assertEqual(it.host.rows.positions, [("events", "w", 7)])

    def test_redundant_positions_are_dropped(self) -> None:
        """A position that says nothing new does nothing, and is counted."""
        it = receiving()
        it.receive("POSITION events w 0 5", "POSITION events w 0 5")
        self.assertEqual(it.host.rows.positions, [("events", "w", 5)])
        self.assertEqual(
            it.host.observer.discards["events", "w", DiscardReason.REDUNDANT_POSITION],
            1,
        )

    def test_a_writer_behind_us_is_connected(self) -> None:
        """A writer that announces less than we know of is connected all the same."""
        it = receiving()
        it.stream.advance("w", 9)
        it.receive("POSITION events w 7 7", 'RDATA events w 10 ["a"]')
        self.assertEqual(it.texts(), [("w", 10, ["a"])])
        self.assertEqual(it.stream.requests, [])

    def test_each_writer_has_its_own_gap(self) -> None:
        """Newer rows of one writer do not hide the gap of another."""
        it = receiving()
        it.receive("POSITION events a 0 0", "POSITION events b 0 0")
        it.reconnect()
        it.stream.persist("b", 3, ["b3"])
        # A is live at once, so that nothing but B's own state can tell.
        it.receive("POSITION events a 0 0", 'RDATA events b 5 ["b5"]')
        it.stream.persist("b", 5, ["b5"])
        it.receive("POSITION events b 5 5")
        self.assertEqual(it.texts(), [("b", 3, ["b3"]), ("b", 5, ["b5"])])

    def test_a_reconnection_brings_what_was_missed_once(self) -> None:
        """Rows written while the link was down arrive once, by catch-up."""
        it = receiving()
        it.receive("POSITION events w 0 0", 'RDATA events w 1 ["a"]')
        it.stream.persist("w", 1, ["a"])
        it.stream.persist("w", 2, ["b"])
        it.reconnect()
        self.assertIn("REPLICATE", it.connection.take())
        it.receive("POSITION events w 2 2", 'RDATA events w 3 ["c"]')
        self.assertEqual(
            it.texts(), [("w", 1, ["a"]), ("w", 2, ["b"]), ("w", 3, ["c"])]
        )

    def test_an_unprompted_announcement_shows_a_gap(self) -> None:
        """A writer whose rows were lost on the way announces, and is read."""
        it = receiving()
        it.receive("POSITION events w 0 0")
        it.stream.persist("w", 1, ["a"])
        it.receive("POSITION events w 1 1")
        self.assertEqual(it.texts(), [("w", 1, ["a"])])


class ResetTests(SynchronousTestCase):
    """Streams that begin again."""

    def test_a_stream_in_memory_is_fetched_from_its_beginning(self) -> None:
        """A writer that restarted lower is read from zero to its position."""
        it = receiving(resettable=True, held_in_memory=True)
        it.receive("POSITION events w 0 0", 'RDATA events w 649 ["old"]')
        it.stream.persist("w", 2, ["new"])
        it.receive("POSITION events w 3 3", 'RDATA events w 4 ["newer"]')
        self.assertEqual(it.stream.requests, [("w", 0, 3)])
        self.assertEqual(it.texts()[1:], [("w", 2, ["new"]), ("w", 4, ["newer"])])
        self.assertEqual(it.host.observer.resets, [("events", "w", 649, 0)])
        self.assertEqual(it.stream.current_token("w"), 4)

    def test_a_reset_to_zero_fetches_nothing(self) -> None:
        """After a restart without rows nobody is asked."""
        it = receiving(resettable=True, held_in_memory=True)
        it.receive("POSITION events w 0 649", "POSITION events w 0 0")
        self.assertEqual(it.stream.requests, [])
        self.assertEqual(it.stream.current_token("w"), 0)

    def test_a_stream_in_the_database_only_goes_back(self) -> None:
        """A reset of a stream that is stored moves the position, no more."""
        it = receiving(resettable=True)
        it.receive("POSITION events w 0 9", "POSITION events w 4 4")
        self.assertEqual(it.stream.requests, [])
        self.assertEqual(it.stream.current_token("w"), 4)

    def test_rows_alone_never_reset(self) -> None:
        """A lower token without a POSITION is old, not a reset."""
        it = receiving(resettable=True)
        it.receive("POSITION events w 0 9", 'RDATA events w 1 ["a"]')
        self.assertEqual(it.texts(), [])
        self.assertEqual(it.stream.current_token("w"), 9)

    def test_a_reset_while_catching_up(self) -> None:
        """A writer that restarts while it is caught up with is read anew."""
        it = receiving(resettable=True, held_in_memory=True)
        it.stream.is_held = True
        it.receive("POSITION events w 50 50")
        it.stream.persist("w", 2, ["new"])
        it.receive("POSITION events w 2 2")
        it.stream.fail(RuntimeError("the process is gone"))
        it.stream.is_held = False
        it.stream.answer()
        self.assertEqual(it.stream.requests, [("w", 0, 50), ("w", 0, 2)])
        self.assertEqual(it.texts(), [("w", 2, ["new"])])
        it.host.reactor.advance(60)
        self.assertEqual(len(it.stream.requests), 2)


class ToldTests(SynchronousTestCase):
    """What a writer tells on the extension, in a queue that overflows."""

    def fill(self, process: Receiving, *tokens: int) -> None:
        """Have rows arrive for which the queue has no room."""
        for token in tokens:
            text = f"row {token} " + "x" * 300
            process.stream.persist("w", token, [text])
            process.receive(f'RDATA events w {token} ["{text}"]')

    def tell(self, process: Receiving, token: int, epoch: str) -> None:
        process.handler.writer_reported(
            process.connection, "w", {"events": token}, epoch=epoch
        )

    def test_heartbeat_is_dropped(self) -> None:
        """A heartbeat among what is dropped costs nothing: all of it is fetched."""
        process = receiving(receiver=ReceiverOptions(max_queue_size=1000))
        process.receive("POSITION events w 0 0")
        process.host.rows.is_held = True
        self.fill(process, 1, 2, 3)
        # The last of these is what does not fit any more.
        for _ in range(5):
            self.tell(process, 3, "e")
        process.host.rows.is_held = False
        process.host.rows.release()
        process.host.reactor.pump([0.1] * 20)
        self.fill(process, 4)
        self.assertEqual([token for _, token, _ in process.texts()], [1, 2, 3, 4])
        self.assertEqual(len(process.stream.requests), 1)

    def test_gap_of_another_writer(self) -> None:
        """
        What a writer told that had no rows in the queue is looked at all the same.
        """
        process = receiving(receiver=ReceiverOptions(max_queue_size=1000))
        process.receive("POSITION events w 0 0", "POSITION events v 0 0")
        process.stream.persist("v", 1, ["lost"])
        process.host.rows.is_held = True
        self.fill(process, 2, 3)
        process.handler.writer_reported(process.connection, "v", {"events": 1})
        self.fill(process, 4, 5)
        process.host.rows.is_held = False
        process.host.rows.release()
        process.host.reactor.pump([0.1] * 20)
        self.assertEqual(process.host.rows.tokens("v"), [1])
        self.assertEqual(process.host.rows.tokens("w"), [2, 3, 4, 5])

    def test_new_epoch_outlives_the_rows_before_it(self) -> None:
        """Of rows that an earlier start sent, none is asked of the next one."""
        process = receiving(
            receiver=ReceiverOptions(max_queue_size=1000),
            resettable=True,
            held_in_memory=True,
        )
        process.receive("POSITION events w 0 0")
        process.host.rows.is_held = True
        self.fill(process, 50, 51, 52)
        process.stream.forget("w")
        process.stream.persist("w", 2, ["new"])
        self.tell(process, 2, "e")
        process.receive("POSITION events w 2 2", "POSITION events w 2 2")
        for token in (3, 4, 5):
            self.fill(process, token)
        process.host.rows.is_held = False
        process.host.rows.release()
        process.host.reactor.pump([0.1] * 20)
        self.assertEqual([token for _, token, _ in process.texts()], [50, 2, 3, 4, 5])
        self.assertEqual(process.stream.current_token("w"), 5)
