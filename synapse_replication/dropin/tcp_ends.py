"""Creates the two ends of a direct TCP connection, for a host.

Their modules are loaded when the first end is created: a host with several processes
connects them through Redis.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from synapse_replication.dropin import protocol


def make_server_end(
    hs: Any, server_name: str, clock: Any, handler: Any
) -> protocol.DropInServerProtocol:
    """Return the server's end of a connection."""
    from synapse_replication.dropin.protocol import DropInServerProtocol

    return DropInServerProtocol(hs, server_name, clock, handler)


def make_client_end(
    hs: Any, client_name: str, server_name: str, clock: Any, command_handler: Any
) -> protocol.DropInClientProtocol:
    """Return the client's end of a connection."""
    from synapse_replication.dropin.protocol import DropInClientProtocol

    return DropInClientProtocol(hs, client_name, server_name, clock, command_handler)
