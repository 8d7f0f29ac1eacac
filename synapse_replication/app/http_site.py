"""The HTTP resources of a process: its own rows, its health, metrics and status."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from twisted.web.resource import Resource

from synapse_replication.app.http_limits import MAX_CONNECTIONS, BoundedSite
from synapse_replication.app.status_page import (
    ReadyResource,
    StatusJsonResource,
    StatusPageResource,
)
from synapse_replication.instrumentation.status.model import ProcessStatus

#: How long a connection may be idle, in s. Peers close their connections earlier.
_IDLE_TIMEOUT = 300
_REPLICATION = b"/_synapse/replication/"


class HealthResource(Resource):
    """Responds with ``OK``: a process listens only after its streams are loaded."""

    isLeaf = True  # noqa: N815

    def render_GET(self, request: Any) -> bytes:
        """Return ``OK``."""
        request.setHeader(b"Content-Type", b"text/plain; charset=utf-8")
        return b"OK"


class MetricsResource(Resource):
    """Responds with the metrics of a registry.

    The metrics are read in the reactor's thread, because some are computed from open
    connections.
    """

    isLeaf = True  # noqa: N815

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._registry = registry

    def render_GET(self, request: Any) -> bytes:
        """Return the metrics in the format of Prometheus."""
        request.setHeader(b"Content-Type", CONTENT_TYPE_LATEST.encode())
        return generate_latest(self._registry)


def make_root(
    resources: frozenset[str],
    registry: CollectorRegistry,
    snapshot: Callable[[], ProcessStatus],
    replication: Resource | None = None,
) -> Resource:
    """Return the root resource of one listener.

    :param resources: the resources to serve: ``replication``, ``health`` (with
        ``/ready``) and ``metrics`` (with ``/status`` and ``/status.json``).
    :param registry: the registry whose metrics are served at ``/metrics`` and
        ``/_synapse/metrics``.
    :param snapshot: returns the current status.
    :param replication: the resource at ``/_synapse/replication``.
    """
    root: Any = Resource()  # type: ignore[no-untyped-call]
    synapse: Any = Resource()  # type: ignore[no-untyped-call]
    root.putChild(b"_synapse", synapse)
    if "replication" in resources and replication is not None:
        synapse.putChild(b"replication", replication)
    if "health" in resources:
        root.putChild(b"health", HealthResource())  # type: ignore[no-untyped-call]
        root.putChild(b"ready", ReadyResource(snapshot))
    if "metrics" in resources:
        root.putChild(b"metrics", MetricsResource(registry))
        root.putChild(b"status", StatusPageResource(snapshot))
        root.putChild(b"status.json", StatusJsonResource(snapshot))
        synapse.putChild(b"metrics", MetricsResource(registry))
    return cast(Resource, root)


def make_site(
    root: Resource,
    *,
    hosts: frozenset[str] | None = None,
    has_secret: bool = False,
    max_connections: int = MAX_CONNECTIONS,
    refused: Callable[[int, str], object] = lambda status, why: None,
) -> BoundedSite:
    """Return the site of one listener.

    :param root: its root resource.
    :param hosts: the host names that the listener serves; ``None`` for any.
    :param has_secret: whether requests for rows must contain a secret.
    :param max_connections: the most connections that are open at a time.
    :param refused: called with a status and the reason for each refused request or
        connection.
    """
    site = BoundedSite(
        root,
        hosts,
        timeout=_IDLE_TIMEOUT,
        max_connections=max_connections,
        is_guarded=lambda path: has_secret and path.startswith(_REPLICATION),
        refused=refused,
    )
    site.noisy = False
    site.displayTracebacks = False
    # Paths contain no secrets, but a log line for each request would be noise.
    site.log = _log_nothing  # type: ignore[method-assign]
    return site


def _log_nothing(request: Any) -> None:
    """Write no access log."""
