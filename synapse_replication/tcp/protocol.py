"""The line protocol on a Twisted transport: bytes in, bytes out.

Theory of operation: a :class:`~synapse_replication.wire.connection.LineConnection`
implements states, buffers and time limits. The classes here pass received data to it,
write the data that it returns, and call it when its next tick is due. The items that
were received in one chunk of data are passed to the handler together, unless a message
of the extension arrived between them. The same classes serve plain TCP, TLS and Unix
sockets.

If this process speaks the extension, its extension handler is notified of the link as
soon as the link is established and the peer has declared that it speaks the extension,
too. This precedes the handling of the rows and commands in the chunk that contained the
declaration. The client declares this first, in a way that stock servers ignore; see
:mod:`~synapse_replication.wire.connection`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
from twisted.internet.address import IPv4Address, IPv6Address
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IHandshakeListener, IPushProducer, ISSLTransport
from twisted.internet.protocol import Protocol, connectionDone
from twisted.python.failure import Failure
from typing_extensions import override
from zope.interface import implementer

from synapse_replication.errors import LineTooLongError, RemoteProtocolError
from synapse_replication.handlers.events import (
    ConnectionBuffers,
    LineRefused,
    LinkDown,
    LinkUp,
)
from synapse_replication.handlers.extension.extension import ReplicationExtension
from synapse_replication.handlers.interfaces import Clock, ConnectionHandler
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.handlers.timer import Timer
from synapse_replication.transport.buffers import ReadSize, read_buffers
from synapse_replication.transport.error_text import explain
from synapse_replication.wire import commands
from synapse_replication.wire.close_reason import CloseReason
from synapse_replication.wire.connection import ConnectionState, LineConnection
from synapse_replication.wire.extension import (
    COUNTED_AS,
    LINE_PREFIX,
    PING_MARK,
    ExtensionLine,
)
from synapse_replication.wire.pending_lines import PendingLimit
from synapse_replication.wire.rdata import ReceivedItem

#: The time that a server waits for the end of a client's TLS handshake, in s.
TLS_HANDSHAKE_TIMEOUT: Final = 10.0
_UNIX_SOCKET: Final = "a Unix socket"


def host_of(address: object) -> str:
    """Return the host of a client, for messages.

    :param address: the client's address, as its transport states it.
    """
    if isinstance(address, (IPv4Address, IPv6Address)):
        return address.host
    return _UNIX_SOCKET


@attrs.define(eq=False, repr=False, slots=False)
@implementer(IPushProducer)
class BaseReplicationStreamProtocol(Protocol):
    """Base class of both ends of a connection.

    :param server_name: the homeserver's name.
    :param clock: the host's clock.
    :param handler: notified when the link comes up and goes down, and of the items
        that arrive on it. PING, NAME, SERVER, ERROR and refused lines are handled by
        this class instead.
    :param observer: notified of the link's start and end, refused lines, failures, and
        the numbers of commands received and sent.
    :param closed: called with this object when the connection has been lost, after all
        other objects were notified.
    :param limit: the limit of lines buffered for a peer that reads too slowly.
    :param extension: handles the extension; ``None`` to disable it.
    :ivar name: label of the connection in logs and metrics; at a server, the peer's
        NAME as soon as it is received.
    :ivar is_established: whether the link came up and the handler was notified.
    :ivar close_reason: why the connection was closed; ``None`` while it is open.
    :ivar close_text: the reason as text for display; empty while it is open.
    """

    #: A TCP, TLS or Unix transport.
    transport: Any = attrs.field(init=False)
    relays: bool = attrs.field(init=False)
    is_direct = True
    has_own_channel = False
    #: Always false: each peer has its own buffer, so a slow peer does not delay others.
    #: It is disconnected when its buffer is full.
    is_behind = False

    server_name: str
    _clock: Clock
    _handler: ConnectionHandler
    _observer: ReplicationObserver
    _closed: Callable[[BaseReplicationStreamProtocol], object] | None = None
    _limit: PendingLimit | None = attrs.field(default=None, kw_only=True)
    _extension: ReplicationExtension | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        self.name = "unnamed"
        self._begin()
        self._next_tick = Timer(self._clock)

    def _begin(self) -> None:
        """Initialise the state of a new connection."""
        self.is_established = False
        self._connection = LineConnection(
            self.server_name,
            self._clock.seconds(),
            self._limit,
            is_server=self.relays,
            speaks_extension=self._extension is not None,
        )
        self._is_extension_up = False
        self._is_transport_closing = False
        self._read_size = ReadSize()

    @property
    def close_reason(self) -> CloseReason | None:
        """Why the connection was closed; ``None`` while it is open."""
        return self._connection.close_reason

    @property
    def close_text(self) -> str:
        """Why the connection was closed, as text; empty while it is open."""
        return self._connection.close_text

    def greeting(self) -> Sequence[commands.Command]:
        """Return the commands to send first."""
        raise NotImplementedError

    # -- from the transport ---------------------------------------------------------

    @override
    def connectionMade(self) -> None:
        # A transport whose buffer is full pauses this object, a streaming producer.
        self.transport.registerProducer(self, True)
        # Lines are already batched here; Nagle's algorithm would only add latency.
        # Twisted 22.8 raises an exception for a Unix socket.
        set_no_delay = getattr(self.transport, "setTcpNoDelay", None)
        has_port = isinstance(self.transport.getHost(), (IPv4Address, IPv6Address))
        if set_no_delay is not None and has_port:
            set_no_delay(True)
        for command in self.greeting():
            self.send_command(command)
        self._tick()

    @override
    def dataReceived(self, data: bytes) -> None:
        connection = self._connection
        self._read_size.received(self.transport, len(data))
        received = connection.receive_data(data, self._clock.seconds())
        self.name = connection.peer_name or self.name
        for command_name, count in received.counts.items():
            self._observer.commands_received(self.name, command_name, count)
        for error in received.refused:
            self._observer.observe(LineRefused(self.name, error))
        if not self.is_established and connection.state is ConnectionState.ESTABLISHED:
            self._establish()
        if connection.extension_agreed and not self._is_extension_up:
            self._begin_extension()
        if received.items and self.is_established:
            self._dispatch(received.items)
        self._flush()

    @override
    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._connection.connection_lost(
            isinstance(reason.value, ConnectionDone), explain(reason.value)
        )
        self._next_tick.stop()
        if self.is_established:
            assert self.close_reason is not None
            self._observer.observe(
                LinkDown(
                    self.name,
                    self.close_reason,
                    self.close_text,
                    self.client_address(),
                )
            )
            if self._is_extension_up:
                assert self._extension is not None
                self._extension.extension_down(self)
            self._handler.lost_connection(self)
        if self._closed is not None:
            self._closed(self)

    def pauseProducing(self) -> None:
        """Stop sending: the transport's buffer is full."""
        self._connection.pause_writing()

    def resumeProducing(self) -> None:
        """Resume sending: the transport's buffer is empty."""
        self._connection.resume_writing()
        self._flush()

    def stopProducing(self) -> None:
        """Do nothing: ``connectionLost`` handles the disconnection."""

    # -- from the handler: a ReplicationConnection ------------------------------------

    def send_command(self, command: commands.Command) -> None:
        """Send a command."""
        self.send_lines(command.NAME, [command.encode()])

    def send_lines(self, command_name: str, lines: Sequence[bytes]) -> None:
        """Send lines of one command. If the connection is closing, do nothing."""
        if self._connection.send_lines(command_name, lines, self._clock.seconds()):
            self._observer.commands_sent(self.name, command_name, len(lines))
        self._flush()

    def send_extension(self, payloads: Sequence[bytes], to: str = "") -> None:
        """Send messages of the extension. Never raises."""
        try:
            self.send_lines(COUNTED_AS, [LINE_PREFIX + each for each in payloads])
        except LineTooLongError as error:
            # A message about hundreds of streams can be longer than a line may be:
            # encode_message() does not limit its length.
            self._observer.failure(f"reporting positions to {self.name}", error)

    def close_with_error(self, text: str) -> None:
        """Send ERROR, then close the connection."""
        self._connection.close_with_error(text, self._clock.seconds())
        self._flush()

    def close(self) -> None:
        """Close gracefully: pending lines are still sent."""
        self._connection.close(self._clock.seconds())
        self._flush()

    def abort(self) -> None:
        """Close immediately, without sending pending lines."""
        self.transport.abortConnection()

    # -- for metrics ----------------------------------------------------------------

    def buffers(self) -> ConnectionBuffers:
        """Return the fill levels of the connection's buffers."""
        pending = self._connection.pending.lines
        buffers = read_buffers(self.transport)
        return ConnectionBuffers(self.name, pending, *attrs.astuple(buffers))

    def client_address(self) -> str:
        """Return the address of the peer if it is a client; otherwise, an empty text.

        The address of a server is part of :attr:`name`.
        """
        return ""

    # -- inside ---------------------------------------------------------------------

    def _establish(self) -> None:
        self.is_established = True
        self._observer.observe(LinkUp(self.name, self.client_address()))
        self._handler.new_connection(self)

    def _begin_extension(self) -> None:
        if not self.is_established or not self._connection.is_open:
            return
        assert self._extension is not None
        self._is_extension_up = True
        if self.relays:
            self.send_command(self._ping(PING_MARK))
        self._extension.extension_up(self)

    def _dispatch(self, items: Sequence[ReceivedItem | ExtensionLine]) -> None:
        """Pass items to the handler and messages to the extension, in order."""
        waiting: list[ReceivedItem] = []
        for item in items:
            if not isinstance(item, ExtensionLine):
                waiting.append(item)
                continue
            if waiting:
                self._handler.received(self, waiting)
                waiting = []
            assert self._extension is not None
            self._extension.extension_received(self, item.payload)
        if waiting:
            self._handler.received(self, waiting)

    def _ping(self, *marks: str) -> commands.PingCommand:
        return commands.PingCommand(" ".join([str(self._clock.time_msec()), *marks]))

    def _flush(self) -> None:
        # write() may call pauseProducing(), after which data_to_send() returns nothing,
        # unless the connection is closing.
        while data := self._connection.data_to_send():
            self.transport.write(data)
        if (
            self._connection.state is ConnectionState.CLOSING
            and not self._is_transport_closing
        ):
            self._is_transport_closing = True
            # A transport does not close while it has a paused producer.
            self.transport.unregisterProducer()
            self.transport.loseConnection()

    def _tick(self) -> None:
        now = self._clock.seconds()
        if self._connection.is_ping_due(now):
            self.send_command(self._ping())
        delay = self._connection.tick(now)
        self._flush()
        if self._connection.close_hangs:
            self.transport.abortConnection()
        else:
            self._next_tick.start(delay, self._tick)


@implementer(IHandshakeListener)
class ServerReplicationStreamProtocol(BaseReplicationStreamProtocol):
    """The server's end of a connection.

    The link is established when the client's NAME arrives.
    """

    relays = True

    @override
    def greeting(self) -> Sequence[commands.Command]:
        return [commands.ServerCommand(self.server_name), self._ping()]

    @override
    def client_address(self) -> str:
        peer = self.transport.getPeer()
        if not isinstance(peer, (IPv4Address, IPv6Address)):
            return _UNIX_SOCKET
        host = f"[{peer.host}]" if isinstance(peer, IPv6Address) else peer.host
        return f"{host}:{peer.port}"

    @override
    def connectionMade(self) -> None:
        self._handshake = Timer(self._clock)
        super().connectionMade()
        if ISSLTransport.providedBy(self.transport):
            # Limit the time for the handshake: the client is not authenticated yet.
            self._handshake.start(TLS_HANDSHAKE_TIMEOUT, self._handshake_timed_out)

    def handshakeCompleted(self) -> None:
        """Stop the timer of the TLS handshake. Called by Twisted."""
        self._handshake.stop()

    @override
    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if self._handshake.is_running and not isinstance(reason.value, ConnectionDone):
            self._report_handshake_failure(explain(reason.value))
        self._handshake.stop()
        super().connectionLost(reason)

    def _handshake_timed_out(self) -> None:
        self._report_handshake_failure(
            f"no TLS handshake within {TLS_HANDSHAKE_TIMEOUT:g} s"
        )
        self.transport.abortConnection()

    def _report_handshake_failure(self, reason: str) -> None:
        assert self.transport is not None
        host = host_of(self.transport.getPeer())
        self._observer.observe(
            LineRefused(f"the TLS client {host}", RemoteProtocolError(reason))
        )


class ClientReplicationStreamProtocol(BaseReplicationStreamProtocol):
    """The client's end of a connection.

    The link is established when SERVER has arrived with the expected name. The handler
    then requests positions with REPLICATE; a passive handler does not.

    :param client_name: this instance's name, sent in NAME.
    :param server_name: the homeserver's name, which SERVER must contain.
    :param label: the label of the connection: the server's address, because the server
        sends no instance name. By default, ``client_name``.
    """

    relays = False

    def __init__(
        self,
        client_name: str,
        server_name: str,
        clock: Clock,
        handler: ConnectionHandler,
        observer: ReplicationObserver,
        closed: Callable[[BaseReplicationStreamProtocol], object] | None = None,
        *,
        limit: PendingLimit | None = None,
        extension: ReplicationExtension | None = None,
        label: str = "",
    ) -> None:
        super().__init__(
            server_name,
            clock,
            handler,
            observer,
            closed,
            limit=limit,
            extension=extension,
        )
        self._client_name = client_name
        self.name = label or client_name

    @override
    def greeting(self) -> Sequence[commands.Command]:
        # A stock server ignores the text of a PING.
        marks = [] if self._extension is None else [PING_MARK]
        return [commands.NameCommand(self._client_name), self._ping(*marks)]
