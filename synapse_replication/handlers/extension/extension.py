"""The extension: epochs and heartbeats, and the detection of gaps and restarts.

Theory of operation: :class:`ReplicationExtension` is notified of all rows and positions
that this instance sends. On the same connection, in order with the rows, it sends this
instance's epoch and the positions up to which it has sent its streams: over Redis on a
separate channel, over direct TCP in separate lines to peers that speak the extension.
It receives the same messages from peers and

* passes a writer's reported positions to the command handler. The handler compares them
  with the received rows only after all rows that arrived before have been handled, so
  rows in its queues do not look like a gap;
* causes a stream held in a writer's memory to be fetched again if the writer's epoch
  differs from that of the delivered rows, whatever its tokens are;
* reports a second process with the same name: a message with this instance's name and
  another epoch, messages with a peer's stale epoch that continue to arrive, or new
  epochs of a peer at an implausible rate.

Rows that the streamer sends together are preceded by a message with the stream's
position before these rows, if it is known, because RDATA has no previous token. A
reader compares that position with its own before it receives the rows. Once it has
received the rows, the comparison would no longer show a gap before them. Heartbeats
report only tokens that were sent in a row or a POSITION, or that were not sent because
there was no reader. Until a stream has such a token, they report the position from
which this instance began to send the stream.

A writer answers a hello with a heartbeat: see
:mod:`~synapse_replication.handlers.extension.hello_answers`. Instances that write
nothing do not answer, and send heartbeats rarely: nobody waits for what they write. If
a peer is of an older version, which does not state the interval of its heartbeats, all
instances send heartbeats as frequently as it expects.

Among more than a few peers that all know how, heartbeats to all are rare, and a few
peers watch each instance: see :mod:`~synapse_replication.handlers.extension.watches`.

Stock peers do not receive messages of the extension. Passive processes do not use it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final
from zlib import crc32

import attrs
from msgspec.structs import replace

from synapse_replication import __version__
from synapse_replication.errors import LocalProtocolError, RemoteProtocolError
from synapse_replication.handlers.command_handler import ReplicationCommandHandler
from synapse_replication.handlers.epochs import (
    EXPECTS_FOR,
    SETTLED_AFTER,
    USUAL_INTERVAL,
    EpochStatus,
    PeerEpochs,
)
from synapse_replication.handlers.events import (
    DuplicateInstance,
    EpochChanged,
    LineRefused,
    PeerHeartbeat,
    PeerNamed,
    PeerSilent,
    UnknownFields,
)
from synapse_replication.handlers.extension.hello_answers import HelloAnswers
from synapse_replication.handlers.extension.watches import (
    FEW_PEERS,
    WATCH_INTERVAL,
    Watches,
)
from synapse_replication.handlers.interfaces import (
    ExtensionConnection,
    ReplicationConnection,
)
from synapse_replication.handlers.sending.command_sender import SendingListener
from synapse_replication.handlers.timer import Timer
from synapse_replication.streams.backlog import Backlog
from synapse_replication.wire import commands
from synapse_replication.wire.extension import (
    MAX_INTERVAL,
    MAX_STREAMS,
    ExtensionMessage,
    MessageType,
    Silence,
    StreamPosition,
    encode_message,
    make_rows_encoder,
    parse_message,
    parse_rows_message,
)

#: A hello contains the names of the followed streams only up to this number of streams,
#: so that it fits into a line. Without the names, peers send all streams.
MAX_FOLLOWED: Final = 100

#: The longest message with a command, in bytes, so that it fits into a line.
MAX_COMMAND_LENGTH: Final = 15 * 1024

#: The shortest interval of checks of the watched instances, in s.
WATCH_CHECK_INTERVAL: Final = 1.0

#: The largest number of instances that one check reports; the next one reports others.
MAX_SILENT_REPORTS: Final = 10

#: The interval of heartbeats while positions advance, in s; while no position advances
#: it is :data:`~synapse_replication.handlers.epochs.USUAL_INTERVAL`.
BUSY_INTERVAL: Final = 1.0

#: The interval of the heartbeats of an instance that writes nothing, in s. With more
#: peers, it is as many seconds as there are peers.
RARE_INTERVAL: Final = 30

#: The shortest delay until a heartbeat, in s.
MIN_DELAY: Final = 0.01


@attrs.define(eq=False, repr=False, slots=False)
class ReplicationExtension(SendingListener):
    """The extension of one instance.

    Create it before anything is sent, and use it in the reactor's thread only.

    :param epochs: the peers' epochs.
    :param backlog: retains the sent rows; ``None`` if this instance has no backlog.
    :param where: the location of this process, for display; without spaces.
    """

    _handler: ReplicationCommandHandler
    _epochs: PeerEpochs
    _backlog: Backlog | None
    _where: str = attrs.field(default="", kw_only=True)
    _connections: list[ExtensionConnection] = attrs.field(factory=list, init=False)
    #: The links whose hello has not come back: if it was dropped, REPLICATE follows the
    #: next one.
    _replicating: set[ExtensionConnection] = attrs.field(factory=set, init=False)
    #: The instance at the other end of each direct link that has sent a message.
    _peers: dict[ExtensionConnection, str] = attrs.field(factory=dict, init=False)
    _positions: dict[str, StreamPosition] = attrs.field(factory=dict, init=False)
    _has_advanced: bool = attrs.field(default=False, init=False)
    _last_heartbeat: float = attrs.field(default=-math.inf, init=False)
    #: Whether the next tick is that of an instance whose positions do not advance.
    _is_tick_idle: bool = attrs.field(default=False, init=False)
    _contradicted_at: float = attrs.field(default=-math.inf, init=False)
    _has_stopped: bool = attrs.field(default=False, init=False)
    _last_watch: float = attrs.field(default=-math.inf, init=False)
    #: The interval that this instance stated last to all.
    _stated_interval: int = attrs.field(default=USUAL_INTERVAL, init=False)

    def __attrs_post_init__(self) -> None:
        host, self._observer = self._handler.host, self._handler.observer
        self._clock = host.clock
        #: This instance's name.
        self.instance_name = host.identity.instance_name
        #: This instance's epoch, which is part of each message.
        self.epoch = host.identity.instance_id
        self._heartbeat_timer = Timer(host.clock)
        self._hello_answers = HelloAnswers(
            host.clock, self._epochs, self._send_heartbeat_to, self._send_heartbeat
        )
        #: The answer to another process with the name of this one, or to an accusation.
        self._contradiction_timer = Timer(host.clock)
        self._watch_timer = Timer(host.clock)
        self._watches = Watches(self.epoch)
        #: Which part of the interval of heartbeats passes before the first of many.
        self._phase = crc32(self.epoch.encode()) / 2**32
        self._followed = frozenset(host.streams.get_streams())
        self._describe_written()
        #: A message with the fields that are the same in all messages.
        self._message_template = ExtensionMessage(
            type=MessageType.HEARTBEAT,
            instance_name=self.instance_name,
            epoch=self.epoch,
            where=self._where,
            version=__version__,
            time_ms=0,
            positions={},
            has_backlog=self._backlog is not None,
            answers=self._writes,
        )
        self._encode_rows = make_rows_encoder(
            replace(self._message_template, answers=None)
        )
        self._handler.sender.listen_to_sending(self)

    def _describe_written(self) -> None:
        """Set what depends on the streams that this instance writes."""
        written = [
            stream.description
            for stream in self._handler.host.streams.get_streams_to_replicate()
        ]
        self._in_memory = {each.name for each in written if each.held_in_memory}
        #: Whether peers wait for what this instance writes. Every instance of a
        #: homeserver may write ``caches``, for which no reader waits.
        self._writes = not all(each.announce_own_moves_only for each in written)
        #: Whether a REPLICATE would be answered by positions.
        self._has_positions = bool(written)

    # -- starting and stopping --------------------------------------------------------

    def start(self) -> None:
        """Start sending heartbeats."""
        self._tick_later(BUSY_INTERVAL)

    def stop(self) -> None:
        """Send goodbye as the last message. Call it after all rows have been sent."""
        self._heartbeat_timer.stop()
        self._hello_answers.stop()
        self._contradiction_timer.stop()
        self._watch_timer.stop()
        self._send_message(MessageType.GOODBYE)
        # Send nothing afterwards, because peers treat any message as proof of life.
        self._has_stopped = True

    def _on_tick(self) -> None:
        now, every = self._clock.seconds(), self._idle_interval()
        # Peers expect the interval that was stated to them.
        left = min(every, self._stated_interval) - (now - self._last_heartbeat)
        # Because of rounding, a timer may be due slightly too early.
        is_due = left < MIN_DELAY
        self._ask_watchers(now)
        # Reschedule first, so that an exception cannot stop the timer.
        if self._has_advanced:
            self._tick_later(BUSY_INTERVAL)
        elif not is_due:
            self._tick_later(left)
        else:
            # A late tick does not postpone the next one.
            self._tick_later(every + max(left, -every / 2))
        if self._has_advanced or is_due:
            self._send_heartbeat()

    def _idle_interval(self) -> int:
        """Return the interval of heartbeats while no position advances, in s."""
        now = self._clock.seconds()
        # Over direct TCP, only the other end hears it, and must learn of two processes
        # of one name.
        is_direct = any(each.is_direct for each in self._connections)
        is_contradicted = now - self._contradicted_at < EXPECTS_FOR
        if is_direct or is_contradicted or self._epochs.expect_usual_interval(now):
            return USUAL_INTERVAL
        if self._is_watched(now):
            return min(2 * len(self._epochs), MAX_INTERVAL)
        if self._writes:
            return USUAL_INTERVAL
        return min(max(RARE_INTERVAL, len(self._epochs)), MAX_INTERVAL)

    def _is_watched(self, now: float) -> bool:
        """Return whether a few peers watch this instance."""
        return (
            len(self._epochs) > FEW_PEERS
            and all(each.has_own_channel for each in self._connections)
            and self._epochs.all_can_watch(now)
        )

    def _ask_watchers(self, now: float) -> None:
        """Send a message to the watchers of this instance, if it has any."""
        if now - self._last_watch < WATCH_INTERVAL - MIN_DELAY:
            return
        watchers = self._watches.watchers(
            self._epochs.living_watchers(now), is_wanted=self._is_watched(now)
        )
        if not watchers or self._has_stopped:
            return
        self._last_watch = now
        message = replace(
            self._message_template,
            type=MessageType.WATCH,
            time_ms=self._clock.time_msec(),
            heartbeat_interval=self._stated_interval,
        )
        payload = encode_message(message)
        for connection in tuple(self._connections):
            if connection.has_own_channel:
                for name in watchers:
                    connection.send_extension([payload], to=name)

    def _tick_later(self, delay: float) -> None:
        self._is_tick_idle = delay > BUSY_INTERVAL
        if self._watches.has_watchers:
            delay = min(delay, WATCH_INTERVAL)
        self._heartbeat_timer.start(delay, self._on_tick)

    def _tick_sooner(self) -> None:
        """Replace the tick of an idle instance, because a position has advanced."""
        if self._is_tick_idle and self._heartbeat_timer.is_running:
            self._tick_later(BUSY_INTERVAL)

    # -- connections ------------------------------------------------------------------

    def extension_up(self, connection: ExtensionConnection) -> None:
        """Send hello on a new link, before anything else."""
        self._connections.append(connection)
        self._replicating.add(connection)
        self._watches.hearing_interrupted(self._clock.seconds())
        if not self._has_stopped:
            self._send_hello(connection, replicates=not connection.is_direct)

    def _send_hello(
        self, connection: ExtensionConnection, *, replicates: bool = False
    ) -> None:
        """Send hello on a link.

        :param replicates: whether the command handler sends REPLICATE after it.
        """
        hello = self._message(MessageType.HELLO)
        self._stated_interval = self._idle_interval()
        if not (self._writes or connection.is_direct):
            # It says all that the next heartbeat would, to all peers.
            self._last_heartbeat = self._clock.seconds()
            if self._is_watched(self._last_heartbeat):
                # All may have connected at the same time. Spread their heartbeats.
                self._last_heartbeat -= self._phase * self._idle_interval()
        if connection.is_direct and len(self._followed) <= MAX_FOLLOWED:
            hello = replace(hello, follows=self._followed)
        if connection.has_own_channel:
            hello = replace(hello, has_channel=True, replicates=replicates)
        connection.send_extension([encode_message(hello)])

    def sending_resumed(self) -> None:
        """Send hello again: earlier messages may not have arrived.

        If a link came up while nothing could be published, its hello was dropped, but
        its REPLICATE is published now.
        """
        replicating, self._replicating = self._replicating, set()
        if not self._has_stopped:
            for connection in tuple(self._connections):
                self._send_hello(connection, replicates=connection in replicating)

    def extension_down(self, connection: ExtensionConnection) -> None:
        """Remove a link that is down."""
        self._connections.remove(connection)
        self._replicating.discard(connection)
        self._peers.pop(connection, None)
        self._watches.hearing_interrupted(self._clock.seconds())

    def extension_received(
        self, connection: ExtensionConnection, payload: bytes
    ) -> None:
        """Handle one message, in order with the link's other items. Never raises."""
        rows = parse_rows_message(payload)
        if rows is not None:
            name, epoch, stream_name, token = rows
            if name != self.instance_name:
                self._rows_announced(connection, name, epoch, {stream_name: token})
                return
            if epoch == self.epoch:
                return
        try:
            message = parse_message(payload)
        except RemoteProtocolError as error:
            self._observer.observe(LineRefused(connection.name, error))
            return
        if message.unknown_fields:
            self._observer.observe(
                UnknownFields(connection.name, message.unknown_fields)
            )
        if message.instance_name != self.instance_name:
            self._handle_message(connection, message)
        elif message.epoch == self.epoch:
            if message.replicates:
                # This hello was not dropped. This process announces its positions on
                # each new link.
                self._replicating.discard(connection)
                self._handler.skip_next_request(connection)
        elif message.type is not MessageType.GOODBYE:
            self._report_duplicate(message, self._where)
            self._contradicted_at = self._clock.seconds()
            if not (self._has_stopped or self._contradiction_timer.is_running):
                # All must learn that this process still runs. They ignore what arrives
                # at once, as if it had been delayed.
                self._contradiction_timer.start(2 * SETTLED_AFTER, self._contradict)

    def _contradict(self) -> None:
        self._send_heartbeat()
        # Others may believe the other one, until this process speaks once more.
        self._tick_sooner()

    def _handle_message(
        self, connection: ExtensionConnection, message: ExtensionMessage
    ) -> None:
        name, epoch, kind = message.instance_name, message.epoch, message.type
        if kind is MessageType.ROWS:
            self._rows_announced(connection, name, epoch, _tokens(message))
            return
        now = self._clock.seconds()
        status = self._epochs.record_message(
            name,
            epoch,
            now,
            has_backlog=message.has_backlog,
            heartbeat_interval=message.heartbeat_interval,
            can_watch=message.answers is not None,
        )
        if status is EpochStatus.LATE:
            return
        if status is EpochStatus.DUPLICATE:
            if kind is not MessageType.GOODBYE:
                self._report_duplicate(message, "")
            # A single process that restarts too often has the same status. It must know
            # this instance's epoch, or it would fetch streams held in memory twice.
            self._answer_hello(connection, message, is_new=False)
            return
        self._heard(message, now)
        if kind is MessageType.WATCH and status is EpochStatus.SAME:
            return
        if connection.is_direct:
            self._name_peer(connection, name)
            if kind is MessageType.COMMAND:
                self._handle_command(connection, message)
                return
            if message.follows is not None:
                self._handler.sender.send_only(connection, message.follows)
        if message.heartbeat_interval is None and status is not EpochStatus.SAME:
            # This peer expects frequent heartbeats.
            self._tick_sooner()
        self._report(connection, message, status)
        if kind is MessageType.GOODBYE:
            self._epochs.leave(name, epoch)
        self._answer_hello(connection, message, is_new=status is not EpochStatus.SAME)

    def _report(
        self,
        connection: ExtensionConnection,
        message: ExtensionMessage,
        status: EpochStatus,
    ) -> None:
        """Report an instance's epoch and positions to the observer and the readers."""
        name, kind = message.instance_name, message.type
        is_new = status is EpochStatus.NEW
        if is_new:
            self._observer.observe(EpochChanged(name))
        self._observer.observe(_to_heartbeat(message, self._followed))
        self._handler.writer_reported(
            connection,
            name,
            _tokens(message),
            prev_tokens=message.prev_tokens,
            # Rows that a process sent before its first message may have been missed.
            is_new_epoch=is_new or status is EpochStatus.FIRST,
            # A process that is shutting down cannot serve the rows of its epoch.
            epoch=None if kind is MessageType.GOODBYE else message.epoch,
            # All that a direct link carries is of one process, even what precedes the
            # hello.
            has_restarted=kind is MessageType.HELLO and not connection.is_direct,
        )

    def _name_peer(self, connection: ExtensionConnection, name: str) -> None:
        if connection not in self._peers:
            self._observer.observe(PeerNamed(connection.name, name))
        self._peers[connection] = name

    # -- watched instances -------------------------------------------------------------

    def _heard(self, message: ExtensionMessage, now: float) -> None:
        if self._has_stopped:
            return
        name, epoch = message.instance_name, message.epoch
        self._watches.heard(name, epoch, now)
        if message.type is MessageType.WATCH:
            self._watches.watch(name, epoch, now)
            self._check_later()
        elif message.type is MessageType.GOODBYE:
            self._watches.forget(name, epoch)
        elif message.silence is not None:
            self._hear_of_silence(message.silence)

    def _check_later(self) -> None:
        if self._watch_timer.is_running:
            return
        due = self._watches.next_check()
        if due is not None:
            delay = max(due - self._clock.seconds(), WATCH_CHECK_INTERVAL)
            self._watch_timer.start(delay, self._check_watched)

    def _check_watched(self) -> None:
        """Report to all peers which watched instances have fallen silent."""
        now = self._clock.seconds()
        if self._connections:
            all_can_watch = self._epochs.all_can_watch(now)
            for name, epoch, seconds in self._watches.silent(now)[:MAX_SILENT_REPORTS]:
                silence = Silence(name, epoch, int(seconds))
                if all_can_watch:
                    message = self._message(MessageType.SILENT)
                    self._send(encode_message(replace(message, silence=silence)))
                self._hear_of_silence(silence)
        self._check_later()

    def _hear_of_silence(self, silence: Silence) -> None:
        name, now = silence.instance_name, self._clock.seconds()
        if name == self.instance_name:
            # It is not true.
            if now - self._last_heartbeat >= BUSY_INTERVAL:
                self._send_heartbeat()
            elif not self._contradiction_timer.is_running:
                # The last heartbeat may have arrived before the accusation.
                self._contradiction_timer.start(BUSY_INTERVAL, self._send_heartbeat)
            return
        self._watches.forget(name, silence.epoch)
        if self._epochs.fell_silent(name, silence.epoch, now - silence.seconds):
            self._observer.observe(PeerSilent(name, silence.epoch, silence.seconds))

    def _handle_command(
        self, connection: ExtensionConnection, message: ExtensionMessage
    ) -> None:
        try:
            command = commands.parse_command_from_line(message.line)
        except RemoteProtocolError as error:
            self._observer.observe(LineRefused(connection.name, error))
            return
        if command.NAME in commands.RELAYED:
            self._observer.commands_received(connection.name, command.NAME, 1)
            self._handler.command_relayed(connection, command, message.reached)

    def _rows_announced(
        self,
        connection: ExtensionConnection,
        instance_name: str,
        epoch: str,
        tokens: Mapping[str, int],
    ) -> None:
        # If the epoch is not known yet, ignore the position: the next heartbeat
        # contains the epoch and all positions.
        if self._epochs.epoch_of(instance_name) == epoch:
            self._handler.writer_reported(connection, instance_name, tokens)

    def _report_duplicate(self, message: ExtensionMessage, other: str) -> None:
        locations = [where for where in (message.where, other) if where]
        self._observer.observe(
            DuplicateInstance(message.instance_name, " and ".join(locations))
        )

    def _answer_hello(
        self, connection: ExtensionConnection, hello: ExtensionMessage, *, is_new: bool
    ) -> None:
        """Answer a message of a peer by a heartbeat, if it is a hello."""
        if hello.type is not MessageType.HELLO:
            return
        # If this instance may not use such channels, it could not publish on one.
        is_private = connection.is_direct or (
            hello.has_channel and connection.has_own_channel
        )
        is_answered = is_private and hello.replicates and self._has_positions
        if is_answered:
            self._handler.skip_next_request(connection)
        if self._has_stopped or not (self._writes or is_answered):
            return
        # The peer must know the epoch of this instance before a position of a stream
        # held in memory arrives.
        self._hello_answers.answer(
            connection,
            hello.instance_name,
            is_private=is_private,
            is_urgent=is_new and bool(self._in_memory),
        )

    # -- notifications of sent rows and positions (SendingListener) --------------------

    def retains(self, stream_name: str) -> bool:
        """Return whether a stream's rows are retained in the backlog."""
        return self._backlog is not None and stream_name not in self._in_memory

    def before_rows_sent(
        self,
        stream_name: str,
        prev_token: int | None,
        batches: Sequence[tuple[int, Sequence[bytes]]],
    ) -> None:
        """Send the position that precedes new rows, if it is known; retain the rows.

        This method is called just before the rows are sent. Without a link, the rows
        are only retained.
        """
        position = self._positions.get(stream_name)
        if position is not None and self._connections:
            now = self._clock.time_msec()
            self._send(self._encode_rows(now, stream_name, position), stream_name)
        self.position_advanced(stream_name, batches[-1][0])
        if self._backlog is not None and self.retains(stream_name):
            self._backlog.of(stream_name).add(prev_token, batches)

    def position_advanced(self, stream_name: str, token: int) -> None:
        """Record the token up to which rows were sent, or were not sent at all.

        Only the rows that are passed to :meth:`before_rows_sent` are retained.
        """
        position = self._positions.get(stream_name)
        if position is None or position.token != token:
            now = self._clock.time_msec()
            self._positions[stream_name] = StreamPosition(token, now)
            if not self._has_advanced:
                self._has_advanced = True
                self._tick_sooner()

    def position_sent(self, stream_name: str, prev_token: int, new_token: int) -> None:
        """Record a POSITION that was sent."""
        self.position_advanced(stream_name, new_token)
        self.range_skipped(stream_name, prev_token, new_token)

    def range_skipped(self, stream_name: str, prev_token: int, new_token: int) -> None:
        """Record that this instance has no rows in ``(prev_token, new_token]``."""
        if self._backlog is not None and self.retains(stream_name):
            self._backlog.of(stream_name).skip_range(prev_token, new_token)

    def relay(
        self,
        command: commands.Command,
        origin: ReplicationConnection | None,
        reached: frozenset[str],
    ) -> Collection[ReplicationConnection]:
        """Send a command for all instances to the peers that it has not reached.

        Never raises: the sender of the plain line reports why it cannot be sent.
        """
        if self._has_stopped or not self._peers:
            return ()
        try:
            line = command.encode().decode()
        except LocalProtocolError:
            return ()
        receivers = {
            connection: name
            for connection, name in self._peers.items()
            if connection is not origin and name not in reached
        }
        if origin is not None:
            # One link to each peer is enough for what others have sent.
            of_names = {name: connection for connection, name in receivers.items()}
            receivers = {connection: name for name, connection in of_names.items()}
        message = replace(
            self._message_template,
            type=MessageType.COMMAND,
            time_ms=self._clock.time_msec(),
            line=line,
            reached=reached.union([self.instance_name], receivers.values()),
            heartbeat_interval=self._idle_interval(),
        )
        payload = encode_message(message)
        if len(payload) > MAX_COMMAND_LENGTH or len(message.reached) > MAX_STREAMS:
            # There are hundreds of instances. Let the peers relay it as a plain line.
            return ()
        for connection in receivers:
            connection.send_extension([payload])
        return self._peers

    # -- messages ----------------------------------------------------------------------

    def _message(self, kind: MessageType) -> ExtensionMessage:
        now, sender = self._clock.time_msec(), self._handler.sender
        positions = {
            name: self._positions.get(name)
            or StreamPosition(sender.last_sent_token(stream), now)
            for stream in self._handler.host.streams.get_streams_to_replicate()
            for name in [stream.description.name]
        }
        return replace(
            self._message_template,
            type=kind,
            time_ms=now,
            positions=positions,
            prev_tokens={
                name: prev_token
                for name, position in positions.items()
                # Of one in memory, a peer may have rows of an earlier process.
                if name not in self._in_memory
                for prev_token in [sender.prev_token(name, position.token)]
                if prev_token < position.token
            },
            heartbeat_interval=self._idle_interval(),
        )

    def _send_heartbeat(self) -> None:
        self._has_advanced = False
        self._last_heartbeat = self._clock.seconds()
        every = self._idle_interval()
        if every > 2 * self._stated_interval:
            # Many that started at the same time find at the same time that they are
            # many. Spread their heartbeats.
            self._last_heartbeat -= self._phase * every
        elif every == USUAL_INTERVAL:
            # The processes of a host, whose reactors have the same time, send theirs at
            # the same moment: each peer then receives them in one turn of its reactor.
            self._last_heartbeat -= self._last_heartbeat % every
        self._stated_interval = every
        self._send_message(MessageType.HEARTBEAT)

    def _send_heartbeat_to(
        self, instances: Iterable[tuple[ExtensionConnection, str]]
    ) -> None:
        payload = encode_message(self._message(MessageType.HEARTBEAT))
        for connection, name in instances:
            # Sending may drop a connection.
            if connection in self._connections:
                connection.send_extension([payload], to=name)

    def _send_message(self, kind: MessageType) -> None:
        if self._connections and not self._has_stopped:
            self._send(encode_message(self._message(kind)))

    def _send(self, payload: bytes, stream_name: str | None = None) -> None:
        if not self._has_stopped:
            # Copy the list: sending may drop a connection from it.
            for connection in tuple(self._connections):
                if stream_name is None or self._handler.sender.sends(
                    connection, stream_name
                ):
                    connection.send_extension([payload])


def _tokens(message: ExtensionMessage) -> dict[str, int]:
    return {stream: position.token for stream, position in message.positions.items()}


def _to_heartbeat(message: ExtensionMessage, known: Collection[str]) -> PeerHeartbeat:
    # Peers can invent names of streams; observers store the others.
    return PeerHeartbeat(
        message.instance_name,
        message.epoch,
        message.version,
        message.where,
        message.type is MessageType.GOODBYE,
        {
            name: (position.token, (message.time_ms - position.time_ms) / 1000)
            for name, position in message.positions.items()
            if name in known
        },
        message.heartbeat_interval or USUAL_INTERVAL,
        bool(message.answers),
    )
