"""A proxy before Redis, or before a listener, that cuts a link in one direction.

Theory of operation: a process publishes on one connection and subscribes on
another. Which of them a connection is shows when ``SUBSCRIBE`` passes; a connection
over direct TCP is like one that publishes. While a direction is cut its bytes vanish,
and the connection stays open: neither end hears of it. When it is healed, each
connection that lost bytes is closed, as TCP does not let bytes vanish in the middle of
a stream.

Blocking sockets in threads of its own; its methods may be called in any thread.
"""

from __future__ import annotations

import contextlib
import enum
import socket
import threading

__all__ = ["Cut", "LinkProxy"]

#: Bytes that are passed on at a time.
CHUNK = 65536

#: s that the target may take to accept.
CONNECT_TIMEOUT = 5.0

_SUBSCRIBE = b"SUBSCRIBE"


class Cut(enum.Enum):
    """Which bytes vanish."""

    PUBLISHES = "publishes"  #: what a process sends where it does not subscribe
    REPLIES = "replies"  #: what is sent to it there
    SUBSCRIPTION = "subscription"  #: what is sent to a process that subscribed
    PINGS = "pings"  #: what it sends there

    @property
    def to_target(self) -> bool:
        """Whether it is what a process sends."""
        return self in (Cut.PUBLISHES, Cut.PINGS)

    @property
    def of_subscriptions(self) -> bool:
        """Whether it is on connections that subscribed."""
        return self in (Cut.SUBSCRIPTION, Cut.PINGS)


class _Pair:
    """A connection of a process, and ours to the target for it."""

    def __init__(self, process: socket.socket, target: socket.socket) -> None:
        self.process = process
        self.target = target
        self.subscribes = False
        self.lost_bytes = False

    def close(self) -> None:
        for end in (self.process, self.target):
            # Wakes the thread that reads from it; closed by the last one.
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class LinkProxy:
    """Passes connections on to a target.

    :param target: host and port.
    :param port: where to listen, for one that takes the place of another; 0 for any.
    :ivar port: where it listens, on the loopback interface, from the beginning.
    """

    def __init__(self, target: tuple[str, int], port: int = 0) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._pairs: set[_Pair] = set()
        self._cut: Cut | None = None
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, what: Cut) -> None:
        """Let bytes vanish from now on, of new connections, too."""
        with self._lock:
            self._cut = what

    def heal(self) -> None:
        """Let nothing vanish any more, and close what has lost bytes."""
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
        # A thread that waits in accept() is woken by this, not by close().
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for pair in pairs:
            pair.close()

    def _accept(self) -> None:
        while True:
            try:
                process, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(process,), daemon=True).start()

    def _serve(self, process: socket.socket) -> None:
        with process:
            try:
                target = socket.create_connection(self._target, CONNECT_TIMEOUT)
            except OSError:
                # The process learns it as it would without us: its end is closed.
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
        # An end that was lost is lost for both.
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
