"""Replacements for ``synapse.replication.tcp.protocol``."""

from __future__ import annotations

from typing import Any

from twisted.internet.protocol import connectionDone
from twisted.python.failure import Failure

from synapse_replication.dropin.foreign import as_connection_handler
from synapse_replication.dropin.observer import observer_of
from synapse_replication.dropin.synapse_host import HostClock
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

    def __init__(self, hs: Any, server_name: str, clock: Any, handler: Any) -> None:
        observer = observer_of(hs)
        super().__init__(
            server_name,
            HostClock(clock, hs.get_reactor()),
            as_connection_handler(handler, hs.run_as_background_process, observer),
            observer,
        )


class DropInClientProtocol(_Reusable, protocol.ClientReplicationStreamProtocol):
    """The client's end of a connection."""

    def __init__(
        self,
        hs: Any,
        client_name: str,
        server_name: str,
        clock: Any,
        command_handler: Any,
    ) -> None:
        observer = observer_of(hs)
        super().__init__(
            client_name,
            server_name,
            HostClock(clock, hs.get_reactor()),
            as_connection_handler(
                command_handler, hs.run_as_background_process, observer
            ),
            observer,
        )
