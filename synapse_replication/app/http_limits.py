"""What an HTTP listener refuses before it costs anything: bodies, hosts, connections.

Theory of operation: nothing that is served here takes a body, so a request that
announces one, by its length or in chunks, is answered with 413 once its headers are
read; nothing of the body is. (Twisted would store it, and parse a form, before any code
of ours is asked.) A request that names a host which this listener does not serve comes
from a web page whose own name was pointed at this machine; it is answered with 421. An
address is always served: a page cannot be bound to one. When too many connections are
open, the one that has been idle longest is closed, so that idle clients keep out
nobody.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Final

from twisted.internet.address import UNIXAddress
from twisted.internet.interfaces import IAddress
from twisted.python.failure import Failure
from twisted.web.http import HTTPChannel
from twisted.web.resource import IResource, Resource
from twisted.web.server import Site
from typing_extensions import override

__all__ = ["MAX_CONNECTIONS", "BoundedSite", "served_hosts"]

#: Connections of a listener that are open at a time, unless it is configured.
MAX_CONNECTIONS: Final = 500
#: How long a client whose body was refused has to read the answer, in s.
_REFUSED_FOR: Final = 1.0
#: What needs no check of the host: it says nothing that a web page may not read.
_FOR_EVERYBODY: Final = frozenset({b"/health"})
_PORT: Final = re.compile(r":[0-9]*\Z")
_TOO_LARGE: Final = b"no request takes a body here\n"


def served_hosts(bound_to: Iterable[str], more: Iterable[str]) -> frozenset[str]:
    """Return the names under which a listener serves.

    :param bound_to: the addresses on which it listens.
    :param more: further names, for instance those in ``instance_map``.
    """
    name = socket.gethostname()
    names = {"localhost", name, name.partition(".")[0], *bound_to, *more}
    return frozenset(map(_plain, names))


def _plain(name: str) -> str:
    return name.lower().rstrip(".")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


class _BoundedChannel(HTTPChannel):
    """A connection that reads no body.

    :ivar site: the listener that it belongs to.
    :ivar is_busy: a request is being answered.
    """

    site: BoundedSite
    transport: Any
    is_busy = False
    _is_refused = False

    def allHeadersReceived(self) -> None:
        # None: in chunks.
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
        # To close with bytes unread resets the connection, perhaps before the client
        # has read the answer: stop reading, and close a little later.
        self.transport.pauseProducing()
        self.setTimeout(_REFUSED_FOR)  # type: ignore[no-untyped-call]

    def requestDone(self, request: Any) -> None:
        self.is_busy = False
        self.site.used(self)
        super().requestDone(request)  # type: ignore[no-untyped-call]

    def dataReceived(self, data: bytes) -> None:
        if not self._is_refused:
            super().dataReceived(data)  # type: ignore[no-untyped-call]

    def rawDataReceived(self, data: bytes) -> None:
        if not self._is_refused:
            super().rawDataReceived(data)

    def timeoutConnection(self) -> None:
        # Idle clients are everyday: no log line, and no patience.
        self.transport.abortConnection()

    def connectionLost(self, reason: Failure) -> None:  # type: ignore[override]
        self.site.lost(self)
        super().connectionLost(reason)  # type: ignore[no-untyped-call]


class _MisdirectedResource(Resource):
    isLeaf = True  # noqa: N815

    def render(self, request: Any) -> bytes:
        request.setResponseCode(421)
        request.setHeader(b"Content-Type", b"text/plain; charset=utf-8")
        return (
            b"this listener does not serve the host that the request names; use its "
            b"address, or add the name to synapse_replication.http.allowed_hosts\n"
        )


class BoundedSite(Site):
    """A site that refuses bodies and foreign hosts, and bounds its connections.

    :param hosts: the names that it serves, besides addresses; see
        :func:`served_hosts`. ``None`` for any.
    :param is_guarded: returns whether a path needs a secret, so that the host does
        not matter.
    :param refused: told of each request that is refused: the status, and why.
    """

    def __init__(
        self,
        root: IResource,
        hosts: frozenset[str] | None,
        *,
        timeout: float,
        max_connections: int = MAX_CONNECTIONS,
        is_guarded: Callable[[bytes], bool] = lambda path: False,
        refused: Callable[[int, str], object] = lambda status, why: None,
    ) -> None:
        super().__init__(root, timeout=timeout)  # type: ignore[no-untyped-call]
        self._hosts = hosts
        self._max_connections = max_connections
        self._is_guarded = is_guarded
        self.refused = refused
        #: Those that are open, the one used longest ago first.
        self._channels: OrderedDict[_BoundedChannel, None] = OrderedDict()

    # mypy: the base class has a function that makes a wrapper which speaks HTTP/2 too.
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

    def used(self, channel: _BoundedChannel) -> None:
        """Note that a request on a connection was answered."""
        if channel in self._channels:
            self._channels.move_to_end(channel)

    def lost(self, channel: _BoundedChannel) -> None:
        """Forget a connection."""
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
            self._hosts is None
            or path in _FOR_EVERYBODY
            or self._is_guarded(path)
            # No web page reaches a Unix socket.
            or isinstance(request.getHost(), UNIXAddress)
        ):
            return True
        host = (request.getHeader(b"Host") or b"").decode("latin-1")
        name = _plain(_PORT.sub("", host))
        # Without the header it is no browser that asks.
        return not name or name in self._hosts or _is_address(name)
