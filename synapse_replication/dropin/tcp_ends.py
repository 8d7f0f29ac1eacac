"""Replacements for ``synapse.replication.tcp.protocol``.

The protocols are loaded when the first end of a direct TCP connection is created: a
host with several processes connects them through Redis.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from synapse_replication.dropin.foreign import as_connection_handler
from synapse_replication.dropin.observer import observer_of
from synapse_replication.dropin.synapse_host import HostClock

if TYPE_CHECKING:
    from synapse_replication.dropin import protocol


def make_server_end(
    hs: Any, server_name: str, clock: Any, handler: Any
) -> protocol.DropInServerProtocol:
    """Return the server's end of a connection."""
    from synapse_replication.dropin.protocol import DropInServerProtocol

    return DropInServerProtocol(
        server_name,
        HostClock(clock, hs.get_reactor()),
        as_connection_handler(hs, handler),
        observer_of(hs),
    )


def make_client_end(
    hs: Any, client_name: str, server_name: str, clock: Any, command_handler: Any
) -> protocol.DropInClientProtocol:
    """Return the client's end of a connection."""
    from synapse_replication.dropin.protocol import DropInClientProtocol

    return DropInClientProtocol(
        client_name,
        server_name,
        HostClock(clock, hs.get_reactor()),
        as_connection_handler(hs, command_handler),
        observer_of(hs),
    )
