"""Tests that the doubles behave as the real objects do."""

from __future__ import annotations

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import (
    CatchUpError,
    LineTooLongError,
)
from synapse_replication.handlers.events import LinksChanged
from synapse_replication.handlers.interfaces import (
    ReplicationConnection,
    ReplicationHost,
    SyncingUser,
)
from synapse_replication.streams.stream import StreamUpdateResult
from synapse_replication.testing.doubles import (
    EPOCH_MS,
    EventRecorder,
    MemoryConnection,
    MemoryHost,
    SourceStream,
)
from synapse_replication.wire.commands import PingCommand, ReplicateCommand
from tests.handlers.fixtures import Row


class MemoryHostTests(SynchronousTestCase):
    """Tests for a host whose time advances only when the test advances it."""

    def test_implements_host(self) -> None:
        """The host has the given streams, and replicates those that it writes."""
        stream = SourceStream("s", Row)
        host = MemoryHost(stream, SourceStream("t", Row), written=["s"])
        contract: ReplicationHost = host
        self.assertEqual(list(contract.streams.get_streams()), ["s", "t"])
        self.assertEqual(contract.streams.get_streams_to_replicate(), [stream])
        self.assertFalse(contract.stores_user_ips)

    def test_time(self) -> None:
        """Both clocks advance only when the test advances them."""
        host = MemoryHost()
        self.assertEqual(host.clock.time_msec(), EPOCH_MS)
        slept = host.clock.sleep(2)
        host.reactor.advance(1)
        self.assertNoResult(slept)
        host.reactor.advance(1)
        self.successResultOf(slept)
        self.assertEqual(host.clock.seconds(), 2)
        self.assertEqual(host.clock.time_msec(), EPOCH_MS + 2000)

    def test_notifier(self) -> None:
        """A registered callback is called after a write."""
        host = MemoryHost()
        rung: list[int] = []
        host.notifier.add_replication_callback(lambda: rung.append(1))
        host.notifier.notify()
        self.assertEqual(rung, [1])

    def test_observer(self) -> None:
        """Events are recorded, and failures of background tasks are among them."""
        observer = MemoryHost().observer
        assert isinstance(observer, EventRecorder)
        error = ValueError()
        observer.observe(LinksChanged(1))
        observer.failure("work", error)
        self.assertEqual(observer.events[0], LinksChanged(1))
        self.assertEqual(observer.failures, [("work", error)])

    def test_commands(self) -> None:
        """Calls are recorded, and answered or failed as the test specifies."""
        commands = MemoryHost().commands
        commands.syncing = [SyncingUser("@a:b", None, 1)]
        self.assertEqual(len(list(commands.get_currently_syncing_users())), 1)
        commands.answer = Deferred()
        self.assertIs(commands.on_command(PingCommand("1")), commands.answer)
        commands.error = ValueError()
        self.assertRaises(ValueError, commands.on_command, PingCommand("2"))
        self.assertEqual(commands.received, [PingCommand("1"), PingCommand("2")])


class MemoryConnectionTests(SynchronousTestCase):
    """Tests for a connection without a peer."""

    def test_records_lines(self) -> None:
        """Commands and lines are recorded in order, as text."""
        connection = MemoryConnection()
        typed: ReplicationConnection = connection
        typed.send_command(ReplicateCommand())
        typed.send_command(PingCommand("1"))
        typed.send_lines("RDATA", [b"RDATA a", b"RDATA b"])
        self.assertEqual(
            connection.take(), ["REPLICATE", "PING 1", "RDATA a", "RDATA b"]
        )
        self.assertEqual(connection.take(), [])
        self.assertEqual(connection.writes, [1, 1, 2])

    def test_refuses_long_lines(self) -> None:
        """A line that is too long is rejected with all lines sent with it."""
        connection = MemoryConnection(max_line_length=5)
        with self.assertRaises(LineTooLongError):
            connection.send_lines("RDATA", [b"short", b"longer"])
        self.assertEqual(connection.take(), [])

    def test_breaks(self) -> None:
        """A broken connection raises the given exception."""
        connection = MemoryConnection()
        connection.broken = ValueError()
        self.assertRaises(ValueError, connection.send_command, PingCommand("1"))

    def test_control(self) -> None:
        """The reason for closing is recorded."""
        connection = MemoryConnection()
        connection.close_with_error("why")
        self.assertEqual(connection.closed_with, ["why"])


class SourceStreamTests(SynchronousTestCase):
    """Tests for a stream whose store answers when the test requests it."""

    def test_pages_do_not_split_tokens(self) -> None:
        """A page ends between tokens, and reports whether there are more."""
        stream = SourceStream("s", Row, page_rows=2)
        stream.persist("w", 1, ["a"])
        stream.persist("w", 2, ["b"], ["c"])
        stream.persist("w", 3, ["d"])
        self.assertEqual(
            self.successResultOf(stream.get_updates_since("w", 0, 9)),
            StreamUpdateResult([(1, ["a"]), (2, ["b"]), (2, ["c"])], 2, True),
        )
        self.assertEqual(
            self.successResultOf(stream.get_updates_since("w", 2, 9)),
            StreamUpdateResult([(3, ["d"])], 9, False),
        )
        stream.forget("w")
        self.assertEqual(
            self.successResultOf(stream.get_updates_since("w", 0, 9)).updates, []
        )

    def test_held(self) -> None:
        """A held store answers with the rows that it has at the time of the answer."""
        stream = SourceStream("s", Row)
        stream.is_held = True
        first, second = (stream.get_updates_since("w", 0, 9) for _ in range(2))
        self.assertEqual(stream.waiting, 2)
        stream.fail(CatchUpError("down"))
        self.failureResultOf(first, CatchUpError)
        stream.persist("w", 1, ["a"])
        stream.answer()
        self.assertEqual(self.successResultOf(second).updates, [(1, ["a"])])

    def test_local_updates(self) -> None:
        """
        Rows of this instance advance its token; with ``is_guess``,
        ``has_local_updates`` returns true for ranges without rows, too.
        """
        stream = SourceStream("s", Row, instance_name="w")
        stream.persist("w", 3, ["a"])
        self.assertEqual(stream.minimal_local_current_token(), 3)
        self.assertTrue(stream.has_local_updates(3, 9))
        stream.is_guess = False
        self.assertFalse(stream.has_local_updates(3, 9))
        self.assertTrue(stream.has_local_updates(2, 3))


class RecordingSinkTests(SynchronousTestCase):
    """Tests for a sink that accepts rows when the test requests it."""

    def test_records_and_advances(self) -> None:
        """Rows are recorded and never move the stream back; positions may."""
        stream = SourceStream("s", Row)
        sink = MemoryHost(stream).rows
        for token in (5, 3):
            self.assertIsNone(sink.on_rdata("s", "w", token, [Row("a")]))
        self.assertEqual(stream.current_token("w"), 5)
        self.assertEqual(sink.tokens("w"), [5, 3])
        self.assertEqual(sink.tokens("w", "other"), [])
        sink.on_position("s", "w", 1)
        self.assertEqual(stream.current_token("w"), 1)

    def test_held_and_failing(self) -> None:
        """A call is held until the test releases it or lets it fail."""
        sink = MemoryHost(SourceStream("s", Row)).rows
        sink.failures = [None, ValueError()]
        sink.is_held = True
        waiting = sink.on_rdata("s", "w", 1, [])
        assert isinstance(waiting, Deferred)
        self.assertRaises(ValueError, sink.on_rdata, "s", "w", 2, [])
        self.assertEqual(sink.tokens("w"), [])
        sink.release()
        self.successResultOf(waiting)
        self.assertEqual(sink.tokens("w"), [1])
