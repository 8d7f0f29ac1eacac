"""Tests of how a receiver handles positions, resets and reported positions."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.events import DiscardReason
from synapse_replication.handlers.receiving.context import ReceiverOptions
from tests.handlers.fixtures import Receiving, receiving


class PositionTests(SynchronousTestCase):
    """Effects of a POSITION."""

    def test_in_sync_fetches_nothing(self) -> None:
        """
        If the previous token is not above the reader's position, the reader advances
        without a fetch.
        """
        fixture = receiving()
        fixture.stream.advance("w", 5)
        fixture.receive("POSITION events w 3 9")
        self.assertEqual(fixture.stream.requests, [])
        self.assertEqual(fixture.host.rows.positions, [("events", "w", 9)])
        self.assertEqual(fixture.host.observer.connected, [("memory", "events", "w")])
        self.assertEqual(fixture.host.observer.catch_ups, [])

    def test_rows_up_to_the_position(self) -> None:
        """
        A position that the last row has already reached is not delivered separately.
        """
        fixture = receiving()
        fixture.receive("POSITION events w 1 1")
        fixture.stream.persist("w", 4, ["a"])
        fixture.receive("POSITION events w 4 4")
        self.assertEqual(fixture.texts(), [("w", 4, ["a"])])
        self.assertEqual(fixture.host.rows.positions, [("events", "w", 1)])

    def test_a_gap_is_fetched(self) -> None:
        """Rows before an announced position are fetched before newer ones."""
        fixture = receiving()
        fixture.stream.persist("w", 4, ["a"])
        fixture.receive("POSITION events w 7 7", 'RDATA events w 8 ["b"]')
        self.assertEqual(fixture.texts(), [("w", 4, ["a"]), ("w", 8, ["b"])])
        self.assertEqual(fixture.stream.requests, [("w", 0, 7)])
        self.assertEqual(fixture.host.rows.positions, [("events", "w", 7)])

    def test_redundant_positions_are_dropped(self) -> None:
        """A POSITION that changes nothing is discarded and counted."""
        fixture = receiving()
        fixture.receive("POSITION events w 0 5", "POSITION events w 0 5")
        self.assertEqual(fixture.host.rows.positions, [("events", "w", 5)])
        self.assertEqual(
            fixture.host.observer.discards[
                "events", "w", DiscardReason.REDUNDANT_POSITION
            ],
            1,
        )

    def test_writer_behind_reader_is_connected(self) -> None:
        """A writer that announces less than the reader's position becomes live."""
        fixture = receiving()
        fixture.stream.advance("w", 9)
        fixture.receive("POSITION events w 7 7", 'RDATA events w 10 ["a"]')
        self.assertEqual(fixture.texts(), [("w", 10, ["a"])])
        self.assertEqual(fixture.stream.requests, [])

    def test_each_writer_has_its_own_gap(self) -> None:
        """Newer rows of one writer do not hide the gap of another."""
        fixture = receiving()
        fixture.receive("POSITION events a 0 0", "POSITION events b 0 0")
        fixture.reconnect()
        fixture.stream.persist("b", 3, ["b3"])
        # A is live immediately, so that only B's own state can reveal the gap.
        fixture.receive("POSITION events a 0 0", 'RDATA events b 5 ["b5"]')
        fixture.stream.persist("b", 5, ["b5"])
        fixture.receive("POSITION events b 5 5")
        self.assertEqual(fixture.texts(), [("b", 3, ["b3"]), ("b", 5, ["b5"])])

    def test_reconnect_delivers_missed_rows_once(self) -> None:
        """Rows written while the link was down are delivered once, by a catch-up."""
        fixture = receiving()
        fixture.receive("POSITION events w 0 0", 'RDATA events w 1 ["a"]')
        fixture.stream.persist("w", 1, ["a"])
        fixture.stream.persist("w", 2, ["b"])
        fixture.reconnect()
        self.assertIn("REPLICATE", fixture.connection.take())
        fixture.receive("POSITION events w 2 2", 'RDATA events w 3 ["c"]')
        self.assertEqual(
            fixture.texts(), [("w", 1, ["a"]), ("w", 2, ["b"]), ("w", 3, ["c"])]
        )

    def test_an_unprompted_announcement_shows_a_gap(self) -> None:
        """A POSITION reveals rows that were lost, and they are fetched."""
        fixture = receiving()
        fixture.receive("POSITION events w 0 0")
        fixture.stream.persist("w", 1, ["a"])
        fixture.receive("POSITION events w 1 1")
        self.assertEqual(fixture.texts(), [("w", 1, ["a"])])


class ResetTests(SynchronousTestCase):
    """Streams that are reset."""

    def test_a_stream_in_memory_is_fetched_from_its_beginning(self) -> None:
        """
        After a writer has restarted at a lower token, its rows are fetched from zero.
        """
        fixture = receiving(resettable=True, held_in_memory=True)
        fixture.receive("POSITION events w 0 0", 'RDATA events w 649 ["old"]')
        fixture.stream.persist("w", 2, ["new"])
        fixture.receive("POSITION events w 3 3", 'RDATA events w 4 ["newer"]')
        self.assertEqual(fixture.stream.requests, [("w", 0, 3)])
        self.assertEqual(fixture.texts()[1:], [("w", 2, ["new"]), ("w", 4, ["newer"])])
        self.assertEqual(fixture.host.observer.resets, [("events", "w", 649, 0)])
        self.assertEqual(fixture.stream.current_token("w"), 4)

    def test_a_reset_to_zero_fetches_nothing(self) -> None:
        """A reset to zero causes no fetch."""
        fixture = receiving(resettable=True, held_in_memory=True)
        fixture.receive("POSITION events w 0 649", "POSITION events w 0 0")
        self.assertEqual(fixture.stream.requests, [])
        self.assertEqual(fixture.stream.current_token("w"), 0)

    def test_a_reset_behind_a_row_that_waits(self) -> None:
        """A POSITION at the handled position is a reset if a row arrived before it."""
        fixture = receiving(resettable=True, held_in_memory=True)
        fixture.receive("POSITION events w 0 0")
        fixture.host.rows.is_held = True
        fixture.receive('RDATA events w 1 ["a"]')
        fixture.receive("POSITION events w 0 0", 'RDATA events w 1 ["b"]')
        fixture.host.rows.is_held = False
        fixture.host.rows.release()
        self.assertEqual(fixture.texts(), [("w", 1, ["a"]), ("w", 1, ["b"])])

    def test_stored_stream_rewinds_without_fetch(self) -> None:
        """A reset of a stored stream decreases the position without a fetch."""
        fixture = receiving(resettable=True)
        fixture.receive("POSITION events w 0 9", "POSITION events w 4 4")
        self.assertEqual(fixture.stream.requests, [])
        self.assertEqual(fixture.stream.current_token("w"), 4)

    def test_rows_alone_never_reset(self) -> None:
        """A token of a delivered row, without a POSITION, is old, not a reset."""
        fixture = receiving(resettable=True)
        fixture.receive("POSITION events w 0 8", 'RDATA events w 9 ["i"]')
        fixture.receive('RDATA events w 1 ["a"]')
        self.assertEqual(fixture.texts(), [("w", 9, ["i"])])
        self.assertEqual(fixture.stream.current_token("w"), 9)

    def test_row_of_a_range_that_was_said_to_be_empty(self) -> None:
        """A row above the last delivered row shows that a position was false."""
        fixture = receiving(resettable=True)
        fixture.stream.persist("w", 1, ["a"])
        fixture.receive("POSITION events w 0 9", 'RDATA events w 1 ["a"]')
        self.assertEqual(fixture.texts(), [("w", 1, ["a"])])
        self.assertEqual(fixture.stream.current_token("w"), 1)

    def test_a_reset_while_catching_up(self) -> None:
        """A writer that restarts during its catch-up is fetched from zero."""
        fixture = receiving(resettable=True, held_in_memory=True)
        fixture.stream.is_held = True
        fixture.receive("POSITION events w 50 50")
        fixture.stream.persist("w", 2, ["new"])
        fixture.receive("POSITION events w 2 2")
        fixture.stream.fail(RuntimeError("the process is gone"))
        fixture.stream.is_held = False
        fixture.stream.answer()
        self.assertEqual(fixture.stream.requests, [("w", 0, 50), ("w", 0, 2)])
        self.assertEqual(fixture.texts(), [("w", 2, ["new"])])
        fixture.host.reactor.advance(60)
        self.assertEqual(len(fixture.stream.requests), 2)


class ReportedPositionTests(SynchronousTestCase):
    """Reported positions in a queue that overflows."""

    def fill(self, process: Receiving, *tokens: int) -> None:
        """Deliver rows that exceed the queue's limit."""
        for token in tokens:
            text = f"row {token} " + "x" * 300
            process.stream.persist("w", token, [text])
            process.receive(f'RDATA events w {token} ["{text}"]')

    def report(self, process: Receiving, token: int, epoch: str) -> None:
        process.handler.writer_reported(
            process.connection, "w", {"events": token}, epoch=epoch
        )

    def test_heartbeat_is_dropped(self) -> None:
        """Reported positions among dropped rows cause a single catch-up."""
        process = receiving(receiver=ReceiverOptions(max_queue_size=1000))
        process.receive("POSITION events w 0 0")
        process.host.rows.is_held = True
        self.fill(process, 1, 2, 3)
        # The last of these exceeds the queue's limit.
        for _ in range(5):
            self.report(process, 3, "e")
        process.host.rows.is_held = False
        process.host.rows.release()
        process.host.reactor.pump([0.1] * 20)
        self.fill(process, 4)
        self.assertEqual([token for _, token, _ in process.texts()], [1, 2, 3, 4])
        self.assertEqual(len(process.stream.requests), 1)

    def test_gap_of_another_writer(self) -> None:
        """A reported position of a writer without queued rows is handled, too."""
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

    def test_new_epoch_survives_dropped_rows(self) -> None:
        """Dropped rows of a stale epoch are not requested from the new epoch."""
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
        self.report(process, 2, "e")
        process.receive("POSITION events w 2 2", "POSITION events w 2 2")
        for token in (3, 4, 5):
            self.fill(process, token)
        process.host.rows.is_held = False
        process.host.rows.release()
        process.host.reactor.pump([0.1] * 20)
        self.assertEqual([token for _, token, _ in process.texts()], [50, 2, 3, 4, 5])
        self.assertEqual(process.stream.current_token("w"), 5)

    def test_epoch_that_returns_behind_another(self) -> None:
        """An epoch is not redundant if another one is to be handled before it."""
        process = receiving(resettable=True, held_in_memory=True)
        process.receive("POSITION events w 0 0")
        self.report(process, 0, "a")
        process.host.reactor.pump([0.1] * 20)
        self.fill(process, 1)
        process.host.rows.is_held = True
        self.fill(process, 2)
        self.report(process, 2, "b")
        self.report(process, 2, "a")
        process.host.rows.is_held = False
        process.host.rows.release()
        process.host.reactor.pump([0.1] * 20)
        self.assertEqual(process.host.rows.epochs, {("events", "w"): "a"})
        self.fill(process, 3)
        self.assertEqual(process.texts()[-1][1], 3)
