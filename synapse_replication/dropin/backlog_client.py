"""The client that requests rows from the backlogs of a host's other processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from synapse_replication.dropin.host_streams import instances_of
from synapse_replication.dropin.observer import observer_of
from synapse_replication.http.agent import make_agent
from synapse_replication.http.client import HttpCatchUpClient
from synapse_replication.http.location import InstanceLocation

#: The host's TLS policy is requested with a port, which has no effect on certificates.
_ANY_PORT = 443


def make_client(hs: Any) -> HttpCatchUpClient:
    """Return a client for the instances in the host's ``instance_map``."""
    reactor, worker = hs.get_reactor(), hs.config.worker
    locations = instance_locations(worker.instance_map)
    # The TLS policy that the host uses for requests between its instances.
    policy = hs.get_http_client_context_factory()
    agent, pool = make_agent(
        reactor,
        locations,
        lambda host: policy.creatorForNetloc(host.encode("ascii"), _ANY_PORT),
    )
    # Close the connections even if the reactor keeps running after the shutdown.
    hs.register_sync_shutdown_handler(
        phase="during",
        eventType="shutdown",
        shutdown_func=pool.closeCachedConnections,
    )
    return HttpCatchUpClient(
        agent,
        locations,
        worker.worker_replication_secret,
        reactor,
        observer=observer_of(hs),
    )


def instance_locations(instance_map: Mapping[str, Any]) -> dict[str, InstanceLocation]:
    """Return the addresses in a host's ``instance_map``, by instance name."""
    return {
        name: InstanceLocation(
            getattr(location, "host", None),
            getattr(location, "port", None),
            getattr(location, "tls", False),
            getattr(location, "path", None),
        )
        for name, location in instances_of(instance_map).items()
    }
