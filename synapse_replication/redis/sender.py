"""The publishing side of Redis: pipelined, in order, with recovery from losses.

Theory of operation: a :class:`RedisSender` outlives its connections. After an idle
period, it writes a message immediately, unless the message belongs to the extension. It
buffers messages of the extension, and all messages published within
:data:`COALESCE_WINDOW` after a write (:class:`Coalescer`), and writes them together in
the reactor's next turn. On a transport without a socket this would have no benefit, so
every message is written immediately. While the transport is paused, all messages remain
buffered.

Publishes count as lost if a connection ended before Redis acknowledged them, or if they
could not be written and were not retained. Messages of the extension that could not be
written are not counted. After a loss, ``on_lost`` publishes this instance's positions
on the next connection, before any row or other command, so that readers detect and
fetch missed rows.
:mod:`~synapse_replication.redis.publish_ledger` decides which publishes count as lost
and which are published again. :mod:`~synapse_replication.redis.flow_control` decides
whether Redis is behind. :mod:`~synapse_replication.redis.fencing` makes Redis close the
lost connection before the next connection is used.

See docs/failure-modes.rst: failure-reconnect-order, failure-slow-subscriber.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IPushProducer, IReactorTime
from zope.interface import implementer

from synapse_replication.handlers.events import CommandDropReason, CommandsDropped
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.handlers.waiters import Waiters
from synapse_replication.redis.flow_control import SHORT_LINES, PublishFlowControl
from synapse_replication.redis.publish_ledger import (
    MAX_RETAINED,
    NOT_RETAINED,
    Publish,
    PublishLedger,
)
from synapse_replication.redis.resp import encode_publishes
from synapse_replication.wire.extension import COUNTED_AS

#: The name under which the connection is reported to the observer.
SENDER_NAME = "redis_out"
#: Messages published within this time after a write, in s, are coalesced.
COALESCE_WINDOW = 0.0005

#: The limit of pending lines, in bytes; the connection is aborted if it is exceeded.
MAX_PENDING_BYTES = 32 * 1024 * 1024


class PublishConnection(Protocol):
    """The part of a connection that a sender uses.

    :ivar unacknowledged: the number of publishes without a reply.
    :ivar has_socket: whether the transport writes to a socket.
    """

    unacknowledged: int
    has_socket: bool

    def write_publishes(self, data: list[bytes]) -> None:
        """Write encoded PUBLISH commands in a single write."""

    def abort(self, why: str) -> None:
        """Abort the connection."""


class Coalescer:
    """A buffer of messages to be written.

    :param flush: called in the reactor turn after :meth:`flush_later`; it calls
        :meth:`take`.
    :ivar pending: the buffered messages, in order.
    :ivar size: their total size in bytes.
    """

    def __init__(self, clock: IReactorTime, flush: Callable[[], object]) -> None:
        self._clock = clock
        self._flush = flush
        self._call: IDelayedCall | None = None
        self._last_write = -math.inf
        self.pending: list[Publish] = []
        self.size = 0

    def add(self, publish: Publish) -> None:
        """Append messages to the buffer."""
        self.pending.append(publish)
        self.size += sum(map(len, publish.lines))

    def is_quiet(self) -> bool:
        """Return whether the window after the last write has elapsed."""
        return self._clock.seconds() - self._last_write > COALESCE_WINDOW

    def record_write(self) -> None:
        """Restart the window, as after a write."""
        self._last_write = self._clock.seconds()

    def flush_later(self) -> None:
        """Schedule a flush in the reactor's next turn, unless one is scheduled."""
        if self._call is None:
            self._call = self._clock.callLater(0, self._flush_now)

    def _flush_now(self) -> None:
        self._call = None
        self._flush()

    def take(self) -> list[Publish]:
        """Empty the buffer, return its messages, and restart the window."""
        self._last_write = self._clock.seconds()
        if self._call is not None:
            self._call.cancel()
            self._call = None
        pending, self.pending, self.size = self.pending, [], 0
        return pending


@attrs.define(eq=False, repr=False, slots=False)
@implementer(IPushProducer)
class RedisSender:
    """Publisher of lines on channels, over the current connection.

    :param clock: the reactor.
    :param on_lost: called on the next connection if publishes may have been lost, with
        their number, after ``on_connected`` and before anything else is published. It
        must publish this instance's positions before it returns.
    :param on_connected: called on each new connection, before anything else is
        published.
    """

    _clock: IReactorTime
    _observer: ReplicationObserver
    _on_lost: Callable[[int], None]
    _on_connected: Callable[[], object] | None = None

    def __attrs_post_init__(self) -> None:
        self._protocol: PublishConnection | None = None
        self._waiting = Coalescer(self._clock, self.flush)
        self._ledger = PublishLedger()
        self._flow = PublishFlowControl()
        self._when_ready: list[Callable[[], object]] = []
        self._waiters = Waiters()

    @property
    def unacknowledged(self) -> int:
        """The number of publishes without a reply."""
        return 0 if self._protocol is None else self._protocol.unacknowledged

    @property
    def waiting(self) -> tuple[int, int]:
        """The number of lines that are not written yet, and their size in bytes."""
        pending = self._waiting.pending
        return sum(len(publish.lines) for publish in pending), self._waiting.size

    @property
    def is_behind(self) -> bool:
        """Whether Redis is behind, so that pages of rows must wait."""
        return self._flow.is_behind(self.unacknowledged, self._clock.seconds())

    def call_when_ready(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` each time pages of rows may be published again.

        After Redis was behind, it is called once: as soon as the transport accepts data
        and few enough publishes are unacknowledged (see
        :meth:`~synapse_replication.redis.flow_control.PublishFlowControl.take_ready`),
        or the connection is lost.
        """
        self._when_ready.append(callback)

    def _notify_if_writable(self) -> None:
        flow = self._flow
        if flow.was_behind and flow.take_ready(
            self.unacknowledged, self._clock.seconds()
        ):
            for callback in self._when_ready:
                callback()

    def publish(self, command_name: str, channel: str, lines: Sequence[bytes]) -> None:
        """Publish lines of one command, in order, one message per line.

        The lines are written immediately, or coalesced with others (see
        :class:`Coalescer`). While the transport is paused, they are buffered; if too
        much is buffered, the connection is aborted. Without a connection, the ledger
        decides which lines are published later. Never raises.
        """
        if not lines:
            return
        publish = Publish(command_name, channel.encode(), lines)
        protocol = self._protocol
        if protocol is None:
            self._retain_for_reconnect(publish)
            return
        # An extension message precedes each page of rows: it is not other traffic, and
        # is written together with the page.
        is_extension = command_name == COUNTED_AS
        if len(lines) < SHORT_LINES and not is_extension:
            self._flow.record_other_traffic(
                protocol.unacknowledged, self._clock.seconds()
            )
        waiting = self._waiting
        waiting.add(publish)
        if waiting.size > MAX_PENDING_BYTES:
            protocol.abort(f"Redis does not read: {waiting.size} bytes are pending")
            self._drop_protocol(protocol.unacknowledged)
        elif not protocol.has_socket or (not is_extension and waiting.is_quiet()):
            self.flush()
        elif not self._flow.is_paused:
            waiting.flush_later()

    def flush(self) -> None:
        """Write pending messages, if there is a connection that is not paused."""
        protocol = self._protocol
        if protocol is None or self._flow.is_paused or not self._waiting.pending:
            return
        pending = self._waiting.take()
        ledger = self._ledger
        data: list[bytes] = []
        counts: dict[str, int] = {}
        for publish in pending:
            command_name, lines = publish.command_name, publish.lines
            data += encode_publishes(publish.channel, lines)
            if command_name not in NOT_RETAINED:
                ledger.retain_until_acknowledged(publish, len(data))
            counts[command_name] = counts.get(command_name, 0) + len(lines)
        ledger.record_write(len(data), protocol.unacknowledged)
        protocol.write_publishes(data)
        if not self._flow.was_behind:
            self._flow.update(self.unacknowledged, self._clock.seconds())
        for command_name, count in counts.items():
            self._observer.commands_sent(SENDER_NAME, command_name, count)

    def _retain_for_reconnect(self, publish: Publish) -> None:
        """Pass lines to the ledger, and report those that exceed its bound."""
        too_many = self._ledger.retain(publish)
        if too_many:
            self._observer.observe(
                CommandsDropped(
                    publish.command_name, CommandDropReason.QUEUE_FULL, too_many
                )
            )

    def drained(self) -> Deferred[None]:
        """Return a Deferred that fires when no publish is pending or unacknowledged.

        Publishes that are retained for the next connection do not count as pending.
        """
        waiter = self._waiters.add()
        self.flush()
        self._notify_if_drained()
        return waiter

    def acknowledged(self) -> None:
        """Notify waiters after the number of unacknowledged publishes has decreased."""
        self._notify_if_writable()
        self._notify_if_drained()

    def _notify_if_drained(self) -> None:
        if self._waiters and not self._waiting.pending and not self.unacknowledged:
            self._waiters.fire()

    # -- reports of the connection --------------------------------------------------

    def connection_up(self, protocol: PublishConnection) -> None:
        """Start publishing on a connection."""
        self._protocol = protocol
        self._flow.resume()
        # Restart the window, so that the first messages are coalesced, too.
        self._waiting.record_write()
        if self._on_connected is not None:
            self._on_connected()
        if self._ledger.lost:
            try:
                self._on_lost(self._ledger.lost)
            except Exception as error:  # noqa: BLE001 -- reported and retried
                self._observer.failure("announcing positions again", error)
                protocol.abort("this instance's positions could not be announced")
                self._drop_protocol(0)
                return
            self._ledger.lost = 0
        for publish in self._ledger.take_retained():
            self.publish(publish.command_name, publish.channel.decode(), publish.lines)

    def connection_down(
        self, protocol: PublishConnection, count: int, *, is_refused: bool = False
    ) -> None:
        """Record that a connection ended with ``count`` unacknowledged publishes.

        :param is_refused: whether Redis rejected the first of these publishes.
        """
        if protocol is self._protocol:
            self._drop_protocol(count, is_refused=is_refused)

    def _drop_protocol(self, unacknowledged: int, *, is_refused: bool = False) -> None:
        self._protocol = None
        # A closed transport cannot resume the sender.
        self._flow.resume()
        again, has_evicted = self._ledger.end_connection(
            unacknowledged, is_refused=is_refused
        )
        if has_evicted:
            self._observer.failure(
                "retaining commands until Redis answers",
                BufferError(
                    f"more than {MAX_RETAINED} were unacknowledged; some may be lost"
                ),
            )
        for publish in [*again, *self._waiting.take()]:
            self._retain_for_reconnect(publish)
        self.acknowledged()

    # This object is the transport's producer, because the protocol's own methods of
    # these names pause and resume reading.

    def pauseProducing(self) -> None:
        """Stop writing: the transport's buffer is full."""
        self._flow.pause()

    def resumeProducing(self) -> None:
        """Resume writing: the transport accepts data again."""
        self._flow.resume()
        self.flush()
        self._notify_if_writable()

    def stopProducing(self) -> None:
        """Do nothing: ``connectionLost`` handles the disconnection."""
