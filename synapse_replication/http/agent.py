"""HTTP GET requests to other instances: treq over TCP, TLS and Unix sockets, bounded.

Theory of operation: treq sends a request and collects the body of its response. Two
layers below it bound what a peer can make this process store or compute, because
Twisted's client bounds neither:

* :class:`_BoundedHead` is a protocol between a connection and Twisted's HTTP client. It
  aborts the connection if the head of a response (status line, headers, and responses
  such as 100) exceeds :data:`MAX_HEAD_LENGTH` or :data:`MAX_HEAD_LINES`.
* :class:`_BoundedAgent` is an agent between treq and Twisted's agent. It decompresses
  a body itself, up to a bound, and counts what would become Python objects.

If a bound is exceeded, the connection is aborted and the request fails with
:exc:`ResponseTooLargeError`.

treq and Twisted's web client take memory and time when a process starts, so this module
is imported only if addresses of instances are configured.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, cast

import attrs
from hyperlink import URL, DecodedURL
from treq.client import HTTPClient
from twisted.internet.endpoints import UNIXClientEndpoint, wrapClientTLS
from twisted.internet.interfaces import IReactorTime, IStreamClientEndpoint
from twisted.internet.protocol import Protocol as TwistedProtocol, connectionDone
from twisted.protocols.policies import ProtocolWrapper, WrappingFactory
from twisted.python.components import proxyForInterface
from twisted.python.failure import Failure
from twisted.web import client as web
from twisted.web.http_headers import Headers
from twisted.web.iweb import IAgent, IAgentEndpointFactory, IResponse
from typing_extensions import override
from zope.interface import implementer

from synapse_replication.errors import ResponseTooLargeError
from synapse_replication.http.location import InstanceLocation
from synapse_replication.streams.rows import count_values
from synapse_replication.transport.host_names import needs_resolving
from synapse_replication.transport.reactor import IReactor
from synapse_replication.transport.resolving import host_endpoint
from synapse_replication.transport.tls import TlsConfig

#: Time limit of connecting, in s.
CONNECT_TIMEOUT = 10.0
#: The longest accepted head of a response, in bytes.
MAX_HEAD_LENGTH = 64 * 1024
#: The most lines of a response's head. Stock instances send about 10.
MAX_HEAD_LINES = 256
#: The longest accepted body of a response that reports an error, in bytes.
MAX_ERROR_LENGTH = 64 * 1024
#: The most bytes of a body to decompress in one turn of the reactor.
_INFLATED_PER_TURN = 1024 * 1024

_trust_system: Final = TlsConfig().for_connecting


def make_url(location: InstanceLocation, path: Sequence[str]) -> tuple[DecodedURL, str]:
    """Return the URL of a path below an instance's replication resource.

    :return: the URL, and a text for display.
    """
    alias, host = _alias_of(location), location.host or ""
    scheme = "https" if location.tls and location.path is None else "http"
    root = URL(scheme=scheme, host=alias or host, port=location.port)
    url = DecodedURL(root).child("_synapse", "replication", *path)
    if location.path is not None:
        return url, f"unix:{location.path}:/{'/'.join(url.path)}"
    shown = f"[{host}]" if ":" in host else host
    return url, url.to_text().replace(alias, shown) if alias else url.to_text()


def _alias_of(location: InstanceLocation) -> str:
    """Return the host name in the URL of a location that has none of its own.

    A Unix socket has no host, and a URL cannot contain every name of a host. A pool
    identifies connections by host, so each location has its own alias.

    :return: an empty text if the URL contains the host itself.
    """
    if location.path is not None:
        return f"{_digest(location.path)}.unix.invalid"
    host = location.host
    # hyperlink encodes an IPv6 address as if it were a name.
    if host is not None and (needs_resolving(host) or ":" in host):
        return f"{_digest(host)}.host.invalid"
    return ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@implementer(IAgentEndpointFactory)
class _Endpoints:
    def __init__(
        self,
        reactor: IReactor,
        locations: Iterable[InstanceLocation],
        tls_for: Callable[[str], Any],
    ) -> None:
        self._reactor = reactor
        self._aliases = {_alias_of(each).encode(): each for each in locations}
        self._tls_for = tls_for

    def endpointForURI(self, uri: web.URI) -> IStreamClientEndpoint:
        endpoint: Any
        at = self._aliases.get(uri.host)
        host = at.host if at is not None and at.host else uri.host.decode("ascii")
        if at is not None and at.path is not None:
            endpoint = UNIXClientEndpoint(  # type: ignore[no-untyped-call]
                self._reactor, at.path, timeout=CONNECT_TIMEOUT
            )
        else:
            endpoint = host_endpoint(self._reactor, host, uri.port, CONNECT_TIMEOUT)
        if uri.scheme == b"https":
            creator = self._tls_for(host)
            endpoint = wrapClientTLS(creator, endpoint)
        return cast(IStreamClientEndpoint, _BoundedEndpoint(endpoint))


@implementer(IStreamClientEndpoint)
@attrs.frozen
class _BoundedEndpoint:
    """An endpoint that bounds the heads of the responses it receives."""

    _endpoint: Any

    def connect(self, factory: Any) -> Any:
        bounded = WrappingFactory(factory)  # type: ignore[no-untyped-call]
        bounded.protocol = _BoundedHead
        bounded.noisy = False
        connecting = self._endpoint.connect(bounded)
        return connecting.addCallback(lambda made: made.wrappedProtocol)


@attrs.define
class _Head:
    """How much of the head of a response was received: bytes and lines."""

    length: int = 0
    lines: int = 0


class _BoundedHead(ProtocolWrapper):
    """The protocol below Twisted's HTTP client, which bounds the head of a response."""

    #: The received part of a response's head; ``None`` while none is expected.
    _head: _Head | None = None
    _error: ResponseTooLargeError | None = None

    @override
    def write(self, data: bytes) -> None:
        self._head = _Head()
        super().write(data)  # type: ignore[no-untyped-call]

    @override
    def writeSequence(self, data: Iterable[bytes]) -> None:
        self._head = _Head()
        super().writeSequence(data)  # type: ignore[no-untyped-call]

    def pauseProducing(self) -> None:
        # The client pauses the connection when the head is complete.
        self._head = None
        transport: Any = self.transport
        transport.pauseProducing()

    def stopProducing(self) -> None:
        """Abort the connection.

        Twisted's client lets the receiver of a body stop the connection, but not abort
        it. Over TLS, a peer could delay a connection that is closed in order.
        """
        transport: Any = self.transport
        transport.abortConnection()

    @override
    def dataReceived(self, data: bytes) -> None:
        if self._error is not None:
            return
        head = self._head
        super().dataReceived(data)  # type: ignore[no-untyped-call]
        if head is None or self._head is not head:
            # The data ended the head; the next request may have been sent, too.
            return
        head.length += len(data)
        head.lines += data.count(b"\n")
        if head.length > MAX_HEAD_LENGTH or head.lines > MAX_HEAD_LINES:
            self._error = ResponseTooLargeError(
                f"the head of the response has more than {MAX_HEAD_LENGTH} bytes or "
                f"{MAX_HEAD_LINES} lines"
            )
            self.stopProducing()

    @override
    def connectionLost(self, reason: Failure) -> None:  # type: ignore[override]
        if self._error is not None:
            reason = Failure(self._error)  # type: ignore[no-untyped-call]
        super().connectionLost(reason)  # type: ignore[no-untyped-call]


def make_agent(
    reactor: IReactor,
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
    aliased = [each for each in locations.values() if _alias_of(each)]
    endpoints = _Endpoints(reactor, aliased, tls_for)
    agent: IAgent = untyped.Agent.usingEndpointFactory(reactor, endpoints, pool)
    return agent, pool


async def get(
    agent: IAgent,
    url: DecodedURL,
    headers: Mapping[str, str],
    *,
    reactor: IReactorTime,
    max_length: int,
    max_values: int,
) -> tuple[int, bytes]:
    """Send a GET request. Cancelling it aborts the connection.

    :param max_length: the longest accepted body of a response, in bytes, as received
        and decompressed. A body that reports an error is bounded by
        :data:`MAX_ERROR_LENGTH`.
    :param max_values: the most JSON values of a body; see :func:`.count_values`.
    :return: the status and the body of the response.
    :raises ResponseTooLargeError: if the response exceeds a bound.
    """
    bounded = _BoundedAgent(agent, reactor, max_length, max_values)
    # A client stores the cookies of its peers, so it sends no other request.
    client = HTTPClient(bounded)
    try:
        response = await client.get(
            url,
            headers=Headers({name: [value] for name, value in headers.items()}),
            allow_redirects=False,
            unbuffered=True,
            # treq declares a type of its own; it needs a reactor only for its timeouts.
            reactor=cast(Any, reactor),
        )
        code = int(response.code)
        try:
            return code, await response.content()
        except ResponseTooLargeError as error:
            if code == 200:
                raise
            return code, f"({error})".encode()
    except BaseException:
        bounded.abort()
        raise


@implementer(IAgent)
@attrs.define(eq=False)
class _BoundedAgent:
    """An agent for one request, which bounds the body of the response.

    It removes the header ``Content-Encoding``, so that nothing is decompressed above
    it.
    """

    _agent: IAgent
    _clock: IReactorTime
    _max_length: int
    _max_values: int
    _body: _BoundedBody | None = attrs.field(default=None, init=False)

    def request(self, *request: Any) -> Any:
        sending: Any = self._agent.request(*request)
        return sending.addCallback(self._bound)

    def _bound(self, response: Any) -> Any:
        encodings = response.headers.getRawHeaders(b"Content-Encoding", [])
        response.headers.removeHeader(b"Content-Encoding")
        length = self._max_length
        if response.code != 200:
            length = min(length, MAX_ERROR_LENGTH)
        is_compressed = [each.strip().lower() for each in encodings] == [b"gzip"]
        self._body = _BoundedBody(self._clock, length, self._max_values, is_compressed)
        return _BoundedResponse(response, self._body)

    def abort(self) -> None:
        """Abort the connection, if the response has begun."""
        if self._body is not None:
            self._body.abort()


class _BoundedResponse(proxyForInterface(IResponse)):  # type: ignore[misc]
    def __init__(self, original: Any, body: _BoundedBody) -> None:
        super().__init__(original)
        self._body = body

    def deliverBody(self, protocol: Any) -> None:
        self._body.receiver = protocol
        self.original.deliverBody(self._body)


class _BoundedBody(TwistedProtocol):
    """The protocol that receives a body, and delivers it decompressed.

    At most :data:`_INFLATED_PER_TURN` bytes are decompressed in a turn of the reactor;
    meanwhile, the connection is paused.
    """

    #: The protocol to which the body is delivered.
    receiver: Any = None

    def __init__(
        self, clock: Any, max_length: int, max_values: int, is_compressed: bool
    ) -> None:
        self._clock = clock
        self._max_length = max_length
        self._max_values = max_values
        self._unzip = zlib.decompressobj(16 + zlib.MAX_WBITS) if is_compressed else None
        self._received = self._length = self._values = 0
        self._is_inflating = False
        self._end: Failure | None = None
        self._error: Exception | None = None

    @override
    def dataReceived(self, data: bytes) -> None:
        self._received += len(data)
        if self._unzip is None:
            self._deliver(data)
        else:
            self._inflate(self._unzip, self._unzip.unconsumed_tail + data)

    def _inflate(self, unzip: Any, data: bytes) -> None:
        self._is_inflating = False
        try:
            self._deliver(unzip.decompress(data, _INFLATED_PER_TURN))
        except zlib.error as error:
            self._fail(error)
        if unzip.unconsumed_tail and self._error is None:
            self._is_inflating = True
            self._call("pauseProducing")
            self._clock.callLater(0, self._continue, unzip)
        elif self._end is not None:
            self._finish(self._end)

    def _continue(self, unzip: Any) -> None:
        self._inflate(unzip, unzip.unconsumed_tail)
        if not self._is_inflating:
            self._call("resumeProducing")

    def _deliver(self, data: bytes) -> None:
        self._length += len(data)
        self._values += count_values(data)
        if max(self._received, self._length) > self._max_length:
            what = f"is longer than {self._max_length} bytes"
        elif self._values > self._max_values:
            what = f"has more than {self._max_values} JSON values"
        else:
            if self._error is None:
                self.receiver.dataReceived(data)
            return
        self._fail(ResponseTooLargeError(f"the response {what}"))

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
            self.abort()

    @override
    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._end = reason
        if not self._is_inflating:
            self._finish(reason)

    def _finish(self, reason: Failure) -> None:
        if self._error is not None:
            reason = Failure(self._error)  # type: ignore[no-untyped-call]
        elif (
            isinstance(reason.value, web.ResponseDone)
            and self._unzip is not None
            and not self._unzip.eof
        ):
            early = zlib.error("the compressed response ends early")
            reason = Failure(early)  # type: ignore[no-untyped-call]
        self.receiver.connectionLost(reason)

    def abort(self) -> None:
        """Abort the connection; see :meth:`_BoundedHead.stopProducing`."""
        self._call("stopProducing")

    def _call(self, name: str) -> None:
        # Some transports of treq's testing tools do not have these methods.
        method = getattr(self.transport, name, None)
        if method is not None:
            method()
