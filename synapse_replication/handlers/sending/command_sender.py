"""The sender of this process's commands, rows and positions on all its connections.

Theory of operation: :class:`CommandSender` tracks the connections and, for each stream
that this process writes, the token up to which its rows were sent, or were skipped
because there was no reader. POSITION announces that token, not the newest committed
token: a reader that did not receive a row at or below the announced token must fetch
that row.

The previous token of a POSITION is that of the last row of this process: after it, it
has no rows. Until it has sent a row, it is the token that was announced last, before a
range without rows, or else the same as the new token, which makes no statement about
earlier rows. A reader that has not delivered the rows up to it fetches them.

See docs/failure-modes.rst: failure-unprompted-announcement.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import attrs

from synapse_replication.errors import LineTooLongError
from synapse_replication.handlers import events
from synapse_replication.handlers.interfaces import (
    Link,
    ReplicationConnection,
    ReplicationHost,
)
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.handlers.sending.unsent import UnsentCommands
from synapse_replication.streams.stream import JsonValue, Stream
from synapse_replication.wire.commands import (
    RELAYED,
    VALID_SERVER_COMMANDS,
    Command,
    PositionCommand,
    RdataCommand,
)
from synapse_replication.wire.rdata import rdata_lines


class SendingListener:
    """Receiver of notifications about sent rows and positions, in sending order.

    This class ignores them; a subclass overrides methods. No method may raise or wait.
    """

    def retains(self, stream_name: str) -> bool:
        """Return whether rows of a stream are retained for disconnected readers."""
        return False

    def before_rows_sent(
        self,
        stream_name: str,
        prev_token: int | None,
        batches: Sequence[tuple[int, Sequence[bytes]]],
    ) -> None:
        """Record that rows are about to be sent, or to be retained if there is no link.

        :param prev_token: the last sent token before these rows; ``None`` if it is not
            known.
        :param batches: pairs of a token and the JSON texts of its rows, in order.
        """

    def position_advanced(self, stream_name: str, token: int) -> None:
        """Record that rows were sent without the streamer, or were not sent at all."""

    def position_sent(self, stream_name: str, prev_token: int, new_token: int) -> None:
        """Record that a POSITION was sent on the links, if there are any.

        A POSITION sent only to a single client over direct TCP is not recorded.
        """

    def range_skipped(self, stream_name: str, prev_token: int, new_token: int) -> None:
        """Record that a range without rows was skipped without an announcement."""

    def relay(
        self,
        command: Command,
        origin: ReplicationConnection | None,
        reached: frozenset[str],
    ) -> Collection[ReplicationConnection]:
        """Send a command for all instances to the peers that it has not reached.

        :param origin: the link on which it arrived; ``None`` if it is of this process.
        :param reached: the instances to which it was already sent.
        :return: the links whose peers need no plain line.
        """
        return ()


@attrs.define(eq=False, repr=False, slots=False)
class CommandSender:
    """Sender to all connections of this process.

    :param passive: whether to send nothing at all.
    :param retains_unsent: whether to retain commands while there is no link.
    :ivar links: the link of each connection.
    """

    _host: ReplicationHost
    _observer: ReplicationObserver
    _passive: bool = attrs.field(kw_only=True)
    _retains_unsent: bool = attrs.field(default=True, kw_only=True)

    def __attrs_post_init__(self) -> None:
        self._instance_name = self._host.identity.instance_name
        self.links: dict[ReplicationConnection, Link] = {}
        #: The streams that the peer follows, for links whose peer does not follow all.
        self._followed: dict[ReplicationConnection, frozenset[str]] = {}
        self._last_sent_tokens: dict[str, int] = {}
        #: The token of the last row of this process, after which it has none up to the
        #: last sent token.
        self._row_tokens: dict[str, int] = {}
        #: The last token of a stream that was announced, if it was followed by a range
        #: without rows of this process that was not announced.
        self._skipped_after: dict[str, int] = {}
        self._listener = SendingListener()
        self._when_ready: list[Callable[[], object]] = []
        self._unsent = UnsentCommands(self._observer)

    def add(self, connection: ReplicationConnection) -> Link:
        """Start to send on a connection."""
        link = self.links[connection] = Link(connection)
        self._observer.observe(events.LinksChanged(len(self.links)))
        return link

    def remove(self, connection: ReplicationConnection) -> Link | None:
        """Stop sending on a connection; return its link, if it had one.

        Call :meth:`ready_again` when the loss has been handled.
        """
        link = self.links.pop(connection, None)
        self._followed.pop(connection, None)
        if link is not None:
            self._observer.observe(events.LinksChanged(len(self.links)))
        return link

    def listen_to_sending(self, listener: SendingListener) -> None:
        """Set the only listener that is notified of sent rows and positions."""
        self._listener = listener

    def connected(self) -> bool:
        """Return whether there is a link to send on."""
        return bool(self.links)

    def has_consumers(self, stream_name: str) -> bool:
        """Return whether rows can reach a reader, now or later.

        If rows are retained, a reader that is now disconnected can fetch them later
        from the backlog, even if there is no other reader.
        """
        return self.connected() or self._listener.retains(stream_name)

    def is_behind(self) -> bool:
        """Return whether any link is behind; see :class:`ReplicationConnection`."""
        return any(connection.is_behind for connection in self.links)

    def call_when_ready(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` whenever :meth:`is_behind` may have become false."""
        self._when_ready.append(callback)

    def ready_again(self) -> None:
        """Notify the callbacks that a connection is no longer behind, or was lost."""
        for callback in self._when_ready:
            callback()

    def send_only(
        self, connection: ReplicationConnection, stream_names: frozenset[str]
    ) -> None:
        """Send rows and positions of only these streams on a link."""
        written = {
            stream.description.name
            for stream in self._host.streams.get_streams_to_replicate()
        }
        if connection in self.links and not written <= stream_names:
            self._followed[connection] = stream_names

    def sends(self, connection: ReplicationConnection, stream_name: str) -> bool:
        """Return whether rows and positions of a stream are sent on a link."""
        followed = self._followed.get(connection)
        return followed is None or stream_name in followed

    def _links_for(self, stream_name: str) -> list[ReplicationConnection]:
        if not self._followed:
            return list(self.links)
        return [link for link in self.links if self.sends(link, stream_name)]

    # -- commands ----------------------------------------------------------------------

    def send(self, command: Command) -> None:
        """Send a command on every link, or retain it for the next link.

        A failure on one link is reported and does not affect the other links. A client
        of this process's direct TCP listener is sent only what a server may send. If
        there is no link, the command is dropped if this sender does not retain
        commands, or if its loss would be recovered. A retained command may be replaced
        by a newer command, or dropped if too many commands are retained; see
        :mod:`~synapse_replication.handlers.sending.unsent`.
        """
        links = [each for each in self.links if _may_send(command, each)]
        if not links:
            if self._retains_unsent:
                self._attempt(self._unsent.put, command)
            return
        is_served: Collection[ReplicationConnection] = ()
        if command.NAME in RELAYED:
            is_served = self._listener.relay(command, None, frozenset())
        for connection in links:
            if connection not in is_served:
                self.send_to(connection, command)

    def relay(
        self,
        command: Command,
        origin: ReplicationConnection,
        reached: frozenset[str],
    ) -> None:
        """Send a command for all instances on to the peers that it has not reached.

        A peer without the extension relays what arrives from its clients, so that a
        plain line is sent to clients only: it cannot circulate.
        """
        is_served = self._listener.relay(command, origin, reached)
        for connection in list(self.links):
            if (
                connection.relays
                and connection is not origin
                and connection not in is_served
            ):
                self.send_to(connection, command)

    def send_to(self, connection: ReplicationConnection, command: Command) -> None:
        """Send a command on one link; a failure is reported."""
        if not self._passive:
            self._attempt(connection.send_command, command)

    def _attempt(self, send: Callable[[Command], object], command: Command) -> None:
        try:
            send(command)
        except Exception as error:  # noqa: BLE001 -- reported to the observer
            self._observer.failure(f"sending {command.NAME}", error)
            self._observer.observe(
                events.CommandsDropped(command.NAME, events.CommandDropReason.FAILED, 1)
            )

    def _send_of_stream(self, stream_name: str, command: Command) -> None:
        for connection in self._links_for(stream_name):
            self.send_to(connection, command)

    def send_unsent(self) -> None:
        """Send the commands that were retained while there was no link."""
        for command in self._unsent.take():
            self.send(command)

    def drop_unsent(self) -> None:
        """Drop and report the retained commands, because the process is stopping."""
        self._unsent.drop()

    # -- rows and positions ------------------------------------------------------------

    def last_sent_token(self, stream: Stream) -> int:
        """Return the token up to which this process's rows were sent or skipped.

        If nothing was sent before the first call, the current token becomes the last
        sent token: rows that were committed earlier are not sent, and readers fetch
        them.
        """
        name = stream.description.name
        token = self._last_sent_tokens.get(name)
        if token is None:
            token = stream.minimal_local_current_token()
            self._last_sent_tokens[name] = token
        return token

    def set_last_sent_token(self, stream_name: str, token: int) -> None:
        """Advance the last sent token without an announcement.

        Rows up to ``token`` are not sent, because there is no reader.
        """
        self._set_sent(stream_name, token)
        self._listener.position_advanced(stream_name, token)

    def skip_range(self, stream_name: str, prev_token: int, new_token: int) -> None:
        """Advance the last sent token without an announcement.

        This process wrote no row in ``(prev_token, new_token]``.
        """
        self._skip(stream_name, prev_token, new_token)
        self._skipped_after.setdefault(stream_name, prev_token)
        self._listener.range_skipped(stream_name, prev_token, new_token)

    def prev_token(self, stream_name: str, token: int) -> int:
        """Return the token after which this process has no rows up to ``token``.

        :param token: a token that was announced last, or is the last sent one.
        """
        skipped_after = self._skipped_after.get(stream_name, token)
        return min(token, self._row_tokens.get(stream_name, skipped_after))

    def _skip(self, stream_name: str, prev_token: int, new_token: int) -> None:
        if prev_token != self._last_sent_tokens.get(stream_name):
            self._set_sent(stream_name, prev_token)
        self._last_sent_tokens[stream_name] = new_token

    def announce_positions(
        self, connection: ReplicationConnection | None = None
    ) -> None:
        """Announce the position of each stream that this process writes.

        Readers then detect gaps. Call it whenever sent rows may have been lost. Readers
        that have everything up to the last row need not fetch the range that this
        process has skipped since.

        :param connection: the connection to announce on; ``None`` for all connections.
        """
        for stream in self._host.streams.get_streams_to_replicate():
            name, token = stream.description.name, self.last_sent_token(stream)
            prev_token = self.prev_token(name, token)
            command = PositionCommand(name, self._instance_name, prev_token, token)
            if connection is None:
                self._send_of_stream(name, command)
            elif self.sends(connection, name):
                self.send_to(connection, command)
            # An announcement to a single client over direct TCP does not reach the
            # other peers, so it is not recorded.
            if connection is None or not connection.relays:
                self._listener.position_sent(name, token, token)

    def _position(self, stream_name: str, token: int) -> PositionCommand:
        """Return a POSITION that makes no statement about the rows before it."""
        return PositionCommand(stream_name, self._instance_name, token, token)

    def _set_sent(self, stream_name: str, token: int) -> None:
        if token != self._last_sent_tokens.get(stream_name):
            self._last_sent_tokens[stream_name] = token
            self._row_tokens.pop(stream_name, None)
            self._skipped_after.pop(stream_name, None)

    def send_position(self, stream_name: str, prev_token: int, new_token: int) -> None:
        """Announce that this process has no rows in ``(prev_token, new_token]``."""
        self._skip(stream_name, prev_token, new_token)
        skipped_after = self._skipped_after.pop(stream_name, prev_token)
        no_rows_after = self._row_tokens.get(stream_name, skipped_after)
        self._send_of_stream(
            stream_name,
            PositionCommand(stream_name, self._instance_name, no_rows_after, new_token),
        )
        self._listener.position_sent(stream_name, prev_token, new_token)

    def send_rows(
        self, stream_name: str, batches: Sequence[tuple[int, Sequence[bytes]]]
    ) -> None:
        """Send rows of this process, encoded once for all connections.

        If a line is too long for a connection, the token of its batch is announced on
        that connection instead of the batch, so that the peers fetch the batch.

        :param batches: pairs of a token and the JSON texts of its rows, in order.
        """
        if not batches:
            return
        prev_token = self._last_sent_tokens.get(stream_name)
        self._listener.before_rows_sent(stream_name, prev_token, batches)
        self._set_sent(stream_name, batches[-1][0])
        self._row_tokens[stream_name] = batches[-1][0]
        self._observer.observe(
            events.RowsSent(stream_name, sum(len(rows) for _, rows in batches))
        )
        if self._passive or not self.links:
            return
        lines = rdata_lines(stream_name, self._instance_name, batches)
        for connection in self._links_for(stream_name):
            try:
                connection.send_lines(RdataCommand.NAME, lines)
            except LineTooLongError:
                self._send_batches_singly(connection, stream_name, batches)
            except Exception as error:  # noqa: BLE001 -- reported to the observer
                self._observer.observe(events.SendingFailed(stream_name, error))
                self.send_to(
                    connection,
                    self._position(stream_name, batches[-1][0]),
                )

    def _send_batches_singly(
        self,
        connection: ReplicationConnection,
        stream_name: str,
        batches: Sequence[tuple[int, Sequence[bytes]]],
    ) -> None:
        for batch in batches:
            lines = rdata_lines(stream_name, self._instance_name, [batch])
            try:
                connection.send_lines(RdataCommand.NAME, lines)
            except LineTooLongError as error:
                self._observer.observe(events.SendingFailed(stream_name, error))
                self.send_to(connection, self._position(stream_name, batch[0]))

    def stream_update(
        self, stream_name: str, token: int | None, data: JsonValue
    ) -> None:
        """Send one row of this process immediately, without the streamer.

        :param token: the row's token; ``None`` if more rows of the same token follow.
        """
        self._send_of_stream(
            stream_name, RdataCommand(stream_name, self._instance_name, token, data)
        )
        if token is not None:
            self._set_sent(stream_name, token)
            self._row_tokens[stream_name] = token
            self._listener.position_advanced(stream_name, token)


def _may_send(command: Command, connection: ReplicationConnection) -> bool:
    """Return whether a command may be sent from this end of a connection."""
    return not connection.relays or command.NAME in VALID_SERVER_COMMANDS
