"""Receiving: the subscription, as a connection of the handler.

Theory of operation: SUBSCRIBE goes out when Redis let us in; when all channels
are confirmed, and not before, the handler hears of the connection and asks
everybody for positions, so that no answer can be missed. From then on the
messages that arrived together go to the handler together.

What the handler sends on this connection is published by the process's
:class:`~synapse_replication.redis.sender.RedisSender`: a connection that
subscribed can say nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import txredisapi
from twisted.python.failure import Failure
from typing_extensions import override

from synapse_replication.errors import LineTooLongError
from synapse_replication.handlers.interfaces import ReplicationConnection
from synapse_replication.handlers.observer import CloseReason
from synapse_replication.redis.factory import RedisLink, SynapseRedisFactory
from synapse_replication.redis.ledger import EXTENSION
from synapse_replication.redis.resp import encode
from synapse_replication.redis.sender import RedisSender
from synapse_replication.transport.timeouts import Timeout
from synapse_replication.wire.commands.standard import Command, encode_command
from synapse_replication.wire.extension import CHANNEL
from synapse_replication.wire.rdata import (
    InterleavedRun,
    RdataRun,
    ReceivedItem,
    RefusedLine,
    read_lines,
)

__all__ = [
    "MAX_LINE_LENGTH",
    "ConnectionHandler",
    "ExtensionHandler",
    "RedisSubscriber",
    "SubscriberFactory",
]

#: The longest line that is published, in bytes. Redis would take 512 MiB.
MAX_LINE_LENGTH = 1024 * 1024
#: Commands that are published on a channel of their own, and its suffix.
_OWN_CHANNEL = {"USER_IP": "/USER_IP"}


class ConnectionHandler(Protocol):
    """What is asked of the command handler."""

    def new_connection(self, connection: ReplicationConnection) -> None:
        """Record a connection that can send and receive."""
        ...

    def lost_connection(self, connection: ReplicationConnection) -> None:
        """Forget a connection."""
        ...

    def received(
        self, connection: ReplicationConnection, items: Sequence[ReceivedItem]
    ) -> None:
        """Take what arrived together, in order."""
        ...

    def ready_again(self, connection: ReplicationConnection) -> None:
        """Record that a connection that was behind is so no more."""
        ...


class ExtensionHandler(Protocol):
    """What is asked of the extension; see ``handlers/extension/extension.py``."""

    def extension_up(self, connection: RedisSubscriber) -> None:
        """Record that messages can be sent and received on a link."""
        ...

    def extension_down(self, connection: RedisSubscriber) -> None:
        """Forget a link."""
        ...

    def sending_resumed(self) -> None:
        """Record that what was sent before may not have arrived. Never raises."""
        ...

    def extension_received(self, connection: RedisSubscriber, payload: bytes) -> None:
        """Take one message, in order with what the command handler is given."""
        ...


class RedisSubscriber(RedisLink, txredisapi.SubscriberProtocol):  # type: ignore[misc]
    """One subscribed connection; a ``ReplicationConnection``."""

    factory: SubscriberFactory
    relays = False
    is_direct = False

    @property
    def name(self) -> str:
        """For logs and metrics."""
        return self.factory.name

    @override
    def connectionMade(self) -> Any:
        self._unconfirmed: set[bytes] = set()
        #: Of the extension: asked for and not confirmed; confirmed.
        self._extension_asked = False
        self._extension_channel: bytes | None = None
        self._pong_timer: Timeout | None = None
        return super().connectionMade()

    @override
    def authenticated(self) -> None:
        channels = [channel.encode() for channel in self.factory.channels]
        self._unconfirmed = set(channels)
        if self.factory.extension is not None:
            # Apart and first: an ACL may refuse it, and then all else goes on.
            self._extension_asked = True
            self.transport.write(
                encode(b"SUBSCRIBE", self.factory.extension_channel.encode())
            )
        self.transport.write(encode(b"SUBSCRIBE", *channels))

    @override
    def connectionLost(self, why: Failure) -> None:
        self._stop_pong_timer()
        established = self.established
        super().connectionLost(why)
        if established:
            if self._extension_channel is not None:
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
        while reply is not False:
            if type(reply) is list and len(reply) == 3 and reply[0] == b"message":
                if reply[1] == self._extension_channel:
                    self._deliver(lines)
                    lines = []
                    self._deliver_extension(reply[2])
                else:
                    lines.append(reply[2])
            else:
                self._other_reply(reply)
            reply = gets()
        self._deliver(lines)
        return True

    def _deliver(self, lines: list[bytes]) -> None:
        # What came before the confirmation is nobody's: REPLICATE will be asked.
        if lines and self.established:
            try:
                items = read_lines(lines)
            except (AttributeError, TypeError):
                self._check_bytes(lines)
                raise
            self._count(items)
            self.factory.command_handler.received(self, items)

    @staticmethod
    def _check_bytes(messages: Sequence[object]) -> None:
        """Check messages only once reading them failed: it costs time for each.

        :raises InvalidData: if one is no string: it did not come from Redis.
        """
        if any(type(message) is not bytes for message in messages):
            raise txredisapi.InvalidData("a message is not a string")

    def _deliver_extension(self, payload: bytes) -> None:
        self._check_bytes([payload])
        if self.established and self.factory.extension is not None:
            self.factory.observer.commands_received(self.name, EXTENSION, 1)
            self.factory.extension.extension_received(self, payload)

    def _count(self, items: Sequence[ReceivedItem]) -> None:
        """Tell the observer what arrived, once a command."""
        observer = self.factory.observer
        counts: dict[str, int] = {}
        for item in items:
            if isinstance(item, (RdataRun, InterleavedRun)):
                counts["RDATA"] = counts.get("RDATA", 0) + len(item.rows)
            elif isinstance(item, RefusedLine):
                observer.line_refused(self.name, item.error)
            else:
                counts[item.NAME] = counts.get(item.NAME, 0) + 1
        for command_name, count in counts.items():
            observer.commands_received(self.name, command_name, count)

    def _other_reply(self, reply: Any) -> None:
        if self._extension_asked and isinstance(
            reply, (list, txredisapi.ResponseError)
        ):
            self._extension_answered(reply)
        elif isinstance(reply, list) and reply and reply[0] == b"subscribe":
            self._unconfirmed.discard(reply[1])
            if not self._unconfirmed and not self.established:
                self.subscribed()
        elif isinstance(reply, txredisapi.ResponseError) and self._unconfirmed:
            self.cut(f"Redis refuses SUBSCRIBE: {reply}")
        elif isinstance(reply, list):
            # The answer to our PING.
            self._stop_pong_timer()
        else:
            # To AUTH and SELECT.
            self.replyQueue.put(self.tryConvertData(reply))

    def _extension_answered(self, reply: Any) -> None:
        # The answers come in the order of the questions, and this was the first.
        self._extension_asked = False
        if isinstance(reply, list):
            self._extension_channel = self.factory.extension_channel.encode()
        else:
            self.factory.observer.feature_unavailable(
                "the extension",
                f"Redis refuses the channel {self.factory.extension_channel} "
                f"({reply}); a message that Redis loses is noticed later. Allow its "
                "user the channel, or turn the extension off",
            )

    def subscribed(self) -> None:
        """Handle the confirmation of the last channel: the link is usable."""
        self.link_established()
        self.link_proved()
        # First: others are to know our epoch before our positions.
        if self._extension_channel is not None:
            assert self.factory.extension is not None
            self.factory.extension.extension_up(self)
        self.report_connection()

    def report_connection(self) -> None:
        """Report the connection to the command handler, which sends REPLICATE."""
        self.factory.command_handler.new_connection(self)

    # -- keep-alive -----------------------------------------------------------------

    @override
    def keep_alive(self) -> None:
        if self._pong_timer is not None:
            return
        self.transport.write(encode(b"PING"))
        self._pong_timer = Timeout(
            self.factory.reactor_clock, self.factory.replyTimeout, self._silent
        )

    def _silent(self) -> None:
        # Messages may have come all the while: then it is the other direction.
        self._pong_timer = None
        self.cut(
            f"no answer came within {self.factory.replyTimeout:g} s of a PING",
            CloseReason.TIMED_OUT,
        )

    def _stop_pong_timer(self) -> None:
        timer, self._pong_timer = self._pong_timer, None
        if timer is not None:
            timer.cancel()

    # -- ReplicationConnection ------------------------------------------------------

    @property
    def is_behind(self) -> bool:
        """Redis has not taken what was published: more would only wait there."""
        return self.factory.sender.is_behind

    def send_command(self, command: Command) -> None:
        """Publish one command.

        :raises LineTooLongError: if its line is too long; nothing was published.
        :raises LocalProtocolError: if a field holds what a line cannot say.
        """
        self.send_lines(command.NAME, [encode_command(command)])

    def send_lines(self, command_name: str, lines: Sequence[bytes]) -> None:
        """Publish lines of one command, in order.

        :raises LineTooLongError: if one is too long; none was published.
        """
        longest = max(map(len, lines), default=0)
        if longest > MAX_LINE_LENGTH:
            raise LineTooLongError(command_name, longest, MAX_LINE_LENGTH)
        channel = self.factory.server_name + _OWN_CHANNEL.get(command_name, "")
        self.factory.sender.publish(command_name, channel, lines)

    def send_extension(self, payloads: Sequence[bytes]) -> None:
        """Publish messages of the extension, in order with what else is sent."""
        self.factory.sender.publish(EXTENSION, self.factory.extension_channel, payloads)

    def close_with_error(self, text: str) -> None:
        """Do nothing: those behind Redis are many, and the link stays.

        The observer was told of the line when it came.
        """


class SubscriberFactory(SynapseRedisFactory):
    """Keeps a subscription up for ever.

    :param server_name: the channel of all commands.
    :param channels: more channels, by what follows ``<server_name>/``.
    :param command_handler: hears of each connection and of what arrives.
    :param sender: publishes what is sent on the connections.
    :param extension: hears of its own channel; ``None`` to leave that alone.
    """

    protocol = RedisSubscriber

    def __init__(
        self,
        *args: Any,
        server_name: str,
        channels: Sequence[str],
        command_handler: ConnectionHandler,
        sender: RedisSender,
        extension: ExtensionHandler | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.server_name = server_name
        self.channels = [server_name, *(f"{server_name}/{name}" for name in channels)]
        # txredisapi has a handler of its own.
        self.command_handler = command_handler
        self.extension = extension
        self.extension_channel = f"{server_name}/{CHANNEL}"
        self.sender = sender
        sender.call_when_ready(self._ready_again)

    def _ready_again(self) -> None:
        for link in list(self.links):
            if isinstance(link, RedisSubscriber) and link.established:
                self.command_handler.ready_again(link)
