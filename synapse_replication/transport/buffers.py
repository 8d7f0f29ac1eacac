"""Fill levels and read size of a transport (plain TCP, TLS or a Unix socket)."""

from __future__ import annotations

import fcntl
import struct
import termios
from typing import Any

import attrs
from twisted.protocols.policies import ProtocolWrapper

#: A transport's default read size, in bytes.
DEFAULT_READ_SIZE = 65536
#: The largest read size, in bytes, used while the peer sends continuously.
MAX_READ_SIZE = 4 * DEFAULT_READ_SIZE


@attrs.frozen
class TransportBuffers:
    """Fill levels of a transport's buffers in bytes; 0 where unknown.

    :ivar send: bytes that have not been passed to the kernel yet.
    :ivar kernel_send: bytes in the kernel that the peer has not acknowledged.
    :ivar kernel_read: bytes in the kernel that this process has not read.
    """

    send: int
    kernel_send: int
    kernel_read: int


class ReadSize:
    """Controller that increases a transport's read size while reads fill it.

    Each read has a fixed cost for every stream whose rows it contains, so larger reads
    are cheaper under load; on an idle link they would only waste memory. A TLS
    transport ignores the size. Twisted has one setting for both directions: with a
    larger read size, more unwritten data may accumulate on the connection before its
    producer is paused.
    """

    def __init__(self) -> None:
        self._size = DEFAULT_READ_SIZE

    def received(self, transport: Any, length: int) -> None:
        """Choose the size of the next read from the last read's length, in bytes."""
        size = self._size
        if length >= size:
            size = min(2 * size, MAX_READ_SIZE)
        elif size > DEFAULT_READ_SIZE and 2 * length <= size:
            size //= 2
        if size != self._size:
            self._size = transport.bufferSize = size


def read_buffers(transport: Any) -> TransportBuffers:
    """Return the fill levels of a transport's buffers."""
    while isinstance(transport, ProtocolWrapper):
        # A TLS transport wraps the transport that has the file descriptor.
        transport = transport.transport
    return TransportBuffers(
        # Twisted has no public attributes for the sizes of its send buffers.
        len(getattr(transport, "dataBuffer", b""))
        - getattr(transport, "offset", 0)
        + getattr(transport, "_tempDataLen", 0),
        _query_kernel(transport, termios.TIOCOUTQ),
        _query_kernel(transport, termios.FIONREAD),
    )


def _query_kernel(transport: Any, request: int) -> int:
    get_handle = getattr(transport, "getHandle", None)
    if get_handle is None:
        return 0
    try:
        answer = fcntl.ioctl(get_handle(), request, bytes(4))
    except (OSError, ValueError):
        # The socket was closed, or the system does not support the request.
        return 0
    return int(struct.unpack("i", answer)[0])
