"""The reasons why a connection was closed."""

from __future__ import annotations

import enum


class CloseReason(enum.Enum):
    """The reason why a connection was closed."""

    CLEAN = "clean"  #: the peer closed the connection
    LOST = "lost"  #: the transport failed
    PEER_ERROR = "peer_error"  #: the peer sent ERROR
    PROTOCOL_ERROR = "protocol_error"  #: the peer violated the protocol
    TIMED_OUT = "timed_out"
    CONGESTED = "congested"  #: the peer reads too slowly
    SHUTDOWN = "shutdown"  #: this process closed the connection on request
