"""The HTTP resources of a process: its own rows, its health, metrics and status."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from twisted.web.resource import Resource

from synapse_replication.app.status_page import (
    ReadyResource,
    StatusJsonResource,
    StatusPageResource,
)
from synapse_replication.instrumentation.status.model import ProcessStatus

#: The beginning of the paths of rows, which require the secret if there is one.
REPLICATION_PATH = b"/_synapse/replication/"


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


class HealthResource(Resource):
    """Responds with ``OK``: a process listens only after its streams are loaded."""

    isLeaf = True  # noqa: N815

    def render_GET(self, request: Any) -> bytes:
        """Return ``OK``."""
        request.setHeader(b"Content-Type", b"text/plain; charset=utf-8")
        return b"OK"

    def render_HEAD(self, request: Any) -> bytes:
        """Return nothing: Twisted logs a warning for each body that it discards."""
        request.setHeader(b"Content-Length", b"%d" % len(self.render_GET(request)))
        return b""


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
