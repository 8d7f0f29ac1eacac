"""What the callbacks of a host may do: the matrix of docs/plugging-in.rst."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import attrs
from twisted.application.service import Service
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone
from twisted.internet.testing import MemoryReactorClock, StringTransport
from twisted.logger import capturedLogs, formatEvent
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.api import (
    Command,
    InMemory,
    InstanceLocation,
    Listener,
    Replication,
    ReplicationOptions,
    SyncingUsers,
)
from synapse_replication.app.stop_steps import DRAIN_TIMEOUT
from synapse_replication.handlers.events import LinkUp
from synapse_replication.instrumentation.hooks import Stopping
from tests.handlers.fixtures import Row

OTHER = InMemory(name="other", row_type=Row, writers="w2")
OWN = InMemory(name="own", row_type=Row, writers="w1")
#: How long a callback waits for rows that never come, in s.
PATIENCE = 5.0

#: By callback and what it waits for: how the last line of the stop names what was not
#: finished; empty if everything was.
MATRIX = {
    ("sink rows", "stop"): "received rows of other were not delivered",
    ("sink rows", "write"): "",
    ("sink rows", "wait"): "",
    ("sink rows", "never"): "received rows of other were not delivered",
    ("sink position", "stop"): "handling received commands",
    ("sink position", "write"): "",
    ("sink position", "wait"): "",
    ("sink position", "never"): "handling received commands",
    ("sink close", "stop"): "closing",
    ("sink close", "write"): "closing",
    ("sink close", "wait"): "",
    ("sink close", "never"): "closing",
    ("command sink", "stop"): "",
    ("command sink", "write"): "",
    ("command sink", "wait"): "",
    ("command sink", "never"): "",
    ("module stop", "stop"): "stopping",
    ("module stop", "write"): "",
    ("module stop", "wait"): "",
    ("module stop", "never"): "stopping",
    ("hook", "stop"): "",
    ("hook", "write"): "",
    ("hook", "wait"): "",
    ("hook", "never"): "",
    ("work", "stop"): "",
    ("work", "write"): "",
    ("work", "wait"): "",
    ("work", "never"): "",
}


class _Reactor(MemoryReactorClock):
    def callWhenRunning(
        self, callable: Callable[..., object], *args: Any, **kw: Any
    ) -> None:
        callable(*args, **kw)


class _Host(SyncingUsers, Service):
    """A sink, a command sink and a module's service that call ``act`` once.

    :ivar part: the callback that calls it.
    """

    def __init__(self, part: str, act: Callable[[], Awaitable[Any]]) -> None:
        SyncingUsers.__init__(self)
        self._part = part
        self._act = act
        self.rows: list[str] = []

    def _call(self, part: str) -> Awaitable[Any] | None:
        if part != self._part:
            return None
        self._part = ""
        return self._act()

    def on_rdata(self, stream: str, writer: str, token: int, rows: list[Any]) -> Any:
        self.rows += [row.text for row in rows]
        return self._call("sink rows")

    def on_position(self, stream: str, writer: str, token: int) -> Any:
        return self._call("sink position")

    def on_command(self, command: Command) -> Any:
        return self._call("command sink")

    def close(self) -> Any:
        return self._call("sink close")

    def stopService(self) -> Any:
        return self._call("module stop")


class _Transport(StringTransport):
    """A transport that reports that it was closed."""

    def __init__(self, protocol: Any) -> None:
        super().__init__()
        self._protocol: Any = protocol

    def loseConnection(self) -> None:
        super().loseConnection()
        protocol, self._protocol = self._protocol, None
        if protocol is not None:
            protocol.connectionLost(Failure(ConnectionDone()))

    abortConnection = loseConnection  # noqa: N815 -- Twisted's name


@attrs.define
class _Process:
    """A process, and a writer that is connected to it."""

    replication: Replication
    reactor: Any
    peer: Any

    def receive(self, *lines: str) -> None:
        self.peer.dataReceived("".join(f"{line}\n" for line in lines).encode())
        self.reactor.advance(0)


class MatrixTests(SynchronousTestCase):
    def start(self, part: str, action: str) -> tuple[_Process, _Host, list[str]]:
        reactor = _Reactor()
        ended: list[str] = []

        async def act() -> None:
            if action == "stop":
                await replication.stopService()
            elif action == "write":
                replication[OWN].write([Row("written")])
            elif action == "wait":
                try:
                    await replication.host.rows.wait_for_stream_position(
                        "w2", "other", 1000, timeout=PATIENCE
                    )
                except Exception as error:  # noqa: BLE001 -- the result of the test
                    ended.append(type(error).__name__)
                    return
            else:
                await Deferred()
            ended.append(action)

        host = _Host(part, act)
        replication = Replication(
            reactor,
            ReplicationOptions(
                server_name="x.test",
                instance_name="w1",
                streams=[OTHER, OWN],
                listeners=[Listener(9092, addresses=("127.0.0.1",), direct_tcp=True)],
                instances={"w2": InstanceLocation("127.0.0.1", 1)},
                secret="a long secret",
            ),
            host,
            command_sink=host,
            modules=[lambda _: host],
        )
        replication.startService()
        self.successResultOf(replication.started)
        kind = Stopping if action == "stop" else LinkUp
        if part == "hook":
            replication.hooks.subscribe(kind, lambda _: host._act())
        factory: Any = next(each[1] for each in reactor.tcpServers if each[0] == 9092)
        peer = factory.buildProtocol(None)
        peer.makeConnection(_Transport(peer))
        process = _Process(replication, reactor, peer)
        process.receive("NAME w2", "REPLICATE", "POSITION other w2 0 0")
        if part == "work":
            replication.host.run_as_background_process("work", host._act)
        return process, host, ended

    def check(self, part: str, action: str, unfinished: str) -> None:
        with capturedLogs() as logged:
            process, host, ended = self.start(part, action)
            process.receive('RDATA other w2 1 ["a"]', "REMOTE_SERVER_UP x")
            process.receive("POSITION other w2 1 5")
            process.reactor.pump([1.0] * int(PATIENCE + 1))
            stopped = process.replication.stopService()
            process.reactor.pump([DRAIN_TIMEOUT / 10] * 100)
            self.successResultOf(stopped)
        if action in ("write", "wait"):
            self.assertEqual(host.rows, ["a"])
        texts = [text for text in map(formatEvent, logged) if text]
        (last,) = [text for text in texts if "has stopped" in text]
        self.assertIn(unfinished or "everything received was handled", last)
        # The exit status of run_service() is 1 if there is such a text.
        self.assertEqual(bool(process.replication.unfinished), bool(unfinished))
        if action == "write":
            # Readers would not receive what the sink writes when it is closed.
            self.assertEqual(ended, [] if part == "sink close" else ["write"])
        elif action == "wait" and part != "sink close":
            self.assertEqual(ended, ["WaitTimeoutError"])

    def test_matrix(self) -> None:
        """
        Whatever a callback waits for, the process stops within its limits, and its last
        log line says what was not finished.
        """
        for (part, action), unfinished in MATRIX.items():
            with self.subTest(part=part, action=action):
                self.check(part, action, unfinished)
