"""The HTTP listeners of a process: its own rows, its health, metrics and status."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Any, cast

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from twisted.web.resource import Resource

from synapse_replication.app.host import StandaloneHost
from synapse_replication.app.http_limits import BoundedSite, served_hosts
from synapse_replication.app.status_page import render_page
from synapse_replication.config.listener_safety import Listener
from synapse_replication.config.replication_options import ReplicationOptions
from synapse_replication.handlers.events import RequestRefused
from synapse_replication.http.resource import ReplicationResource
from synapse_replication.instrumentation.status import model
from synapse_replication.streams.backlog import Backlog

#: The beginning of the paths of rows, which require the secret if there is one.
_REPLICATION_PATH = b"/_synapse/replication/"
_TEXT = "text/plain; charset=utf-8"


class GetResource(Resource):
    """Responds to GET with the body that a function returns.

    The function is called in the reactor's thread.

    :param respond: returns the body of the response to a request.
    """

    isLeaf = True  # noqa: N815

    def __init__(self, content_type: str, respond: Callable[[Any], bytes]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._content_type = content_type.encode()
        self._respond = respond

    def render_GET(self, request: Any) -> bytes:
        """Return the body."""
        request.setHeader(b"Content-Type", self._content_type)
        return self._respond(request)

    def render_HEAD(self, request: Any) -> bytes:
        """Return nothing: Twisted logs a warning for each body that it discards."""
        request.setHeader(b"Content-Length", b"%d" % len(self.render_GET(request)))
        return b""


def metrics_resource(registry: CollectorRegistry) -> GetResource:
    """Return a resource that responds with the metrics of a registry.

    Unlike Prometheus's own resource, it reads them in the reactor's thread, because
    some are computed from open connections.
    """
    return GetResource(CONTENT_TYPE_LATEST, lambda request: generate_latest(registry))


def ready_resource(snapshot: Callable[[], model.ProcessStatus]) -> GetResource:
    """Return a resource that responds with ``ready``, or 503 and reasons, one a line.

    :param snapshot: returns the current status.
    """

    def respond(request: Any) -> bytes:
        not_ready = snapshot().not_ready
        if not_ready:
            request.setResponseCode(503)
        return "".join(f"{line}\n" for line in not_ready or ["ready"]).encode()

    return GetResource(_TEXT, respond)


def status_json_resource(snapshot: Callable[[], model.ProcessStatus]) -> GetResource:
    """Return a resource that responds with the status as JSON.

    :param snapshot: returns the current status.
    """

    def respond(request: Any) -> bytes:
        request.setHeader(b"Cache-Control", b"no-store")
        return model.encode_status(snapshot())

    return GetResource("application/json", respond)


def status_page_resource(snapshot: Callable[[], model.ProcessStatus]) -> GetResource:
    """Return a resource that responds with the status page.

    It responds to ``?part=body`` with the part of the page that changes. The page's
    policy prevents that it loads anything from other hosts.

    :param snapshot: returns the current status.
    """

    def respond(request: Any) -> bytes:
        nonce = secrets.token_urlsafe(12)
        policy = (
            f"default-src 'none'; style-src 'nonce-{nonce}'; img-src data:; "
            f"script-src 'nonce-{nonce}'; connect-src 'self'; base-uri 'none'; "
            "frame-ancestors 'none'"
        )
        request.setHeader(b"Cache-Control", b"no-store")
        request.setHeader(b"X-Content-Type-Options", b"nosniff")
        request.setHeader(b"Content-Security-Policy", policy.encode())
        is_body = request.args.get(b"part") == [b"body"]
        return render_page(snapshot(), nonce, is_body=is_body).encode()

    return GetResource("text/html; charset=utf-8", respond)


def make_root(
    resources: frozenset[str],
    registry: CollectorRegistry,
    snapshot: Callable[[], model.ProcessStatus],
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
        # A process listens only after its streams are loaded.
        root.putChild(b"health", GetResource(_TEXT, lambda request: b"OK"))
        root.putChild(b"ready", ready_resource(snapshot))
    if "metrics" in resources:
        root.putChild(b"metrics", metrics_resource(registry))
        root.putChild(b"status", status_page_resource(snapshot))
        root.putChild(b"status.json", status_json_resource(snapshot))
        synapse.putChild(b"metrics", metrics_resource(registry))
    return cast(Resource, root)


def make_sites(
    options: ReplicationOptions,
    host: StandaloneHost,
    backlog: Backlog | None,
    registry: CollectorRegistry,
    snapshot: Callable[[], model.ProcessStatus],
) -> Iterator[tuple[Listener, BoundedSite]]:
    """Yield each HTTP listener of a process, and what it serves.

    :param backlog: the rows that this process sent most recently; ``None`` if it does
        not use the extension.
    :param registry: the registry of the process's metrics.
    :param snapshot: returns the current status.
    """
    replication = ReplicationResource(
        host.streams,
        options.instance_name,
        options.secret,
        host.observer,
        epoch=None if backlog is None else host.identity.instance_id,
        backlog=backlog,
        status=lambda: model.encode_status(snapshot()),
    )

    def refused(status: int, why: str) -> None:
        host.observer.observe(RequestRefused(status, why))

    hosts = [at.host for at in options.instances.values() if at.host]
    for listener in options.listeners:
        if listener.direct_tcp:
            continue
        site = BoundedSite(
            make_root(listener.resources, registry, snapshot, replication),
            served_hosts(listener.addresses, [*options.allowed_hosts, *hosts]),
            guarded=None if options.secret is None else _REPLICATION_PATH,
            max_connections=options.max_http_connections,
            refused=refused,
        )
        yield listener, site
