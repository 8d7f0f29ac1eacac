"""The command handler: dispatches all items that the links receive.

Theory of operation: all connections pass received items to the handler, and send the
commands that the handler passes to them. Rows and positions are enqueued at the
:class:`~synapse_replication.handlers.receiving.receiver.StreamReceiver` of their
stream, or discarded if their stream or writer is not known; REPLICATE is answered with
this process's positions; most other commands are delivered to the host (see
``host_commands.py``). The handler's ``sender`` sends this process's commands, rows and
positions on all connections.

Commands and refused lines are counted by the connections, not by the handler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs

from synapse_replication.errors import (
    LocalProtocolError,
    StreamConfigurationError,
    UnknownCommandError,
)
from synapse_replication.handlers.accepted_writers import (
    AcceptedWriters,
    DeclaredWriters,
)
from synapse_replication.handlers.events import (
    Discarded,
    DiscardReason,
    FeatureUnavailable,
)
from synapse_replication.handlers.host_calls import HostCalls
from synapse_replication.handlers.host_commands import HostCommandDispatcher
from synapse_replication.handlers.interfaces import (
    Link,
    ReplicationConnection,
    ReplicationHost,
)
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.handlers.receiving.context import (
    ReactorYielder,
    ReceiverOptions,
    StreamContext,
)
from synapse_replication.handlers.receiving.partial_resync import PartialResync
from synapse_replication.handlers.receiving.receiver import StreamReceiver
from synapse_replication.handlers.redaction import without_secrets
from synapse_replication.handlers.sending.answers import PositionAnswers
from synapse_replication.handlers.sending.command_sender import CommandSender
from synapse_replication.streams.reader import Reader
from synapse_replication.streams.reader_table import State
from synapse_replication.streams.rows import encode_json
from synapse_replication.streams.stream import CheckedStream, Stream
from synapse_replication.wire import commands
from synapse_replication.wire.rdata import (
    InterleavedGroup,
    RdataGroup,
    ReceivedItem,
    RefusedLine,
)


@attrs.frozen
class HandlerOptions:
    """Options of a command handler.

    :ivar passive: whether to send nothing at all, not even REPLICATE.
    :ivar expects_links: whether to retain, while there is no link, the commands whose
        loss would not be recovered, and to send them on the next link. False for a
        process that will never have a link.
    :ivar receiver: the limits and retry settings of each received stream.
    :ivar partial: fetches rows from the writer's backlog; ``None`` to fetch all rows
        from the stream's source.
    :ivar writers: the declared writers of each stream; ``None`` if none are declared.
    """

    passive: bool = False
    expects_links: bool = True
    receiver: ReceiverOptions = attrs.field(factory=ReceiverOptions)
    partial: PartialResync | None = None
    writers: DeclaredWriters | None = None


class ReplicationCommandHandler(HostCalls):
    """Receives the commands of all connections.

    Use it in the reactor's thread only. After :meth:`start_replication` no channel can
    be added.

    :ivar host: the host.
    :ivar observer: receives all events.
    :ivar sender: sends this process's commands, rows and positions on all connections.
    :ivar receivers: the receiver of each stream, by name.

    :raises StreamConfigurationError: if the host writes a stream that its
        ``get_streams()`` does not return.
    """

    def __init__(
        self,
        host: ReplicationHost,
        observer: ReplicationObserver,
        *,
        options: HandlerOptions | None = None,
    ) -> None:
        options = options or HandlerOptions()
        self.host = host
        self.observer = observer
        self._instance_name = host.identity.instance_name
        self.sender = CommandSender(
            host,
            observer,
            passive=options.passive,
            retains_unsent=options.expects_links and not options.passive,
        )
        self._dispatcher = HostCommandDispatcher(host, observer, self.sender)
        self._is_started = False
        self._accepted = AcceptedWriters(options.writers)
        self._channels: list[str] = []
        if host.stores_user_ips:
            self.subscribe_to_channel(commands.UserIpCommand.NAME)
        self._answers = PositionAnswers(self.sender, host.clock)
        self.receivers = self._make_receivers(options)
        self._report_unchecked(host.streams.get_streams().values())
        for stream in host.streams.get_streams_to_replicate():
            if stream.description.name not in self.receivers:
                raise StreamConfigurationError(
                    f"{self._instance_name} writes {stream.description.name}, but "
                    "its host's get_streams() does not return that stream; add it there"
                )
        self._item_handlers: dict[type[ReceivedItem], Callable[[Link, Any], None]] = {
            RdataGroup: self._handle_rows,
            InterleavedGroup: self._handle_interleaved,
            RefusedLine: self._handle_refused_line,
        }

    def _make_receivers(self, options: HandlerOptions) -> dict[str, StreamReceiver]:
        yielder = ReactorYielder(
            self.host.clock,
            options.receiver.break_after_rows,
            options.receiver.break_after_seconds,
        )
        return {
            name: StreamReceiver(
                StreamContext(
                    stream,
                    self.host,
                    self.observer,
                    options.receiver,
                    yielder,
                    options.partial,
                ),
                self._ask,
            )
            for name, stream in self.host.streams.get_streams().items()
        }

    def _report_unchecked(self, streams: Iterable[Stream]) -> None:
        for stream in streams:
            if not isinstance(stream, CheckedStream):
                self.observer.observe(
                    FeatureUnavailable(
                        f"checks of announced tokens of {stream.description.name}",
                        f"{type(stream).__name__} has no method is_plausible",
                    )
                )

    # -- starting and stopping --------------------------------------------------------

    def subscribe_to_channel(self, channel_name: str) -> None:
        """Subscribe to a Redis channel in addition to the main channel.

        :param channel_name: the part of the channel's name after ``<server_name>/``.
        :raises LocalProtocolError: if replication has already started.
        """
        if self._is_started:
            raise LocalProtocolError(
                f"cannot subscribe to {channel_name}: replication has already started; "
                "call subscribe_to_channel before start_replication"
            )
        if channel_name not in self._channels:
            self._channels.append(channel_name)

    def start_replication(self) -> tuple[str, ...]:
        """Return the additional channels to subscribe to, and refuse further ones."""
        self._is_started = True
        return tuple(self._channels)

    def readers(self) -> dict[tuple[str, str], Reader]:
        """Return the reader of each writer, by (stream, writer). Thread-safe."""
        return {
            (stream_name, instance_name): reader
            for stream_name, receiver in self.receivers.items()
            for instance_name, reader in receiver.readers().items()
        }

    async def wait_until_idle(self) -> None:
        """Wait until all received rows and positions have been handled."""
        for receiver in self.receivers.values():
            await receiver.wait_until_empty()

    def busy_streams(self) -> list[str]:
        """Return the streams with received rows that were not delivered yet."""
        return sorted(name for name, each in self.receivers.items() if not each.is_idle)

    # -- connections -------------------------------------------------------------------

    def new_connection(
        self, connection: ReplicationConnection, *, asks: bool = True
    ) -> None:
        """Start to replicate on an established connection.

        The end that opened the connection sends REPLICATE. If that is this process, it
        also announces its own positions without a request: over Redis, other instances
        do not notice a new subscriber.

        :param asks: false for a connection of the host that sends REPLICATE itself:
            send neither REPLICATE nor positions.
        """
        link = self.sender.add(connection)
        for receiver in self.receivers.values():
            receiver.link_up(link)
        if asks and not connection.relays:
            self._ask(link)
            self.sender.announce_positions(connection)
        self.sender.send_unsent()
        self._send_syncing_users(connection)

    def _ask(self, link: Link) -> None:
        # The end that serves a direct link may not send REPLICATE.
        if link.connection in self.sender.links and not link.connection.relays:
            self.sender.send_to(link.connection, commands.ReplicateCommand())

    def _send_syncing_users(self, connection: ReplicationConnection) -> None:
        if connection.relays:
            # Only clients report their users.
            return
        instance_id = self.host.identity.instance_id
        for user in self.host.commands.get_currently_syncing_users():
            self.sender.send_to(
                connection,
                commands.UserSyncCommand(
                    instance_id, user.user_id, user.device_id, True, user.last_sync_ms
                ),
            )

    def lost_connection(self, connection: ReplicationConnection) -> None:
        """Forget a connection and all state that depended on it."""
        link = self.sender.remove(connection)
        if link is not None:
            for receiver in self.receivers.values():
                receiver.link_lost(link)
            self._dispatcher.forget_copies(connection)
            self._answers.forget(connection)
            self.sender.ready_again()

    def ready_again(self, connection: ReplicationConnection) -> None:
        """Resume sending: a connection is no longer behind."""
        self.sender.ready_again()

    def received(
        self, connection: ReplicationConnection, items: Sequence[ReceivedItem]
    ) -> None:
        """Handle items that arrived on a connection, in order."""
        link = self.sender.links.get(connection)
        if link is None:
            # The connection was lost after these items had been read from it.
            return
        asked: commands.ReplicateCommand | None = None
        for item in items:
            if isinstance(item, commands.ReplicateCommand):
                asked = asked if self._answers.skip(connection) else item
            else:
                self._item_handlers.get(type(item), self._handle_command)(link, item)
        if asked is not None:
            # One answer is enough: it is sent after all of them have arrived.
            self._handle_command(link, asked)

    def skip_next_request(self, connection: ReplicationConnection) -> None:
        """Leave the next REPLICATE unanswered: the extension answers its sender."""
        self._answers.skip_next(connection)

    def should_announce_positions(self) -> bool:
        """Return whether all positions will be announced in a moment.

        Requests that arrive shortly after one another are answered together. This and
        :meth:`will_announce_positions` have the names of methods of Synapse's command
        handler, for code of a host that calls them; this package does not.
        """
        return self._answers.is_waiting()

    def will_announce_positions(self) -> None:
        """Leave out the next answer: the caller announces all positions now."""
        self._answers.announced()

    def is_stream_connected(
        self, conn: ReplicationConnection, stream_name: str
    ) -> bool:
        """Return whether rows of a stream can be received now.

        :return: whether the connection is up, and a writer of the stream is live: it
            has announced its position, and no earlier row is missing.
        """
        receiver = self.receivers.get(stream_name)
        return (
            conn in self.sender.links
            and receiver is not None
            and any(each.state is State.LIVE for each in receiver.readers().values())
        )

    def _receiver_for(
        self, stream_name: str, instance_name: str, count: int
    ) -> StreamReceiver | None:
        """Return the receiver of a writer's rows.

        :param count: the number of rows or positions to report as discarded if this
            process does not receive from the writer.
        """
        receiver = self.receivers.get(stream_name)
        if instance_name == self._instance_name:
            reason = DiscardReason.OWN_ECHO
        elif receiver is None:
            reason = DiscardReason.UNKNOWN_STREAM
        elif not self._accepts(stream_name, instance_name):
            reason = DiscardReason.UNDECLARED_WRITER
        else:
            return receiver
        self.observer.observe(Discarded(stream_name, instance_name, reason, count))
        return None

    def _handle_rows(self, link: Link, group: RdataGroup) -> None:
        receiver = self._receiver_for(
            group.stream_name, group.instance_name, len(group.rows)
        )
        if receiver is not None:
            receiver.enqueue_rows(link, group)

    def _handle_row(self, link: Link, command: commands.RdataCommand) -> None:
        """Enqueue a row that the caller has parsed."""
        group = RdataGroup(
            command.stream_name,
            command.instance_name,
            [command.token],
            [encode_json(command.row)],
        )
        self._handle_rows(link, group)

    def _handle_position(self, link: Link, command: commands.PositionCommand) -> None:
        """Enqueue a writer's position behind the rows that arrived before it."""
        receiver = self._receiver_for(command.stream_name, command.instance_name, 1)
        if receiver is not None:
            receiver.enqueue_position(link, command)

    def _handle_interleaved(self, link: Link, group: InterleavedGroup) -> None:
        receiver = self.receivers.get(group.stream_name)
        if receiver is None or not all(
            self._accepts(group.stream_name, name) for name in set(group.instance_names)
        ):
            for of_writer in group.groups():
                self._handle_rows(link, of_writer)
            return
        if self._instance_name in group.instance_names:
            others = group.without(self._instance_name)
            self.observer.observe(
                Discarded(
                    group.stream_name,
                    self._instance_name,
                    DiscardReason.OWN_ECHO,
                    len(group.rows) - len(others.rows),
                )
            )
            group = others
        receiver.enqueue_interleaved(link, group)

    def _accepts(self, stream_name: str, instance_name: str) -> bool:
        """Return whether an instance is accepted as a writer of a stream.

        If another writer is evicted to make room for it, forget that writer's state.
        """
        is_accepted, evicted = self._accepted.accept(
            stream_name, instance_name, self.host.clock.seconds()
        )
        if evicted is not None:
            stream_name, instance_name = evicted
            if stream_name in self.receivers:
                self.receivers[stream_name].forget_writer(instance_name)
        return is_accepted

    def _handle_refused_line(self, link: Link, refused: RefusedLine) -> None:
        if refused.stream_name is not None and refused.instance_name is not None:
            receiver = self.receivers.get(refused.stream_name)
            if (
                receiver is not None
                and refused.instance_name != self._instance_name
                and self._accepts(refused.stream_name, refused.instance_name)
            ):
                receiver.enqueue_lost_row(link, refused.instance_name)
        # An unknown command may be that of a newer peer, so it is only ignored.
        if not isinstance(refused.error, UnknownCommandError):
            link.connection.close_with_error(str(refused.error))

    def command_relayed(
        self,
        connection: ReplicationConnection,
        command: commands.Command,
        reached: frozenset[str],
    ) -> None:
        """Handle a command for all instances that a peer has relayed or sent.

        :param reached: the instances to which it was already sent.
        """
        if connection in self.sender.links:
            self._dispatcher.dispatch(connection, command, reached)

    def _handle_command(self, link: Link, command: commands.Command) -> None:
        """Handle a command; report a failure, so that the link stays up."""
        try:
            if isinstance(command, commands.ReplicateCommand):
                self._answers.answer(link.connection)
            elif isinstance(command, commands.PositionCommand):
                self._handle_position(link, command)
            elif isinstance(command, commands.RdataCommand):
                self._handle_row(link, command)
            else:
                self._dispatcher.dispatch(link.connection, command)
        except Exception as error:  # noqa: BLE001 -- reported to the observer
            shown = without_secrets(error, command)
            self.observer.failure(f"handling {command.NAME}", shown)

    # -- messages of the extension -----------------------------------------------------

    def writer_reported(
        self,
        connection: ReplicationConnection,
        instance_name: str,
        tokens: Mapping[str, int],
        *,
        prev_tokens: Mapping[str, int] = MappingProxyType({}),
        is_new_epoch: bool = False,
        epoch: str | None = None,
        has_restarted: bool = False,
    ) -> None:
        """Compare a writer's reported positions with the rows that arrived.

        The comparison takes place after all rows that arrived before the report have
        been handled.

        :param tokens: for each stream, the token up to which the writer has sent its
            rows or announced its position on this connection.
        :param prev_tokens: for streams of which the writer has no rows between a token
            and the one in ``tokens``, the former.
        :param is_new_epoch: whether the writer has restarted, or was not known before.
        :param epoch: the writer's current epoch, to be compared with the epoch of the
            handled rows; ``None`` if the epochs need not be compared.
        :param has_restarted: whether this may be the first message of a process.
        """
        link = self.sender.links.get(connection)
        if link is None:
            return
        for stream_name, token in tokens.items():
            receiver = self.receivers.get(stream_name)
            if receiver is not None and self._accepts(stream_name, instance_name):
                receiver.enqueue_report(
                    link,
                    instance_name,
                    token,
                    prev_token=prev_tokens.get(stream_name, token),
                    is_first=is_new_epoch,
                    epoch=epoch,
                    has_restarted=has_restarted,
                )

    def stored_position(self, stream_name: str, instance_name: str, token: int) -> None:
        """Fetch rows up to a stored position that its writer has not announced.

        Without a link, do nothing: no announcement could have arrived.
        """
        if self.sender.links and self._accepts(stream_name, instance_name):
            self.receivers[stream_name].enqueue_stored_position(instance_name, token)
