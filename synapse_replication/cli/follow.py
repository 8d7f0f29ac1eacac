"""Filters and printers of lines for ``synapse-replication follow``.

Lines are received by :mod:`synapse_replication.app.passive`; this module does no I/O
except writing to its output and to standard error. Access tokens in USER_IP lines are
masked before the lines are filtered or printed.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO, TypeAlias

import attrs
from msgspec.structs import asdict, replace
from rich.console import Console
from rich.text import Text

from synapse_replication.app.passive import Follower
from synapse_replication.cli.output import Output
from synapse_replication.config.process import ProcessConfig
from synapse_replication.errors import RemoteProtocolError
from synapse_replication.streams.rows import encode_json
from synapse_replication.text import printable
from synapse_replication.transport.reactor import IReactor
from synapse_replication.wire.commands import (
    Command,
    PositionCommand,
    RdataCommand,
    UserIpCommand,
    parse_command_from_line,
)

_MASK = "***"


@attrs.frozen
class Filters:
    """Selects the commands to print; an empty set selects all.

    :ivar streams: names of streams; unless empty, commands without a stream are
        excluded.
    :ivar writers: names of instances; unless empty, commands without an instance are
        excluded.
    :ivar commands: names of commands.
    """

    streams: frozenset[str] = frozenset()
    writers: frozenset[str] = frozenset()
    commands: frozenset[str] = frozenset()

    def admit_name(self, name: str) -> bool:
        """Return whether commands of this name are selected."""
        return not self.commands or name in self.commands

    def admit_origin(self, command: Command | None) -> bool:
        """Return whether the stream and the writer of a command are selected.

        :param command: ``None`` if the line could not be parsed.
        """
        if self.streams and getattr(command, "stream_name", None) not in self.streams:
            return False
        return (
            not self.writers or getattr(command, "instance_name", None) in self.writers
        )


@attrs.frozen
class ReceivedLine:
    """A received line with its parsed command.

    :ivar time: the monotonic time of its arrival, in s.
    :ivar channel: the Redis channel; for direct TCP, the server's name.
    :ivar line: the text of the line. In USER_IP, the access token is masked, or all
        fields if the line could not be parsed.
    :ivar name: the first word of the line.
    :ivar command: the parsed command; ``None`` if the line could not be parsed.
    :ivar error: why the line could not be parsed; empty if it was parsed.
    """

    time: float
    channel: str
    line: str
    name: str
    command: Command | None
    error: str


def parse_line(time: float, channel: str, line: bytes) -> ReceivedLine:
    """Parse a line, and mask the access token of a USER_IP command."""
    text = line.decode("utf-8", "replace")
    name = text.split(" ", 1)[0]
    command: Command | None = None
    error = ""
    try:
        command = parse_command_from_line(text)
    except RemoteProtocolError as wrong:
        error = str(wrong)
        if name == UserIpCommand.NAME:
            text = f"{name} {_MASK}"
    if isinstance(command, UserIpCommand):
        command = replace(command, access_token=_MASK)
        text = command.encode().decode()
    return ReceivedLine(time, channel, text, name, command, error)


#: Prints one line.
LinePrinter: TypeAlias = Callable[[ReceivedLine], None]


def print_as_json(out: TextIO, received: ReceivedLine) -> None:
    """Print a line as a JSON object.

    The object has the keys of a recording (``t``, ``channel``, ``line``), the name of
    the ``command``, and the command's fields or an ``error``.
    """
    entry: dict[str, Any] = {
        "t": received.time,
        "channel": received.channel,
        "line": received.line,
        "command": received.name,
    }
    if received.command is not None:
        entry |= asdict(received.command)
    else:
        entry["error"] = received.error
    out.write(encode_json(entry).decode() + "\n")


class TextPrinter:
    """Prints lines as text, in colour if the output is a terminal."""

    def __init__(self, out: TextIO) -> None:
        self._console = Console(file=out, highlight=False, soft_wrap=True)
        self._started: float | None = None

    def __call__(self, received: ReceivedLine) -> None:
        """Print a line as text."""
        if self._started is None:
            self._started = received.time
        # A style of the Text itself would also apply to all text appended to it.
        text = Text().append(f"{received.time - self._started:10.3f} ", style="dim")
        text.append(f"{printable(received.name):<12} ", style="bold cyan")
        command = received.command
        if isinstance(command, RdataCommand):
            token = "batch" if command.token is None else str(command.token)
            row = received.line.split(" ", 4)[4]
            _append_origin(text, command.stream_name, command.instance_name)
            text.append(f" {token} ", style="yellow")
            text.append(printable(row), style="default")
        elif isinstance(command, PositionCommand):
            _append_origin(text, command.stream_name, command.instance_name)
            text.append(f" {command.prev_token} -> {command.new_token}", style="yellow")
        elif command is not None:
            text.append(printable(received.line.partition(" ")[2]), style="default")
        else:
            text.append(printable(received.error), style="red")
        self._console.print(text)


def _append_origin(text: Text, stream: str, writer: str) -> None:
    text.append(printable(stream), style="green")
    text.append(" of ", style="dim")
    text.append(printable(writer), style="magenta")


def make_printer(out: TextIO, as_json: bool) -> LinePrinter:
    """Return a printer for JSON or text."""
    return functools.partial(print_as_json, out) if as_json else TextPrinter(out)


@attrs.define(eq=False, repr=False)
class Follow:
    """Parses, filters and prints lines, and tracks the writers' positions.

    :param printer: prints the selected lines.
    :param filters: selects the lines to print.
    :param now: returns a monotonic time in s.
    """

    _printer: LinePrinter
    _filters: Filters
    _now: Callable[[], float]
    _positions: dict[tuple[str, str], int] = attrs.field(factory=dict, init=False)

    def receive(self, channel: str, line: bytes) -> None:
        """Process one line."""
        received = parse_line(self._now(), channel, line)
        command = received.command
        if not self._filters.admit_origin(command):
            return
        if isinstance(command, PositionCommand):
            origin = (command.stream_name, command.instance_name)
            self._positions[origin] = command.new_token
        elif isinstance(command, RdataCommand) and command.token is not None:
            origin = (command.stream_name, command.instance_name)
            # A late row of the stream ``caches`` does not lower the position.
            self._positions[origin] = max(
                command.token, self._positions.get(origin, command.token)
            )
        if self._filters.admit_name(received.name):
            self._printer(received)

    def positions(self) -> list[tuple[str, str, int]]:
        """Return the last positions as sorted ``(stream, writer, token)`` tuples."""
        return [(*origin, token) for origin, token in sorted(self._positions.items())]


def make_follower(
    config: ProcessConfig,
    reactor: IReactor,
    *,
    filters: Filters,
    as_json: bool,
    with_positions: bool,
    out: TextIO | None = None,
) -> Follower:
    """Return a service that prints what a deployment replicates.

    :param with_positions: whether to print each writer's last position at the end.
    """
    output: Any = Output(out or sys.stdout, reactor, lambda error: follower.fail(error))
    follow = Follow(make_printer(output, as_json), filters, time.monotonic)

    def finish() -> None:
        if with_positions:
            for stream, writer, token in follow.positions():
                sys.stderr.write(f"{stream} {writer} {token}\n")
        output.finish()

    follower = Follower(config, reactor, "follow", follow.receive, finish)
    return follower
