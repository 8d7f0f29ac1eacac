"""Runs the classes of the drop-in in a strict host; see ``strict.py``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.dropin.tcp_ends import (
    DropInClientProtocol,
    DropInServerProtocol,
)
from tests.dropin.host import FakeStream
from tests.dropin.strict import StrictCluster, join

#: A jump of the clock that exceeds every timeout, in s.
JUMP = 3600.0
_EXPECTED_COMMANDS = {b"PING", b"PUBLISH", b"SUBSCRIBE"}


class StrictHostTests(SynchronousTestCase):
    """Tests with a main process, a writer of events and a reader, over Redis."""

    def setUp(self) -> None:
        self.rows: list[tuple[int, Any]] = []
        self.streams: dict[str, FakeStream] = {}

        def make(hs: Any) -> FakeStream:
            # All instances share one database, so each can fetch the others' rows.
            stream = FakeStream("events", updates=self.rows)
            self.streams[hs.get_instance_name()] = stream
            return stream

        self.cluster = StrictCluster(
            self, ("master", "w", "reader"), {"events": make}, {"events": ["w"]}
        )
        self.cluster.start()
        self.reader = self.cluster.hosts["reader"]
        self.transports = self.cluster.reactor.transports
        self.addCleanup(self._check_server)

    def _check_server(self) -> None:
        self.assertEqual(self.cluster.server.errors, [])
        self.assertEqual(set(self.cluster.server.commands) - _EXPECTED_COMMANDS, set())

    def write(self, token: int) -> None:
        """Commit a row, and announce it in this turn."""
        self.rows.append((token, [f"row{token}"]))
        self.streams["w"].tokens["w"] = token
        self.cluster.hosts["w"].get_replication_streamer().on_notifier_poke()

    @property
    def delivered(self) -> list[int]:
        """The tokens of the rows that the reader's host received."""
        return [call[3] for call in self.reader.calls if call[0] == "on_rdata"]

    def test_rows(self) -> None:
        """Rows reach the reader, and only known commands are sent to the server."""
        for token in range(1, 6):
            self.write(token)
        self.cluster.run(1)
        self.assertEqual(self.delivered, [1, 2, 3, 4, 5])

    def test_same_turn(self) -> None:
        """Each row is written to the transport in the turn in which it is announced."""
        for token in (1, 2):
            self.write(token)
            sent = b"".join(end.written for end in self.transports)
            self.assertIn(b'RDATA events w %d ["row%d"]' % (token, token), sent)

    def test_clock_jumps(self) -> None:
        """No jump of the clock closes a connection, and rows still arrive."""
        count = len(self.transports)
        for token in range(1, 8):
            # A PING is in flight when the clock jumps again.
            self.cluster.reactor.pump([JUMP, JUMP])
            self.write(token)
            self.cluster.run(0.5)
        self.assertEqual(len(self.transports), count)
        self.assertEqual(self.delivered, list(range(1, 8)))

    def test_connections_end(self) -> None:
        """
        If all connections are lost with a row in flight, they are re-established, and
        the row is fetched.
        """
        self.write(1)
        self.cluster.run(1)
        for end in list(self.transports):
            end.loseConnection()
        self.write(2)
        self.cluster.run(15)
        self.write(3)
        self.cluster.run(1)
        self.assertEqual(self.delivered, [1, 2, 3])


class StrictDirectTests(SynchronousTestCase):
    """Tests for both ends of a direct TCP connection."""

    def test_clock_jumps(self) -> None:
        """No jump of the clock closes a direct TCP connection."""
        cluster = StrictCluster(
            self, ("master", "w"), {"events": lambda hs: FakeStream("events")}, {}
        )
        main, worker = cluster.hosts["master"], cluster.hosts["w"]
        # Users sync with workers.
        main.get_presence_handler = lambda: SimpleNamespace(
            get_currently_syncing_users_for_replication=list
        )
        server: Any = DropInServerProtocol(
            main, "test", main.clock, main.get_replication_command_handler()
        )
        client: Any = DropInClientProtocol(
            worker,
            "w",
            "test",
            worker.clock,
            worker.get_replication_command_handler(),
        )
        join(cluster.reactor, client, server)
        cluster.run(2)
        for _ in range(5):
            cluster.reactor.advance(JUMP)
            cluster.run(0.5)
        self.assertIsNone(client.close_reason)
        self.assertIsNone(server.close_reason)
        self.assertTrue(client.is_established and server.is_established)
