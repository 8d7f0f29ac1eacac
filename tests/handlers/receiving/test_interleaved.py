"""Tests of rows of several writers that arrive together."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.events import DiscardReason
from synapse_replication.handlers.receiving.context import ReceiverOptions
from tests.handlers.fixtures import Receiving, receiving

WRITERS = [f"w{n}" for n in range(10)]


def connected(
    receiver: ReceiverOptions | None = None, *, idempotent: bool = False
) -> Receiving:
    """Make a reader for which all writers are live."""
    fixture = receiving(receiver=receiver, idempotent=idempotent)
    fixture.receive(*(f"POSITION events {writer} 0 0" for writer in WRITERS))
    return fixture


def line(token: int, row: str | None = None) -> str:
    """Return an RDATA line; consecutive tokens have different writers."""
    return f"RDATA events {WRITERS[token % 10]} {token} " + (row or f'["{token}"]')


class InterleavedTests(SynchronousTestCase):
    """Consecutive rows of different writers."""

    def test_order(self) -> None:
        """Rows are delivered in the order of arrival, across writers."""
        fixture = connected()
        fixture.receive(*map(line, range(1, 351)))
        self.assertEqual(
            [token for _, token, _ in fixture.texts()], list(range(1, 351))
        )
        self.assertEqual([rows for *_, rows in fixture.texts()[:2]], [["1"], ["2"]])
        self.assertEqual(fixture.stream.requests, [])
        self.assertEqual(fixture.stream.current_token("w3"), 343)

    def test_repeated_row(self) -> None:
        """A row that is repeated among rows of other writers is delivered once."""
        fixture = connected()
        fixture.receive(*map(line, (1, 2, 12, 12)))
        self.assertEqual([token for _, token, _ in fixture.texts()], [1, 2, 12])

    def test_lower_position(self) -> None:
        """A POSITION below a row that arrived among others is that of a restart."""
        fixture = receiving(resettable=True, held_in_memory=True)
        fixture.receive("POSITION events w1 0 0", "POSITION events w2 0 0")
        fixture.receive(line(1), line(12))
        fixture.stream.persist("w2", 2, ["new"])
        fixture.receive("POSITION events w2 3 3")
        self.assertEqual(fixture.texts()[2:], [("w2", 2, ["new"])])

    def test_one_process_and_one_report(self) -> None:
        """
        A chunk is handled by one background process, and each writer is reported once.
        """
        fixture = connected()
        fixture.host.observer.processes.clear()
        fixture.host.observer.positions.clear()
        fixture.receive(*map(line, range(1, 101)))
        self.assertEqual(fixture.host.observer.processes, ["replication_stream_events"])
        self.assertEqual(
            fixture.host.observer.positions,
            {("events", writer): 90 + n for n, writer in enumerate(WRITERS)}
            | {("events", "w0"): 100},
        )
        self.assertEqual(
            fixture.host.observer.announced, fixture.host.observer.positions
        )
        self.assertEqual(fixture.host.observer.received["events"], 100)

    def test_undecodable_row(self) -> None:
        """An undecodable row causes a catch-up of its writer only."""
        fixture = connected()
        fixture.stream.persist("w5", 5, ["5"])
        fixture.stream.persist("w5", 15, ["15"])
        fixture.receive(
            *map(line, range(1, 5)), line(5, "nonsense"), *map(line, [6, 7, 15])
        )
        self.assertEqual(fixture.stream.requests, [("w5", 0, 5)])
        self.assertEqual(fixture.host.rows.tokens("w5"), [5, 15])
        self.assertEqual(fixture.host.rows.tokens("w6"), [6])

    def test_sink_fails(self) -> None:
        """
        If the sink rejects rows of one writer, the rows of other writers are not
        delayed.
        """
        fixture = connected()
        fixture.stream.persist("w2", 2, ["2"])
        fixture.stream.persist("w2", 12, ["12"])
        fixture.host.rows.failures = [None, ValueError("no")]
        fixture.receive(*map(line, [1, 2, 3, 12]))
        self.assertEqual(fixture.host.rows.tokens("w3"), [3])
        self.assertEqual(fixture.host.rows.tokens("w2"), [])
        fixture.host.reactor.advance(1)
        self.assertEqual(fixture.host.rows.tokens("w2"), [2, 12])

    def test_sink_fails_after_accepted_rows(self) -> None:
        """After a row fails, later rows of its writer are fetched again."""
        fixture = connected()
        for token in (12, 22):
            fixture.stream.persist("w2", token, [str(token)])
        fixture.host.rows.failures = [None, None, ValueError("no")]
        fixture.receive(*map(line, [2, 3, 12, 13, 22]))
        self.assertEqual(fixture.host.rows.tokens("w2"), [2])
        self.assertEqual(fixture.host.observer.positions["events", "w2"], 2)
        fixture.host.reactor.advance(1)
        self.assertEqual(fixture.host.rows.tokens("w2"), [2, 12, 22])
        self.assertEqual(fixture.stream.requests, [("w2", 2, 22)])

    def test_sink_fails_with_late_row(self) -> None:
        """A late row of an idempotent stream that the sink rejects is fetched again."""
        fixture = connected(idempotent=True)
        for token in (2, 22):
            fixture.stream.persist("w2", token, [str(token)])
        fixture.host.rows.failures = [None, None, ValueError("no")]
        fixture.receive(*map(line, [12, 3, 2, 22]))
        self.assertEqual(fixture.host.rows.tokens("w2"), [12])
        fixture.host.reactor.advance(1)
        self.assertEqual(fixture.host.rows.tokens("w2"), [12, 2, 22])

    def test_old_tokens(self) -> None:
        """A token at or below the writer's last delivered token is discarded."""
        fixture = connected()
        fixture.receive(*map(line, [12, 3, 2, 12, 13, 22]))
        self.assertEqual([token for _, token, _ in fixture.texts()], [12, 3, 13, 22])
        discards = fixture.host.observer.discards
        self.assertEqual(discards["events", "w2", DiscardReason.OLD_TOKEN], 2)

    def test_old_tokens_after_slow_path(self) -> None:
        """Old tokens are discarded even if rows in between took the slow path."""
        fixture = connected()

        def others(first: int, last: int) -> list[str]:
            return [f'RDATA events w3 {n} ["{n}"]' for n in range(first, last)]

        # Slices of 100 rows: on the fast path; with a batch; with an old token.
        lines = [line(12), *others(13, 112)]
        lines += ['RDATA events w2 batch ["x"]', 'RDATA events w2 500 ["y"]']
        lines += [*others(600, 698), 'RDATA events w2 300 ["z"]', *others(700, 705)]
        fixture.receive(*lines)
        self.assertEqual(fixture.host.rows.tokens("w2"), [12, 500])
        self.assertEqual(len(fixture.host.rows.tokens("w3")), 99 + 98 + 5)

    def test_slow_path(self) -> None:
        """
        Batches, old tokens and unknown writers on the slow path are handled correctly.
        """
        fixture = connected()
        fixture.receive(
            'RDATA events w1 batch ["a"]',
            line(2),
            'RDATA events nobody 3 ["x"]',
            'RDATA events w1 11 ["b"]',
            line(2),
        )
        self.assertEqual(fixture.texts(), [("w2", 2, ["2"]), ("w1", 11, ["a", "b"])])
        discards = fixture.host.observer.discards
        self.assertEqual(discards["events", "nobody", DiscardReason.NOT_CONNECTED], 1)
        self.assertEqual(discards["events", "w2", DiscardReason.OLD_TOKEN], 1)

    def test_a_writer_without_position(self) -> None:
        """Only the rows of a writer that sent no POSITION are discarded."""
        fixture = connected()
        fixture.receive(line(1), 'RDATA events nobody 2 ["x"]', line(3), line(4))
        self.assertEqual([token for _, token, _ in fixture.texts()], [1, 3, 4])
        discards = fixture.host.observer.discards
        self.assertEqual(discards["events", "nobody", DiscardReason.NOT_CONNECTED], 1)
        fixture.receive(line(5), line(6))
        self.assertEqual([token for _, token, _ in fixture.texts()], [1, 3, 4, 5, 6])

    def test_own_rows_among_others(self) -> None:
        """Rows that this instance wrote itself are discarded as its own echo."""
        fixture = connected()
        fixture.receive(line(1), 'RDATA events reader 2 ["own"]', line(3))
        self.assertEqual([token for _, token, _ in fixture.texts()], [1, 3])
        discards = fixture.host.observer.discards
        self.assertEqual(discards["events", "reader", DiscardReason.OWN_ECHO], 1)
        self.assertEqual(
            fixture.host.observer.processes[-1], "replication_stream_events"
        )

    def test_an_unknown_stream(self) -> None:
        """Rows of an unknown stream are discarded and counted per writer."""
        fixture = connected()
        fixture.receive("RDATA made-up w1 1 []", "RDATA made-up w2 2 []")
        reason = DiscardReason.UNKNOWN_STREAM
        discards = fixture.host.observer.discards
        self.assertEqual([discards["made-up", w, reason] for w in ("w1", "w2")], [1, 1])

    def test_extra_fields_are_counted_once(self) -> None:
        """Rows with extra fields of a newer peer are delivered, and each is counted."""
        fixture = connected()
        fixture.receive(*(line(token, f'["{token}", 7]') for token in (1, 2, 3)))
        self.assertEqual(len(fixture.texts()), 3)
        self.assertEqual(fixture.host.observer.extra["events"], 3)

    def test_waits_for_the_sink(self) -> None:
        """
        A row is delivered once the sink has handled the previous row, of any writer.
        """
        fixture = connected()
        fixture.host.rows.is_held = True
        fixture.receive(line(1), line(2))
        self.assertEqual(fixture.texts(), [])
        fixture.host.rows.release()
        self.assertEqual(fixture.texts(), [("w1", 1, ["1"])])
        fixture.host.rows.release()
        self.assertEqual(len(fixture.texts()), 2)

    def test_yields_to_the_reactor(self) -> None:
        """While handling a long chunk, the receiver yields to the reactor."""
        fixture = connected(ReceiverOptions(break_after_rows=100))
        fixture.receive(*map(line, range(1, 251)))
        self.assertEqual(len(fixture.texts()), 100)
        self.assertEqual(fixture.host.observer.positions["events", "w0"], 100)
        fixture.run_pending_calls()
        fixture.run_pending_calls()
        self.assertEqual(len(fixture.texts()), 250)

    def test_a_full_queue(self) -> None:
        """
        Rows dropped from a full queue are fetched for each writer, up to its last
        dropped row.
        """
        fixture = connected(ReceiverOptions(max_queue_size=1000))
        fixture.host.rows.is_held = True
        for token in range(1, 101):
            fixture.stream.persist(WRITERS[token % 10], token, [str(token)])
        for first in range(1, 101, 5):
            fixture.receive(*map(line, range(first, first + 5)))
        fixture.host.rows.is_held = False
        fixture.host.rows.release()
        for n, writer in enumerate(WRITERS):
            self.assertEqual(
                fixture.host.rows.tokens(writer), list(range(n or 10, 101, 10)), writer
            )

    def test_a_full_queue_meanwhile(self) -> None:
        """
        If the queue overflows while the sink handles a row, the rows of later slices
        are fetched, as if they had arrived from one writer.
        """
        fixture = connected(ReceiverOptions(max_queue_size=1000))
        for token in range(1, 281):
            fixture.stream.persist(WRITERS[token % 10], token, [str(token)])
        fixture.host.rows.is_held = True
        fixture.receive(*map(line, range(1, 241)))
        for first in range(241, 281, 5):
            fixture.receive(*map(line, range(first, first + 5)))
        fixture.stream.requests.clear()
        fixture.host.rows.is_held = False
        fixture.host.rows.release()
        fixture.run_pending_calls()
        for n, writer in enumerate(WRITERS):
            self.assertEqual(
                fixture.host.rows.tokens(writer), list(range(n or 10, 281, 10)), writer
            )
        self.assertEqual(
            {(name, after) for name, after, _ in fixture.stream.requests},
            # Before the overflow, only w1 was known to be live.
            {(name, 91 if name == "w1" else 0) for name in WRITERS},
        )
