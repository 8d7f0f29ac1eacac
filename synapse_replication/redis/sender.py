"""Publishing: pipelined, in order, and knowing what was not acknowledged.

Theory of operation. :class:`RedisSender` outlives its connections. What is published is
gathered for the turn of the reactor (:mod:`~synapse_replication.redis.coalescing`).
Without a socket there is nothing to gain by that, and it is written at once.

The rule is that after publishes were lost (not acknowledged when the connection ended,
or not accepted since), the *first* thing on the next connection is what ``on_lost``
sends: our positions, from which readers see what they miss and fetch it. What counts as
lost, and what is published again, is the affair of
:mod:`~synapse_replication.redis.ledger`; whether Redis is behind, that of
:mod:`~synapse_replication.redis.pacing`. What may be left of a connection that was lost
is ended at Redis first (:mod:`~synapse_replication.redis.fencing`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime

from synapse_replication.handlers.observer import (
    CommandDropReason,
    ReplicationObserver,
)
from synapse_replication.redis.coalescing import Coalescer
from synapse_replication.redis.ledger import (
    EXTENSION,
    MAX_KEPT,
    NOT_KEPT,
    Publish,
    PublishLedger,
)
from synapse_replication.redis.pacing import SHORT_LINES, Pacing
from synapse_replication.redis.resp import encode_publishes

__all__ = ["PublishConnection", "RedisSender"]

#: How much may wait for Redis to read, in bytes of lines, before it is given up.
MAX_PENDING_BYTES = 32 * 1024 * 1024


class PublishConnection(Protocol):
    """What a sender needs of a connection.

    :ivar unacknowledged: publishes that were written and not answered yet.
    :ivar has_socket: its transport writes to a socket.
    """

    unacknowledged: int
    has_socket: bool

    def write_publishes(self, data: list[bytes]) -> None:
        """Write PUBLISH commands that were encoded already, at once."""
        ...

    def cut(self, why: str) -> None:
        """Abort the connection."""
        ...


class RedisSender:
    """Publishes lines on channels, over whatever connection there is.

    :param clock: the reactor.
    :param name: for the observer.
    :param on_lost: called with how many publishes were or may have been lost, on
        the next connection, before anything else is published. It publishes our
        positions, before it returns.
    :param on_connected: called on each connection, before anything is published.
    :param max_pending_bytes: see :data:`MAX_PENDING_BYTES`; past it the
        connection is cut, since Redis does not read.
    :ivar connected: whether there is a connection to publish on.
    :ivar receivers: how many processes got the newest message that was
        acknowledged, this one included; 1 may mean a wrong server name or Redis.
    """

    def __init__(
        self,
        clock: IReactorTime,
        observer: ReplicationObserver,
        name: str,
        on_lost: Callable[[int], None],
        max_pending_bytes: int = MAX_PENDING_BYTES,
        on_connected: Callable[[], object] | None = None,
    ) -> None:
        self._clock = clock
        self._observer = observer
        self._name = name
        self._on_lost = on_lost
        self._max_pending_bytes = max_pending_bytes
        self._on_connected = on_connected
        self._protocol: PublishConnection | None = None
        self._waiting = Coalescer(clock, self.flush)
        self._ledger = PublishLedger()
        self._pacing = Pacing()
        self._when_ready: list[Callable[[], object]] = []
        self._waiters: list[Deferred[None]] = []
        self.receivers: int | None = None

    @property
    def connected(self) -> bool:
        """Whether there is a connection to publish on."""
        return self._protocol is not None

    @property
    def unacknowledged(self) -> int:
        """How many publishes were written and not answered yet."""
        return 0 if self._protocol is None else self._protocol.unacknowledged

    @property
    def waiting(self) -> tuple[int, int]:
        """How many lines wait for the transport, and their bytes."""
        pending = self._waiting.pending
        return sum(len(publish.lines) for publish in pending), self._waiting.size

    @property
    def lost(self) -> int:
        """How many publishes were lost since the last announcement."""
        return self._ledger.lost

    @property
    def is_behind(self) -> bool:
        """Whether much was published and not answered, so that more only waits."""
        return self._pacing.is_behind(self.unacknowledged, self._clock.seconds())

    def call_when_ready(self, callback: Callable[[], object]) -> None:
        """Have ``callback`` called each time that it was behind and is so no more.

        Also when the connection was lost: nothing is to be waited for then.
        """
        self._when_ready.append(callback)

    def _notify_if_writable(self) -> None:
        pacing = self._pacing
        if pacing.was_behind and pacing.becomes_ready(
            self.unacknowledged, self._clock.seconds()
        ):
            for callback in self._when_ready:
                callback()

    def publish(self, command_name: str, channel: str, lines: Sequence[bytes]) -> None:
        """Publish lines of one command, in order, one message each.

        They are written at once; but if something was just before, with all that
        follows in this turn of the reactor. Never raises.
        """
        if not lines:
            return
        publish = Publish(command_name, channel.encode(), lines)
        protocol = self._protocol
        if protocol is None:
            self._retain_for_reconnect(publish)
            return
        # The extension goes with each page, as the first of several.
        is_alone = command_name != EXTENSION
        if len(lines) < SHORT_LINES and is_alone:
            self._pacing.share(protocol.unacknowledged, self._clock.seconds())
        waiting = self._waiting
        waiting.add(publish)
        if waiting.size > self._max_pending_bytes:
            protocol.cut(f"Redis does not read: {waiting.size} bytes wait for it")
            self._drop_protocol(protocol.unacknowledged)
        elif not protocol.has_socket or (is_alone and waiting.is_quiet()):
            self.flush()
        elif not self._pacing.is_paused:
            waiting.flush_later()

    def flush(self) -> None:
        """Write what waits, unless the transport asked for a pause."""
        protocol = self._protocol
        if protocol is None or self._pacing.is_paused or not self._waiting.pending:
            return
        pending = self._waiting.take()
        ledger = self._ledger
        data: list[bytes] = []
        counts: dict[str, int] = {}
        for publish in pending:
            command_name, channel, lines = publish
            data += encode_publishes(channel, lines)
            if command_name not in NOT_KEPT:
                ledger.keep_until_answered(publish, len(data))
            counts[command_name] = counts.get(command_name, 0) + len(lines)
        ledger.record_write(len(data), protocol.unacknowledged)
        protocol.write_publishes(data)
        if not self._pacing.was_behind:
            self._pacing.observe(self.unacknowledged, self._clock.seconds())
        for command_name, count in counts.items():
            self._observer.commands_sent(self._name, command_name, count)

    def _retain_for_reconnect(self, publish: Publish) -> None:
        """Set aside what can be sent later; count the rest as lost."""
        too_many = self._ledger.retain(publish)
        if too_many:
            self._observer.commands_dropped(
                publish.command_name, CommandDropReason.QUEUE_FULL, too_many
            )

    def drained(self) -> Deferred[None]:
        """Fire when all that was published was acknowledged, or is lost."""
        waiter: Deferred[None] = Deferred()
        self._waiters.append(waiter)
        self.flush()
        self._wake_drained()
        return waiter

    def acknowledged(self) -> None:
        """Look what may go on, now that there are fewer unanswered publishes."""
        self._notify_if_writable()
        self._wake_drained()

    def _wake_drained(self) -> None:
        if self._waiters and not self._waiting.pending and not self.unacknowledged:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                waiter.callback(None)

    # -- what the connection tells --------------------------------------------------

    def connection_up(self, protocol: PublishConnection) -> None:
        """Publish on this connection from now on."""
        self._protocol = protocol
        self._pacing.resume()
        # What is said first is gathered, too.
        self._waiting.record_write()
        if self._on_connected is not None:
            self._on_connected()
        if self._ledger.lost:
            try:
                self._on_lost(self._ledger.lost)
            except Exception as error:  # noqa: BLE001 -- told, and tried again
                self._observer.failure("announcing positions again", error)
                protocol.cut("our positions could not be announced")
                self._drop_protocol(0)
                return
            self._ledger.lost = 0
        for publish in self._ledger.take_retained():
            self.publish(publish.command_name, publish.channel.decode(), publish.lines)

    def connection_down(
        self, protocol: PublishConnection, count: int, *, is_refused: bool = False
    ) -> None:
        """Record that a connection ended with ``count`` unanswered publishes.

        :param is_refused: the first of them was refused.
        """
        if protocol is self._protocol:
            self._drop_protocol(count, is_refused=is_refused)

    def _drop_protocol(self, unacknowledged: int, *, is_refused: bool = False) -> None:
        self._protocol = None
        # Nothing waits for a transport that is gone.
        self._pacing.resume()
        again, has_forgotten = self._ledger.end_connection(
            unacknowledged, is_refused=is_refused
        )
        if has_forgotten:
            self._observer.failure(
                "keeping commands until Redis answers",
                BufferError(f"{MAX_KEPT} wait already; earlier ones may be lost"),
            )
        for publish in [*again, *self._waiting.take()]:
            self._retain_for_reconnect(publish)
        self.acknowledged()

    def pause(self) -> None:
        """Write no more for now: the transport's buffer is full."""
        self._pacing.pause()

    def resume(self) -> None:
        """Write on."""
        self._pacing.resume()
        self.flush()
        self._notify_if_writable()
