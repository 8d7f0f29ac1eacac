"""The extension: epochs, heartbeats and what follows from them.

Theory of operation: :class:`ReplicationExtension` hears what this process sends and
publishes, in order with it on the same connection (over Redis on a channel of its own;
over direct TCP in lines of its own, to peers that asked for them), who we
are and how far we told the others. It takes the same of the others and

* hands how far a writer told us to the command handler, which compares it with what
  came once all that came before was handled: no row that is merely under way looks
  like a gap;
* has a stream that is in a writer's memory fetched anew when the writer has another
  epoch than what was handled of it, whatever its tokens are now;
* reports a second process of one name: our own name with an epoch that is not
  ours, or an epoch of somebody's earlier start that goes on talking.

Before each chunk of rows the position before them is told, so that a reader sees a
gap at once and before the rows that would hide it: RDATA carries no previous token.
A keep-alive is no position: a heartbeat tells only what was sent, by row or POSITION.

Whoever says hello is answered at once by a heartbeat, so that a process knows the
epochs of the others before their positions, which it asks for next, arrive.

Stock peers see nothing of it. Passive processes have no extension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Protocol

import attrs

from synapse_replication import __version__
from synapse_replication.errors import RemoteProtocolError
from synapse_replication.handlers.epochs import EpochStatus, PeerEpochs
from synapse_replication.handlers.handler import ReplicationCommandHandler
from synapse_replication.handlers.interfaces import (
    DelayedCall,
    ReplicationConnection,
    ReplicationHost,
)
from synapse_replication.handlers.observer import PeerHeartbeat, ReplicationObserver
from synapse_replication.streams.backlog import Backlog
from synapse_replication.wire.extension import (
    ExtensionMessage,
    MessageType,
    StreamPosition,
    encode_message,
    parse_message,
)

__all__ = [
    "ExtensionConnection",
    "ExtensionHandler",
    "ExtensionOptions",
    "ReplicationExtension",
]


#: With more streams than these, all are sent: a hello is to fit into a line.
MAX_FOLLOWED: Final = 100


class ExtensionConnection(ReplicationConnection, Protocol):
    """A link that has the extension's channel, or a peer that speaks it.

    :ivar is_direct: one peer is behind it, over direct TCP.
    """

    is_direct: bool

    def send_extension(self, payloads: Sequence[bytes]) -> None:
        """Send messages, after what was sent before on the link.

        They are lost if nothing can be sent just now. Never raises.
        """
        ...


class ExtensionHandler(Protocol):
    """What a link asks of :class:`ReplicationExtension`."""

    def extension_up(self, connection: ExtensionConnection) -> None:
        """Record that messages can be sent and received on a link."""
        ...

    def extension_down(self, connection: ExtensionConnection) -> None:
        """Forget a link."""
        ...

    def extension_received(
        self, connection: ExtensionConnection, payload: bytes
    ) -> None:
        """Take one message, in order with what the command handler is given."""
        ...


@attrs.frozen
class ExtensionOptions:
    """How often heartbeats are sent.

    :ivar busy_interval: s between two looks; one is sent if a position moved.
    :ivar idle_interval: s between two heartbeats if none moved.
    :ivar answer_interval: s between two answers to others' hellos, at least.
    """

    busy_interval: float = 1.0
    idle_interval: float = 5.0
    answer_interval: float = 0.2


class ReplicationExtension:
    """Speaks the extension for one process.

    Used in the reactor's thread only. Made before anything is sent.

    :param where: for people: where this process runs, one word.
    :param epochs: of the other processes; outlives connections.
    :param backlog: keeps what is sent; ``None`` if this process cannot be asked for it.
    """

    def __init__(
        self,
        host: ReplicationHost,
        command_handler: ReplicationCommandHandler,
        observer: ReplicationObserver,
        epochs: PeerEpochs,
        backlog: Backlog | None,
        *,
        where: str = "",
        options: ExtensionOptions | None = None,
    ) -> None:
        self._host = host
        self._clock = host.clock
        self._handler = command_handler
        self._observer = observer
        self._epochs = epochs
        self._backlog = backlog
        self._where = where
        self._options = options or ExtensionOptions()
        self._name = host.identity.instance_name
        #: Ours, told to others with each message.
        self.epoch = host.identity.instance_id
        self._in_memory = {
            stream.description.name
            for stream in host.streams.get_streams_to_replicate()
            if stream.description.held_in_memory
        }
        self._followed = frozenset(host.streams.get_streams())
        self._connections: list[ExtensionConnection] = []
        self._told: dict[str, StreamPosition] = {}
        self._has_moved = False
        self._last_heartbeat = self._last_answer = -math.inf
        self._tick: DelayedCall | None = None
        self._answer: DelayedCall | None = None
        self._has_left = False
        command_handler.listen_to_sending(self)

    # -- start and end ----------------------------------------------------------------

    def start(self) -> None:
        """Send heartbeats from now on."""
        self._tick = self._clock.call_later(self._options.busy_interval, self._look)

    def stop(self) -> None:
        """Say goodbye; it is the last word. Rows were sent before."""
        for call in (self._tick, self._answer):
            if call is not None and call.active():
                call.cancel()
        self._tick = self._answer = None
        self._send(self._message(MessageType.GOODBYE))
        # Others take who speaks to be there.
        self._has_left = True

    def _look(self) -> None:
        # First, so that nothing that fails ends it.
        self._tick = self._clock.call_later(self._options.busy_interval, self._look)
        idle = self._clock.seconds() - self._last_heartbeat
        if self._has_moved or idle >= self._options.idle_interval:
            self._send_heartbeat()

    # -- connections ------------------------------------------------------------------

    def extension_up(self, connection: ExtensionConnection) -> None:
        """Say hello on a link, before anything else is sent on it."""
        self._connections.append(connection)
        if self._has_left:
            return
        hello = self._message(MessageType.HELLO)
        if connection.is_direct and len(self._followed) <= MAX_FOLLOWED:
            hello = attrs.evolve(hello, follows=self._followed)
        connection.send_extension([encode_message(hello)])

    def sending_resumed(self) -> None:
        """Say hello again: what was said before may not have arrived."""
        self._send(self._message(MessageType.HELLO))

    def extension_down(self, connection: ExtensionConnection) -> None:
        """Record that a link is gone."""
        self._connections.remove(connection)

    def extension_received(
        self, connection: ExtensionConnection, payload: bytes
    ) -> None:
        """Take one message, after what came before it on the link. Never raises."""
        try:
            message = parse_message(payload)
        except RemoteProtocolError as error:
            self._observer.line_refused(connection.name, error)
            return
        if message.unknown_fields:
            self._observer.unknown_fields(connection.name, message.unknown_fields)
        if message.instance_name != self._name:
            self._take(connection, message)
        elif message.epoch != self.epoch and message.type is not MessageType.GOODBYE:
            self._report_duplicate(message, self._where)

    def _take(self, connection: ExtensionConnection, message: ExtensionMessage) -> None:
        name, epoch, kind = message.instance_name, message.epoch, message.type
        tokens = {stream: pos.token for stream, pos in message.positions.items()}
        if kind is MessageType.ROWS:
            # Of another epoch it says too little; a heartbeat will come.
            if self._epochs.epoch_of(name) == epoch:
                self._handler.writer_reported(connection, name, tokens)
            return
        heard = self._epochs.observe(
            name, epoch, self._clock.seconds(), has_backlog=message.has_backlog
        )
        if heard is EpochStatus.LATE:
            return
        if heard is EpochStatus.DUPLICATE:
            if kind is not MessageType.GOODBYE:
                self._report_duplicate(message, "")
            return
        if message.follows is not None and connection.is_direct:
            self._handler.send_only(connection, message.follows)
        is_new = heard is EpochStatus.NEW
        if is_new:
            self._observer.epoch_changed(name)
        self._observer.peer_heard(_news(message))
        is_leaving = kind is MessageType.GOODBYE
        self._handler.writer_reported(
            connection,
            name,
            tokens,
            is_new_epoch=is_new,
            # Who goes cannot be asked for all that it has.
            epoch=None if is_leaving else epoch,
        )
        if is_leaving:
            self._epochs.leave(name, epoch)
        elif kind is MessageType.HELLO:
            self._answer_soon(is_new=heard is not EpochStatus.SAME)

    def _report_duplicate(self, message: ExtensionMessage, other: str) -> None:
        places = [place for place in (message.where, other) if place]
        self._observer.duplicate_instance(message.instance_name, " and ".join(places))

    def _answer_soon(self, *, is_new: bool) -> None:
        if self._has_left:
            return
        due = self._last_answer + self._options.answer_interval
        wait = due - self._clock.seconds()
        if wait <= 0 or (is_new and self._in_memory):
            # Who hears our position first cannot tell of which epoch it is.
            self._send_answer()
        elif self._answer is None or not self._answer.active():
            self._answer = self._clock.call_later(wait, self._send_answer)

    def _send_answer(self) -> None:
        if self._answer is not None and self._answer.active():
            self._answer.cancel()
        self._last_answer = self._clock.seconds()
        self._send_heartbeat()

    # -- what this process sends -------------------------------------------------------

    def retains(self, stream_name: str) -> bool:
        """Return whether rows of a stream are kept for who asks for them later."""
        return self._backlog is not None and stream_name not in self._in_memory

    def rows_follow(
        self,
        stream_name: str,
        prev_token: int | None,
        batches: Sequence[tuple[int, Sequence[bytes]]],
    ) -> None:
        """Tell the position before rows that are about to be sent; keep them."""
        told = self._told.get(stream_name)
        if told is not None and self._connections:
            self._send(
                self._message(MessageType.ROWS, {stream_name: told}), stream_name
            )
        self._tell(stream_name, batches[-1][0])
        if self._backlog is not None and self.retains(stream_name):
            self._backlog.of(stream_name).add(prev_token, batches)

    def position_advanced(self, stream_name: str, token: int) -> None:
        """Record a row that was sent past the streamer, or of none: not kept."""
        self._tell(stream_name, token)

    def position_sent(self, stream_name: str, prev_token: int, new_token: int) -> None:
        """Record a POSITION."""
        self._tell(stream_name, new_token)
        self.range_skipped(stream_name, prev_token, new_token)

    def range_skipped(self, stream_name: str, prev_token: int, new_token: int) -> None:
        """Record that there are no rows of ours between the two."""
        if self._backlog is not None and self.retains(stream_name):
            self._backlog.of(stream_name).skip_range(prev_token, new_token)

    def _tell(self, stream_name: str, token: int) -> None:
        told = self._told.get(stream_name)
        if told is None or told.token != token:
            self._told[stream_name] = StreamPosition(token, self._clock.time_msec())
            self._has_moved = True

    # -- messages ----------------------------------------------------------------------

    def _message(
        self, kind: MessageType, positions: dict[str, StreamPosition] | None = None
    ) -> ExtensionMessage:
        now = self._clock.time_msec()
        if positions is None:
            positions = {
                name: self._told.get(name)
                or StreamPosition(self._handler.last_sent_token(stream), now)
                for stream in self._host.streams.get_streams_to_replicate()
                for name in [stream.description.name]
            }
        return ExtensionMessage(
            kind,
            self._name,
            self.epoch,
            now,
            positions,
            self._where,
            __version__,
            has_backlog=self._backlog is not None,
        )

    def _send_heartbeat(self) -> None:
        self._has_moved = False
        self._last_heartbeat = self._clock.seconds()
        self._send(self._message(MessageType.HEARTBEAT))

    def _send(self, message: ExtensionMessage, stream_name: str | None = None) -> None:
        if self._connections and not self._has_left:
            payload = encode_message(message)
            # A snapshot: a peer may be lost by being told.
            for connection in tuple(self._connections):
                if stream_name is None or self._handler.sends(connection, stream_name):
                    connection.send_extension([payload])


def _news(message: ExtensionMessage) -> PeerHeartbeat:
    return PeerHeartbeat(
        message.instance_name,
        message.epoch,
        message.version,
        message.where,
        message.type is MessageType.GOODBYE,
        {
            name: (position.token, (message.time_ms - position.time_ms) / 1000)
            for name, position in message.positions.items()
        },
    )
