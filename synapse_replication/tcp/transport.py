"""The interface of transports: plain TCP, TLS or a Unix socket."""

from __future__ import annotations

from typing import Protocol

__all__ = ["ReplicationTransport"]


class ReplicationTransport(Protocol):
    """The part of Twisted's transports that the line protocol uses."""

    def write(self, data: bytes) -> None:
        """Write bytes."""
        ...

    def loseConnection(self) -> None:
        """Close once everything is written."""
        ...

    def abortConnection(self) -> None:
        """Close at once; unwritten data is discarded."""
        ...

    def registerProducer(self, producer: object, streaming: bool) -> None:
        """Register the producer to be paused and resumed."""
        ...

    def unregisterProducer(self) -> None:
        """Remove the producer."""
        ...

    def pauseProducing(self) -> None:
        """Stop reading."""
        ...

    def resumeProducing(self) -> None:
        """Resume reading."""
        ...
