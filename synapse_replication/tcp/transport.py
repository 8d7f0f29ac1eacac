"""The interface of transports: plain TCP, TLS or a Unix socket."""

from __future__ import annotations

from typing import Protocol


class ReplicationTransport(Protocol):
    """The part of Twisted's transports that the line protocol uses."""

    def write(self, data: bytes) -> None:
        """Write bytes."""
        ...

    def loseConnection(self) -> None:
        """Close the connection after writing all pending data."""
        ...

    def abortConnection(self) -> None:
        """Close the connection immediately, without writing pending data."""
        ...

    def registerProducer(self, producer: object, streaming: bool) -> None:
        """Register the producer that the transport pauses and resumes."""
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
