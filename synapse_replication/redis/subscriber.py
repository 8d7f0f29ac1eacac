"""The subscribed connection to Redis, one of the command handler's connections.

Theory of operation: SUBSCRIBE is sent after AUTH. The command handler is notified of
the connection only when Redis has confirmed all channels (the extension's channel may
be rejected). The command handler then requests positions from every instance, and
cannot miss an answer. Commands that arrive together are passed to the command handler
together, unless a message of the extension arrives between them.

Commands that the command handler sends on this connection are published by the
process's :class:`~synapse_replication.redis.sender.RedisSender`, because Redis does not
allow PUBLISH on a subscribed connection.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import txredisapi
from twisted.python.failure import Failure
from typing_extensions import override

from synapse_replication.errors import ExtensionMessageError, LineTooLongError
from synapse_replication.handlers.events import FeatureUnavailable, LineRefused
from synapse_replication.handlers.extension.extension import ReplicationExtension
from synapse_replication.handlers.interfaces import ConnectionHandler
from synapse_replication.redis.factory import RedisConnectionMixin, SynapseRedisFactory
from synapse_replication.redis.resp import Parser, ReplyParser, encode
from synapse_replication.transport.timeouts import Timeout, stop
from synapse_replication.wire import rdata
from synapse_replication.wire.close_reason import CloseReason
from synapse_replication.wire.commands import Command
from synapse_replication.wire.extension import CHANNEL, COUNTED_AS

#: The longest line to publish or to accept, in bytes. Redis itself allows 512 MiB.
MAX_LINE_LENGTH = 1024 * 1024
#: The channel suffixes of the commands that have a channel of their own, by command.
_OWN_CHANNEL = {"USER_IP": "/USER_IP"}
_new_parser = partial(ReplyParser, MAX_LINE_LENGTH)


class RedisSubscriber(RedisConnectionMixin, txredisapi.SubscriberProtocol):  # type: ignore[misc]
    """A subscribed connection, which implements ``ReplicationConnection``."""

    factory: SubscriberFactory
    relays = False
    is_direct = False

    @property
    def name(self) -> str:
        """The connection's label in logs and metrics."""
        return self.factory.name

    @override
    def connectionMade(self) -> Any:
        self._main_channel = self.factory.server_name.encode()
        self._unconfirmed: set[bytes] = set()
        #: The extension's channels whose SUBSCRIBE was not answered yet, in order.
        self._extension_pending: deque[str] = deque()
        #: The extension's channels that Redis has confirmed.
        self._extension_channels: set[bytes] = set()
        self._pong_timer: Timeout | None = None
        return super().connectionMade()

    @override
    def authenticated(self) -> None:
        channels = [channel.encode() for channel in self.factory.channels]
        self._unconfirmed = set(channels)
        if self.factory.extension is not None:
            # Subscribe to each channel separately: if an ACL forbids it, the other
            # channels can still be used.
            self._extension_pending = deque(
                [self.factory.extension_channel, self.factory.own_channel]
            )
            for channel in self._extension_pending:
                self.transport.write(encode(b"SUBSCRIBE", channel.encode()))
        self.transport.write(encode(b"SUBSCRIBE", *channels))

    @override
    def connectionLost(self, why: Failure) -> None:
        stop(self._pong_timer)
        established = self.established
        super().connectionLost(why)
        if established:
            if self._has_extension:
                assert self.factory.extension is not None
                self.factory.extension.extension_down(self)
            self.factory.command_handler.lost_connection(self)

    @override
    def read_replies(self) -> bool:
        gets = self._reader.gets
        reply = gets()
        if reply is False:
            return False
        lines: list[bytes] = []
        may_be_long = self._unfinished > MAX_LINE_LENGTH
        # Nearly every reply is a row, so this loop does as little as possible for one.
        main_channel = self._main_channel
        while reply is not False:
            try:
                kind, channel, message = reply
            except (TypeError, ValueError):
                kind = None
            if kind != b"message":
                self._other_reply(reply)
            elif may_be_long and _is_too_long(message):
                self._deliver(lines)
                lines = []
                self._refuse(message, channel in self._extension_channels)
            elif channel == main_channel or channel not in self._extension_channels:
                lines.append(message)
            else:
                self._deliver(lines)
                lines = []
                self._deliver_extension(message)
            reply = gets()
        self._deliver(lines)
        return True

    def _deliver(self, lines: list[bytes]) -> None:
        # Messages that arrive before all channels are confirmed can be ignored, like
        # those before SUBSCRIBE: REPLICATE is sent afterwards, and the answers to it
        # state all positions.
        if lines and self.established:
            try:
                items = rdata.read_lines(lines)
            except (AttributeError, TypeError):
                self._check_bytes(lines)
                raise
            self._receive(items)

    def _refuse(self, message: bytes, is_extension: bool) -> None:
        """Refuse a message that no peer of this package would send, undecoded.

        The parser has dropped its rest: decoding 15 MiB would block the process for
        seconds. A row in it is fetched.
        """
        if is_extension:
            error = ExtensionMessageError(f"it has more than {MAX_LINE_LENGTH} bytes")
            self.factory.observer.observe(LineRefused(self.name, error))
        elif self.established:
            self._receive([rdata.refuse_long_line(message, MAX_LINE_LENGTH)])

    @staticmethod
    def _check_bytes(messages: Sequence[object]) -> None:
        """Check that messages are strings, as the messages of Redis always are.

        For messages with rows, call it only after parsing has failed, because the check
        takes time for each message.

        :raises InvalidData: if a message is not a string.
        """
        if any(type(message) is not bytes for message in messages):
            raise txredisapi.InvalidData("a message is not a string")

    def _deliver_extension(self, payload: bytes) -> None:
        if type(payload) is not bytes:
            self._check_bytes([payload])
        if self.established and self.factory.extension is not None:
            self.factory.observer.commands_received(self.name, COUNTED_AS, 1)
            self.factory.extension.extension_received(self, payload)

    def _receive(self, items: Sequence[rdata.ReceivedItem]) -> None:
        """Pass received items to the command handler.

        The observer is notified of them first, once per command name.
        """
        observer = self.factory.observer
        counts: dict[str, int] = {}
        for item in items:
            if isinstance(item, (rdata.RdataGroup, rdata.InterleavedGroup)):
                counts["RDATA"] = counts.get("RDATA", 0) + len(item.rows)
            elif isinstance(item, rdata.RefusedLine):
                observer.observe(LineRefused(self.name, item.error))
            else:
                counts[item.NAME] = counts.get(item.NAME, 0) + 1
        for command_name, count in counts.items():
            observer.commands_received(self.name, command_name, count)
        self.factory.command_handler.received(self, items)

    def _other_reply(self, reply: Any) -> None:
        if self._extension_pending and isinstance(
            reply, (list, txredisapi.ResponseError)
        ):
            self._extension_answered(reply)
        elif isinstance(reply, list) and reply and reply[0] == b"subscribe":
            self._unconfirmed.discard(reply[1])
            if not self._unconfirmed and not self.established:
                self.subscribed()
        elif isinstance(reply, txredisapi.ResponseError) and self._unconfirmed:
            self.abort(f"Redis rejects SUBSCRIBE: {reply}")
        elif isinstance(reply, list) or reply == b"PONG":
            # The reply to PING; a subscriber gets a string from other servers.
            stop(self._pong_timer)
        else:
            # The replies to AUTH and SELECT.
            self.replyQueue.put(self.tryConvertData(reply))

    def _extension_answered(self, reply: Any) -> None:
        # These replies arrive first, because their SUBSCRIBEs were sent first.
        channel = self._extension_pending.popleft()
        if isinstance(reply, list):
            self._extension_channels.add(channel.encode())
        elif channel == self.factory.extension_channel:
            self.factory.observer.observe(
                FeatureUnavailable(
                    "the extension",
                    f"Redis rejects the channel {self.factory.extension_channel} "
                    f"({reply}); without this channel, the loss of messages is "
                    "detected later. Permit the channel in the user's ACL, or disable "
                    "the extension",
                )
            )

    def subscribed(self) -> None:
        """Report the link as established, after the last channel was confirmed."""
        self.connection_established()
        self.connection_proved()
        # Peers must learn this instance's epoch before its positions.
        if self._has_extension:
            assert self.factory.extension is not None
            self.factory.extension.extension_up(self)
        self.report_connection()

    def report_connection(self) -> None:
        """Report the connection to the command handler, which sends REPLICATE."""
        self.factory.command_handler.new_connection(self)

    # -- keep-alive -----------------------------------------------------------------

    @override
    def keep_alive(self) -> None:
        if self._pong_timer is not None and self._pong_timer.active():
            return
        self.transport.write(encode(b"PING"))
        self._pong_timer = Timeout(
            self.factory.reactor_clock, self.factory.replyTimeout, self._pong_timed_out
        )

    def _pong_timed_out(self) -> None:
        # Abort even if messages still arrive: the outgoing direction may be broken.
        self.abort(
            f"no reply to PING within {self.factory.replyTimeout:g} s",
            CloseReason.TIMED_OUT,
        )

    # -- ReplicationConnection ------------------------------------------------------

    @property
    def is_behind(self) -> bool:
        """Whether to pause sending rows, because Redis is behind."""
        return self.factory.sender.is_behind

    def send_command(self, command: Command) -> None:
        """Publish one command.

        :raises LineTooLongError: if the command's line is too long; nothing is
            published then.
        :raises LocalProtocolError: if a field cannot be represented in a line.
        """
        self.send_lines(command.NAME, [command.encode()])

    def send_lines(self, command_name: str, lines: Sequence[bytes]) -> None:
        """Publish lines of one command, in order.

        :raises LineTooLongError: if a line is too long; no line is published then.
        """
        longest = max(map(len, lines), default=0)
        if longest > MAX_LINE_LENGTH:
            raise LineTooLongError(command_name, longest, MAX_LINE_LENGTH)
        channel = self.factory.server_name + _OWN_CHANNEL.get(command_name, "")
        self.factory.sender.publish(command_name, channel, lines)

    @property
    def _has_extension(self) -> bool:
        return self.factory.extension_channel.encode() in self._extension_channels

    @property
    def has_own_channel(self) -> bool:
        """Whether messages for this instance alone arrive on this connection."""
        return self.factory.own_channel.encode() in self._extension_channels

    def send_extension(self, payloads: Sequence[bytes], to: str = "") -> None:
        """Publish messages of the extension, in order with the commands."""
        channel = self.factory.extension_channel
        self.factory.sender.publish(
            COUNTED_AS, f"{channel}/{to}" if to else channel, payloads
        )

    def close_with_error(self, text: str) -> None:
        """Do nothing: all peers share the link, so it must stay up.

        The observer has already been notified of the error.
        """


def _is_too_long(message: object) -> bool:
    return type(message) is bytes and len(message) > MAX_LINE_LENGTH


class CommandPublisher(Protocol):
    """The publisher of a subscription's commands, usually a ``RedisSender``."""

    @property
    def is_behind(self) -> bool:
        """Whether Redis is behind, so that pages of rows must wait."""

    def call_when_ready(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` each time pages of rows may be published again."""

    def publish(self, command_name: str, channel: str, lines: Sequence[bytes]) -> None:
        """Publish lines of one command, in order, one message per line."""


class SubscriberFactory(SynapseRedisFactory):
    """Factory for the subscribed connection; reconnects until the factory is stopped.

    :param server_name: the homeserver's name, which is also the main channel.
    :param channels: further channels, without the prefix ``<server_name>/``.
    :param command_handler: notified of each connection and of the received items.
    :param sender: publishes the commands that are sent on the connection.
    :param extension: notified of the messages on its channel; ``None`` to disable the
        extension.
    """

    protocol = RedisSubscriber

    def __init__(
        self,
        *args: Any,
        server_name: str,
        channels: Sequence[str],
        command_handler: ConnectionHandler,
        sender: CommandPublisher,
        extension: ReplicationExtension | None = None,
        parser_factory: Callable[[], Parser] = _new_parser,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, parser_factory=parser_factory, **kwargs)
        self.server_name = server_name
        self.channels = [server_name, *(f"{server_name}/{name}" for name in channels)]
        # Not named "handler", because txredisapi's factory has an attribute of that
        # name.
        self.command_handler = command_handler
        self.extension = extension
        self.extension_channel = f"{server_name}/{CHANNEL}"
        #: The channel of messages for this instance alone.
        name = "" if extension is None else extension.instance_name
        self.own_channel = f"{self.extension_channel}/{name}"
        self.sender = sender
        sender.call_when_ready(self._ready_again)

    def _ready_again(self) -> None:
        for connection in list(self.connections):
            if isinstance(connection, RedisSubscriber) and connection.established:
                self.command_handler.ready_again(connection)
