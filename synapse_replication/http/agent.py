"""HTTP GET requests to other instances, with Twisted's web client.

That takes memory and time when a process starts, so this module is imported only if
addresses of instances are configured.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, cast

from hyperlink import URL, DecodedURL
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import (
    HostnameEndpoint,
    UNIXClientEndpoint,
    wrapClientTLS,
)
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.internet.protocol import Protocol as TwistedProtocol, connectionDone
from twisted.python.failure import Failure
from twisted.web import client as web
from twisted.web.http_headers import Headers
from twisted.web.iweb import IAgent, IAgentEndpointFactory
from zope.interface import implementer

from synapse_replication.http.location import InstanceLocation
from synapse_replication.transport.tls import TlsConfig

#: Time limit of connecting, in s.
CONNECT_TIMEOUT = 10.0

_trust_system: Final = TlsConfig().for_connecting


def make_url(location: InstanceLocation, path: Sequence[str]) -> tuple[DecodedURL, str]:
    """Return the URL of a path below an instance's replication resource.

    :return: the URL, and a text for display.
    """
    if location.path is not None:
        # A pool identifies connections by host, so each socket gets its own host name.
        root = URL(scheme="http", host=_socket_host(location.path))
    else:
        scheme = "https" if location.tls else "http"
        root = URL(scheme=scheme, host=location.host or "", port=location.port)
    url = DecodedURL(root).child("_synapse", "replication", *path)
    if location.path is not None:
        return url, f"unix:{location.path}:/{'/'.join(url.path)}"
    return url, url.to_text()


def _socket_host(path: str) -> str:
    return f"{hashlib.sha256(path.encode()).hexdigest()[:32]}.unix.invalid"


@implementer(IAgentEndpointFactory)
class _Endpoints:
    def __init__(
        self, reactor: Any, sockets: Iterable[str], tls_for: Callable[[str], Any]
    ) -> None:
        self._reactor = reactor
        self._sockets = {_socket_host(path).encode(): path for path in sockets}
        self._tls_for = tls_for

    def endpointForURI(self, uri: web.URI) -> IStreamClientEndpoint:
        endpoint: Any
        if uri.host in self._sockets:
            path = self._sockets[uri.host]
            endpoint = UNIXClientEndpoint(self._reactor, path, timeout=CONNECT_TIMEOUT)  # type: ignore[no-untyped-call]
        else:
            endpoint = HostnameEndpoint(
                self._reactor, uri.host, uri.port, timeout=CONNECT_TIMEOUT
            )
        if uri.scheme == b"https":
            creator = self._tls_for(uri.host.decode("ascii"))
            endpoint = wrapClientTLS(creator, endpoint)
        return cast(IStreamClientEndpoint, endpoint)


def make_agent(
    reactor: Any,
    locations: Mapping[str, InstanceLocation],
    tls_for: Callable[[str], Any] = _trust_system,
) -> tuple[IAgent, Any]:
    """Return an agent with persistent connections over TCP, TLS and Unix sockets.

    :param locations: the location of each instance, by its name.
    :param tls_for: returns the TLS connection creator for a host name. It is called for
        each TLS connection; the default trusts the system's authorities.
    :return: the agent, and its ``HTTPConnectionPool``, which the caller must close.
    """
    # twisted.web is only partly typed.
    untyped: Any = web
    pool = untyped.HTTPConnectionPool(reactor, persistent=True)
    # A retry needs a new txn_id, so the pool must not repeat requests by itself.
    pool.retryAutomatically = False
    sockets = [at.path for at in locations.values() if at.path is not None]
    endpoints = _Endpoints(reactor, sockets, tls_for)
    agent: IAgent = untyped.Agent.usingEndpointFactory(reactor, endpoints, pool)
    return agent, pool


async def get(
    agent: IAgent, url: DecodedURL, headers: Mapping[str, str], max_length: int
) -> tuple[int, bytes]:
    """Send a GET request.

    :param max_length: the longest accepted response body, in bytes.
    :return: the status and the body of the response.
    """
    decompressing: Any = web.ContentDecoderAgent(  # type: ignore[no-untyped-call]
        agent, [(b"gzip", web.GzipDecoder)]
    )
    raw = Headers({name: [value] for name, value in headers.items()})
    address = url.to_uri().to_text().encode("ascii")
    response = await decompressing.request(b"GET", address, raw)
    body = _Body(max_length)
    response.deliverBody(body)
    return int(response.code), await body.finished


class _Body(TwistedProtocol):
    """Collector of a response body of bounded length.

    :ivar finished: a Deferred that fires with the body. Cancelling it aborts the
        connection.
    """

    def __init__(self, max_length: int) -> None:
        self._max_length = max_length
        self.finished: Deferred[bytes] = Deferred(lambda _: self._abort())
        self._parts: list[bytes] = []
        self._length = 0

    def dataReceived(self, data: bytes) -> None:
        self._parts.append(data)
        self._length += len(data)
        if self._length > self._max_length and not self.finished.called:
            self._parts = []
            self.finished.errback(
                ValueError(f"the response is longer than {self._max_length} bytes")
            )
            self._abort()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if self.finished.called:
            return
        if isinstance(reason.value, web.ResponseDone):
            self.finished.callback(b"".join(self._parts))
        else:
            self.finished.errback(reason)

    def _abort(self) -> None:
        # Some transports of treq's testing tools do not have this method.
        abort = getattr(self.transport, "abortConnection", None)
        if abort is not None:
            abort()
