"""What is asked of a transport, be it plain TCP, TLS or a Unix socket."""

from __future__ import annotations

from typing import Protocol

__all__ = ["ReplicationTransport"]


class ReplicationTransport(Protocol):
    """The part of Twisted's transports that the line protocol uses."""

    def write(self, data: bytes) -> None:
        """Write bytes."""
        ...

    def loseConnection(self) -> None:
        """Close once all is written."""
        ...

    def abortConnection(self) -> None:
        """Close at once; what is not written is discarded."""
        ...

    def registerProducer(self, producer: object, streaming: bool) -> None:
        """Register what writes, to be paused and resumed."""
        ...

    def unregisterProducer(self) -> None:
        """Remove the producer."""
        ...

    def pauseProducing(self) -> None:
        """Stop reading."""
        ...

    def resumeProducing(self) -> None:
        """Read again."""
        ...
