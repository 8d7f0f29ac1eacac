"""Tests of the command handler: connections and commands."""

from __future__ import annotations

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import LocalProtocolError, StreamConfigurationError
from synapse_replication.handlers.command_handler import (
    HandlerOptions,
    ReplicationCommandHandler,
)
from synapse_replication.handlers.events import Discarded, DiscardReason, Event
from synapse_replication.handlers.interfaces import SyncingUser
from synapse_replication.handlers.sending.answers import POSITIONS_INTERVAL
from synapse_replication.streams.memory import MemoryStream
from synapse_replication.streams.standard.registry import STANDARD_STREAMS
from synapse_replication.testing.doubles import MemoryConnection, SourceStream
from synapse_replication.wire.commands import (
    COMMANDS,
    CancelTaskCommand,
    ClearUserSyncsCommand,
    FederationAckCommand,
    InvalidateCacheCommand,
    LockReleasedCommand,
    NewActiveTaskCommand,
    PingCommand,
    RdataCommand,
    RemoteServerUpCommand,
    RemovePusherCommand,
    UserIpCommand,
    UserSyncCommand,
)
from synapse_replication.wire.rdata import read_lines
from tests.handlers.fixtures import Receiving, Row, receiving
from tests.support.recording_observer import RecordingHost
from tests.wire.lines import LINES


class ConnectionTests(SynchronousTestCase):
    """Tests for new and lost connections."""

    def setUp(self) -> None:
        self.stream = SourceStream("events", Row, instance_name="writer")
        self.stream.local_token = 7
        self.host = RecordingHost(
            self.stream, written=["events"], instance_name="writer"
        )
        self.handler = ReplicationCommandHandler(self.host, self.host.observer)

    def test_a_new_connection(self) -> None:
        """
        On a new link, REPLICATE is sent, then the positions, then the syncing users.
        """
        self.host.commands.syncing = [SyncingUser("@a:b", None, 5)]
        connection = MemoryConnection()
        self.handler.new_connection(connection)
        self.assertEqual(
            connection.take(),
            [
                "REPLICATE",
                "POSITION events writer 7 7",
                "USER_SYNC writer-id @a:b None start 5",
            ],
        )

    def test_inbound_peer(self) -> None:
        """A peer that connected receives the positions when it sends REPLICATE."""
        connection = MemoryConnection(relays=True)
        self.handler.new_connection(connection)
        self.assertEqual(connection.take(), [])
        Receiving(self.host, self.handler, connection, self.stream).receive("REPLICATE")
        self.assertEqual(connection.take(), ["POSITION events writer 7 7"])

    def test_failing_stream(self) -> None:
        """A failure of a stream is reported, and the next command is handled."""

        def fail(*arguments: object) -> int:
            raise ValueError("no position")

        self.patch(self.stream, "current_token", fail)
        self.patch(self.stream, "minimal_local_current_token", fail)
        connection = MemoryConnection(relays=True)
        self.handler.new_connection(connection)
        Receiving(self.host, self.handler, connection, self.stream).receive(
            "REPLICATE", "POSITION events w 0 5", "REMOTE_SERVER_UP a.example"
        )
        self.assertEqual(
            sorted((what, str(error)) for what, error in self.host.observer.failures),
            [
                ("handling POSITION", "no position"),
                ("handling REPLICATE", "no position"),
            ],
        )
        self.assertEqual(
            self.host.commands.received, [RemoteServerUpCommand("a.example")]
        )

    def test_repeated_requests(self) -> None:
        """REPLICATE that arrives many times at once is answered once."""
        connection = MemoryConnection(relays=True)
        self.handler.new_connection(connection)
        fixture = Receiving(self.host, self.handler, connection, self.stream)
        fixture.receive("REPLICATE", "REMOTE_SERVER_UP hs2.example", "REPLICATE")
        self.assertEqual(connection.take(), ["POSITION events writer 7 7"])

    def test_requests_over_redis(self) -> None:
        """A request shortly after an answer is answered in a moment, each time."""
        connection = MemoryConnection()
        self.handler.new_connection(connection)
        fixture = Receiving(self.host, self.handler, connection, self.stream)
        fixture.receive("REPLICATE")
        connection.take()
        for _ in range(3):
            fixture.receive("REPLICATE")
            self.assertEqual(connection.take(), [])
            self.host.reactor.advance(POSITIONS_INTERVAL)
            self.assertEqual(connection.take(), ["POSITION events writer 7 7"])

    def test_connected(self) -> None:
        """The handler is connected while it has at least one connection."""
        connection = MemoryConnection()
        self.assertFalse(self.handler.sender.connected())
        self.handler.new_connection(connection)
        self.assertTrue(self.handler.sender.connected())
        self.assertEqual(self.host.observer.connections, 1)
        self.handler.lost_connection(connection)
        self.handler.lost_connection(connection)
        self.assertFalse(self.handler.sender.connected())
        self.assertEqual(self.host.observer.connections, 0)

    def test_nothing_is_received_after_the_end(self) -> None:
        """Lines from a connection that was lost are ignored."""
        fixture = receiving()
        fixture.receive("POSITION events w 0 0")
        fixture.handler.lost_connection(fixture.connection)
        fixture.receive('RDATA events w 1 ["a"]', "POSITION events w 1 1")
        self.assertEqual(fixture.texts(), [])

    def test_passive(self) -> None:
        """A passive handler never sends anything."""
        handler = ReplicationCommandHandler(
            self.host, self.host.observer, options=HandlerOptions(passive=True)
        )
        connection = MemoryConnection()
        handler.new_connection(connection)
        handler.sender.send(RemoteServerUpCommand("a.example"))
        handler.sender.send_rows("events", [(8, [b'["a"]'])])
        Receiving(self.host, handler, connection, self.stream).receive("REPLICATE")
        self.assertEqual(connection.take(), [])

    def test_a_written_stream_must_be_known(self) -> None:
        """A written stream that is not in the stream directory is an error."""
        host = RecordingHost(self.stream, written=["events"])
        streams = {"events": self.stream}

        class Directory:
            def get_streams(self) -> dict[str, SourceStream]:
                return {}

            def get_streams_to_replicate(self) -> list[SourceStream]:
                return list(streams.values())

        host.streams = Directory()  # type: ignore[assignment]
        with self.assertRaisesRegex(StreamConfigurationError, "writes events"):
            ReplicationCommandHandler(host, host.observer)


class UncheckedStreamTests(SynchronousTestCase):
    def test_report(self) -> None:
        """A stream that cannot check tokens is reported at the start."""

        class Unchecked:
            description = SourceStream("notes", Row).description

            def current_token(self, instance_name: str) -> int:
                return 0

        host = RecordingHost(SourceStream("events", Row))
        host.streams.get_streams()["notes"] = Unchecked()  # type: ignore[index]
        ReplicationCommandHandler(host, host.observer)
        self.assertEqual(
            host.observer.unavailable,
            [
                (
                    "checks of announced tokens of notes",
                    "Unchecked has no method is_plausible",
                )
            ],
        )


class ChannelTests(SynchronousTestCase):
    """The Redis channels to subscribe to."""

    def test_user_ip_subscription(self) -> None:
        """USER_IP is subscribed to only if the host stores IPs."""
        for stores, channels in ((True, ("USER_IP",)), (False, ())):
            host = RecordingHost(stores_user_ips=stores)
            handler = ReplicationCommandHandler(host, host.observer)
            self.assertEqual(handler.start_replication(), channels)

    def test_too_late(self) -> None:
        """
        A channel that is added twice is subscribed to once; adding one after the start
        is an error.
        """
        host = RecordingHost()
        handler = ReplicationCommandHandler(host, host.observer)
        handler.subscribe_to_channel("extra")
        handler.subscribe_to_channel("extra")
        self.assertEqual(handler.start_replication(), ("extra",))
        with self.assertRaisesRegex(LocalProtocolError, "before start_replication"):
            handler.subscribe_to_channel("late")


class ReceivedTests(SynchronousTestCase):
    """Received commands."""

    def test_commands_go_to_the_host(self) -> None:
        """Each command calls its method of the host."""
        fixture = receiving()
        fixture.host.stores_user_ips = True
        fixture.receive(
            "USER_SYNC id1 @a:b My Phone start 5",
            "CLEAR_USER_SYNC id1",
            "FEDERATION_ACK fed1 9",
            'USER_IP @a:b ["secret","1.2.3.4","agent",null,6]',
            "REMOTE_SERVER_UP a.example",
            'LOCK_RELEASED ["w1","lock","key"]',
            "NEW_ACTIVE_TASK t1",
            "CANCEL_TASK t2",
            "REMOVE_PUSHER app key @a:b",
            'INVALIDATE_CACHE func ["x"]',
            "PING 1",
        )
        self.assertEqual(
            fixture.host.commands.received,
            [
                UserSyncCommand("id1", "@a:b", "My Phone", True, 5),
                ClearUserSyncsCommand("id1"),
                FederationAckCommand("fed1", 9),
                UserIpCommand("@a:b", "secret", "1.2.3.4", "agent", None, 6),
                RemoteServerUpCommand("a.example"),
                LockReleasedCommand("w1", "lock", "key"),
                NewActiveTaskCommand("t1"),
                CancelTaskCommand("t2"),
                RemovePusherCommand("app", "key", "@a:b"),
                InvalidateCacheCommand("func", ["x"]),
            ],
        )
        self.assertEqual(fixture.host.observer.processes, [])

    def test_every_command_goes_to_the_host(self) -> None:
        """The host receives all commands but those about links, positions and rows."""
        fixture = receiving()
        fixture.host.stores_user_ips = True
        fixture.receive(*LINES)
        not_for_hosts = {"ERROR", "NAME", "PING", "POSITION", "RDATA", "REPLICATE"}
        self.assertEqual(
            {command.NAME for command in fixture.host.commands.received},
            COMMANDS.keys() - not_for_hosts - {"SERVER"},
        )

    def test_user_ip_needs_storing_host(self) -> None:
        """A host that stores no IPs receives none."""
        fixture = receiving()
        fixture.receive('USER_IP @a:b ["secret","1.2.3.4","agent",null,6]')
        discards = fixture.host.observer.discards
        self.assertEqual(discards["USER_IP", "", DiscardReason.NOT_RESPONSIBLE], 1)
        self.assertEqual(fixture.host.commands.received, [])

    def test_user_ip_of_the_far_end_of_a_chain(self) -> None:
        """A peer that connected here, and sends client IPs in vain, is reported."""
        fixture = receiving()
        seen: list[Event] = []
        self.patch(fixture.host.observer, "observe", seen.append)
        far = MemoryConnection("w2", relays=True)
        fixture.handler.new_connection(far)
        for connection in (far, fixture.connection):
            fixture.handler.received(
                connection,
                read_lines([b'USER_IP @a:b ["secret","1.2.3.4","agent",null,6]']),
            )
        self.assertEqual(
            [each.lost_by for each in seen if isinstance(each, Discarded)], ["w2", ""]
        )

    def test_own_commands_are_discarded(self) -> None:
        """
        The instance's own commands, echoed by Redis, are discarded without decoding.
        """
        fixture = receiving()
        fixture.receive(
            "POSITION events reader 0 5",
            "RDATA events reader 6 nonsense",
            "USER_SYNC reader-id @a:b None start 5",
            "CLEAR_USER_SYNC reader-id",
            'LOCK_RELEASED ["reader","lock","key"]',
            "RDATA events reader x []",
        )
        self.assertEqual(fixture.host.commands.received, [])
        self.assertEqual(fixture.texts(), [])
        self.assertEqual(
            fixture.host.observer.discards["events", "reader", DiscardReason.OWN_ECHO],
            2,
        )
        self.assertEqual(fixture.host.observer.failures, [])

    def test_presence_storm(self) -> None:
        """
        100 USER_SYNCs of each of 1,000 users cause 1,000 calls; each change of state is
        delivered, in order.
        """
        fixture = receiving()
        storm = [f"USER_SYNC id1 @u{n}:hs None start 1000000" for n in range(1000)]
        for _ in range(100):
            fixture.receive(*storm)
        self.assertEqual(len(fixture.host.commands.received), 1000)
        self.assertEqual(
            fixture.host.observer.discards["USER_SYNC", "", DiscardReason.REPEATED],
            99_000,
        )
        fixture.host.commands.received.clear()
        for state in ("end", "start", "start", "end", "end", "start"):
            fixture.receive(f"USER_SYNC id1 @u5:hs None {state} 1000500")
        states = [
            command.is_syncing
            for command in fixture.host.commands.received
            if isinstance(command, UserSyncCommand)
        ]
        self.assertEqual(states, [False, True, False, True])

    def test_syncs_after_the_end_of_a_process(self) -> None:
        """
        A repeated USER_SYNC is delivered again after CLEAR_USER_SYNC, and after a
        failure of the host.
        """
        fixture = receiving()
        line = "USER_SYNC id1 @u:hs None start 5"
        failing: Deferred[None] = Deferred()
        commands = fixture.host.commands
        commands.error = RuntimeError("no")
        fixture.receive(line)
        commands.error = None
        commands.answer = failing
        fixture.receive(line)
        self.assertEqual(len(commands.received), 2)
        fixture.receive(line)
        self.assertEqual(len(commands.received), 2)
        failing.errback(RuntimeError("no database"))
        commands.answer = None
        fixture.receive(line, line)
        self.assertEqual(len(commands.received), 3)
        fixture.receive("CLEAR_USER_SYNC id1", line, line)
        self.assertEqual(len(commands.received), 5)
        self.assertEqual(len(fixture.host.observer.failures), 2)

    def test_unknown_streams(self) -> None:
        """Rows and positions of an unknown stream are discarded and counted."""
        fixture = receiving()
        fixture.receive("POSITION new w 0 0", "RDATA new w 1 []", "RDATA new w x []")
        self.assertEqual(
            fixture.host.observer.discards["new", "w", DiscardReason.UNKNOWN_STREAM], 2
        )

    def test_unknown_commands(self) -> None:
        """An unknown command neither closes the link nor affects the next line."""
        fixture = receiving()
        fixture.receive("FROBNICATE 1", "REMOTE_SERVER_UP a.example")
        self.assertEqual(fixture.connection.closed_with, [])
        self.assertEqual(len(fixture.host.commands.received), 1)

    def test_broken_lines(self) -> None:
        """A malformed line is answered with one ERROR; the next line is handled."""
        fixture = receiving()
        fixture.receive("USER_SYNC nonsense", "REMOTE_SERVER_UP a.example")
        self.assertEqual(len(fixture.connection.closed_with), 1)
        self.assertEqual(len(fixture.host.commands.received), 1)

    def test_asynchronous_host(self) -> None:
        """A background process starts only if the host returns an awaitable."""
        fixture = receiving()
        waiting: Deferred[None] = Deferred()
        fixture.host.commands.answer = waiting
        fixture.receive("REMOTE_SERVER_UP a.example")
        self.assertEqual(
            fixture.host.observer.processes, ["replication_REMOTE_SERVER_UP"]
        )
        self.assertEqual(fixture.host.observer.open_processes, 1)
        waiting.callback(None)
        self.assertEqual(fixture.host.observer.open_processes, 0)

    def test_failing_host(self) -> None:
        """A failure of the host is reported, and the next command is handled."""
        fixture = receiving()
        fixture.host.commands.error = ValueError("at once")
        fixture.receive("REMOTE_SERVER_UP a.example")
        fixture.host.commands.error = None
        failed: Deferred[None] = Deferred()
        fixture.host.commands.answer = failed
        fixture.receive("REMOTE_SERVER_UP b.example")
        failed.errback(ValueError("later"))
        self.assertEqual(
            [str(error) for _, error in fixture.host.observer.failures],
            ["at once", "later"],
        )

    def test_a_parsed_row(self) -> None:
        """A row that the caller has parsed is handled like any other row."""
        fixture = receiving()
        fixture.receive("POSITION events w 0 0")
        fixture.handler.received(
            fixture.connection, [RdataCommand("events", "w", 1, ["a"])]
        )
        self.assertEqual(fixture.texts(), [("w", 1, ["a"])])

    def test_waiting_until_idle(self) -> None:
        """``wait_until_idle`` fires once everything received was handled."""
        fixture = receiving()
        fixture.receive("POSITION events w 0 0")
        fixture.host.rows.is_held = True
        fixture.receive('RDATA events w 1 ["a"]')
        idle = Deferred.fromCoroutine(fixture.handler.wait_until_idle())
        self.assertNoResult(idle)
        fixture.host.rows.release()
        self.successResultOf(idle)

    def test_processes_for_many_rows(self) -> None:
        """Many rows in one chunk start one background process for their stream."""
        fixture = receiving()
        fixture.receive("POSITION events w 0 0")
        del fixture.host.observer.processes[:]
        fixture.receive(*(f'RDATA events w {n} ["a"]' for n in range(1, 10_001)))
        while fixture.host.reactor.getDelayedCalls():
            fixture.run_pending_calls()
        self.assertEqual(fixture.stream.current_token("w"), 10_000)
        self.assertEqual(len(fixture.host.observer.processes), 1)


class AcknowledgementTests(SynchronousTestCase):
    def test_acknowledged(self) -> None:
        """FEDERATION_ACK frees rows of the stream ``federation`` of this process."""
        stream = MemoryStream(
            STANDARD_STREAMS["federation"].description, instance_name="w"
        )
        host = RecordingHost(stream, written=["federation"], instance_name="w")  # type: ignore[arg-type]
        handler = ReplicationCommandHandler(host, host.observer)
        connection = MemoryConnection()
        handler.new_connection(connection)
        acknowledged: list[tuple[str | None, int]] = []
        self.patch(stream, "acknowledge", lambda *args: acknowledged.append(args))
        handler.received(connection, [FederationAckCommand("sender1", 1)])
        self.assertEqual(acknowledged, [("sender1", 1)])
        self.assertEqual(host.commands.received, [FederationAckCommand("sender1", 1)])


class RelayTests(SynchronousTestCase):
    """Relaying commands to other peers."""

    def setUp(self) -> None:
        self.fixture = receiving()
        self.first = MemoryConnection("first", relays=True)
        self.second = MemoryConnection("second", relays=True)
        for connection in (self.first, self.second):
            self.fixture.handler.new_connection(connection)

    def test_relayed_to_other_inbound_peers_only(self) -> None:
        """
        A relayed command goes only to the other peers that connected to this instance.
        """
        self.fixture.receive(
            "REMOTE_SERVER_UP a.example",
            'LOCK_RELEASED ["w1","lock","key"]',
            connection=self.first,
        )
        expected = ["REMOTE_SERVER_UP a.example", 'LOCK_RELEASED ["w1","lock","key"]']
        self.assertEqual(self.first.take(), [])
        self.assertEqual(self.second.take(), expected)
        self.assertEqual(self.fixture.connection.take(), [])

    def test_never_over_redis(self) -> None:
        """Commands received over Redis are not relayed."""
        self.fixture.receive(
            "REMOTE_SERVER_UP a.example", 'LOCK_RELEASED ["w1","lock","key"]'
        )
        for connection in (self.first, self.second, self.fixture.connection):
            self.assertEqual(connection.take(), [])


class ConnectionEndTests(SynchronousTestCase):
    """Connections that are lost during a broadcast."""

    def test_connection_lost_during_broadcast(self) -> None:
        """If a connection is lost during a send on it, the others are not affected."""
        fixture = receiving()
        handler = fixture.handler

        class LeavingConnection(MemoryConnection):
            def send_lines(self, command_name: str, lines: object) -> None:
                handler.lost_connection(self)

        leaving = LeavingConnection("leaving", relays=True)
        handler.new_connection(leaving)
        last = fixture.connect("last")
        last.take()
        handler.sender.send(PingCommand("1"))
        self.assertEqual(last.take(), ["PING 1"])
        self.assertEqual(fixture.connection.take(), ["PING 1"])
