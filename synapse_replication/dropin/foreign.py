"""Adapters between classes of this package and classes of the host.

An operator may replace only some parts of the host, and the host's tests use doubles of
connections and handlers. The host's objects exchange single commands:
``handler.on_RDATA(connection, command)`` and ``connection.send_command(command)``.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence

import attrs

from synapse_replication.dropin.homeserver import (
    CommandConnection,
    CommandHandler,
    Homeserver,
)
from synapse_replication.dropin.host_code import host_attribute
from synapse_replication.dropin.observer import observer_of
from synapse_replication.handlers.command_handler import ReplicationCommandHandler
from synapse_replication.handlers.interfaces import (
    ConnectionHandler,
    ReplicationConnection,
)
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.handlers.redaction import without_secrets
from synapse_replication.wire import commands, rdata


class ForeignConnection:
    """Adapts a host's connection, which sends single commands.

    The host's connection requests positions itself once it is established.
    """

    relays = False
    is_behind = False

    def __init__(self, original: CommandConnection) -> None:
        self.name = type(original).__name__
        self._original = original

    def send_command(self, command: commands.Command) -> None:
        """Send one command."""
        self._original.send_command(command)

    def send_lines(self, command_name: str, lines: Sequence[bytes]) -> None:
        """Send lines of one command, in order."""
        for line in lines:
            self._original.send_command(commands.parse_command_from_line(line.decode()))

    def close_with_error(self, text: str) -> None:
        """Do nothing: the host's connection handles lines that it cannot parse."""


@attrs.define(eq=False, repr=False)
class ForeignHandler:
    """Adapts a host's command handler, which receives single commands.

    :param original: the host's handler.
    :param group_awaitable: groups the awaitable that a method of the handler returns.
    :param observer: receives the failures of the handler.
    """

    _original: CommandHandler
    _group_awaitable: Callable[[str, Callable[[], Awaitable[object]]], object]
    _observer: ReplicationObserver

    def new_connection(self, connection: ReplicationConnection) -> None:
        """Report a new connection to the host's handler.

        Then request positions on the connection, and announce the host's positions. At
        the server's end of a direct TCP connection, do neither: the client requests
        positions itself.
        """
        self._original.new_connection(connection)
        if not connection.relays:
            connection.send_command(commands.parse_command_from_line("REPLICATE"))
            self._original.send_positions_to_connection()

    def lost_connection(self, connection: ReplicationConnection) -> None:
        """Report the end of a connection."""
        self._original.lost_connection(connection)

    def ready_again(self, connection: ReplicationConnection) -> None:
        """Do nothing: this handler never pauses."""

    def received(
        self, connection: ReplicationConnection, items: Sequence[rdata.ReceivedItem]
    ) -> None:
        """Dispatch each row and command to the host's handler.

        A refused line closes a direct TCP connection; over Redis, it is ignored.
        """
        for item in items:
            if isinstance(item, rdata.RefusedLine):
                connection.close_with_error(str(item.error))
            elif isinstance(item, rdata.RdataGroup):
                self._dispatch_rows(connection, item)
            elif isinstance(item, rdata.InterleavedGroup):
                for group in item.groups():
                    self._dispatch_rows(connection, group)
            else:
                self._dispatch(connection, item.NAME, item.encode(), item)

    def _dispatch_rows(
        self, connection: ReplicationConnection, group: rdata.RdataGroup
    ) -> None:
        for token, row in zip(group.tokens, group.rows, strict=True):
            text = "batch" if token is None else str(token)
            head = f"RDATA {group.stream_name} {group.instance_name} {text} "
            self._dispatch(connection, "RDATA", head.encode() + row)

    def _dispatch(
        self,
        connection: ReplicationConnection,
        name: str,
        line: bytes,
        ours: commands.Command | None = None,
    ) -> None:
        method = getattr(self._original, f"on_{name}", None)
        if method is None:
            return
        try:
            # The handler may require a command of the host's own class. The host may
            # reject a line or a row that this package accepts.
            parse = host_attribute("commands", "parse_command_from_line")
            waiting = method(connection, parse(line.decode()))
        except Exception as error:  # noqa: BLE001 -- reported to the observer
            shown = error if ours is None else without_secrets(error, ours)
            self._observer.failure(f"handling {name}", shown)
            return
        if inspect.isawaitable(waiting):
            self._group_awaitable(f"replication-{name}", lambda: waiting)


def as_connection_handler(hs: Homeserver, handler: CommandHandler) -> ConnectionHandler:
    """Return a handler for this package's connections, with an adapter if needed."""
    if isinstance(handler, ReplicationCommandHandler):
        return handler
    return ForeignHandler(handler, hs.run_as_background_process, observer_of(hs))
