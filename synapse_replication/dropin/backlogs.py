"""Backlogs inside a host: retaining, serving and requesting recently sent rows.

Theory of operation: a host mounts one class at its replication path, on exactly those
listeners that have the resource ``replication``. That class is replaced by a subclass.
If the command handler is replaced, too, the subclass passes requests for
``.../status``, and (if there is a backlog) those with ``backlog=1``, to this package's
:class:`ReplicationResource`. All other requests go to the host's class. The backlog is
therefore available at the same address as the host's own rows, with the same
``worker_replication_secret``.

Only a process with such a listener has a backlog; its peers learn this from messages of
the extension. Readers request rows from such a writer before they query the database.
The writer's address comes from the host's ``instance_map``: a host and port, with the
host's TLS policy, or a Unix socket.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec import convert
from twisted.internet.defer import Deferred

from synapse_replication.dropin.homeserver import Homeserver
from synapse_replication.dropin.host_code import make_yieldable
from synapse_replication.dropin.host_streams import instances_of
from synapse_replication.dropin.observer import observer_of, observers_of
from synapse_replication.dropin.settings import own_settings
from synapse_replication.handlers.command_handler import ReplicationCommandHandler
from synapse_replication.handlers.receiving.partial_resync import RequestRows
from synapse_replication.http.location import InstanceLocation
from synapse_replication.http.resource import ReplicationResource
from synapse_replication.streams.standard.registry import MAIN_INSTANCE
from synapse_replication.streams.stream import StreamUpdateResult

if TYPE_CHECKING:
    from synapse_replication.http.client import HttpCatchUpClient

#: The host's TLS policy is requested with a port, which has no effect on certificates.
_ANY_PORT = 443


# -- serving ------------------------------------------------------------------------


def with_backlog(original: Any) -> Any:
    """Return a subclass of the class that a host mounts at its replication path."""

    class ReplicationRestResource(original):  # type: ignore[misc]
        """The host's resource, which also serves the backlog and the status."""

        answers_for_backlog = True

        def __init__(self, hs: Homeserver) -> None:
            super().__init__(hs)
            # Made for the first request: the host makes its command handler later.
            self._our_resource = functools.cache(lambda: _make_resource(hs))

        def render(self, request: Any) -> Any:
            is_status = request.postpath == [b"status"]
            if is_status or request.args.get(b"backlog") == [b"1"]:
                ours = self._our_resource()
                if ours is not None and (is_status or ours.has_backlog):
                    return ours.render(request)
            return super().render(request)

    return ReplicationRestResource


def _make_resource(hs: Homeserver) -> ReplicationResource | None:
    handler = hs.get_replication_command_handler()
    if not isinstance(handler, ReplicationCommandHandler):
        # The host's own handler has no backlog and no status.
        return None
    return ReplicationResource(
        handler.host.streams,
        hs.get_instance_name(),
        hs.config.worker.worker_replication_secret,
        observer_of(hs),
        epoch=handler.host.identity.instance_id,
        backlog=getattr(handler, "backlog", None),
        status=observers_of(hs).encode_status,
    )


def serves_backlog(hs: Homeserver) -> bool:
    """Return whether peers can request rows from this process's memory."""
    return _is_in_use() and _serves_replication(hs)


def _is_in_use() -> bool:
    """Return whether the extension is used, and the host's resource is replaced."""
    module = importlib.import_module("synapse.replication.http")
    resource = module.ReplicationRestResource
    return own_settings().backlog is not None and getattr(
        resource, "answers_for_backlog", False
    )


def _serves_replication(hs: Homeserver) -> bool:
    """Return whether a listener of this process has the resource ``replication``."""
    is_main = hs.get_instance_name() == MAIN_INSTANCE
    # A worker's configuration also contains the listeners of the main process.
    config = hs.config
    listeners = config.server.listeners if is_main else config.worker.worker_listeners
    return any(
        "replication" in resource.names
        for listener in listeners
        if listener.http_options is not None
        for resource in listener.http_options.resources
    )


# -- requesting ---------------------------------------------------------------------


def row_requests(hs: Homeserver) -> RequestRows | None:
    """Return a function that requests rows from the backlog of a writer, once.

    :return: ``None`` if backlogs are not used.
    """
    if not _is_in_use():
        return None
    make_client = functools.cache(lambda: _make_client(hs))

    async def request_rows(
        stream_name: str, instance_name: str, epoch: str, from_token: int, upto: int
    ) -> StreamUpdateResult:
        client = make_client()
        asking = client.get_backlog(stream_name, instance_name, epoch, from_token, upto)
        return await make_yieldable(Deferred.fromCoroutine(asking))

    return request_rows


def _make_client(hs: Homeserver) -> HttpCatchUpClient:
    """Return a client for the instances in the host's ``instance_map``."""
    # Imported here, because many processes never request rows.
    from synapse_replication.http.agent import make_agent
    from synapse_replication.http.client import HttpCatchUpClient

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


def instance_locations(
    instance_map: Mapping[str, object],
) -> dict[str, InstanceLocation]:
    """Return the addresses in a host's ``instance_map``, by instance name."""
    return {
        name: convert(location, InstanceLocation, from_attributes=True)
        for name, location in instances_of(instance_map).items()
    }
