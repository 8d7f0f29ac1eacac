"""How much lies in the buffers of a transport, plain, TLS or a Unix socket's."""

from __future__ import annotations

import fcntl
import struct
import termios
from typing import Any

import attrs
from twisted.protocols.policies import ProtocolWrapper

__all__ = ["TransportBuffers", "read_buffers"]


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
