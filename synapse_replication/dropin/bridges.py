"""Between our classes and those of a host that were not replaced.

An operator may replace some parts only; and a host's own tests put doubles of their
own in the place of a connection or a handler. Those speak in single commands:
``handler.on_RDATA(connection, command)`` and ``connection.send_command(command)``.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from twisted.internet.defer import Deferred

from synapse_replication.handlers.handler import ReplicationCommandHandler
from synapse_replication.handlers.interfaces import (
    ConnectionHandler,
    ReplicationConnection,
)
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.handlers.redaction import without_secrets
from synapse_replication.wire.commands.standard import (
    Command,
    encode_command,
    parse_command_from_line,
)
from synapse_replication.wire.rdata import (
    InterleavedRun,
    RdataRun,
    ReceivedItem,
    RefusedLine,
)

__all__ = [
    "ForeignConnection",
    "ForeignHandler",
    "as_connection_handler",
    "installed",
    "make_yieldable",
]

T = TypeVar("T")


def installed(module: str, name: str) -> Any:
    """Return what stands under a name of the host now: ours, if it was replaced."""
    return getattr(importlib.import_module(f"synapse.replication.tcp.{module}"), name)


def make_yieldable(deferred: Deferred[T]) -> Deferred[T]:
    """Keep the host's rule: who waits comes back in its own log context."""
    context = importlib.import_module("synapse.logging.context")
    yieldable: Deferred[T] = context.make_deferred_yieldable(deferred)
    return yieldable


class ForeignConnection:
    """A connection that only knows single commands, as one of ours.

    It asks for positions itself when it is up.
    """

    relays = False
    is_behind = False

    def __init__(self, original: Any) -> None:
        self.name = type(original).__name__
        self._original = original

    def send_command(self, command: Command) -> None:
        """Send one command."""
        self._original.send_command(command)

    def send_lines(self, command_name: str, lines: Sequence[bytes]) -> None:
        """Send lines of one command, in order."""
        for line in lines:
            self._original.send_command(parse_command_from_line(line.decode()))

    def close_with_error(self, text: str) -> None:
        """Leave it open: it deals with lines that it cannot read by itself."""


class ForeignHandler:
    """A command handler that only knows single commands, as one of ours.

    :param run_as_background_process: takes what a command leaves to be waited for.
    """

    def __init__(
        self,
        original: Any,
        run_as_background_process: Callable[..., Awaitable[Any]],
        observer: ReplicationObserver,
    ) -> None:
        self._original = original
        self._run = run_as_background_process
        self._observer = observer

    def new_connection(self, connection: ReplicationConnection) -> None:
        """Tell of a connection, and ask for positions, as its own ones do."""
        self._original.new_connection(connection)
        if not connection.relays:
            connection.send_command(parse_command_from_line("REPLICATE"))
            self._original.send_positions_to_connection()

    def lost_connection(self, connection: ReplicationConnection) -> None:
        """Tell of the end of a connection."""
        self._original.lost_connection(connection)

    def ready_again(self, connection: ReplicationConnection) -> None:
        """Do nothing: it never waited."""

    def received(
        self, connection: ReplicationConnection, items: Sequence[ReceivedItem]
    ) -> None:
        """Tell of each row and command."""
        for item in items:
            if isinstance(item, RefusedLine):
                connection.close_with_error(str(item.error))
            elif isinstance(item, RdataRun):
                self._tell_rows(connection, item)
            elif isinstance(item, InterleavedRun):
                for run in item.runs():
                    self._tell_rows(connection, run)
            else:
                self._tell(connection, item.NAME, encode_command(item), item)

    def _tell_rows(self, connection: ReplicationConnection, run: RdataRun) -> None:
        for token, row in zip(run.tokens, run.rows, strict=True):
            text = "batch" if token is None else str(token)
            head = f"RDATA {run.stream_name} {run.instance_name} {text} "
            self._tell(connection, "RDATA", head.encode() + row)

    def _tell(
        self,
        connection: ReplicationConnection,
        name: str,
        line: bytes,
        ours: Command | None = None,
    ) -> None:
        method = getattr(self._original, f"on_{name}", None)
        if method is None:
            return
        try:
            # It may ask whether the command is of the host's own class. What we take
            # for a line, or for a row, may be none to the host.
            parse = installed("commands", "parse_command_from_line")
            waiting = method(connection, parse(line.decode()))
        except Exception as error:  # noqa: BLE001 -- the observer is told
            shown = error if ours is None else without_secrets(error, ours)
            self._observer.failure(f"handling {name}", shown)
            return
        if inspect.isawaitable(waiting):
            self._run(f"replication-{name}", lambda: waiting)


def as_connection_handler(
    handler: Any,
    run_as_background_process: Callable[..., Awaitable[Any]],
    observer: ReplicationObserver,
) -> ConnectionHandler:
    """Return a handler that takes what our connections say."""
    if isinstance(handler, ReplicationCommandHandler):
        return handler
    return ForeignHandler(handler, run_as_background_process, observer)
