"""The interfaces between the parts of a connection to Redis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias


class ReplyReader(Protocol):
    """Incremental parser of replies."""

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        ...

    def gets(self) -> Any:
        """Return the next complete reply, or ``False`` if there is none yet.

        An error reply is returned as a ``ResponseError``, not raised.

        :raises InvalidData: if the bytes are not a Redis reply.
        """
        ...


ReaderFactory: TypeAlias = Callable[[], ReplyReader]


class PublishConnection(Protocol):
    """The part of a connection that a sender uses.

    :ivar unacknowledged: the number of publishes without a reply.
    :ivar has_socket: whether the transport writes to a socket.
    """

    unacknowledged: int
    has_socket: bool

    def write_publishes(self, data: list[bytes]) -> None:
        """Write encoded PUBLISH commands in a single write."""
        ...

    def abort(self, why: str) -> None:
        """Abort the connection."""
        ...
