"""What is asked of a transport, be it plain TCP, TLS or a Unix socket."""

from __future__ import annotations

from typing import Protocol

__all__ = ["ReplicationTransport"]


class ReplicationTransport(Protocol):
    """The part of Twisted's transports that the line protocol uses."""

    def write(self, data: bytes) -> None: ...

    def loseConnection(self) -> None: ...

    def abortConnection(self) -> None: ...

    def registerProducer(self, producer: object, streaming: bool) -> None: ...

    def unregisterProducer(self) -> None: ...

    def pauseProducing(self) -> None: ...

    def resumeProducing(self) -> None: ...
