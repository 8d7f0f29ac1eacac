"""``synapse.replication.tcp.protocol`` on our line protocol."""

from __future__ import annotations

from typing import Any

from synapse_replication.dropin.adapter import HostClock
from synapse_replication.dropin.bridges import as_connection_handler
from synapse_replication.dropin.observer import observer_of
from synapse_replication.tcp import protocol

__all__ = ["ClientReplicationStreamProtocol", "ServerReplicationStreamProtocol"]


class _Reusable(protocol.BaseReplicationStreamProtocol):
    """May be made long before it is connected, and be connected again.

    A host's tests do that with one object, and do not tell it the end of the
    connection in between.
    """

    def makeConnection(self, transport: Any) -> None:
        if self.is_established and self.close_reason is None:
            self.connectionLost()
        self._begin()
        super().makeConnection(transport)  # type: ignore[no-untyped-call]


class ServerReplicationStreamProtocol(
    _Reusable, protocol.ServerReplicationStreamProtocol
):
    """The end that was connected to."""

    def __init__(self, hs: Any, server_name: str, clock: Any, handler: Any) -> None:
        observer = observer_of(hs)
        super().__init__(
            server_name,
            HostClock(clock, hs.get_reactor()),
            as_connection_handler(handler, hs.run_as_background_process, observer),
            observer,
        )


class ClientReplicationStreamProtocol(
    _Reusable, protocol.ClientReplicationStreamProtocol
):
    """The end that connected."""

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
