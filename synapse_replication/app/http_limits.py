"""Limits of an HTTP listener on request bodies, hosts and connections.

Theory of operation: no resource here accepts a body, so a request that announces one,
by its length or in chunks, is answered with 413 after its headers were read; the body
is not read. (Twisted would store the body, and parse it if it is a form, before calling
any code of this package.) A request for a host that this listener does not serve may
come from a web page whose domain was made to resolve to this machine (DNS rebinding);
the request is answered with 421. The host is not checked if the path is public or
requires a secret, or if the listener is a Unix socket. An IP address is accepted as the
host, because rebinding needs a domain name; and so is a name that exists only in the
network of this machine, because an attacker cannot make it resolve to something else: a
name without a dot, as containers have it, a name below a domain that public DNS does
not have, or one below a search domain of this machine. When a client connects and the
maximum number of connections is open, the one that has been idle for the longest time
is closed, so that idle clients cannot lock out others. For the same reason, a
connection is closed if a request is not complete some seconds after it, or the
connection, began. Requests are answered in the order of their arrival, for a few ms in
each turn of the reactor, so that a client that sends many at once does not delay
replication.
"""

from __future__ import annotations

import re
import socket
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from twisted.internet.abstract import isIPAddress, isIPv6Address
from twisted.internet.address import UNIXAddress
from twisted.internet.interfaces import IAddress
from twisted.python.failure import Failure
from twisted.web.http import HTTPChannel
from twisted.web.resource import IResource, Resource
from twisted.web.server import Request, Site
from typing_extensions import override

#: How long a connection may be idle, in s. Peers close their connections earlier.
_IDLE_TIMEOUT: Final = 300
#: The time that a client has to read a 413 response before its connection is closed, in
#: s.
_REFUSED_FOR: Final = 1.0
#: The time within which a request must be complete, in s.
REQUEST_TIMEOUT: Final = 10.0
#: The time in s for which requests are answered in one turn of the reactor.
_SLICE: Final = 0.02
#: Paths that are served under any host, because their content is not confidential.
_PUBLIC_PATHS: Final = frozenset({b"/health"})
_PORT: Final = re.compile(r":[0-9]*\Z")
_TOO_LARGE: Final = b"requests to this listener must not have a body\n"


def served_hosts(bound_to: Iterable[str], more: Iterable[str]) -> frozenset[str]:
    """Return the host names that a listener serves, in lower case.

    :param bound_to: the addresses on which it listens.
    :param more: further names, for instance those in ``instance_map``.
    """
    name = socket.gethostname()
    names = {"localhost", name, name.partition(".")[0], *_aliases(name)}
    names |= {*bound_to, *more}
    return frozenset(map(_plain, names))


def _aliases(name: str) -> set[str]:
    """Return the names of this machine in its file of hosts, without asking DNS."""
    try:
        lines = Path("/etc/hosts").read_text("ascii", "ignore").splitlines()
    except OSError:
        return set()
    entries = [line.partition("#")[0].split()[1:] for line in lines]
    return {alias for names in entries if name in names for alias in names}


#: Domains that public DNS does not have.
_PRIVATE_DOMAINS: Final = (
    "home.arpa",
    "internal",
    "local",
    "localdomain",
    "localhost",
    "svc",
    "cluster.local",
)


def search_domains(path: Path = Path("/etc/resolv.conf")) -> tuple[str, ...]:
    """Return the domains in which this machine looks up names without a dot.

    In a pod of Kubernetes, ``NAMESPACE.svc.cluster.local`` is one of them; then
    ``NAMESPACE`` is another, because ``SERVICE.NAMESPACE`` is a name of a service.
    Domains of one label are omitted otherwise, because anyone can register a name in
    them.
    """
    try:
        lines = path.read_text("ascii", "ignore").splitlines()
    except OSError:
        return ()
    words = [line.split() for line in lines]
    found = [
        _plain(domain)
        for first, *domains in filter(None, words)
        if first in ("search", "domain")
        for domain in domains
    ]
    namespaces = [
        domain.partition(".")[0] for domain in found if ".svc." in f"{domain}."
    ]
    return (*(domain for domain in found if "." in domain), *namespaces)


def _plain(name: str) -> str:
    return name.lower().rstrip(".")


class _QueuedRequest(Request):
    """A request that waits for its turn."""

    channel: Any

    def process(self) -> None:
        self.channel.site.enqueue(self)

    def answer(self) -> None:
        """Answer the request, once its client reads; not if the client is gone."""
        if self.channel is None:
            return
        if self.channel.is_full:
            self.channel.hold(self)
        else:
            super().process()  # type: ignore[no-untyped-call]


class _BoundedChannel(HTTPChannel):
    """An HTTP connection that accepts no request bodies.

    :ivar site: the site that it belongs to.
    :ivar is_busy: whether a request is being answered.
    :ivar is_full: whether the client has not read earlier answers yet.
    """

    site: BoundedSite
    transport: Any
    is_busy = is_full = False
    _held: _QueuedRequest | None = None
    _is_refused = False
    #: Runs from the first byte of a request until its headers are complete.
    _request_timer: Any = None

    def connectionMade(self) -> None:
        super().connectionMade()  # type: ignore[no-untyped-call]
        self._start_timer()

    def _start_timer(self) -> None:
        self._request_timer = self.callLater(  # type: ignore[no-untyped-call]
            REQUEST_TIMEOUT, self._timed_out
        )

    def _stop_timer(self) -> None:
        timer, self._request_timer = self._request_timer, None
        if timer is not None:
            timer.cancel()

    def _timed_out(self) -> None:
        self._request_timer = None
        self.site.refused(408, "a request was not complete in time")
        self.transport.abortConnection()

    def allHeadersReceived(self) -> None:
        self._stop_timer()
        # The length is None for a chunked body.
        if self.length == 0:
            self.is_busy = True
            super().allHeadersReceived()  # type: ignore[no-untyped-call]
            return
        self._is_refused = True
        self.site.refused(413, "a request had a body")
        self.transport.write(
            b"HTTP/1.1 413 Content Too Large\r\nConnection: close\r\n"
            b"Content-Type: text/plain; charset=utf-8\r\nContent-Length: %d\r\n\r\n%b"
            % (len(_TOO_LARGE), _TOO_LARGE)
        )
        # Closing a connection with unread bytes resets it, perhaps before the client
        # has read the response: stop reading, and close it a little later.
        self.transport.pauseProducing()
        self.setTimeout(_REFUSED_FOR)  # type: ignore[no-untyped-call]

    def hold(self, request: _QueuedRequest) -> None:
        """Answer a request when the client has read the previous answers."""
        self._held = request
        # If the client never reads, the connection counts as idle.
        self.is_busy = False

    def pauseProducing(self) -> None:
        self.is_full = True
        super().pauseProducing()  # type: ignore[no-untyped-call]

    def resumeProducing(self) -> None:
        self.is_full = False
        super().resumeProducing()  # type: ignore[no-untyped-call]
        request, self._held = self._held, None
        if request is not None:
            self.is_busy = True
            self.site.enqueue(request)

    def requestDone(self, request: Any) -> None:
        self.is_busy = False
        self.site.used(self)
        super().requestDone(request)  # type: ignore[no-untyped-call]

    def dataReceived(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._request_timer is None and not self.is_busy:
            self._start_timer()
        super().dataReceived(data)  # type: ignore[no-untyped-call]

    def rawDataReceived(self, data: bytes) -> None:
        if not self._is_refused:
            super().rawDataReceived(data)

    def timeoutConnection(self) -> None:
        # Idle clients are normal: close the connection without a log line.
        self.transport.abortConnection()

    def connectionLost(self, reason: Failure) -> None:  # type: ignore[override]
        self._stop_timer()
        self.site.lost(self)
        super().connectionLost(reason)  # type: ignore[no-untyped-call]


class _MisdirectedResource(Resource):
    isLeaf = True  # noqa: N815

    def render(self, request: Any) -> bytes:
        request.setResponseCode(421)
        request.setHeader(b"Content-Type", b"text/plain; charset=utf-8")
        return (
            b"this listener does not serve the host that the request names; use the "
            b"listener's IP address, or add the name to "
            b"synapse_replication.http.allowed_hosts\n"
        )


class BoundedSite(Site):
    """A site that refuses bodies and unknown hosts, and limits its connections.

    :param hosts: the host names that it serves, in addition to addresses; see
        :func:`served_hosts`.
    :param guarded: the beginning of the paths that require a secret, for which the host
        is not checked; ``None`` if there are none.
    :param max_connections: the most connections that are open at a time.
    :param refused: called with a status and the reason for each refused request, and
        for each connection that is refused because all others are busy.
    """

    def __init__(
        self,
        root: IResource,
        hosts: frozenset[str],
        *,
        guarded: bytes | None,
        max_connections: int,
        refused: Callable[[int, str], object],
    ) -> None:
        super().__init__(root, timeout=_IDLE_TIMEOUT)  # type: ignore[no-untyped-call]
        self._hosts = hosts
        domains = (*_PRIVATE_DOMAINS, *search_domains())
        self._domains = tuple(f".{domain}" for domain in domains)
        self._max_connections = max_connections
        self._guarded = guarded
        self.refused = refused
        #: The open connections, the least recently used first.
        self._channels: OrderedDict[_BoundedChannel, None] = OrderedDict()
        #: At most one for each connection.
        self._waiting: deque[_QueuedRequest] = deque()
        self._is_scheduled = False

    noisy = False
    displayTracebacks = False  # noqa: N815
    requestFactory = _QueuedRequest  # noqa: N815
    # mypy: in the base class, this is a function that returns a wrapper for HTTP/2.
    protocol = _BoundedChannel  # type: ignore[assignment]

    @override
    def buildProtocol(self, addr: IAddress | None) -> Any:
        if len(self._channels) >= self._max_connections:
            idle = next((c for c in self._channels if not c.is_busy), None)
            if idle is None:
                self.refused(503, "too many connections are busy")
                return None
            self.lost(idle)
            idle.transport.abortConnection()
        channel = super().buildProtocol(addr)  # type: ignore[no-untyped-call]
        self._channels[channel] = None
        return channel

    @override
    def log(self, request: Any) -> None:
        """Write no access log: a line for each request would be noise."""

    def enqueue(self, request: _QueuedRequest) -> None:
        """Answer a request in a later turn of the reactor."""
        self._waiting.append(request)
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self.reactor.callLater(0, self._answer_some)

    def _answer_some(self) -> None:
        self._is_scheduled = False
        deadline = time.monotonic() + _SLICE
        while self._waiting:
            self._waiting.popleft().answer()
            if self._waiting and time.monotonic() >= deadline:
                self._schedule()
                return

    def used(self, channel: _BoundedChannel) -> None:
        """Record that a request on a connection was answered."""
        if channel in self._channels:
            self._channels.move_to_end(channel)

    def lost(self, channel: _BoundedChannel) -> None:
        """Remove a connection."""
        self._channels.pop(channel, None)

    @override
    def getResourceFor(self, request: Any) -> Any:
        if self._serves(request):
            return super().getResourceFor(request)  # type: ignore[no-untyped-call]
        self.refused(421, "a request named a host that is not served")
        return _MisdirectedResource()  # type: ignore[no-untyped-call]

    def _serves(self, request: Any) -> bool:
        path = request.path
        if (
            path in _PUBLIC_PATHS
            or (self._guarded is not None and path.startswith(self._guarded))
            # A web page cannot connect to a Unix socket.
            or isinstance(request.getHost(), UNIXAddress)
        ):
            return True
        host = (request.getHeader(b"Host") or b"").decode("latin-1")
        name = _plain(_PORT.sub("", host))
        if not name or name in self._hosts:
            # A browser always sends the header, so a request without it is served.
            return True
        if re.fullmatch(r"[a-z0-9_-]+", name) or name.endswith(self._domains):
            return True
        address = name.strip("[]")
        return isIPAddress(address) or isIPv6Address(address)
