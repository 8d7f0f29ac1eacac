"""A line connection without a socket: its states, buffers and time limits.

Theory of operation: an adapter passes received bytes and the current time to
:meth:`LineConnection.receive_data`, writes the bytes that
:meth:`LineConnection.data_to_send` returns after each call, and calls
:meth:`LineConnection.tick` when it is due. When :attr:`LineConnection.state` has
become ``CLOSING``, the adapter writes the remaining bytes, closes its transport
gracefully, and aborts it once :attr:`LineConnection.close_hangs` is set. This module
never calls back into the adapter.

States::

    CONNECTING --handshake--> ESTABLISHED --close, error--> CLOSING --> CLOSED
         |                                                      ^
         +----------------------close, error--------------------+

A lost transport leads from any state to ``CLOSED``. A client's end is established when
it receives SERVER with the expected name; a server's end, when it receives NAME. Before
NAME, a server accepts only PING and ERROR. It also closes the connection when it
receives an HTTP request, so a web browser that is tricked into connecting cannot make
the server act. In ``CLOSING``, received data is discarded and nothing more can be
enqueued, so a connection closed because of an error is never resumed.

Bounds: a line has at most 16384 bytes in either direction. While the transport is
paused, lines are buffered up to a :class:`PendingLimit` (10,000 lines and 16 MiB by
default); exceeding it closes the connection. A peer that does not read therefore costs
at most that much memory, plus the transport's buffer and the lines that were sent
together when the buffer became full.

Extension: a client that speaks the extension adds a mark to the text of its first PING;
stock servers ignore this text. A server that speaks the extension sends a PING with the
same mark in return. Only then do both ends send extension lines. All other clients
receive exactly the standard protocol.

Time limits: see :mod:`~synapse_replication.wire.time_limits`.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from msgspec import Struct, field

from synapse_replication import errors
from synapse_replication.text import without_lines
from synapse_replication.wire import commands, rdata
from synapse_replication.wire.close_reason import CloseReason
from synapse_replication.wire.extension import (
    COUNTED_AS,
    LINE_PREFIX,
    PING_MARK,
    ExtensionLine,
)
from synapse_replication.wire.pending_lines import PendingLimit, PendingLines
from synapse_replication.wire.time_limits import TimeLimits

#: The longest line in bytes, without its end.
MAX_LINE_LENGTH: Final = 16384
#: NAME is truncated to this many characters, because it becomes a metric label.
_MAX_NAME_LENGTH: Final = 64
#: The longest text of an ERROR that this end sends, in characters.
_MAX_ERROR_LENGTH: Final = 1000
#: The commands that a server accepts while it is waiting for NAME.
_BEFORE_NAME: Final = frozenset({"NAME", "PING", "ERROR"})
#: The number of bytes of an unexpected first word that the error quotes.
_FIRST_WORD: Final = 12
#: First words of HTTP lines, in upper case. No command has such a name.
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
#: The first bytes of a TLS handshake record and of a TLS alert record.
_TLS_HANDSHAKE, _TLS_ALERT = b"\x16\x03", b"\x15\x03"
#: Reasons to close a connection.
_TLS: Final = "the peer speaks TLS, and this end of the connection does not"
_HTTP: Final = "this is a replication listener, which does not speak HTTP"
_NO_NAME: Final = "send NAME first: it identifies the connection"


class ConnectionState(enum.Enum):
    """State of a connection; see the module's diagram."""

    CONNECTING = "connecting"
    ESTABLISHED = "established"
    CLOSING = "closing"
    CLOSED = "closed"


class Received(Struct, frozen=True):
    """The result of parsing one chunk of bytes.

    :ivar items: rows and commands for the handler, and messages of the extension, in
        order.
    :ivar counts: the number of commands by name, including those that the connection
        handles itself (PING, NAME, ...).
    :ivar refused: an error for each line that was invalid or not allowed.
    """

    items: list[rdata.ReceivedItem | ExtensionLine] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    refused: list[errors.RemoteProtocolError] = field(default_factory=list)


class LineConnection:
    """One end of a connection. All times (``now``) are those of the host's clock, in s.

    :param server_name: the homeserver's name, which a client expects in SERVER.
    :param now: the current time.
    :param limit: the limit of lines buffered while the transport is paused.
    :param is_server: whether this object is the server's end.
    :param speaks_extension: whether to speak the extension if the peer does.
    :ivar state: the current state.
    :ivar pending: the lines waiting to be sent.
    :ivar peer_name: the peer's NAME; ``None`` until it is received.
    :ivar extension_agreed: whether both ends speak the extension.
    :ivar close_reason: why the connection was closed; ``None`` while it is open.
    :ivar close_text: the reason as text for display; empty while it is open.
    :ivar close_hangs: whether closing takes so long that the transport must be aborted.
    """

    def __init__(
        self,
        server_name: str,
        now: float,
        limit: PendingLimit | None = None,
        *,
        is_server: bool,
        speaks_extension: bool = False,
    ) -> None:
        self._server_name = server_name
        self._speaks_extension = speaks_extension
        self.state = ConnectionState.CONNECTING
        self._is_server = is_server
        self._allowed = commands.VALID_SERVER_COMMANDS
        if is_server:
            self._allowed = commands.VALID_CLIENT_COMMANDS
        self.peer_name: str | None = None
        self.extension_agreed = False
        self.close_reason: CloseReason | None = None
        self.close_text = ""
        self.close_hangs = False
        # The incomplete last line received so far; None until any data arrives.
        self._line_start: bytes | None = None
        self.pending = PendingLines(limit or PendingLimit())
        self._writing_paused = False
        self._times = TimeLimits(is_server=is_server, now=now)

    @property
    def is_open(self) -> bool:
        """Whether lines can still be sent and received."""
        return self.state in (ConnectionState.CONNECTING, ConnectionState.ESTABLISHED)

    # -- receiving ------------------------------------------------------------------

    def receive_data(self, data: bytes, now: float) -> Received:
        """Parse a chunk of bytes, which may begin and end within a line."""
        received = Received()
        if not self.is_open:
            return received
        self._times.last_received = now
        if self._line_start is None:
            self._line_start = b""
            if data.startswith((_TLS_HANDSHAKE, _TLS_ALERT)):
                self._reject_because(received, _TLS, now)
                return received
        if self._line_start:
            data = self._line_start + data
        lines = data.split(b"\n")
        self._line_start = lines.pop()
        too_long = self._cut_at_too_long_line(lines)
        if self._is_connecting:
            wrong = (
                _find_http(lines) if self._is_server else _find_wrong_greeting(lines)
            )
            if wrong is not None:
                self._reject_because(received, wrong, now)
        if self._speaks_extension and LINE_PREFIX in data:
            self._receive_with_extension(lines, received, now)
        else:
            self._receive_items(rdata.read_lines(lines), received, now)
        if too_long and self.is_open:
            text = f"line is longer than {MAX_LINE_LENGTH} bytes"
            self._reject_because(received, text, now)
        return received

    def _receive_with_extension(
        self, lines: list[bytes], received: Received, now: float
    ) -> None:
        start = 0
        for index, line in enumerate(lines):
            if line.startswith(LINE_PREFIX):
                self._receive_items(rdata.read_lines(lines[start:index]), received, now)
                start = index
                # Before NAME, or without the extension, the line is an unknown command.
                is_message = self.extension_agreed and not self._needs_name(COUNTED_AS)
                if self.is_open and is_message:
                    received.counts[COUNTED_AS] += 1
                    received.items.append(ExtensionLine(line[len(LINE_PREFIX) :]))
                    start += 1
        self._receive_items(rdata.read_lines(lines[start:]), received, now)

    def _receive_items(
        self, items: list[rdata.ReceivedItem], received: Received, now: float
    ) -> None:
        for item in items:
            if not self.is_open:
                return
            if isinstance(item, (rdata.RdataGroup, rdata.InterleavedGroup)):
                if self._needs_name("RDATA"):
                    self._reject_because(received, _NO_NAME, now)
                    return
                received.counts["RDATA"] += len(item.rows)
                received.items.append(item)
            elif isinstance(item, rdata.RefusedLine):
                if isinstance(item.error, errors.UnknownCommandError):
                    # A newer peer may send commands that are unknown here: skip them.
                    name = item.error.command_name
                    if name.upper() in _HTTP_WORDS:
                        self._reject_because(received, _HTTP, now)
                    elif self._needs_name(name):
                        self._reject_because(received, _NO_NAME, now)
                    else:
                        received.refused.append(item.error)
                else:
                    self._reject(received, item.error, now)
            else:
                self._receive_command(item, received, now)

    def _cut_at_too_long_line(self, lines: list[bytes]) -> bool:
        """Remove the first line that is too long and all lines after it.

        :return: whether a line was too long, including the incomplete last line.
        """
        if lines and max(map(len, lines)) > MAX_LINE_LENGTH:
            lengths = list(map(len, lines))
            del lines[next(i for i, n in enumerate(lengths) if n > MAX_LINE_LENGTH) :]
            return True
        assert self._line_start is not None
        return len(self._line_start) > MAX_LINE_LENGTH

    def _needs_name(self, name: str) -> bool:
        """Return whether the peer must send NAME before this command."""
        return self._is_server and self._is_connecting and name not in _BEFORE_NAME

    def _receive_command(
        self, command: commands.Command, received: Received, now: float
    ) -> None:
        name = command.NAME
        received.counts[name] += 1
        if self._needs_name(name):
            self._reject_because(received, _NO_NAME, now)
            return
        if name not in self._allowed:
            self._reject(received, errors.ForbiddenCommandError(name), now)
            return
        match command:
            case commands.PingCommand():
                self._times.peer_pings = True
                if self._speaks_extension and PING_MARK in command.data.split(" "):
                    self.extension_agreed = True
            case commands.NameCommand():
                self.peer_name = errors.excerpt(command.data)[:_MAX_NAME_LENGTH]
                self.state = ConnectionState.ESTABLISHED
            case commands.ServerCommand(data=self._server_name):
                self.state = ConnectionState.ESTABLISHED
            case commands.ServerCommand():
                text = (
                    f"wrong server: this is '{errors.excerpt(command.data)}', "
                    f"but '{self._server_name}' was expected"
                )
                self._reject_because(received, text, now)
            case commands.ErrorCommand():
                # Stock peers quote unparsable lines, which may contain secrets.
                text = errors.excerpt(without_lines(command.data))
                self._close(CloseReason.PEER_ERROR, text, now)
            case _:
                received.items.append(command)

    # -- sending --------------------------------------------------------------------

    def send_lines(self, command_name: str, lines: Sequence[bytes], now: float) -> bool:
        """Enqueue lines of one command, in order: all of them or none.

        :param lines: without their line ends; at least one.
        :return: whether the lines were enqueued. If not, the connection is closing or
            closed; this call closes it if the buffer is full.
        :raises LineTooLongError: if a line is too long.
        :raises LocalProtocolError: if a line contains a newline.
        """
        longest = max(map(len, lines))
        if longest > MAX_LINE_LENGTH:
            raise errors.LineTooLongError(command_name, longest, MAX_LINE_LENGTH)
        data = b"\n".join(lines) + b"\n"
        if data.count(b"\n") != len(lines):
            raise errors.LocalProtocolError(
                f"{command_name} cannot be sent: a line contains a newline"
            )
        if not self.is_open:
            return False
        if self._writing_paused and not self.pending.has_room(len(lines), len(data)):
            self._close(CloseReason.CONGESTED, "Failed to keep up", now)
            return False
        self.pending.add(len(lines), data)
        self._times.last_sent = now
        return True

    def data_to_send(self) -> bytes:
        """Return about 64 KiB of data, but none while paused; in ``CLOSING``, all data.

        Call it until it returns nothing; the transport may pause between calls.
        """
        if self._writing_paused and self.is_open:
            return b""
        return self.pending.take(everything=not self.is_open)

    def pause_writing(self) -> None:
        """Start to buffer lines: the transport's buffer is full."""
        self._writing_paused = True

    def resume_writing(self) -> None:
        """Stop buffering: the transport accepts data again."""
        self._writing_paused = False

    # -- time limits and closing ----------------------------------------------------

    def is_ping_due(self, now: float) -> bool:
        """Return whether a PING must be sent because no line was sent recently."""
        return self.is_open and self._times.is_ping_due(
            now, is_paused=self._writing_paused
        )

    def tick(self, now: float) -> float:
        """Close the connection if a time limit has expired.

        If the call is late, the limits are extended: the process may have been
        suspended, and data that the peer sent in the meantime may be unread.

        :return: the delay until the next call, in s.
        """
        self._times.forgive_late_tick(now)
        if not self.is_open:
            self.close_hangs = self._times.close_hangs(now)
        elif expired := self._times.expired(now, is_connecting=self._is_connecting):
            self._close(CloseReason.TIMED_OUT, expired, now)
        return self._times.next_tick(
            now,
            is_open=self.is_open,
            is_connecting=self._is_connecting,
            is_paused=self._writing_paused,
        )

    @property
    def _is_connecting(self) -> bool:
        return self.state is ConnectionState.CONNECTING

    def close(self, now: float) -> None:
        """Close gracefully: pending lines are still sent."""
        if self.is_open:
            self._close(CloseReason.SHUTDOWN, "shut down", now)

    def close_with_error(self, text: str, now: float) -> None:
        """Send ERROR and close. Pending lines are dropped."""
        if self.is_open:
            self._close(CloseReason.PROTOCOL_ERROR, text, now)

    def connection_lost(self, clean: bool, text: str) -> None:
        """Record that the transport was disconnected.

        :param clean: true if the peer closed the connection, false if it failed.
        :param text: the reason, for display.
        """
        self.state = ConnectionState.CLOSED
        self.pending.clear()
        if self.close_reason is None:
            self.close_reason = CloseReason.CLEAN if clean else CloseReason.LOST
            self.close_text = text

    def _reject_because(self, received: Received, text: str, now: float) -> None:
        self._reject(received, errors.RemoteProtocolError(text), now)

    def _reject(
        self, received: Received, error: errors.RemoteProtocolError, now: float
    ) -> None:
        received.refused.append(error)
        self._close(CloseReason.PROTOCOL_ERROR, str(error), now)

    def _close(self, reason: CloseReason, text: str, now: float) -> None:
        self.state = ConnectionState.CLOSING
        self.close_reason = reason
        self.close_text = text
        self._times.closing_since = now
        if reason is CloseReason.SHUTDOWN:
            return
        self.pending.clear()
        if reason is not CloseReason.PEER_ERROR:
            line = " ".join(text[:_MAX_ERROR_LENGTH].splitlines())
            data = f"ERROR {line}\n".encode("utf-8", "replace")
            self.pending.add(1, data)


# -- peers that speak another protocol ------------------------------------------------


def _find_http(lines: Iterable[bytes]) -> str | None:
    """Return a reason to reject lines of which one looks like an HTTP request line."""
    return _HTTP if any(b" HTTP/1." in line for line in lines) else None


def _find_wrong_greeting(lines: Iterable[bytes]) -> str | None:
    """Return a reason to reject lines if the first one for a client is not SERVER."""
    first = next(filter(None, lines), None)
    if first is None or first.startswith(b"SERVER "):
        return None
    # These bytes suffice to recognise HTTP or SSH, and are too few to reveal a secret.
    shown = errors.excerpt(first.split(b" ")[0][:_FIRST_WORD])
    return (
        f"the first line begins with '{shown}' instead of SERVER: is this the port of "
        "a replication listener?"
    )
