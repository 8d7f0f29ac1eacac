"""A proxy for Redis or a listener that cuts a link in one direction.

Theory of operation: a process publishes on one connection and subscribes on another.
The proxy distinguishes them by ``SUBSCRIBE``; a connection over direct TCP counts as
one that publishes. While a direction is cut, its bytes are dropped, and the connection
stays open, so that neither end notices. When the direction is restored, each connection
that lost bytes is closed, because TCP does not lose bytes in the middle of a stream.

Uses blocking sockets in its own threads; its methods may be called in any thread.
"""

from __future__ import annotations

import contextlib
import enum
import socket
import threading

from tests.support.socket_listener import SocketListener

#: Most bytes forwarded at a time.
CHUNK = 65536

#: Timeout in s for the target to accept.
CONNECT_TIMEOUT = 5.0

_SUBSCRIBE = b"SUBSCRIBE"


class Cut(enum.Enum):
    """The bytes that are dropped."""

    PUBLISHES = "publishes"  #: sent by a process on a publishing connection
    REPLIES = "replies"  #: received by a process on a publishing connection
    SUBSCRIPTION = "subscription"  #: received by a process on its subscription
    PINGS = "pings"  #: sent by a process on its subscription

    @property
    def to_target(self) -> bool:
        """Whether the process sends these bytes."""
        return self in (Cut.PUBLISHES, Cut.PINGS)

    @property
    def of_subscriptions(self) -> bool:
        """Whether these bytes are on connections that subscribed."""
        return self in (Cut.SUBSCRIPTION, Cut.PINGS)


class _Pair:
    """A connection from a process, and ours to the target."""

    def __init__(self, process: socket.socket, target: socket.socket) -> None:
        self.process = process
        self.target = target
        self.subscribes = False
        self.lost_bytes = False

    def close(self) -> None:
        for end in (self.process, self.target):
            # Wakes the thread that reads from the socket; the last one closes it.
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class LinkProxy(SocketListener):
    """Forwards connections to a target.

    :param target: host and port.
    :param port: the port to listen on, to replace an earlier proxy; 0 for any.
    :ivar port: the port on the loopback interface, open from the start.
    """

    def __init__(self, target: tuple[str, int], port: int = 0) -> None:
        self._target = target
        listener = socket.create_server(("127.0.0.1", port))
        self.port: int = listener.getsockname()[1]
        self._lock = threading.Lock()
        self._pairs: set[_Pair] = set()
        self._cut: Cut | None = None
        self._closed = False
        super().__init__(listener)

    def retarget(self, target: tuple[str, int]) -> None:
        """Forward new connections to another target."""
        self._target = target

    def cut(self, what: Cut) -> None:
        """Drop these bytes from now on, including those on new connections."""
        with self._lock:
            self._cut = what

    def heal(self) -> None:
        """Stop dropping bytes, and close every connection that lost some."""
        with self._lock:
            self._cut = None
            broken = [pair for pair in self._pairs if pair.lost_bytes]
        for pair in broken:
            pair.close()

    def close(self) -> None:
        """Close the listener and every connection. May be called twice."""
        with self._lock:
            self._closed = True
            pairs = list(self._pairs)
        self.stop_listening()
        for pair in pairs:
            pair.close()

    def serve(self, connection: socket.socket) -> None:
        with connection as process:
            try:
                target = socket.create_connection(self._target, CONNECT_TIMEOUT)
            except OSError:
                # Close the process's connection, as would happen without the proxy.
                return
            target.settimeout(None)
            with target:
                pair = _Pair(process, target)
                with self._lock:
                    if self._closed:
                        return
                    self._pairs.add(pair)
                back = threading.Thread(
                    target=self._pass_on, args=(pair, False), daemon=True
                )
                back.start()
                self._pass_on(pair, True)
                back.join()
                with self._lock:
                    self._pairs.discard(pair)

    def _pass_on(self, pair: _Pair, to_target: bool) -> None:
        source, sink = pair.process, pair.target
        if not to_target:
            source, sink = sink, source
        tail = b""
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK):
                if to_target and not pair.subscribes:
                    seen = (tail + data).upper()
                    pair.subscribes = _SUBSCRIBE in seen
                    tail = seen[-len(_SUBSCRIBE) :]
                if not self._vanishes(pair, to_target):
                    sink.sendall(data)
        # If one end is closed, so is the other.
        pair.close()

    def _vanishes(self, pair: _Pair, to_target: bool) -> bool:
        with self._lock:
            cut = self._cut
            lost = (
                cut is not None
                and cut.to_target == to_target
                and cut.of_subscriptions == pair.subscribes
            )
            pair.lost_bytes = pair.lost_bytes or lost
            return lost
