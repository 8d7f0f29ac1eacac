"""Instances that speak the extension, on a bus from which a test can drop messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from synapse_replication.errors import HttpCatchUpError
from synapse_replication.handlers.command_handler import (
    HandlerOptions,
    ReplicationCommandHandler,
)
from synapse_replication.handlers.epochs import PeerEpochs
from synapse_replication.handlers.extension.extension import ReplicationExtension
from synapse_replication.handlers.interfaces import ExtensionConnection, Identity
from synapse_replication.handlers.receiving.context import ReceiverOptions
from synapse_replication.handlers.receiving.partial_resync import PartialResync
from synapse_replication.handlers.sending.streamer import ReplicationStreamer
from synapse_replication.handlers.timer import Backoff
from synapse_replication.streams.backlog import Backlog, BacklogOptions
from synapse_replication.streams.stream import StreamUpdateResult
from synapse_replication.testing.doubles import MemoryConnection, SourceStream
from synapse_replication.wire.rdata import read_lines
from tests.handlers.fixtures import Row
from tests.support.recording_observer import RecordingHost


@attrs.frozen
class Published:
    """One message: its sender, whether it is one of the extension, and its payload.

    :ivar to: the only instance that receives it; empty for all.
    """

    sender: str
    is_extension: bool
    payload: bytes
    to: str = ""


class Bus:
    """Delivers messages to all processes, in order, when ``deliver`` is called.

    :ivar drop: returns whether a message is lost.
    :ivar seen: the messages that were not lost, in order.
    :ivar processes: in the order in which they joined.
    """

    def __init__(self) -> None:
        self.processes: list[ExtensionProcess] = []
        self.seen: list[Published] = []
        self.drop: Callable[[Published], bool] = lambda message: False
        self._waiting: deque[Published] = deque()

    def publish(self, message: Published) -> None:
        self._waiting.append(message)

    def deliver(self) -> None:
        """Deliver all published messages, and those that are published in response."""
        while self._waiting:
            message = self._waiting.popleft()
            if self.drop(message):
                continue
            self.seen.append(message)
            for process in list(self.processes):
                if message.to in ("", process.name):
                    process.take(message)

    def advance(self, seconds: float) -> None:
        """
        Advance the clocks of all processes, and deliver the messages that they publish.
        """
        self.deliver()
        for _ in range(round(seconds * 4)):
            for process in list(self.processes):
                process.host.reactor.advance(0.25)
            self.deliver()

    def classic(self) -> list[str]:
        """Return the lines that stock peers see."""
        return [m.payload.decode() for m in self.seen if not m.is_extension]


class BusConnection(MemoryConnection):
    """A link to a bus."""

    is_direct = False

    def __init__(self, bus: Bus, sender: str, *, has_own_channel: bool = True) -> None:
        super().__init__("bus")
        self.has_own_channel = has_own_channel
        self._bus = bus
        self._sender = sender

    def send_lines(self, command_name: str, lines: Sequence[bytes]) -> None:
        for line in lines:
            self._bus.publish(Published(self._sender, False, line))

    def send_extension(self, payloads: Sequence[bytes], to: str = "") -> None:
        for payload in payloads:
            self._bus.publish(Published(self._sender, True, payload, to))


if TYPE_CHECKING:
    _: type[ExtensionConnection] = BusConnection


class ExtensionProcess:
    """An instance with the streams ``events`` and ``typing`` (held in memory).

    :param writes: the streams that it writes.
    :param speaks: ``False`` for a stock peer.
    :param saved: the state of ``typing`` that its earlier epoch saved, by writer: the
        writer's epoch (``None`` if it was not saved) and the token.
    :ivar refusal: the HTTP status of its answers to backlog requests; 0 for no answer.
    :ivar backlog_requests: the backlog requests that it received.
    """

    def __init__(
        self,
        bus: Bus,
        name: str,
        *,
        epoch: str = "",
        writes: Sequence[str] = (),
        speaks: bool = True,
        backlog: BacklogOptions | None = None,
        saved: Mapping[str, tuple[str | None, int]] | None = None,
    ) -> None:
        self.bus = bus
        self.name = name
        self.events = SourceStream("events", Row, instance_name=name)
        self.typing = SourceStream(
            "typing", Row, instance_name=name, resettable=True, held_in_memory=True
        )
        self.host = RecordingHost(
            self.events, self.typing, written=writes, instance_name=name
        )
        self.host.identity = Identity("hs.example", name, epoch or f"{name}-epoch")
        for writer, (saved_epoch, token) in (saved or {}).items():
            self.typing.advance(writer, token)
            if saved_epoch is not None:
                self.host.rows.epochs["typing", writer] = saved_epoch
        self.observer = self.host.observer
        self.epochs = PeerEpochs()
        self.backlog = Backlog(backlog or BacklogOptions())
        self.refusal: int | None = None
        self.backlog_requests: list[tuple[str, int, int]] = []
        partial = PartialResync(
            self.epochs, self.request_backlog, self.host.clock, self.observer
        )
        self.handler = ReplicationCommandHandler(
            self.host,
            self.observer,
            options=HandlerOptions(
                receiver=ReceiverOptions(backoff=Backoff(1.0, 8.0, jitter=lambda: 0.0)),
                partial=partial if speaks else None,
            ),
        )
        self.extension: ReplicationExtension | None = None
        if speaks:
            self.extension = ReplicationExtension(
                self.handler,
                self.epochs,
                self.backlog,
                where=f"host-of-{name}:1",
            )
            self.extension.start()
        self.streamer = ReplicationStreamer(
            self.host, self.handler.sender, self.observer
        )
        self.streamer.start()
        self.connection: BusConnection | None = None
        self.join()

    def join(self) -> None:
        """Connect to the bus."""
        self.bus.processes.append(self)
        self.connection = BusConnection(self.bus, self.name)
        if self.extension is not None:
            self.extension.extension_up(self.connection)
        self.handler.new_connection(self.connection)

    def leave(self) -> None:
        """Lose the connection to the bus."""
        assert self.connection is not None
        self.bus.processes.remove(self)
        if self.extension is not None:
            self.extension.extension_down(self.connection)
        self.handler.lost_connection(self.connection)
        self.connection = None

    def kill(self) -> None:
        """End without a message."""
        self.bus.processes.remove(self)
        assert self.extension is not None
        for call in self.host.reactor.getDelayedCalls():
            call.cancel()

    def take(self, message: Published) -> None:
        """Receive one message."""
        assert self.connection is not None
        if not message.is_extension:
            self.handler.received(self.connection, read_lines([message.payload]))
        elif self.extension is not None:
            self.extension.extension_received(self.connection, message.payload)

    def write(self, token: int, *texts: str, stream: str = "events") -> None:
        """Commit rows in the streams of all processes, and send them."""
        for process in {*self.bus.processes, self}:
            self._source(process, stream).persist(
                self.name, token, *([text] for text in texts)
            )
        self.host.notifier.notify()

    def _source(self, process: ExtensionProcess, stream: str) -> SourceStream:
        return process.events if stream == "events" else process.typing

    def skip(self, token: int, stream: str = "events") -> None:
        """Advance the position without rows, and announce it."""
        self._source(self, stream).local_token = token
        self.host.notifier.notify()

    async def request_backlog(
        self, stream: str, instance: str, epoch: str, from_token: int, upto_token: int
    ) -> StreamUpdateResult:
        """Request another process's backlog, as over HTTP."""
        others = [p for p in self.bus.processes if p.name == instance]
        status: int | None = None
        if others:
            other = others[-1]
            other.backlog_requests.append((stream, from_token, upto_token))
            status = other.refusal
            if other.extension is None or epoch != other.extension.epoch:
                status = 409
            elif status is None:
                result = other.backlog.read(stream, from_token, upto_token)
                if result is not None:
                    return result
                status = 410
        raise HttpCatchUpError("GET", stream, status or None, "no")

    def texts(self, stream: str = "events") -> list[tuple[str, int, list[str]]]:
        """Return (writer, token, texts) of the rows delivered."""
        return [
            (writer, token, [row.text for row in rows])
            for name, writer, token, rows in self.host.rows.rows
            if name == stream
        ]
