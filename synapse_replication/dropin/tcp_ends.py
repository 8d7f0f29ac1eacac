"""Replacements for both ends of a direct TCP connection, and for the server's factory.

A host with several processes connects them through Redis; it creates these ends only in
its tests, or where its own listener for direct TCP is configured.
"""

from __future__ import annotations

from twisted.internet.interfaces import IAddress, ITransport
from twisted.internet.protocol import Protocol, ServerFactory, connectionDone
from twisted.python.failure import Failure
from typing_extensions import override

from synapse_replication.dropin.foreign import as_connection_handler
from synapse_replication.dropin.homeserver import (
    CommandHandler,
    Homeserver,
    HomeserverClock,
)
from synapse_replication.dropin.host_code import host_attribute
from synapse_replication.dropin.observer import observer_of
from synapse_replication.dropin.synapse_host import HostClock
from synapse_replication.tcp import protocol
from synapse_replication.wire.commands import Command


class _ReusableProtocol(protocol.BaseReplicationStreamProtocol):
    """A protocol that can be connected more than once.

    A host's tests reconnect one object without calling ``connectionLost`` in between,
    also after they have closed it.
    """

    _is_connected = False

    @override
    def makeConnection(self, transport: ITransport) -> None:
        if self._is_connected:
            self.connectionLost()
        self._begin()
        self._is_connected = True
        super().makeConnection(transport)  # type: ignore[no-untyped-call]

    @override
    def send_command(self, cmd: Command, do_buffer: bool = True) -> None:
        # Commands are always sent in order, so none is buffered by the caller.
        super().send_command(cmd)

    @override
    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._is_connected = False
        super().connectionLost(reason)


class DropInServerProtocol(_ReusableProtocol, protocol.ServerReplicationStreamProtocol):
    """The server's end of a connection."""

    def __init__(
        self,
        hs: Homeserver,
        server_name: str,
        clock: HomeserverClock,
        handler: CommandHandler,
    ) -> None:
        super().__init__(
            server_name,
            HostClock(clock, hs.get_reactor()),
            as_connection_handler(hs, handler),
            observer_of(hs),
        )


class DropInClientProtocol(_ReusableProtocol, protocol.ClientReplicationStreamProtocol):
    """The client's end of a connection."""

    def __init__(
        self,
        hs: Homeserver,
        client_name: str,
        server_name: str,
        clock: HomeserverClock,
        command_handler: CommandHandler,
    ) -> None:
        super().__init__(
            client_name,
            server_name,
            HostClock(clock, hs.get_reactor()),
            as_connection_handler(hs, command_handler),
            observer_of(hs),
        )


class DropInProtocolFactory(ServerFactory):
    """Creates the server's end of each direct TCP connection."""

    noisy = False

    def __init__(self, hs: Homeserver) -> None:
        self._hs = hs
        self._protocol = host_attribute("protocol", "ServerReplicationStreamProtocol")
        self._handler = hs.get_replication_command_handler()
        # Create the streamer, so that rows are sent as soon as a client connects.
        hs.get_replication_streamer()

    @override
    def buildProtocol(self, addr: IAddress | None) -> Protocol:
        protocol: Protocol = self._protocol(
            self._hs, self._hs.hostname, self._hs.get_clock(), self._handler
        )
        return protocol
