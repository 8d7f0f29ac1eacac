"""What a process serves over HTTP: rows that it wrote, its health, its status."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from twisted.web.resource import Resource

from synapse_replication.app.http_limits import MAX_CONNECTIONS, BoundedSite
from synapse_replication.app.status_page import (
    ReadyResource,
    StatusJsonResource,
    StatusPageResource,
)
from synapse_replication.instrumentation.status.model import ProcessStatus

__all__ = ["HealthResource", "MetricsResource", "make_site"]

#: How long an idle connection is kept, in s. Peers keep theirs for less.
_IDLE_TIMEOUT = 300
_REPLICATION = b"/_synapse/replication/"


class HealthResource(Resource):
    """Answers ``OK``: a process listens only once it is up."""

    isLeaf = True  # noqa: N815

    def render_GET(self, request: Any) -> bytes:
        """Answer ``OK``."""
        request.setHeader(b"Content-Type", b"text/plain; charset=utf-8")
        return b"OK"


class MetricsResource(Resource):
    """Answers with the metrics of a registry.

    In the reactor's thread: some are read from connections at that moment.
    """

    isLeaf = True  # noqa: N815

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._registry = registry

    def render_GET(self, request: Any) -> bytes:
        """Answer with the metrics in the format of Prometheus."""
        request.setHeader(b"Content-Type", CONTENT_TYPE_LATEST.encode())
        return generate_latest(self._registry)


def make_site(
    resources: frozenset[str],
    replication: Resource,
    registry: CollectorRegistry,
    snapshot: Callable[[], ProcessStatus],
    *,
    hosts: frozenset[str] | None = None,
    has_secret: bool = False,
    max_connections: int = MAX_CONNECTIONS,
    refused: Callable[[int, str], object] = lambda status, why: None,
) -> BoundedSite:
    """Make what one listener serves.

    :param resources: of ``replication``, ``health`` and ``metrics``.
    :param replication: what stands at ``/_synapse/replication``.
    :param registry: whose metrics stand at ``/metrics`` and
        ``/_synapse/metrics``, the status being at ``/status`` and
        ``/status.json``.
    :param snapshot: gives the status; ``/ready`` stands beside ``/health``.
    :param hosts: the names that the listener serves; ``None`` for any.
    :param has_secret: requests for rows must bear a secret.
    :param max_connections: that are open at a time.
    :param refused: told of each request that is refused: the status, and why.
    """
    root: Any = Resource()  # type: ignore[no-untyped-call]
    synapse: Any = Resource()  # type: ignore[no-untyped-call]
    root.putChild(b"_synapse", synapse)
    if "replication" in resources:
        synapse.putChild(b"replication", replication)
    if "health" in resources:
        root.putChild(b"health", HealthResource())  # type: ignore[no-untyped-call]
        root.putChild(b"ready", ReadyResource(snapshot))
    if "metrics" in resources:
        root.putChild(b"metrics", MetricsResource(registry))
        root.putChild(b"status", StatusPageResource(snapshot))
        root.putChild(b"status.json", StatusJsonResource(snapshot))
        synapse.putChild(b"metrics", MetricsResource(registry))
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
    # Requests carry no secrets in their paths, but a line for each is noise.
    site.log = _log_nothing  # type: ignore[method-assign]
    return site


def _log_nothing(request: Any) -> None:
    """Keep no access log."""
