"""The publishing connection, with pipelined PUBLISH commands.

Theory of operation: a PUBLISH has no Deferred of its own. Redis replies in order, so
counting the replies yields the number of unacknowledged publishes. Other commands are
sent by :meth:`RedisSenderProtocol.request`, which costs less than txredisapi's methods:
one Deferred, and one timer for all pending requests. txredisapi's own commands can be
used on the same connection.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import txredisapi
from twisted.internet.address import UNIXAddress
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import ISystemHandle, IWriteDescriptor
from twisted.python.failure import Failure
from typing_extensions import override

from synapse_replication.errors import excerpt
from synapse_replication.redis.factory import RedisProtocol, SynapseRedisFactory
from synapse_replication.redis.fencing import (
    ConnectionFence,
    LostConnections,
    NameFence,
    PublisherName,
)
from synapse_replication.redis.resp import encode
from synapse_replication.redis.sender import SENDER_NAME, RedisSender
from synapse_replication.transport.error_text import error_text
from synapse_replication.transport.timeouts import Timeout, stop
from synapse_replication.wire.close_reason import CloseReason

#: Stands for a request in the list of expected replies.
_REQUEST = -1


class RedisSenderProtocol(RedisProtocol):
    """A connection for publishing, and for txredisapi's commands.

    :ivar unacknowledged: the number of publishes without a reply.
    :ivar has_socket: whether the transport writes to a socket.
    """

    factory: SenderFactory

    @override
    def connectionMade(self) -> Any:
        #: The expected replies, in order. Each item is the number of consecutive
        #: publishes, ``_REQUEST``, or 0 for one of txredisapi's commands.
        self._awaited: deque[int] = deque()
        #: The Deferreds of the pending requests, in order.
        self._requests: deque[Deferred[Any]] = deque()
        self._request_timer: Timeout | None = None
        self.unacknowledged = 0
        self._proved = False
        self._is_refused = False
        # Whether doWrite() can be called; the in-memory transports of tests do not have
        # it. A TLS transport passes the call to its TCP transport.
        self._has_do_write = IWriteDescriptor.providedBy(self.transport)
        # False only for the in-memory transports of tests.
        self.has_socket = ISystemHandle.providedBy(self.transport)
        self._fence = ConnectionFence(
            self.factory.lost_connections,
            self.execute_command,
            is_possible=self.has_socket
            and not isinstance(self.transport.getPeer(), UNIXAddress),
        )
        publisher = self.factory.publisher
        self._name_fence: NameFence | None = None
        if publisher is not None:
            self._name_fence = NameFence(publisher, self.execute_command)
        return super().connectionMade()

    @override
    def connectionLost(self, why: Failure) -> None:
        self._awaited.clear()
        stop(self._request_timer)
        requests, self._requests = self._requests, deque()
        count, self.unacknowledged = self.unacknowledged, 0
        for fence in (self._fence, self._name_fence):
            if fence is not None:
                fence.connection_lost(is_explained=bool(self._why))
        self.factory.sender.connection_down(self, count, is_refused=self._is_refused)
        super().connectionLost(why)
        for request in requests:
            request.errback(txredisapi.ConnectionError(self._why or "Lost connection"))

    @override
    def authenticated(self) -> None:
        """Make Redis close earlier connections, if that is possible; then continue.

        Otherwise Redis might read outdated positions, or half of a batch, from the
        previous connection, or from that of a predecessor of this process, after it has
        read the commands on this connection.
        """
        self._fence.kill_previous()
        entering = None if self._name_fence is None else self._name_fence.enter()
        if entering is None:
            super().authenticated()
        else:
            entering.addCallbacks(self._entered, self._refused)

    def _entered(self, _: None) -> None:
        if not self._lost:
            super().authenticated()

    def _refused(self, failure: Failure) -> None:
        self.abort(f"this process may not publish: {error_text(failure.value)}")

    @override
    def connection_established(self) -> None:
        super().connection_established()
        self.transport.registerProducer(self.factory.sender, True)
        self.factory.sender.connection_up(self)

    @override
    def close(self) -> None:
        # A TLS transport does not close while it has a producer.
        self.transport.unregisterProducer()
        super().close()

    def write_publishes(self, data: list[bytes]) -> None:
        """Write encoded PUBLISH commands in a single write."""
        self.unacknowledged += len(data)
        if self._awaited and self._awaited[-1] > 0:
            self._awaited[-1] += len(data)
        else:
            self._awaited.append(len(data))
        self.transport.write(b"".join(data))
        if not self._fence.identity_requested:
            self._fence.request_identity()
        self._write_now()

    def request(self, *arguments: bytes) -> Deferred[Any]:
        """Send one command.

        :return: a Deferred that fires with the reply, as bytes, a number or ``None``.
            It fails with ``txredisapi.ResponseError`` if Redis replies with an error,
            and with ``txredisapi.ConnectionError`` if there is no connection, or if it
            is lost before the reply arrives. If no reply arrives, the connection is
            aborted after one to two times the factory's ``replyTimeout``.
        """
        waiting: Deferred[Any] = Deferred()
        if self._lost:
            waiting.errback(txredisapi.ConnectionError("Not connected"))
            return waiting
        self._awaited.append(_REQUEST)
        self._requests.append(waiting)
        self.transport.write(encode(*arguments))
        self._write_now()
        if self._request_timer is None:
            self._start_request_timer()
        return waiting

    def _write_now(self) -> None:
        # Write to the socket now instead of in the reactor's next turn. The result of
        # doWrite() can be ignored, because the reactor will detect any error.
        if self._has_do_write and not self.transport.disconnecting:
            self.transport.doWrite()

    def _start_request_timer(self) -> None:
        if self._requests:
            self._request_timer = Timeout(
                self.factory.reactor_clock,
                self.factory.replyTimeout,
                self._check,
                self._requests[0],
            )

    def _check(self, oldest: Deferred[Any]) -> None:
        """Abort the connection if ``oldest`` is still the oldest pending request."""
        self._request_timer = None
        if self._requests and self._requests[0] is oldest:
            seconds = self.factory.replyTimeout
            self.abort(f"no reply within {seconds:g} s", CloseReason.TIMED_OUT)
        else:
            self._start_request_timer()

    @override
    def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        self._awaited.append(0)
        try:
            return super().execute_command(*args, **kwargs)
        except BaseException:
            # Nothing was written, so no reply will arrive.
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
            if awaited and awaited[0] > 0:
                if not isinstance(reply, int):
                    refusal = reply
                    break
                acknowledged += 1
                if awaited[0] == 1:
                    awaited.popleft()
                else:
                    awaited[0] -= 1
            elif awaited and awaited.popleft() == _REQUEST:
                self._answered(self._requests.popleft(), reply)
            else:
                self.replyReceived(self.tryConvertData(reply))
            reply = gets()
        self.unacknowledged -= acknowledged
        if refusal is not None:
            # This publish and all later ones count as lost, so positions are announced
            # again.
            self._is_refused = True
            self.abort(f"Redis rejects PUBLISH: {excerpt(str(refusal))}")
        elif acknowledged and not self._proved:
            self._proved = True
            self.connection_proved()
        self.factory.sender.acknowledged()
        return True

    @staticmethod
    def _answered(request: Deferred[Any], reply: Any) -> None:
        if isinstance(reply, txredisapi.ResponseError):
            request.errback(reply)
        else:
            request.callback(reply)


class SenderFactory(SynapseRedisFactory):
    """Factory for the connections of one :class:`RedisSender`.

    :param publisher: the name of this process; ``None`` if it can have no predecessor.
    :ivar lost_connections: the fencing of lost connections.
    """

    protocol = RedisSenderProtocol

    def __init__(
        self,
        *args: Any,
        sender: RedisSender,
        publisher: PublisherName | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, name=SENDER_NAME, **kwargs)
        self.sender = sender
        self.publisher = publisher
        self.lost_connections = LostConnections(self.observer)
