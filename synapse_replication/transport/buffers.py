"""The buffers of a transport: plain, TLS or a Unix socket's.

How full they are, and how much is read at once.
"""

from __future__ import annotations

import fcntl
import struct
import termios
from typing import Any

import attrs
from twisted.protocols.policies import ProtocolWrapper

__all__ = ["LARGEST_READ", "USUAL_READ", "ReadSize", "TransportBuffers", "read_buffers"]

#: Bytes that a transport asks its socket for, unless told otherwise.
USUAL_READ = 65536
#: The same at most, where more comes than that.
LARGEST_READ = 4 * USUAL_READ


@attrs.frozen
class TransportBuffers:
    """Bytes on their way, 0 where the transport does not tell.

    :ivar send: not given to the kernel yet.
    :ivar kernel_send: in the kernel, not acknowledged by the peer.
    :ivar kernel_read: in the kernel, not read by this process.
    """

    send: int
    kernel_send: int
    kernel_read: int


class ReadSize:
    """Has a transport read more at once while its peer sends without a break.

    Each stream costs something for each read in which it has rows, whether few or
    many. To ask for as much when little comes would cost each small read its memory.
    A transport with TLS reads as it likes. Twisted knows one size for both ways: where
    we write much on the same connection, as much may wait there before we are paused.
    """

    def __init__(self) -> None:
        self._size = USUAL_READ

    def received(self, transport: Any, length: int) -> None:
        """Choose the size of the next read by what the last one brought, in bytes."""
        size = self._size
        if length >= size:
            size = min(2 * size, LARGEST_READ)
        elif size > USUAL_READ and 2 * length <= size:
            size //= 2
        if size != self._size:
            self._size = transport.bufferSize = size


def read_buffers(transport: Any) -> TransportBuffers:
    """Look how much lies in a transport's buffers."""
    while isinstance(transport, ProtocolWrapper):
        # TLS stands on another one; what it calls its handle is not the kernel's.
        transport = transport.transport
    return TransportBuffers(
        # Twisted has no public name for these.
        len(getattr(transport, "dataBuffer", b""))
        - getattr(transport, "offset", 0)
        + getattr(transport, "_tempDataLen", 0),
        _ask_kernel(transport, termios.TIOCOUTQ),
        _ask_kernel(transport, termios.FIONREAD),
    )


def _ask_kernel(transport: Any, request: int) -> int:
    get_handle = getattr(transport, "getHandle", None)
    if get_handle is None:
        return 0
    try:
        answer = fcntl.ioctl(get_handle(), request, bytes(4))
    except (OSError, ValueError):
        # Closed meanwhile, or a system that does not know the request.
        return 0
    return int(struct.unpack("i", answer)[0])
