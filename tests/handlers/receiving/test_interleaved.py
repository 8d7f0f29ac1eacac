"""Tests of rows of several writers that arrive together."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.observer import DiscardReason
from synapse_replication.handlers.receiving.context import ReceiverOptions
from tests.handlers.fixtures import Receiving, receiving

WRITERS = [f"w{n}" for n in range(10)]


def connected(
    receiver: ReceiverOptions | None = None, *, idempotent: bool = False
) -> Receiving:
    """Make a reader that is connected to all writers."""
    it = receiving(receiver=receiver, idempotent=idempotent)
    it.receive(*(f"POSITION events {writer} 0 0" for writer in WRITERS))
    return it


def line(token: int, row: str | None = None) -> str:
    """Return an RDATA line; consecutive tokens have different writers."""
    return f"RDATA events {WRITERS[token % 10]} {token} " + (row or f'["{token}"]')


class InterleavedTests(SynchronousTestCase):
    """Consecutive rows of different writers."""

    def test_order(self) -> None:
        """Rows are delivered in the order of arrival, across writers."""
        it = connected()
        it.receive(*map(line, range(1, 351)))
        self.assertEqual([token for _, token, _ in it.texts()], list(range(1, 351)))
        self.assertEqual([rows for *_, rows in it.texts()[:2]], [["1"], ["2"]])
        self.assertEqual(it.stream.requests, [])
        self.assertEqual(it.stream.current_token("w3"), 343)

    def test_one_process_and_one_report(self) -> None:
        """
        A chunk is handled by one background process, and each writer is reported once.
        """
        it = connected()
        it.host.observer.processes.clear()
        it.host.observer.positions.clear()
        it.receive(*map(line, range(1, 101)))
        self.assertEqual(it.host.observer.processes, ["replication_stream_events"])
        self.assertEqual(
            it.host.observer.positions,
            {("events", writer): 90 + n for n, writer in enumerate(WRITERS)}
            | {("events", "w0"): 100},
        )

    def test_a_row_that_is_none(self) -> None:
        """An undecodable row causes a catch-up of its writer only."""
        it = connected()
        it.stream.persist("w5", 5, ["5"])
        it.stream.persist("w5", 15, ["15"])
        it.receive(*map(line, range(1, 5)), line(5, "nonsense"), *map(line, [6, 7, 15]))
        self.assertEqual(it.stream.requests, [("w5", 0, 15)])
        self.assertEqual(it.host.rows.tokens("w5"), [5, 15])
        self.assertEqual(it.host.rows.tokens("w6"), [6])

    def test_the_host_fails(self) -> None:
        """Rows of one writer that the sink rejects do not delay other writers."""
        it = connected()
        it.stream.persist("w2", 2, ["2"])
        it.stream.persist("w2", 12, ["12"])
        it.host.rows.failures = [None, ValueError("no")]
        it.receive(*map(line, [1, 2, 3, 12]))
        self.assertEqual(it.host.rows.tokens("w3"), [3])
        self.assertEqual(it.host.rows.tokens("w2"), [])
        it.host.reactor.advance(1)
        self.assertEqual(it.host.rows.tokens("w2"), [2, 12])

    def test_the_host_fails_behind_rows_that_it_took(self) -> None:
        """After a row fails, later rows of its writer are fetched again."""
        it = connected()
        for token in (12, 22):
            it.stream.persist("w2", token, [str(token)])
        it.host.rows.failures = [None, None, ValueError("no")]
        it.receive(*map(line, [2, 3, 12, 13, 22]))
        self.assertEqual(it.host.rows.tokens("w2"), [2])
        self.assertEqual(it.host.observer.positions["events", "w2"], 2)
        it.host.reactor.advance(1)
        self.assertEqual(it.host.rows.tokens("w2"), [2, 12, 22])
        self.assertEqual(it.stream.requests, [("w2", 2, 22)])

    def test_the_host_fails_with_a_late_row(self) -> None:
        """The same after a late row of an idempotent stream fails."""
        it = connected(idempotent=True)
        for token in (2, 22):
            it.stream.persist("w2", token, [str(token)])
        it.host.rows.failures = [None, None, ValueError("no")]
        it.receive(*map(line, [12, 3, 2, 22]))
        self.assertEqual(it.host.rows.tokens("w2"), [12])
        it.host.reactor.advance(1)
        self.assertEqual(it.host.rows.tokens("w2"), [12, 2, 22])

    def test_old_tokens(self) -> None:
        """A token at or below its writer's last one is discarded."""
        it = connected()
        it.receive(*map(line, [12, 3, 2, 12, 13, 22]))
        self.assertEqual([token for _, token, _ in it.texts()], [12, 3, 13, 22])
        discards = it.host.observer.discards
        self.assertEqual(discards["events", "w2", DiscardReason.OLD_TOKEN], 2)

    def test_old_tokens_behind_what_is_not_usual(self) -> None:
        """The same if rows in between took the slow path."""
        it = connected()

        def others(first: int, last: int) -> list[str]:
            return [f'RDATA events w3 {n} ["{n}"]' for n in range(first, last)]

        # Slices of 100 rows: on the fast path; with a batch; with an old token.
        lines = [line(12), *others(13, 112)]
        lines += ['RDATA events w2 batch ["x"]', 'RDATA events w2 500 ["y"]']
        lines += [*others(600, 698), 'RDATA events w2 300 ["z"]', *others(700, 705)]
        it.receive(*lines)
        self.assertEqual(it.host.rows.tokens("w2"), [12, 500])
        self.assertEqual(len(it.host.rows.tokens("w3")), 99 + 98 + 5)

    def test_what_is_not_usual(self) -> None:
        """
        Batches, old tokens and unknown writers on the slow path are handled correctly.
        """
        it = connected()
        it.receive(
            'RDATA events w1 batch ["a"]',
            line(2),
            'RDATA events nobody 3 ["x"]',
            'RDATA events w1 11 ["b"]',
            line(2),
        )
        self.assertEqual(it.texts(), [("w2", 2, ["2"]), ("w1", 11, ["a", "b"])])
        discards = it.host.observer.discards
        self.assertEqual(discards["events", "nobody", DiscardReason.NOT_CONNECTED], 1)
        self.assertEqual(discards["events", "w2", DiscardReason.OLD_TOKEN], 1)

    def test_a_writer_without_position(self) -> None:
        """Only the rows of a writer that sent no POSITION are discarded."""
        it = connected()
        it.receive(line(1), 'RDATA events nobody 2 ["x"]', line(3), line(4))
        self.assertEqual([token for _, token, _ in it.texts()], [1, 3, 4])
        discards = it.host.observer.discards
        self.assertEqual(discards["events", "nobody", DiscardReason.NOT_CONNECTED], 1)
        it.receive(line(5), line(6))
        self.assertEqual([token for _, token, _ in it.texts()], [1, 3, 4, 5, 6])

    def test_own_rows_among_them(self) -> None:
        """Rows that this instance wrote itself are discarded as its own echo."""
        it = connected()
        it.receive(line(1), 'RDATA events reader 2 ["own"]', line(3))
        self.assertEqual([token for _, token, _ in it.texts()], [1, 3])
        discards = it.host.observer.discards
        self.assertEqual(discards["events", "reader", DiscardReason.OWN_ECHO], 1)
        self.assertEqual(it.host.observer.processes[-1], "replication_stream_events")

    def test_an_unknown_stream(self) -> None:
        """Rows of an unknown stream are discarded and counted per writer."""
        it = connected()
        it.receive("RDATA made-up w1 1 []", "RDATA made-up w2 2 []")
        reason = DiscardReason.UNKNOWN_STREAM
        discards = it.host.observer.discards
        self.assertEqual([discards["made-up", w, reason] for w in ("w1", "w2")], [1, 1])

    def test_extra_fields_are_counted_once(self) -> None:
        """Rows with extra fields of a newer peer are delivered, and each is counted."""
        it = connected()
        it.receive(*(line(token, f'["{token}", 7]') for token in (1, 2, 3)))
        self.assertEqual(len(it.texts()), 3)
        self.assertEqual(it.host.observer.extra["events"], 3)

    def test_waits_for_the_host(self) -> None:
        """
        A row is delivered once the sink has handled the one before, of any writer.
        """
        it = connected()
        it.host.rows.is_held = True
        it.receive(line(1), line(2))
        self.assertEqual(it.texts(), [])
        it.host.rows.release()
        self.assertEqual(it.texts(), [("w1", 1, ["1"])])
        it.host.rows.release()
        self.assertEqual(len(it.texts()), 2)

    def test_gives_way_to_the_reactor(self) -> None:
        """While handling a long chunk, the receiver yields to the reactor."""
        it = connected(ReceiverOptions(break_after_rows=100))
        it.receive(*map(line, range(1, 251)))
        self.assertEqual(len(it.texts()), 100)
        self.assertEqual(it.host.observer.positions["events", "w0"], 100)
        it.break_time()
        it.break_time()
        self.assertEqual(len(it.texts()), 250)

    def test_a_full_queue(self) -> None:
        """
        Rows dropped from a full queue are fetched for each writer up to its last one.
        """
        it = connected(ReceiverOptions(max_queue_size=1000))
        it.host.rows.is_held = True
        for token in range(1, 101):
            it.stream.persist(WRITERS[token % 10], token, [str(token)])
        for first in range(1, 101, 5):
            it.receive(*map(line, range(first, first + 5)))
        it.host.rows.is_held = False
        it.host.rows.release()
        for n, writer in enumerate(WRITERS):
            self.assertEqual(
                it.host.rows.tokens(writer), list(range(n or 10, 101, 10)), writer
            )
