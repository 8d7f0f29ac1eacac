"""Replacements for both ends of a direct TCP connection, and for the server's factory.

The protocols are loaded when the first end of a connection is created: a host with
several processes connects them through Redis.
"""

from __future__ import annotations

import functools
from typing import Any

from twisted.internet.interfaces import IAddress
from twisted.internet.protocol import ServerFactory, connectionDone
from twisted.python.failure import Failure
from typing_extensions import override

from synapse_replication.dropin.foreign import as_connection_handler
from synapse_replication.dropin.host_code import host_attribute
from synapse_replication.dropin.observer import observer_of
from synapse_replication.dropin.synapse_host import HostClock


def make_server_end(hs: Any, server_name: str, clock: Any, handler: Any) -> Any:
    """Return the server's end of a connection."""
    from synapse_replication.tcp.protocol import ServerReplicationStreamProtocol

    return reusable(ServerReplicationStreamProtocol)(
        server_name,
        HostClock(clock, hs.get_reactor()),
        as_connection_handler(hs, handler),
        observer_of(hs),
    )


def make_client_end(
    hs: Any, client_name: str, server_name: str, clock: Any, command_handler: Any
) -> Any:
    """Return the client's end of a connection."""
    from synapse_replication.tcp.protocol import ClientReplicationStreamProtocol

    return reusable(ClientReplicationStreamProtocol)(
        client_name,
        server_name,
        HostClock(clock, hs.get_reactor()),
        as_connection_handler(hs, command_handler),
        observer_of(hs),
    )


@functools.cache
def reusable(original: Any) -> Any:
    """Return a subclass of a protocol that can be connected more than once.

    A host's tests reconnect one object without calling ``connectionLost`` in between,
    also after they have closed it.
    """

    class ReusableProtocol(original):  # type: ignore[misc]
        """A protocol that can be connected more than once."""

        _is_connected = False

        def makeConnection(self, transport: Any) -> None:
            if self._is_connected:
                self.connectionLost()
            self._begin()
            self._is_connected = True
            super().makeConnection(transport)

        def connectionLost(self, reason: Failure = connectionDone) -> None:
            self._is_connected = False
            super().connectionLost(reason)

    return ReusableProtocol


class DropInProtocolFactory(ServerFactory):
    """Creates the server's end of each direct TCP connection."""

    noisy = False

    def __init__(self, hs: Any) -> None:
        self._hs = hs
        self._protocol = host_attribute("protocol", "ServerReplicationStreamProtocol")
        self._handler = hs.get_replication_command_handler()
        # Create the streamer, so that rows are sent as soon as a client connects.
        hs.get_replication_streamer()

    @override
    def buildProtocol(self, addr: IAddress | None) -> Any:
        return self._protocol(
            self._hs, self._hs.hostname, self._hs.get_clock(), self._handler
        )
