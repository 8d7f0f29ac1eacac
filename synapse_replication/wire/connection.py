"""A line connection without a socket: its states, buffers and time limits.

Theory of operation: an adapter hands in the bytes that arrived and the time
(:meth:`LineConnection.receive_data`), asks what to write
(:meth:`LineConnection.data_to_send`) after each call, and calls
:meth:`LineConnection.tick` when it is due. When :attr:`LineConnection.state` has
become ``CLOSING`` it writes what is left, closes its transport gracefully, and
aborts it when :meth:`LineConnection.tick` says so. Nothing here calls out.

States::

    CONNECTING --handshake--> ESTABLISHED --close, error--> CLOSING --> CLOSED
         |                                                      ^
         +----------------------close, error--------------------+

The handshake of a client is SERVER with the right name; that of a server is NAME,
before which it accepts PING and ERROR alone. So nothing that a web browser can be made
to send is acted on: a server also closes on a request line or a header of HTTP,
wherever it stands. In ``CLOSING`` whatever arrives is discarded, and nothing more can
be sent: a connection that was closed for an error is never resumed.

Bounds: a line has at most 16384 bytes each way. While the transport is paused, lines
wait up to a :class:`PendingLimit`, 10,000 lines and 16 MiB; what would pass it closes
the connection. So a peer that does not read costs no more than that, what the
transport buffers, and the chunk during which it was paused.

Extension: a client that speaks the extension says so in its first PING, where it harms
nobody; a server that does, too, answers with the same, and only then do lines of it
go either way (:attr:`LineConnection.extension_agreed`). What a server says to others
is the classic wire, byte for byte.

Time, all in s: a PING goes out after 5 s without any other line. After the peer's
first PING, 25 s of silence end the connection; a peer that never sends one may be
a person, and is never cut off. A client waits 10 s for SERVER, so that a wrong
port shows itself.
"""

from __future__ import annotations

import enum
import math
from collections import Counter, deque
from collections.abc import Sequence
from typing import Final

import attrs

from synapse_replication.errors import (
    ForbiddenCommandError,
    LineTooLongError,
    LocalProtocolError,
    RemoteProtocolError,
    UnknownCommandError,
    excerpt,
    without_lines,
)
from synapse_replication.wire.commands.standard import (
    VALID_CLIENT_COMMANDS,
    VALID_SERVER_COMMANDS,
    Command,
    ErrorCommand,
    NameCommand,
    PingCommand,
    ServerCommand,
)
from synapse_replication.wire.extension import (
    COUNTED_AS,
    LINE_PREFIX,
    PING_MARK,
    ExtensionLine,
)
from synapse_replication.wire.rdata import (
    InterleavedRun,
    RdataRun,
    ReceivedItem,
    RefusedLine,
    read_lines,
)

__all__ = [
    "MAX_LINE_LENGTH",
    "CloseReason",
    "ConnectionState",
    "LineConnection",
    "PendingLimit",
    "Received",
    "Role",
]

#: The longest line in bytes, without its end.
MAX_LINE_LENGTH: Final = 16384
#: After how many s without another line a PING is sent.
PING_INTERVAL: Final = 5.0
#: How many s of silence end a connection, and how long a close may take.
TIMEOUT: Final = 25.0
#: How many s a client waits for the server's first line.
HANDSHAKE_TIMEOUT: Final = 10.0
#: How many s a server waits for NAME: time enough for a person to type it.
NAME_TIMEOUT: Final = 60.0
#: About how many bytes are written at once.
WRITE_SIZE: Final = 65536
#: The longest NAME that is kept: it becomes a label of metrics.
_MAX_NAME_LENGTH: Final = 64
#: The longest text of an ERROR that we send, in characters.
_MAX_ERROR_LENGTH: Final = 1000
#: How much is shown of the first word of something that is no SERVER, in bytes.
_FIRST_WORD: Final = 12
#: Rounding must not make a due time that is never reached, in s.
_SHORTEST_DELAY: Final = 0.001
#: The first words of lines of HTTP, in upper case; no command has such a name.
_HTTP_WORDS: Final = frozenset(
    [
        "GET",
        "POST",
        "PUT",
        "HEAD",
        "DELETE",
        "OPTIONS",
        "PATCH",
        "CONNECT",
        "TRACE",
        "PRI",
        "HOST:",
    ]
)
#: What a server accepts before NAME.
_BEFORE_NAME: Final = frozenset({"NAME", "PING", "ERROR"})
#: A call that is due is late by more than that, in s, only if the process did not run
#: or its clock stepped.
_LATE: Final = 1.0
#: How a TLS record of a handshake or of an alert begins.
_TLS_HANDSHAKE, _TLS_ALERT = b"\x16\x03", b"\x15\x03"


class Role(enum.Enum):
    """Which end of the connection we are."""

    SERVER = "server"
    CLIENT = "client"


class ConnectionState(enum.Enum):
    """How far a connection has come."""

    CONNECTING = "connecting"
    ESTABLISHED = "established"
    CLOSING = "closing"
    CLOSED = "closed"


class CloseReason(enum.Enum):
    """Why a connection was closed."""

    CLEAN = "clean"  #: the peer closed
    LOST = "lost"  #: the transport broke
    PEER_ERROR = "peer_error"  #: the peer sent ERROR
    PROTOCOL_ERROR = "protocol_error"  #: the peer did wrong
    TIMED_OUT = "timed_out"
    CONGESTED = "congested"  #: the peer reads too slowly
    SHUTDOWN = "shutdown"  #: we were asked to close


@attrs.frozen
class Received:
    """What one chunk of bytes brought.

    :ivar items: rows and commands for the handler, and messages of the extension, in
        order.
    :ivar counts: how many commands came, by name; the connection's own
        (PING, NAME, ...) among them.
    :ivar refused: what did not parse or was not allowed.
    """

    items: list[ReceivedItem | ExtensionLine] = attrs.Factory(list)
    counts: Counter[str] = attrs.Factory(Counter)
    refused: list[RemoteProtocolError] = attrs.Factory(list)


@attrs.frozen
class PendingLimit:
    """How much may wait for a peer that does not read.

    :ivar lines: commands.
    :ivar bytes: of their lines, ends included.
    """

    lines: int = 10_000
    bytes: int = 16 * 1024 * 1024


class LineConnection:
    """One end of a connection.

    :param role: which end.
    :param server_name: the homeserver's name: what a client expects in SERVER.
    :param now: monotonic time in s.
    :param limit: how much may wait while the transport is paused.
    :param speaks_extension: this end speaks the extension, if the peer does.
    :ivar state: where it stands.
    :ivar peer_name: what the peer's NAME said; ``None`` before.
    :ivar extension_agreed: the peer speaks the extension, and so does this end.
    :ivar close_reason: why it closes; ``None`` while this end does not.
    :ivar close_text: the same for people.
    :ivar close_hangs: the transport is to be aborted.
    """

    def __init__(
        self,
        role: Role,
        server_name: str,
        now: float,
        limit: PendingLimit | None = None,
        *,
        speaks_extension: bool = False,
    ) -> None:
        self._server_name = server_name
        self._limit = limit or PendingLimit()
        self._speaks_extension = speaks_extension
        self.state = ConnectionState.CONNECTING
        self._is_server = role is Role.SERVER
        self._allowed = (
            VALID_CLIENT_COMMANDS if self._is_server else VALID_SERVER_COMMANDS
        )
        self.peer_name: str | None = None
        self.extension_agreed = False
        self.close_reason: CloseReason | None = None
        self.close_text = ""
        self.close_hangs = False
        # What arrived of a line whose end did not; None until anything arrives.
        self._line_start: bytes | None = None
        # How many lines, and the lines with their ends.
        self._pending: deque[tuple[int, bytes]] = deque()
        self._pending_lines = self._pending_bytes = 0
        self._writing_paused = False
        self._peer_pings = False
        self._started = self._last_sent = self._last_received = now
        self._closing_since = now
        self._tick_due = math.inf

    @property
    def is_open(self) -> bool:
        """Whether anything can still be sent and received."""
        return self.state in (ConnectionState.CONNECTING, ConnectionState.ESTABLISHED)

    @property
    def pending_lines(self) -> int:
        """How many lines wait to be sent."""
        return self._pending_lines

    @property
    def pending_bytes(self) -> int:
        """How many bytes of lines wait to be sent."""
        return self._pending_bytes

    # -- receiving ------------------------------------------------------------------

    def receive_data(self, data: bytes, now: float) -> Received:
        """Take a chunk of bytes, cut anywhere."""
        received = Received()
        if not self.is_open:
            return received
        self._last_received = now
        if self._line_start is None:
            self._line_start = b""
            if data.startswith((_TLS_HANDSHAKE, _TLS_ALERT)):
                text = "the peer speaks TLS, and this end of the connection does not"
                self._refuse(received, RemoteProtocolError(text), now)
                return received
        if self._line_start:
            data = self._line_start + data
        lines = data.split(b"\n")
        self._line_start = lines.pop()
        too_long = self._cut_at_too_long_line(lines)
        if self.state is ConnectionState.CONNECTING:
            if self._is_server:
                if any(b" HTTP/1." in line for line in lines):
                    self._refuse(received, _http_error(), now)
            else:
                self._check_first_line(lines, received, now)
        if self._speaks_extension and LINE_PREFIX in data:
            self._receive_with_extension(lines, received, now)
        else:
            self._receive_items(read_lines(lines), received, now)
        if too_long and self.is_open:
            text = f"line is longer than {MAX_LINE_LENGTH} bytes"
            self._refuse(received, RemoteProtocolError(text), now)
        return received

    def _receive_with_extension(
        self, lines: list[bytes], received: Received, now: float
    ) -> None:
        start = 0
        for index, line in enumerate(lines):
            if line.startswith(LINE_PREFIX):
                self._receive_items(read_lines(lines[start:index]), received, now)
                start = index
                # Not asked for, it is a command that nobody knows.
                if self.is_open and self.extension_agreed:
                    received.counts[COUNTED_AS] += 1
                    received.items.append(ExtensionLine(line[len(LINE_PREFIX) :]))
                    start += 1
        self._receive_items(read_lines(lines[start:]), received, now)

    def _receive_items(
        self, items: list[ReceivedItem], received: Received, now: float
    ) -> None:
        for item in items:
            if not self.is_open:
                return
            if isinstance(item, (RdataRun, InterleavedRun)):
                if self._needs_name("RDATA"):
                    self._refuse(received, _no_name_error(), now)
                    return
                received.counts["RDATA"] += len(item.rows)
                received.items.append(item)
            elif isinstance(item, RefusedLine):
                if isinstance(item.error, UnknownCommandError):
                    # A newer peer may say what we do not know.
                    name = item.error.command_name
                    if name.upper() in _HTTP_WORDS:
                        self._refuse(received, _http_error(), now)
                    elif self._needs_name(name):
                        self._refuse(received, _no_name_error(), now)
                    else:
                        received.refused.append(item.error)
                else:
                    self._refuse(received, item.error, now)
            else:
                self._receive_command(item, received, now)

    def _cut_at_too_long_line(self, lines: list[bytes]) -> bool:
        """Remove the first line that is too long, and all after it."""
        if lines and max(map(len, lines)) > MAX_LINE_LENGTH:
            lengths = list(map(len, lines))
            del lines[next(i for i, n in enumerate(lengths) if n > MAX_LINE_LENGTH) :]
            return True
        assert self._line_start is not None
        return len(self._line_start) > MAX_LINE_LENGTH

    def _check_first_line(
        self, lines: list[bytes], received: Received, now: float
    ) -> None:
        first = next(filter(None, lines), None)
        if first is not None and not first.startswith(b"SERVER "):
            # Enough to know HTTP or SSH by, and too little for a secret.
            shown = excerpt(first.split(b" ")[0][:_FIRST_WORD])
            text = (
                f"the first line begins not with SERVER but '{shown}': is this the "
                "port of a replication listener?"
            )
            self._refuse(received, RemoteProtocolError(text), now)

    def _needs_name(self, command_name: str) -> bool:
        """Return whether NAME has to come first: nothing was said of who is there."""
        return (
            self._is_server
            and self.state is ConnectionState.CONNECTING
            and command_name not in _BEFORE_NAME
        )

    def _receive_command(
        self, command: Command, received: Received, now: float
    ) -> None:
        name = command.NAME
        received.counts[name] += 1
        if self._needs_name(name):
            self._refuse(received, _no_name_error(), now)
        elif name not in self._allowed:
            self._refuse(received, ForbiddenCommandError(name), now)
        elif isinstance(command, PingCommand):
            self._peer_pings = True
            if self._speaks_extension and PING_MARK in command.data.split(" "):
                self.extension_agreed = True
        elif isinstance(command, NameCommand):
            self.peer_name = excerpt(command.data)[:_MAX_NAME_LENGTH]
            self.state = ConnectionState.ESTABLISHED
        elif isinstance(command, ServerCommand):
            if command.data == self._server_name:
                self.state = ConnectionState.ESTABLISHED
            else:
                text = (
                    f"wrong server: this is '{excerpt(command.data)}', "
                    f"and '{self._server_name}' was expected"
                )
                self._refuse(received, RemoteProtocolError(text), now)
        elif isinstance(command, ErrorCommand):
            # Stock peers repeat the line that they could not read.
            text = excerpt(without_lines(command.data))
            self._close(CloseReason.PEER_ERROR, text, now)
        else:
            received.items.append(command)

    # -- sending --------------------------------------------------------------------

    def send_lines(self, command_name: str, lines: Sequence[bytes], now: float) -> bool:
        """Put lines of one command up for sending, in order.

        :param lines: without their ends; at least one.
        :return: whether they will be sent. If not, the connection is closing, now
            perhaps because the peer has failed to keep up.
        :raises LineTooLongError: if one is too long; none is sent.
        :raises LocalProtocolError: if one holds a line's end; none is sent.
        """
        longest = max(map(len, lines))
        if longest > MAX_LINE_LENGTH:
            raise LineTooLongError(command_name, longest, MAX_LINE_LENGTH)
        data = b"\n".join(lines) + b"\n"
        if data.count(b"\n") != len(lines):
            raise LocalProtocolError(
                f"{command_name} cannot be sent: a line holds the end of a line"
            )
        if not self.is_open:
            return False
        if self._writing_paused and (
            self._pending_lines + len(lines) > self._limit.lines
            or self._pending_bytes + len(data) > self._limit.bytes
        ):
            self._close(CloseReason.CONGESTED, "Failed to keep up", now)
            return False
        self._pending.append((len(lines), data))
        self._pending_lines += len(lines)
        self._pending_bytes += len(data)
        self._last_sent = now
        return True

    def data_to_send(self) -> bytes:
        """Take what is to be written now: about 64 KiB; in ``CLOSING`` the rest.

        Call it until nothing is left; the transport may pause between.
        """
        if self._writing_paused and self.is_open:
            return b""
        chunks = []
        size = 0
        while self._pending and (size < WRITE_SIZE or not self.is_open):
            count, data = self._pending.popleft()
            self._pending_lines -= count
            self._pending_bytes -= len(data)
            chunks.append(data)
            size += len(data)
        return b"".join(chunks)

    def pause_writing(self) -> None:
        """Record that the transport's buffer is full: what is sent waits."""
        self._writing_paused = True

    def resume_writing(self) -> None:
        """Record that the transport takes more."""
        self._writing_paused = False

    # -- time and the end -----------------------------------------------------------

    def is_ping_due(self, now: float) -> bool:
        """Return whether it is time to send a PING, for want of other lines."""
        return self.is_open and now >= self._ping_due

    def tick(self, now: float) -> float:
        """End what has lasted too long.

        Only time in which this could run counts: if the call is late, the clock may
        have stepped, and what the peer sent meanwhile has not been read yet.

        :return: after how many s to call again.
        """
        late = now - self._tick_due
        if late > _LATE:
            self._started = min(now, self._started + late)
            self._last_received = min(now, self._last_received + late)
            self._closing_since = min(now, self._closing_since + late)
        if not self.is_open:
            self.close_hangs = now >= self._closing_since + TIMEOUT
        elif now >= self._handshake_ends:
            text = (
                f"no NAME within {NAME_TIMEOUT:.0f} s; send it first"
                if self._is_server
                else f"no SERVER within {HANDSHAKE_TIMEOUT:.0f} s: is this the port of "
                "a replication listener, and is TLS set alike at both ends?"
            )
            self._close(CloseReason.TIMED_OUT, text, now)
        elif now >= self._silence_ends:
            text = f"ping timeout: nothing arrived for {TIMEOUT:.0f} s"
            self._close(CloseReason.TIMED_OUT, text, now)
        due = (
            min(self._handshake_ends, self._silence_ends, self._ping_due)
            if self.is_open
            else self._closing_since + TIMEOUT
        )
        # What the due times depend on may change meanwhile: look often enough.
        delay = min(PING_INTERVAL, max(_SHORTEST_DELAY, due - now))
        self._tick_due = now + delay
        return delay

    @property
    def _handshake_ends(self) -> float:
        if self.state is ConnectionState.CONNECTING:
            return self._started + (
                NAME_TIMEOUT if self._is_server else HANDSHAKE_TIMEOUT
            )
        return math.inf

    @property
    def _silence_ends(self) -> float:
        if self._peer_pings:
            return self._last_received + TIMEOUT
        return math.inf

    @property
    def _ping_due(self) -> float:
        # While the transport is paused, older lines are on their way.
        return math.inf if self._writing_paused else self._last_sent + PING_INTERVAL

    def close(self, now: float) -> None:
        """Close in good order: what waits is still sent."""
        if self.is_open:
            self._close(CloseReason.SHUTDOWN, "shut down", now)

    def close_with_error(self, text: str, now: float) -> None:
        """Tell the peer that it did wrong, and close. What waits is dropped."""
        if self.is_open:
            self._close(CloseReason.PROTOCOL_ERROR, text, now)

    def connection_lost(self, clean: bool, text: str) -> None:
        """Record that the transport is gone.

        :param clean: the peer closed it, as opposed to: it broke.
        """
        self.state = ConnectionState.CLOSED
        self._drop_pending()
        if self.close_reason is None:
            self.close_reason = CloseReason.CLEAN if clean else CloseReason.LOST
            self.close_text = text

    def _refuse(
        self, received: Received, error: RemoteProtocolError, now: float
    ) -> None:
        received.refused.append(error)
        self._close(CloseReason.PROTOCOL_ERROR, str(error), now)

    def _close(self, reason: CloseReason, text: str, now: float) -> None:
        self.state = ConnectionState.CLOSING
        self.close_reason = reason
        self.close_text = text
        self._closing_since = now
        if reason is CloseReason.SHUTDOWN:
            return
        self._drop_pending()
        if reason is not CloseReason.PEER_ERROR:
            line = " ".join(text[:_MAX_ERROR_LENGTH].splitlines())
            data = f"ERROR {line}\n".encode("utf-8", "replace")
            self._pending.append((1, data))
            self._pending_lines = 1
            self._pending_bytes = len(data)

    def _drop_pending(self) -> None:
        self._pending.clear()
        self._pending_lines = self._pending_bytes = 0


def _http_error() -> RemoteProtocolError:
    return RemoteProtocolError("this is a replication listener, which speaks no HTTP")


def _no_name_error() -> RemoteProtocolError:
    return RemoteProtocolError("send NAME first: it says who connects")
