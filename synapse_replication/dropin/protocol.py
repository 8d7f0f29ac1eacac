"""The two ends of a direct TCP connection inside a host."""

from __future__ import annotations

from typing import Any

from twisted.internet.protocol import connectionDone
from twisted.python.failure import Failure

from synapse_replication.tcp import protocol


class _Reusable(protocol.BaseReplicationStreamProtocol):
    """A protocol that can be connected more than once.

    A host's tests reconnect one object without calling ``connectionLost`` in between,
    also after they have closed it.
    """

    _is_connected = False

    def makeConnection(self, transport: Any) -> None:
        if self._is_connected:
            self.connectionLost()
        self._begin()
        self._is_connected = True
        super().makeConnection(transport)  # type: ignore[no-untyped-call]

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._is_connected = False
        super().connectionLost(reason)


class DropInServerProtocol(_Reusable, protocol.ServerReplicationStreamProtocol):
    """The server's end of a connection."""


class DropInClientProtocol(_Reusable, protocol.ClientReplicationStreamProtocol):
    """The client's end of a connection."""
