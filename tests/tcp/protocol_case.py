"""Protocols with a clock and a transport in memory, for tests."""

from __future__ import annotations

from twisted.internet.error import ConnectionDone
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.tcp.protocol import (
    BaseReplicationStreamProtocol,
    ClientReplicationStreamProtocol,
    ServerReplicationStreamProtocol,
)
from tests.support.recording_observer import RecordingObserver
from tests.tcp.doubles import (
    FakeClock,
    PausingTransport,
    RecordingHandler,
)


class ProtocolTestCase(SynchronousTestCase):
    """Makes both kinds of protocols with recording doubles."""

    def setUp(self) -> None:
        self.clock = FakeClock()
        self.handler = RecordingHandler()
        self.observer = RecordingObserver()
        self.transport = PausingTransport()
        self.closed: list[BaseReplicationStreamProtocol] = []

    def make_server(
        self, handler: RecordingHandler | None = None
    ) -> ServerReplicationStreamProtocol:
        return ServerReplicationStreamProtocol(
            "repl.test",
            self.clock,
            handler or self.handler,
            self.observer,
            self.closed.append,
        )

    def make_client(
        self, handler: RecordingHandler | None = None
    ) -> ClientReplicationStreamProtocol:
        return ClientReplicationStreamProtocol(
            "worker1",
            "repl.test",
            self.clock,
            handler or self.handler,
            self.observer,
            self.closed.append,
        )

    def connected_server(self) -> ServerReplicationStreamProtocol:
        protocol = self.make_server()
        protocol.makeConnection(self.transport)
        protocol.dataReceived(b"NAME unnamed\n")
        self.observer.received_commands.clear()
        self.transport.take(1000)
        return protocol

    def lose(self, protocol: BaseReplicationStreamProtocol) -> None:
        protocol.connectionLost(Failure(ConnectionDone()))
