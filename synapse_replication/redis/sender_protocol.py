"""A connection for publishing: pipelined, in order, with its answers counted.

Theory of operation: a PUBLISH has no Deferred: Redis answers in order, so that counting
the answers tells how many are outstanding. txredisapi's own commands go beside.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from twisted.internet.address import UNIXAddress
from twisted.internet.interfaces import (
    IPushProducer,
    ISystemHandle,
    IWriteDescriptor,
)
from twisted.python.failure import Failure
from typing_extensions import override
from zope.interface import implementer

from synapse_replication.errors import excerpt
from synapse_replication.redis.factory import RedisProtocol, SynapseRedisFactory
from synapse_replication.redis.fencing import ConnectionFence, FencingState
from synapse_replication.redis.sender import RedisSender

__all__ = ["RedisSenderProtocol", "SenderFactory"]


@implementer(IPushProducer)
class _SenderProducer:
    """What the transport pauses. The protocol's own methods pause its reading."""

    def __init__(self, sender: RedisSender) -> None:
        self._sender = sender

    def pauseProducing(self) -> None:
        self._sender.pause()

    def resumeProducing(self) -> None:
        self._sender.resume()

    def stopProducing(self) -> None:
        """Do nothing; ``connectionLost`` follows."""


class RedisSenderProtocol(RedisProtocol):
    """One connection for publishing, and for txredisapi's commands beside.

    :ivar unacknowledged: publishes that were written and not answered yet.
    :ivar has_socket: the transport writes to one.
    """

    factory: SenderFactory

    @override
    def connectionMade(self) -> Any:
        #: What the next replies answer, in order: a run of so many publishes, or,
        #: for 0, one of txredisapi's commands.
        self._awaited: deque[int] = deque()
        self.unacknowledged = 0
        self._proved = False
        self._is_refused = False
        # Not behind TLS.
        self._writes_itself = IWriteDescriptor.providedBy(self.transport)
        # Behind TLS, too. Doubles of tests call themselves TCP.
        self.has_socket = ISystemHandle.providedBy(self.transport)
        self._fence = ConnectionFence(
            self.factory.fencing,
            self.execute_command,
            is_possible=self.has_socket
            and not isinstance(self.transport.getPeer(), UNIXAddress),
        )
        return super().connectionMade()

    @override
    def connectionLost(self, why: Failure) -> None:
        self._awaited.clear()
        count, self.unacknowledged = self.unacknowledged, 0
        self._fence.end(is_explained=bool(self._why))
        self.factory.sender.connection_down(self, count, is_refused=self._is_refused)
        super().connectionLost(why)

    @override
    def authenticated(self) -> None:
        """End the connection before this one at Redis, too, then go on.

        What Redis has not read of that one yet would be published behind what is said
        on this one: positions that are over, and half of a batch.
        """
        self._fence.end_earlier()
        super().authenticated()

    @override
    def link_established(self) -> None:
        super().link_established()
        self.transport.registerProducer(_SenderProducer(self.factory.sender), True)
        self.factory.sender.connection_up(self)

    @override
    def close(self) -> None:
        # A TLS transport with a producer waits for it before it closes.
        self.transport.unregisterProducer()
        super().close()

    def write_publishes(self, data: list[bytes]) -> None:
        """Write PUBLISH commands that were encoded already, at once."""
        self.unacknowledged += len(data)
        if self._awaited and self._awaited[-1]:
            self._awaited[-1] += len(data)
        else:
            self._awaited.append(len(data))
        self.transport.write(b"".join(data))
        if not self._fence.was_named:
            self._fence.ask_name()
        # The reactor would do so on its next round, and learns of errors there.
        if self._writes_itself and not self.transport.disconnecting:
            self.transport.doWrite()

    @override
    def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        self._awaited.append(0)
        try:
            return super().execute_command(*args, **kwargs)
        except BaseException:
            # Nothing was written, so nothing will be answered.
            self._awaited.pop()
            raise

    @override
    def read_replies(self) -> bool:
        gets = self._reader.gets
        awaited = self._awaited
        reply = gets()
        if reply is False:
            return False
        acknowledged = 0
        refusal = None
        while reply is not False:
            if awaited and awaited[0]:
                if not isinstance(reply, int):
                    refusal = reply
                    break
                acknowledged += 1
                self.factory.sender.receivers = reply
                if awaited[0] == 1:
                    awaited.popleft()
                else:
                    awaited[0] -= 1
            else:
                if awaited:
                    awaited.popleft()
                self.replyReceived(self.tryConvertData(reply))
            reply = gets()
        self.unacknowledged -= acknowledged
        if refusal is not None:
            # Counted as lost with all behind it; our positions go out again.
            self._is_refused = True
            self.cut(f"Redis refuses to publish: {excerpt(str(refusal))}")
        elif acknowledged and not self._proved:
            self._proved = True
            self.link_proved()
        self.factory.sender.acknowledged()
        return True


class SenderFactory(SynapseRedisFactory):
    """Keeps the connection of one :class:`RedisSender`.

    :ivar fencing: what is known of Redis's ability to end a lost connection.
    """

    protocol = RedisSenderProtocol

    def __init__(self, *args: Any, sender: RedisSender, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sender = sender
        self.fencing = FencingState(self.observer)
