"""Tests for :mod:`synapse_replication.handlers.accepted_writers`."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.accepted_writers import (
    MAX_UNDECLARED,
    PAIR_EXPIRES_AFTER,
    AcceptedWriters,
    DeclaredWriters,
)
from synapse_replication.handlers.command_handler import (
    HandlerOptions,
    ReplicationCommandHandler,
)
from synapse_replication.handlers.events import DiscardReason
from synapse_replication.testing.doubles import MemoryConnection, SourceStream
from synapse_replication.wire.rdata import read_lines
from tests.handlers.fixtures import Row
from tests.support.recording_observer import RecordingHost

DECLARED = DeclaredWriters({"events": ["w1"], "caches": []}, ["w2"])


class AcceptedWritersTests(SynchronousTestCase):
    """Tests for :class:`AcceptedWriters`."""

    def setUp(self) -> None:
        self.accepted = AcceptedWriters(DECLARED)

    def accepts(self, stream: str, writer: str, now: float = 0) -> bool:
        return self.accepted.accept(stream, writer, now)[0]

    def test_instances_of_the_deployment(self) -> None:
        """Every instance of the deployment may write every stream."""
        for stream in ("events", "caches"):
            for writer in ("w1", "w2"):
                self.assertTrue(self.accepts(stream, writer))

    def test_undeclared_writers(self) -> None:
        """An undeclared writer may write only streams without declared writers."""
        self.assertFalse(self.accepts("events", "zz"))
        self.assertTrue(self.accepts("caches", "zz"))

    def test_undeclared_writers_are_bounded(self) -> None:
        """Beyond the limit, an undeclared writer can only replace an expired one."""
        for number in range(MAX_UNDECLARED):
            self.assertTrue(self.accepts("caches", f"s{number}"))
        self.assertFalse(self.accepts("caches", "one more", PAIR_EXPIRES_AFTER - 1))
        self.assertTrue(self.accepts("caches", "w1", PAIR_EXPIRES_AFTER - 1))
        self.assertTrue(self.accepts("caches", "s0", PAIR_EXPIRES_AFTER - 1))
        self.assertEqual(
            self.accepted.accept("caches", "one more", PAIR_EXPIRES_AFTER),
            (True, ("caches", "s1")),
        )


class HandlerTests(SynchronousTestCase):
    """Tests for the command handler with undeclared writers."""

    def setUp(self) -> None:
        self.streams = [SourceStream(name, Row) for name in ("events", "caches")]
        self.host = RecordingHost(*self.streams)
        self.handler = ReplicationCommandHandler(
            self.host, self.host.observer, options=HandlerOptions(writers=DECLARED)
        )
        self.connection = MemoryConnection()
        self.handler.new_connection(self.connection)

    def receive(self, *lines: str) -> None:
        self.handler.received(
            self.connection, read_lines([line.encode() for line in lines])
        )
        self.host.reactor.pump([0.1] * 10)

    def _writers(self) -> list[str]:
        receivers = self.handler.receivers.values()
        return [writer.name for each in receivers for writer in each._writers.values()]

    def test_no_state_for_undeclared_writers(self) -> None:
        """5,000 made-up writers leave no state and cause no query."""
        for number in range(5000):
            self.receive(
                f"POSITION events ghost{number} 0 99",
                f"RDATA events ghost{number} 100 []",
            )
        self.assertEqual(self._writers(), [])
        self.assertEqual(self.streams[0].requests, [])
        self.handler.writer_reported(self.connection, "ghost", {"events": 7}, epoch="e")
        self.assertEqual(self._writers(), [])
        reasons = {reason for _, _, reason in self.host.observer.discards}
        self.assertEqual(reasons, {DiscardReason.UNDECLARED_WRITER})

    def test_between_rows_of_writers(self) -> None:
        """Only the undeclared writer's rows in a chunk are discarded."""
        self.receive("POSITION events w1 0 0")
        self.receive(
            'RDATA events w1 1 ["a"]',
            'RDATA events zz 9 ["z"]',
            'RDATA events w1 2 ["b"]',
        )
        self.assertEqual(
            [(writer, token) for _, writer, token, _ in self.host.rows.rows],
            [("w1", 1), ("w1", 2)],
        )
