"""Tests of draining removed writers through the command handler."""

from __future__ import annotations

from collections.abc import Mapping

from twisted.internet.defer import Deferred, succeed
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import CatchUpError
from synapse_replication.handlers.command_handler import (
    HandlerOptions,
    ReplicationCommandHandler,
)
from synapse_replication.handlers.receiving.context import ReceiverOptions
from synapse_replication.handlers.receiving.queue import DrainedQueue
from synapse_replication.handlers.receiving.removed_writers import SEARCH_PAUSE
from synapse_replication.handlers.timer import Backoff
from synapse_replication.streams.stream import RemovedWriter, StreamUpdateResult
from synapse_replication.testing.doubles import MemoryConnection, SourceStream
from tests.handlers.fixtures import Receiving, Row
from tests.support.recording_observer import RecordingHost


class DrainableSource(SourceStream):
    """A stream that reports removed writers.

    :ivar removed: the result of a query; ``None`` to return it later.
    :ivar queries: how often it was queried.
    """

    removed: Mapping[str, RemovedWriter] | Exception | None = {}  # noqa: RUF012
    queries = 0

    def find_removed_writers(self) -> Deferred[Mapping[str, RemovedWriter]]:
        self.queries += 1
        self.query_result: Deferred[Mapping[str, RemovedWriter]] = Deferred()
        if isinstance(self.removed, Exception):
            self.query_result.errback(self.removed)
        elif self.removed is not None:
            return succeed(
                {
                    writer: found
                    for writer, found in self.removed.items()
                    if found.upto_token > self.current_token(writer)
                }
            )
        return self.query_result


def _deleted(upto: int) -> RemovedWriter:
    return RemovedWriter(upto, is_deleted=True)


class DrainTests(SynchronousTestCase):
    """Rows of writers that no longer announce anything."""

    def setUp(self) -> None:
        self.stream = DrainableSource("events", Row, page_rows=2)
        self.host = RecordingHost(self.stream)
        self.observer = self.host.observer
        options = ReceiverOptions(backoff=Backoff(1.0, 8.0, jitter=lambda: 0.0))
        self.handler = ReplicationCommandHandler(
            self.host, self.observer, options=HandlerOptions(receiver=options)
        )

    def connect(self) -> Receiving:
        connection = MemoryConnection()
        self.handler.new_connection(connection)
        return Receiving(self.host, self.handler, connection, self.stream)

    def rest(self) -> None:
        """Let the search that is due, and the pause after it, pass."""
        self.host.reactor.pump([SEARCH_PAUSE, SEARCH_PAUSE])

    def remove(self, writer: str, upto: int) -> None:
        self.stream.removed = {writer: _deleted(upto)}

    def test_failure_to_enqueue(self) -> None:
        """If a removed writer cannot be enqueued, the search is repeated."""
        self.stream.persist("old", 1, ["1"])
        self.remove("old", 1)

        def fail(*_: object) -> None:
            raise ValueError("no")

        patch = self.patch(DrainedQueue, "call", fail)
        fixture = self.connect()
        self.assertEqual([str(error) for _, error in self.observer.failures], ["no"])
        patch.restore()
        self.rest()
        self.assertEqual(fixture.host.rows.tokens("old"), [1])

    def test_when_a_link_comes_up(self) -> None:
        """A removed writer's rows are fetched to the last one, without a POSITION."""
        for token in range(1, 6):
            self.stream.persist("old", token, [str(token)])
        self.stream.advance("old", 2)
        self.remove("old", 5)
        fixture = self.connect()
        self.assertEqual(fixture.host.rows.tokens("old"), [3, 4, 5])
        self.assertEqual(self.observer.removed_found, [("events", "old", 2, 5)])
        self.assertEqual(self.observer.removed_drained, [("events", "old", 5)])
        self.assertEqual(self.observer.connected, [])
        # Its RDATA are discarded until it sends a POSITION.
        fixture.receive('RDATA events old 7 ["7"]')
        self.assertEqual(fixture.host.rows.tokens("old"), [3, 4, 5])

    def test_when_another_writer_starts(self) -> None:
        """A committed row that was never sent is found when another writer starts."""
        fixture = self.connect()
        fixture.receive("POSITION events old 0 0", 'RDATA events old 1 ["1"]')
        self.rest()
        self.stream.persist("old", 2, ["2"])
        self.remove("old", 2)
        queries = self.stream.queries
        fixture.receive("POSITION events new 5 5")
        self.assertGreater(self.stream.queries, queries)
        self.assertEqual(fixture.host.rows.tokens("old"), [1, 2])
        self.rest()
        # The same writer starts again while the link is up.
        self.stream.persist("old", 3, ["3"])
        self.remove("old", 3)
        fixture.receive("POSITION events new 5 5")
        self.assertEqual(fixture.host.rows.tokens("old"), [1, 2, 3])

    def test_when_first_position_arrives(self) -> None:
        """A writer's first POSITION triggers the query even if its tokens differ."""
        fixture = self.connect()
        self.rest()
        self.stream.persist("old", 1, ["1"])
        self.remove("old", 1)
        fixture.receive("POSITION events new 3 5")
        self.assertEqual(fixture.host.rows.tokens("old"), [1])

    def test_later_positions_trigger_no_query(self) -> None:
        """
        A later POSITION whose tokens differ triggers no query: its writer did not just
        start.
        """
        fixture = self.connect()
        fixture.receive("POSITION events new 5 5")
        self.rest()
        queries = self.stream.queries
        fixture.receive("POSITION events new 5 9", 'RDATA events new 10 ["a"]')
        self.rest()
        self.assertEqual(self.stream.queries, queries)

    def test_many_writers_connect(self) -> None:
        """One query serves the POSITIONs of all writers that connect together."""
        fixture = self.connect()
        self.rest()
        queries = self.stream.queries
        for number in range(10):
            fixture.receive(f"POSITION events writer{number} 5 5")
        self.assertEqual(self.stream.queries, queries + 1)
        self.stream.persist("old", 1, ["1"])
        self.remove("old", 1)
        self.host.reactor.advance(SEARCH_PAUSE)
        self.assertEqual(self.stream.queries, queries + 2)
        self.assertEqual(fixture.host.rows.tokens("old"), [1])
        self.rest()
        self.assertEqual(self.stream.queries, queries + 2)

    def test_no_call_is_left(self) -> None:
        """Without a link, no call of the search is left: the process may be over."""
        fixture = self.connect()
        fixture.receive("POSITION events new 5 5")
        self.handler.lost_connection(fixture.connection)
        self.assertEqual(self.host.reactor.getDelayedCalls(), [])
        queries = self.stream.queries
        self.connect()
        self.assertEqual(self.stream.queries, queries + 1)

    def test_writer_returns_during_drain(self) -> None:
        """A writer that sends a POSITION during the drain becomes live after it."""
        for token in (1, 2, 3, 4):
            self.stream.persist("old", token, [str(token)])
        self.remove("old", 3)
        self.stream.is_held = True
        fixture = self.connect()
        fixture.receive("POSITION events old 4 4")
        self.stream.is_held = False
        self.stream.answer()
        self.assertEqual(fixture.host.rows.tokens("old"), [1, 2, 3, 4])
        self.assertEqual(self.observer.removed_drained, [])
        self.assertEqual(self.observer.connected, [("memory", "events", "old")])

    def test_found_during_a_catch_up(self) -> None:
        """
        If a removed writer's rows are being fetched, the page is requested once more:
        it may lack the rows that were committed last.
        """
        for token in range(1, 6):
            self.stream.persist("old", token, [str(token)])
        self.stream.removed = None
        fixture = self.connect()
        self.stream.is_held = True
        fixture.receive("POSITION events old 5 5")
        self.stream.query_result.callback({"old": _deleted(2)})
        fixture.receive("POSITION events old 5 5")
        self.stream.is_held = False
        self.stream.answer_with(StreamUpdateResult([], 5, False))
        self.assertEqual(fixture.host.rows.tokens("old"), [])
        self.stream.answer()
        self.assertEqual(fixture.host.rows.tokens("old"), [1, 2, 3, 4, 5])

    def test_nothing_is_missing(self) -> None:
        """A removed writer whose rows were all delivered is reported once."""
        fixture = self.connect()
        fixture.receive("POSITION events old 2 2", "POSITION events new 2 2")
        self.rest()
        found = {"old": _deleted(2)}
        self.stream.find_removed_writers = lambda: succeed(found)  # type: ignore[method-assign]
        fixture.receive("POSITION events new 2 2", "POSITION events new 2 2")
        self.assertEqual(self.observer.removed_found, [])
        self.assertEqual(self.observer.removed_drained, [("events", "old", 2)])

    def test_row_below_a_false_position(self) -> None:
        """
        A row below a false position is delivered when its writer is removed, although
        no later row shows that the position is false.
        """
        fixture = self.connect()
        fixture.receive("POSITION events old 0 0", "POSITION events old 0 9")
        self.rest()
        self.stream.persist("old", 4, ["4"])
        found = {"old": _deleted(9)}
        self.stream.find_removed_writers = lambda: succeed(found)  # type: ignore[method-assign]
        fixture.receive("POSITION events new 2 2", "POSITION events new 2 2")
        self.assertEqual(fixture.host.rows.tokens("old"), [4])
        self.assertEqual(self.observer.removed_drained, [("events", "old", 9)])
        # No further search reads the range again.
        requests = [each for each in self.stream.requests if each[0] == "old"]
        self.assertEqual(requests, [("old", 0, 9)])

    def test_connected_writer(self) -> None:
        """
        A connected writer that is merely missing from the configuration is not drained.
        """
        fixture = self.connect()
        fixture.receive("POSITION events added 2 2")
        self.rest()
        self.stream.persist("added", 3, ["3"])
        self.stream.removed = {"added": RemovedWriter(3, is_deleted=False)}
        fixture.receive("POSITION events new 5 5")
        self.assertEqual(fixture.host.rows.tokens("added"), [])

    def test_connected_writer_sends_rows_during_query(self) -> None:
        """A connected writer stays connected if its rows arrive before the result."""
        fixture = self.connect()
        fixture.receive("POSITION events added 2 2")
        self.rest()
        self.stream.removed = None
        fixture.receive("POSITION events new 5 5")
        fixture.receive('RDATA events added 3 ["3"]')
        found = RemovedWriter(3, is_deleted=False)
        self.stream.query_result.callback({"added": found})
        fixture.receive('RDATA events added 4 ["4"]')
        self.assertEqual(fixture.host.rows.tokens("added"), [3, 4])
        self.assertEqual(self.observer.removed_drained, [])

    def test_rows_are_delivered_during_query(self) -> None:
        """While the query runs, rows of other writers are delivered."""
        self.stream.removed = None
        fixture = self.connect()
        answer = self.stream.query_result
        fixture.receive("POSITION events new 0 0", 'RDATA events new 1 ["1"]')
        self.assertEqual(fixture.host.rows.tokens("new"), [1])
        self.stream.persist("old", 2, ["2"])
        self.stream.removed = {}
        answer.callback({"old": _deleted(2)})
        self.assertEqual(fixture.host.rows.tokens("old"), [2])

    def test_source_fails(self) -> None:
        """A query that fails is retried later, and then the rows are fetched."""
        self.stream.removed = CatchUpError("the database is gone")
        fixture = self.connect()
        self.stream.persist("old", 2, ["2"])
        self.remove("old", 2)
        fixture.host.reactor.advance(0.9)
        self.assertEqual(fixture.host.rows.tokens("old"), [])
        fixture.host.reactor.advance(0.2)
        self.assertEqual(fixture.host.rows.tokens("old"), [2])
        self.assertEqual(
            [what for what, _ in self.observer.failures],
            ["looking for removed writers of events"],
        )

    def test_link_is_lost(self) -> None:
        """After a reconnection, the drain resumes where it ended."""
        for token in range(1, 6):
            self.stream.persist("old", token, [str(token)])
        self.remove("old", 5)
        self.stream.is_held = True
        fixture = self.connect()
        self.stream.answer()
        self.handler.lost_connection(fixture.connection)
        self.stream.is_held = False
        self.connect()
        self.assertEqual(fixture.host.rows.tokens("old"), [1, 2])
        # The result of the fetch from the lost link is ignored.
        self.stream.answer()
        self.assertEqual(fixture.host.rows.tokens("old"), [1, 2, 3, 4, 5])

    def test_no_link_is_left(self) -> None:
        """Without a link, as after a stop, a search waits for the next link."""
        fixture = self.connect()
        fixture.receive("POSITION events new 5 5")
        self.stream.removed = CatchUpError("the database is closed")
        queries = self.stream.queries
        self.handler.lost_connection(fixture.connection)
        self.rest()
        self.assertEqual(self.stream.queries, queries)
        fixture = self.connect()
        self.assertEqual(self.stream.queries, queries + 1)
        self.handler.lost_connection(fixture.connection)
        self.rest()
        self.assertEqual(self.stream.queries, queries + 1)
        self.assertEqual(self.host.reactor.getDelayedCalls(), [])
        self.connect()
        self.assertEqual(self.stream.queries, queries + 2)

    def test_second_link(self) -> None:
        """With two links, a writer is drained once."""
        self.stream.persist("old", 1, ["1"])
        self.stream.persist("old", 2, ["2"])
        self.remove("old", 2)
        self.stream.is_held = True
        fixture = self.connect()
        self.connect()
        self.stream.is_held = False
        self.stream.answer()
        self.assertEqual(fixture.host.rows.tokens("old"), [1, 2])
        self.assertEqual(len(self.stream.requests), 1)
