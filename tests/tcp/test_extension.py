"""Tests of the extension over direct TCP, between peers with and without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from twisted.internet.error import ConnectionDone
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import LineTooLongError
from synapse_replication.handlers.command_handler import ReplicationCommandHandler
from synapse_replication.handlers.epochs import PeerEpochs
from synapse_replication.handlers.extension.extension import ReplicationExtension
from synapse_replication.handlers.interfaces import ExtensionConnection, Identity
from synapse_replication.handlers.sending.streamer import ReplicationStreamer
from synapse_replication.streams.backlog import Backlog, BacklogOptions
from synapse_replication.tcp.factory import (
    DirectTcpReplicationClientFactory,
    ReplicationStreamProtocolFactory,
)
from synapse_replication.tcp.protocol import BaseReplicationStreamProtocol
from synapse_replication.testing.doubles import SourceStream
from synapse_replication.wire.close_reason import CloseReason
from tests.handlers.fixtures import Row
from tests.support.recording_observer import RecordingHost, RecordingObserver
from tests.tcp.doubles import (
    FakeClock,
    PausingTransport,
    RecordingHandler,
)

#: The word that a client with the extension adds to its first PING.
PING_WORD = b"replication_ext/1"


class RecordingExtension(ReplicationExtension):
    """An extension that sends a hello when a link is up, and records its calls."""

    instance_name = "recorder"

    def __init__(self, calls: list[object]) -> None:
        self.calls = calls

    def extension_up(self, connection: ExtensionConnection) -> None:
        self.calls.append("up")
        connection.send_extension([b"hello"])

    def extension_down(self, connection: ExtensionConnection) -> None:
        self.calls.append("down")

    def sending_resumed(self) -> None:
        self.calls.append("resumed")

    def extension_received(
        self, connection: ExtensionConnection, payload: bytes
    ) -> None:
        self.calls.append(payload)


class WireTests(SynchronousTestCase):
    """The bytes that one end sends."""

    def setUp(self) -> None:
        self.observer = RecordingObserver()
        self.transport = PausingTransport()

    def connect(
        self, *, server: bool, speaks: bool = True
    ) -> BaseReplicationStreamProtocol:
        handler = RecordingHandler()
        self.calls: list[object] = handler.calls  # type: ignore[assignment]
        extension = RecordingExtension(self.calls) if speaks else None
        clock = FakeClock()
        protocol: BaseReplicationStreamProtocol
        if server:
            factory = ReplicationStreamProtocolFactory(
                "repl.test", clock, handler, self.observer, extension=extension
            )
            built = factory.buildProtocol(None)
            assert built is not None
            protocol = built
        else:
            client = DirectTcpReplicationClientFactory(
                "w1", "repl.test", clock, handler, self.observer, extension=extension
            )
            self.addCleanup(client.stop)
            protocol = client.buildProtocol(None)
        protocol.makeConnection(self.transport)
        return protocol

    def sent(self) -> bytes:
        return self.transport.take(10**6)

    def test_stock_client(self) -> None:
        """
        A server sends a stock client the same bytes with and without the extension.
        """
        answers = []
        for speaks in (False, True):
            self.transport = PausingTransport()
            server = self.connect(server=True, speaks=speaks)
            server.dataReceived(b"NAME w1\nPING 1700000000000\nREPLICATE\n")
            server.send_lines("POSITION", [b"POSITION events w 1 1"])
            answers.append(self.sent())
        self.assertEqual(*answers)
        self.assertNotIn("up", self.calls)

    def test_stock_server(self) -> None:
        """A stock server receives one more word in the first PING, and nothing else."""
        answers = []
        for speaks in (False, True):
            self.transport = PausingTransport()
            client = self.connect(server=False, speaks=speaks)
            client.dataReceived(b"SERVER repl.test\nPING 1700000000000\n")
            client.send_lines("REPLICATE", [b"REPLICATE"])
            answers.append(self.sent())
        self.assertEqual(answers[0], answers[1].replace(b" " + PING_WORD, b""))
        self.assertEqual(
            answers[1], b"NAME w1\nPING 1700000000000 replication_ext/1\nREPLICATE\n"
        )
        self.assertNotIn("up", self.calls)

    def test_server_answers(self) -> None:
        """
        A server answers the word of the extension with the same word and a hello,
        before the next command.
        """
        server = self.connect(server=True)
        self.sent()
        server.dataReceived(b"NAME w1\nPING 1 replication_ext/1\nREMOTE_SERVER_UP a\n")
        self.assertEqual(
            self.sent(),
            b"PING 1700000000000 replication_ext/1\nREPLICATION_EXT hello\n",
        )
        self.assertEqual([str(call) for call in self.calls[:2]], ["new", "up"])
        server.dataReceived(b"PING 2 replication_ext/1\nREPLICATION_EXT {}\n")
        self.assertEqual(self.calls[3:], [b"{}"])
        self.assertEqual(self.sent(), b"")
        self.assertEqual(self.observer.received_commands["w1", "EXTENSION"], 1)
        self.assertEqual(self.observer.sent_commands["w1", "EXTENSION"], 1)

    def test_down(self) -> None:
        """
        If the extension was up on a link, it is notified of the link's loss before the
        handler.
        """
        for mark, ends in ((b" " + PING_WORD, ["down", "lost"]), (b"", ["lost"])):
            self.transport = PausingTransport()
            client = self.connect(server=False)
            client.dataReceived(b"SERVER repl.test\nPING 1%b\n" % mark)
            client.connectionLost(Failure(ConnectionDone()))
            self.assertEqual([c for c in self.calls if c in ("down", "lost")], ends)

    def test_mark_before_server(self) -> None:
        """
        A client ignores the word of the extension from a server of another homeserver.
        """
        client = self.connect(server=False)
        client.dataReceived(b"SERVER other\nPING 1 replication_ext/1\n")
        self.assertEqual(client.close_reason, CloseReason.PROTOCOL_ERROR)
        self.assertEqual(self.calls, [])

    def test_too_long(self) -> None:
        """A message that is too long is reported and not sent; the link stays up."""
        server = self.connect(server=True)
        server.dataReceived(b"PING 1 replication_ext/1\n")
        self.sent()
        server.send_extension([b"x" * 20_000])
        self.assertEqual(self.sent(), b"")
        ((_, error),) = self.observer.failures
        self.assertIsInstance(error, LineTooLongError)
        self.assertIsNone(server.close_reason)


class Process:
    """An instance without sockets: ``events`` in a table, ``typing`` in memory.

    :param writes: the streams that it writes.
    """

    def __init__(
        self,
        name: str,
        epoch: str,
        writes: Sequence[str],
        *,
        speaks: bool,
        follows: Sequence[str] = ("events", "typing"),
    ) -> None:
        self.events = SourceStream("events", Row, instance_name=name)
        self.typing = SourceStream(
            "typing", Row, instance_name=name, resettable=True, held_in_memory=True
        )
        streams = [
            stream
            for stream in (self.events, self.typing)
            if stream.description.name in follows
        ]
        self.host = RecordingHost(*streams, written=writes, instance_name=name)
        self.host.identity = Identity("repl.test", name, epoch)
        self.observer = self.host.observer
        self.handler = ReplicationCommandHandler(self.host, self.observer)
        self.extension: ReplicationExtension | None = None
        self.epochs = PeerEpochs()
        if speaks:
            self.extension = ReplicationExtension(
                self.handler,
                self.epochs,
                Backlog(BacklogOptions()),
            )
            self.extension.start()
        self.streamer = ReplicationStreamer(
            self.host, self.handler.sender, self.observer
        )
        self.streamer.start()

    def texts(self) -> list[str]:
        """Return the texts of the delivered rows."""
        return [row.text for _, _, _, rows in self.host.rows.rows for row in rows]


class ProcessTests(SynchronousTestCase):
    """A writer that listens and a reader that connects, with all their parts.

    :ivar drop: returns whether a line of the writer is lost.
    """

    def setUp(self) -> None:
        self.drop: Callable[[bytes], bool] = lambda line: False
        self.lines: list[bytes] = []

    def start(self, *, reader_speaks: bool = True, writer_speaks: bool = True) -> None:
        self.reader = Process("r", "r1", [], speaks=reader_speaks)
        self.begin_writer("w1", speaks=writer_speaks)

    def begin_writer(self, epoch: str, *, speaks: bool = True) -> None:
        self.writer = Process("w", epoch, ["events", "typing"], speaks=speaks)
        self.connect()

    def connect(self) -> None:
        one, other = self.writer, self.reader
        self.ends: list[Any] = [
            ReplicationStreamProtocolFactory(
                "repl.test",
                one.host.clock,
                one.handler,
                one.observer,
                extension=one.extension,
            ).buildProtocol(None),
            DirectTcpReplicationClientFactory(
                "r",
                "repl.test",
                other.host.clock,
                other.handler,
                other.observer,
                extension=other.extension,
            ).buildProtocol(None),
        ]
        self.transports = [PausingTransport(), PausingTransport()]
        for end, transport in zip(self.ends, self.transports, strict=True):
            end.makeConnection(transport)
        self.pump()

    def received_lines(self, stream: str) -> list[bytes]:
        """Return the writer's lines about a stream that were not dropped."""
        return [line for line in self.lines if f" {stream} ".encode() in line]

    def disconnect(self) -> None:
        for end in self.ends:
            end.connectionLost(Failure(ConnectionDone()))

    def pump(self) -> None:
        while any(transport.buffer for transport in self.transports):
            server, client = (transport.take(10**9) for transport in self.transports)
            remaining = [line for line in server.split(b"\n") if not self.drop(line)]
            self.lines += remaining
            if remaining:
                self.ends[1].dataReceived(b"\n".join(remaining))
            if client:
                self.ends[0].dataReceived(client)

    def advance(self, seconds: float) -> None:
        for _ in range(round(seconds * 4)):
            for process in (self.writer, self.reader):
                process.host.reactor.advance(0.25)
            self.pump()

    def write(self, token: int, text: str, stream: str = "events") -> None:
        for process in (self.writer, self.reader):
            source = process.events if stream == "events" else process.typing
            source.persist("w", token, [text])
        self.writer.host.notifier.notify()
        self.pump()

    def test_no_loss_no_fetch(self) -> None:
        """Without losses, all rows are delivered and no gap is found."""
        self.start()
        for token in range(1, 20):
            self.write(token, f"row {token}")
            self.advance(0.25)
        self.assertEqual(self.reader.texts(), [f"row {n}" for n in range(1, 20)])
        self.assertEqual(self.reader.epochs.epoch_of("w"), "w1")
        self.assertEqual(self.writer.epochs.epoch_of("r"), "r1")
        self.assertEqual(self.reader.observer.gaps, [])
        self.assertEqual(self.reader.observer.failures, [])

    def test_few_streams(self) -> None:
        """
        A reader of one stream receives only the rows and positions of that stream.
        """
        self.reader = Process("r", "r1", [], speaks=True, follows=["typing"])
        self.begin_writer("w1")
        self.lines.clear()
        for token in range(1, 20):
            self.write(token, f"row {token}")
            self.write(token, f"typing {token}", "typing")
            self.advance(0.25)
        self.writer.host.notifier.notify()
        self.writer.handler.sender.announce_positions()
        self.pump()
        self.assertEqual(self.reader.texts(), [f"typing {n}" for n in range(1, 20)])
        self.assertEqual(self.received_lines("events"), [])
        rows = [line for line in self.lines if b'"rows"' in line]
        self.assertEqual([line for line in rows if b"events" in line], [])
        self.assertGreater(len(rows), 10)
        # The next reader follows both streams of the same writer.
        self.disconnect()
        self.reader = Process("r", "r2", [], speaks=True)
        self.connect()
        self.write(20, "for both")
        self.assertEqual(self.reader.texts()[-1], "for both")
        self.assertEqual(self.writer.handler.sender._followed, {})

    def test_few_streams_of_a_stock_writer(self) -> None:
        """
        A writer without the extension sends all streams; the reader skips the others.
        """
        self.reader = Process("r", "r1", [], speaks=True, follows=["typing"])
        self.begin_writer("w1", speaks=False)
        self.write(1, "row")
        self.write(1, "typing", "typing")
        self.assertEqual(self.reader.texts(), ["typing"])
        self.assertNotEqual(self.received_lines("events"), [])
        self.assertEqual(self.writer.observer.refused, [])

    def test_a_lost_row(self) -> None:
        """A lost row is fetched when the next one arrives."""
        self.start()
        self.write(1, "one")
        self.drop = lambda line: line.startswith(b"RDATA events w 2 ")
        self.write(2, "two")
        self.write(3, "three")
        self.assertEqual(self.reader.texts(), ["one", "two", "three"])
        self.assertEqual(self.reader.observer.gaps, [("events", "w", 1, 2)])

    def test_a_lost_last_row(self) -> None:
        """A lost row without a later one is fetched within about a second."""
        self.start()
        self.write(1, "one")
        self.drop = lambda line: line.startswith((b"RDATA events w 2 ", b"POSITION"))
        self.write(2, "two")
        self.assertEqual(self.reader.texts(), ["one"])
        self.advance(1.25)
        self.assertEqual(self.reader.texts(), ["one", "two"])

    def test_stock_reader_misses_a_loss(self) -> None:
        """A reader without the extension does not notice the loss of a row."""
        self.start(reader_speaks=False)
        self.write(1, "one")
        self.drop = lambda line: line.startswith(b"RDATA events w 2 ")
        self.write(2, "two")
        self.write(3, "three")
        self.advance(10)
        self.assertEqual(self.reader.texts(), ["one", "three"])

    def test_one_end_is_stock(self) -> None:
        """
        If only one end has the extension, rows are delivered and no line is refused.
        """
        for reader_speaks, writer_speaks in ((True, False), (False, True)):
            self.start(reader_speaks=reader_speaks, writer_speaks=writer_speaks)
            self.write(1, "one")
            self.advance(12)
            self.write(2, "two")
            self.assertEqual(self.reader.texts(), ["one", "two"])
            for process in (self.reader, self.writer):
                self.assertEqual(process.observer.refused, [])

    def test_new_epoch(self) -> None:
        """
        If the writer restarts and passes the reader's position while disconnected, its
        rows held in memory are all fetched.
        """
        self.start()
        self.write(5, "before", "typing")
        self.disconnect()
        self.reader.typing.forget("w")
        self.begin_writer("w2")
        self.drop = lambda line: line.startswith(b"RDATA")
        self.write(3, "after", "typing")
        self.write(9, "later", "typing")
        self.drop = lambda line: False
        self.advance(2)
        self.assertEqual(self.reader.texts()[-2:], ["after", "later"])
        self.assertEqual(self.reader.observer.restarted, ["w"])

    def test_goodbye(self) -> None:
        """
        After a clean stop of the writer, the reader shows that the writer has left.
        """
        self.start()
        self.advance(1)
        assert self.writer.extension is not None
        self.writer.extension.stop()
        self.pump()
        self.assertIsNone(self.reader.epochs.epoch_of("w"))
