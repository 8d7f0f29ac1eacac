"""Tests of sending written rows as RDATA and POSITION."""

from __future__ import annotations

import attrs

from synapse_replication.errors import CatchUpError
from synapse_replication.handlers.events import DiscardReason
from synapse_replication.handlers.sending.streamer import RETRY_SECONDS, StreamerOptions
from synapse_replication.streams.stream import EncodedUpdates, StreamUpdateResult
from synapse_replication.testing.doubles import MemoryConnection
from tests.handlers.sending.streamer_case import RecordingBacklog, StreamerTestCase


class ReplicationStreamerTests(StreamerTestCase):
    """An instance ``w`` that writes ``events`` and ``caches``."""

    def test_rows(self) -> None:
        """Only the last row of a token carries it; the others are marked ``batch``."""
        self.write(1, "a")
        self.write(3, "b", "c")
        self.assertEqual(
            self.connection.take(),
            [
                'RDATA events w 1 ["a"]',
                'RDATA events w batch ["b"]',
                'RDATA events w 3 ["c"]',
            ],
        )

    def test_position_beyond_the_last_row(self) -> None:
        """A token without a row is announced after the last row."""
        self.events.persist("w", 2, ["a"])
        self.events.local_token = 5
        self.host.notifier.notify()
        self.assertEqual(
            self.connection.take(),
            ['RDATA events w 2 ["a"]', "POSITION events w 2 5"],
        )

    def test_position_without_rows(self) -> None:
        """A token that advanced without rows is announced, without a fetch."""
        self.events.local_token = 5
        self.host.notifier.notify()
        self.assertEqual(self.connection.take(), ["POSITION events w 0 5"])
        self.assertEqual(self.events.requests, [])

    def test_idle_writers_are_announced(self) -> None:
        """A token that advances because of other writers is announced within 1 s."""
        self.events.local_token = 5
        self.host.reactor.advance(1)
        self.assertEqual(self.connection.take(), ["POSITION events w 0 5"])
        self.host.reactor.pump([1.0] * 10)
        self.assertEqual(self.connection.take(), [])

    def test_token_that_cannot_be_read(self) -> None:
        """The checks of idle streams go on after an error of the host."""

        def fail() -> int:
            raise ValueError("broken")

        patch = self.patch(self.events, "minimal_local_current_token", fail)
        self.assertRaises(ValueError, self.host.reactor.advance, 1)
        patch.restore()
        self.events.local_token = 5
        self.host.reactor.advance(1)
        self.assertEqual(self.connection.take(), ["POSITION events w 0 5"])

    def test_nothing_new_costs_nothing(self) -> None:
        """Notifications without news start no background process."""
        self.host.reactor.pump([1.0] * 10)
        self.host.notifier.notify()
        self.assertEqual(self.host.observer.processes, [])

    def test_caches_do_not_echo(self) -> None:
        """
        ``caches`` does not announce a token that advanced because of other writers.
        """
        self.caches.local_token = 5
        self.host.notifier.notify()
        self.assertEqual(self.connection.take(), [])
        self.caches.persist("w", 6, ["a"])
        self.caches.local_token = 9
        self.host.notifier.notify()
        self.assertEqual(self.connection.take(), ['RDATA caches w 6 ["a"]'])

    def test_skipped_range(self) -> None:
        """
        A reader that has the last row need not fetch the tokens of other writers after
        it, whenever they are announced.
        """
        sender = self.handler.sender
        self.caches.persist("w", 6, ["a"])
        self.host.notifier.notify()
        for token in (8, 9):
            self.caches.local_token = token
            self.host.notifier.notify()
        self.connection.take()
        for _ in range(2):
            sender.announce_positions()
            self.assertIn("POSITION caches w 6 9", self.connection.take())
        self.caches.is_guess = True
        self.caches.local_token = 11
        self.host.notifier.notify()
        self.assertEqual(self.connection.take(), ["POSITION caches w 6 11"])
        sender.announce_positions()
        self.assertIn("POSITION caches w 6 11", self.connection.take())

    def test_invalid_row_after_a_skipped_range(self) -> None:
        """The token of a row that cannot be sent makes readers fetch it."""
        self.caches.local_token = 9
        self.host.notifier.notify()
        self.caches.persist("w", 12, ["\ud800"])
        self.host.notifier.notify()
        self.assertEqual(self.connection.take(), ["POSITION caches w 12 12"])

    def test_lost_row_before_a_skipped_range(self) -> None:
        """If a row was lost before the range, its token is announced as well."""
        self.caches.local_token = 5
        self.host.notifier.notify()
        self.caches.persist("w", 6, ["a"])
        self.connection.broken = ConnectionError("lost")
        self.host.notifier.notify()
        self.connection.broken = None
        self.caches.local_token = 9
        self.host.notifier.notify()
        self.connection.take()
        self.handler.sender.announce_positions()
        self.assertIn("POSITION caches w 6 9", self.connection.take())

    def test_own_id_without_row(self) -> None:
        """An own id without a row is announced, on ``caches`` as well."""
        self.caches.is_guess = True
        self.caches.local_token = 5
        self.host.notifier.notify()
        self.assertEqual(self.connection.take(), ["POSITION caches w 0 5"])

    def test_reset_in_running_process(self) -> None:
        """A stream that is reset in a running process announces its position."""
        self.events.description = attrs.evolve(self.events.description, resettable=True)
        self.write(7, "a")
        self.connection.take()
        self.events.local_token = 2
        self.host.notifier.notify()
        self.assertEqual(self.connection.take(), ["POSITION events w 2 2"])

    def test_idle_resettable_stream(self) -> None:
        """A resettable stream announces nothing while its position is unchanged."""
        self.events.description = attrs.evolve(self.events.description, resettable=True)
        self.write(7, "a")
        self.connection.take()
        self.host.notifier.notify()
        self.assertEqual(self.connection.take(), [])

    def test_another_stream_advances(self) -> None:
        """A resettable stream announces nothing because another stream advanced."""
        self.events.description = attrs.evolve(self.events.description, resettable=True)
        self.write(7, "a")
        self.connection.take()
        self.caches.is_guess = True
        self.caches.local_token = 5
        self.host.notifier.notify()
        self.assertEqual(self.connection.take(), ["POSITION caches w 0 5"])

    def test_commits_while_rows_are_fetched(self) -> None:
        """Rows committed during a fetch are sent; no POSITION skips them."""
        self.events.is_held = True
        self.write(1, "a")
        self.events.persist("w", 2, ["b"])
        self.host.reactor.advance(1)
        self.assertEqual(self.connection.take(), [])
        self.events.answer()
        self.events.answer()
        self.assertEqual(
            self.connection.take(),
            ['RDATA events w 1 ["a"]', 'RDATA events w 2 ["b"]'],
        )
        self.assertEqual(self.events.requests, [("w", 0, 1), ("w", 1, 2)])

    def test_a_large_commit_races_the_notifier(self) -> None:
        """All 150 rows of one commit are sent as RDATA; no POSITION skips them."""
        self.events.is_held = True
        self.write(1, "a")
        self.events.persist("w", 2, *([str(n)] for n in range(150)))
        self.handler.sender.announce_positions()
        self.assertIn("POSITION events w 0 0", self.connection.take())
        self.events.answer()
        self.host.reactor.advance(1)
        self.events.answer()
        sent = self.connection.take()
        self.assertEqual(len([line for line in sent if "RDATA" in line]), 151)
        self.assertEqual([line for line in sent if "POSITION" in line], [])

    def test_one_loop_at_a_time(self) -> None:
        """Any number of notifications during a run cause one more run."""
        self.events.is_held = True
        self.write(1, "a")
        for token in range(2, 50):
            self.write(token, "b")
        self.assertEqual(len(self.events.requests), 1)
        self.events.answer()
        self.events.answer()
        self.assertEqual(self.events.requests, [("w", 0, 1), ("w", 1, 49)])
        self.assertEqual(self.host.observer.processes, ["replication_streamer"])
        self.assertEqual(len(self.connection.take()), 49)

    def test_no_connection(self) -> None:
        """Without a connection, positions advance and nothing is fetched."""
        self.handler.lost_connection(self.connection)
        self.write(5, "a")
        self.assertEqual(self.events.requests, [])
        self.handler.new_connection(self.connection)
        self.assertIn("POSITION events w 5 5", self.connection.take())

    def test_backlog_without_connection(self) -> None:
        """
        Without a connection, rows still go to the backlog of streams that retain one.
        """
        backlog = RecordingBacklog()
        self.handler.sender.listen_to_sending(backlog)
        self.handler.lost_connection(self.connection)
        self.write(5, "a")
        self.caches.persist("w", 6, ["c"])
        self.write(7, "b", "c")
        self.assertEqual(backlog.rows, [("events", 0, [5]), ("events", 5, [7])])
        self.assertEqual(self.caches.requests, [], "caches has no backlog")
        self.assertEqual(backlog.moves[-1], ("caches", 6))
        self.handler.new_connection(self.connection)
        self.assertIn("POSITION events w 7 7", self.connection.take())

    def test_last_link_lost_amid_many_rows(self) -> None:
        """
        If the last link is lost while many rows are sent, the remaining ones are
        skipped, not fetched.
        """
        self.build(StreamerOptions(max_rows=2))
        self.handler.sender.listen_to_sending(RecordingBacklog())
        for token in range(1, 8):
            self.caches.persist("w", token, [str(token)])
        self.host.notifier.notify()
        self.assertEqual(self.caches.requests, [("w", 0, 7)])
        self.handler.lost_connection(self.connection)
        self.host.reactor.pump([0] * 3)
        self.assertEqual(self.caches.requests, [("w", 0, 7)])
        self.assertEqual(self.handler.sender.last_sent_token(self.caches), 7)

    def test_many_rows_starve_no_stream(self) -> None:
        """
        A stream with many rows sends one slice before the other streams get a turn.
        """
        self.build(StreamerOptions(max_rows=2))
        self.events.page_rows = 3
        for token in range(1, 8):
            self.events.persist("w", token, [str(token)])
        self.caches.persist("w", 1, ["c"])
        self.host.notifier.notify()
        self.assertEqual(
            self.connection.take(),
            [
                'RDATA events w 1 ["1"]',
                'RDATA events w 2 ["2"]',
                'RDATA caches w 1 ["c"]',
            ],
        )
        self.host.reactor.advance(0)
        self.assertEqual(
            self.connection.take(), [f'RDATA events w {n} ["{n}"]' for n in range(3, 8)]
        )

    def test_a_page_is_fetched_once(self) -> None:
        """A page sent in slices is fetched once, without splitting tokens."""
        self.build(StreamerOptions(max_rows=2))
        for token in range(1, 4):
            self.events.persist("w", token, [f"{token}a"], [f"{token}b"], [f"{token}c"])
        self.host.notifier.notify()
        self.assertEqual(len(self.connection.take()), 3)
        self.write(4, "d")
        self.host.reactor.pump([0] * 2)
        sent = self.connection.take()
        self.assertEqual([line.split()[3] for line in sent[2::3]], ["2", "3"])
        self.assertEqual(sent[-1], 'RDATA events w 4 ["d"]')
        self.assertEqual(
            self.events.requests, [("w", 0, 3), ("w", 3, 4)], "one for each commit"
        )

    def test_resettable_stream_is_fetched_per_slice(self) -> None:
        """For a resettable stream, each slice is fetched when it is sent."""
        self.build(StreamerOptions(max_rows=2))
        self.events.description = attrs.evolve(self.events.description, resettable=True)
        for token in range(1, 5):
            self.events.persist("w", token, [str(token)])
        self.host.notifier.notify()
        self.host.reactor.pump([0] * 2)
        self.assertEqual(len(self.connection.take()), 4)
        self.assertEqual(self.events.requests, [("w", 0, 4), ("w", 2, 4)])

    def test_advanced_past_the_page(self) -> None:
        """
        If the stream advances before a page is sent, rows up to its new position are
        skipped.
        """
        self.build(StreamerOptions(max_rows=2))
        for token in range(1, 6):
            self.events.persist("w", token, [str(token)])
        self.host.notifier.notify()
        self.handler.sender.stream_update("events", 3, ["3"])
        self.connection.take()
        self.host.reactor.pump([0] * 2)
        self.assertEqual(
            self.connection.take(), [f'RDATA events w {n} ["{n}"]' for n in (4, 5)]
        )

    def test_a_link_that_is_behind(self) -> None:
        """
        While a link is behind, a stream with many rows waits and other streams do not;
        once the link is writable, the remaining rows are sent.
        """
        waiting = self.block_link()
        self.caches.persist("w", 1, ["c"])
        self.host.notifier.notify()
        self.assertEqual(self.connection.take(), ['RDATA caches w 1 ["c"]'])
        self.make_link_writable()
        # The first slice is sent immediately, then one in each reactor turn.
        self.assertEqual(self.connection.take(), waiting[:1])
        self.host.reactor.pump([0] * 2)
        self.assertEqual(self.connection.take(), waiting[1:])

    def test_waiting_costs_nothing(self) -> None:
        """Waiting for a link involves no polling."""
        self.block_link()
        calls = self.host.reactor.getDelayedCalls()
        self.assertEqual(len(calls), 1, "only the poll of idle streams")
        processes = len(self.host.observer.processes)
        self.host.reactor.advance(0.5)
        self.assertEqual(len(self.host.observer.processes), processes)

    def test_ready_while_rows_are_fetched(self) -> None:
        """A link that becomes writable during another stream's fetch is not missed."""
        waiting = self.block_link()
        self.caches.is_held = True
        self.caches.persist("w", 1, ["c"])
        self.host.notifier.notify()
        self.make_link_writable()
        self.assertEqual(self.connection.take(), [])
        self.caches.answer()
        self.host.reactor.pump([0] * 4)
        self.assertEqual(self.connection.take(), ['RDATA caches w 1 ["c"]', *waiting])

    def test_ready_without_notification(self) -> None:
        """A link that became writable without a notification is noticed within 1 s."""
        waiting = self.block_link()
        self.connection.is_behind = False
        self.host.reactor.advance(1)
        self.host.reactor.pump([0] * 2)
        self.assertEqual(self.connection.take(), waiting)

    def test_a_link_that_is_lost_while_behind(self) -> None:
        """
        When the link that is behind is lost, the remaining rows are sent on the other
        links, or skipped if there is none.
        """
        waiting = self.block_link()
        other = MemoryConnection()
        self.handler.new_connection(other, asks=False)
        self.handler.lost_connection(self.connection)
        self.host.reactor.pump([0] * 2)
        self.assertEqual(other.take(), waiting)
        self.block_link()
        self.handler.lost_connection(self.connection)
        self.handler.new_connection(other)
        self.assertIn("POSITION events w 7 7", other.take())
        self.host.reactor.advance(1)
        self.assertEqual(other.take(), [])

    def test_a_source_that_fails(self) -> None:
        """
        If a fetch fails, it is retried after 1 s, however rarely idle streams are
        checked, and the rows are sent once.
        """
        self.build(StreamerOptions(announce_interval=10.0))
        self.connection.take()
        self.events.is_held = True
        self.write(1, "a")
        self.events.fail(CatchUpError("down"))
        self.assertEqual(len(self.host.observer.sending_failures), 1)
        self.assertEqual(self.connection.take(), [])
        self.events.is_held = False
        self.host.reactor.advance(RETRY_SECONDS)
        self.assertEqual(self.connection.take(), ['RDATA events w 1 ["a"]'])

    def test_a_row_that_is_not_json(self) -> None:
        """
        A row that cannot be encoded as JSON becomes a gap, announced by a POSITION.
        """
        for rows_at_once in (1, 2, 3):
            self.build(StreamerOptions(max_rows=rows_at_once))
            self.events.persist("w", 1, ["a"])
            self.events.persist("w", 2, [float("nan")])
            self.events.persist("w", 3, ["b"])
            self.host.notifier.notify()
            self.host.reactor.advance(0)
            self.assertEqual(
                self.connection.take(),
                [
                    'RDATA events w 1 ["a"]',
                    "POSITION events w 2 2",
                    'RDATA events w 3 ["b"]',
                ],
            )
            discards = self.host.observer.discards
            self.assertEqual(discards["events", "w", DiscardReason.SKIPPED], 1)
            self.assertEqual(self.host.observer.sending_failures, [])

    def test_a_text_that_is_not_json(self) -> None:
        """Rows that are not valid JSON are skipped; the valid ones are in one line."""
        self.events.is_held = True
        self.write(4, "x")
        texts = [(1, '["a",\n1]'), (2, '["b"]'), (2, '["\\ud800"]'), (3, '["c"]')]
        self.events.answer_with(StreamUpdateResult(EncodedUpdates(texts), 4, False))
        self.assertEqual(
            self.connection.take(),
            [
                'RDATA events w 1 ["a",1]',
                "POSITION events w 2 2",
                'RDATA events w 3 ["c"]',
                "POSITION events w 3 4",
            ],
        )
        discards = self.host.observer.discards
        self.assertEqual(discards["events", "w", DiscardReason.SKIPPED], 1)

    def test_torture(self) -> None:
        """Torture mode sends the streams in random order, each after a delay."""
        self.build(StreamerOptions(torture_level=100))
        self.caches.persist("w", 1, ["c"])
        self.write(1, "e")
        self.assertEqual(self.connection.take(), [])
        self.host.reactor.advance(0.05)
        self.assertEqual(self.connection.take(), ['RDATA caches w 1 ["c"]'])
        self.host.reactor.advance(0.05)
        self.assertEqual(self.connection.take(), ['RDATA events w 1 ["e"]'])
