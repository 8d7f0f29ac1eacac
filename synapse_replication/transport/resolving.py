"""Connections to host names and addresses as deployments have them.

Twisted's ``connectTCP`` resolves IPv4 addresses only, and its ``HostnameEndpoint``
rejects names with ``_``, which Docker Compose gives to containers.
:class:`ResolvingConnector` and :func:`host_endpoint` connect to all of them, and to
names that have IPv6 addresses only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import attrs
from twisted.internet.address import IPv4Address, IPv6Address
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.error import DNSLookupError
from twisted.internet.interfaces import (
    IConnector,
    IResolutionReceiver,
    IStreamClientEndpoint,
)
from twisted.internet.protocol import ClientFactory
from twisted.python.failure import Failure
from typing_extensions import override
from zope.interface import implementer

from synapse_replication.transport.host_names import is_ip_address, needs_resolving
from synapse_replication.transport.reactor import IReactor


@implementer(IResolutionReceiver)
class _Addresses:
    """Collects the addresses of a name."""

    def __init__(self, host: str, found: Deferred[list[str]]) -> None:
        self._host = host
        self._found = found
        self._addresses: list[str] = []

    def resolutionBegan(self, resolutionInProgress: Any) -> None:
        """Wait for addresses."""

    def addressResolved(self, address: Any) -> None:
        """Add an address."""
        if address.host not in self._addresses:
            self._addresses.append(address.host)

    def resolutionComplete(self) -> None:
        """Report the addresses."""
        if self._found.called:
            return
        if not self._addresses:
            error = DNSLookupError(f"no address found for {self._host}")
            self._found.errback(Failure(error))  # type: ignore[no-untyped-call]
        else:
            # IPv4 first: an IPv6 route that is missing takes seconds to fail.
            self._found.callback(sorted(self._addresses, key=lambda each: ":" in each))


def resolve(reactor: IReactor, host: str, port: int) -> Deferred[list[str]]:
    """Return the addresses of a host, the IPv4 addresses first.

    The Deferred fails with ``DNSLookupError`` if there are none.
    """
    found: Deferred[list[str]] = Deferred()
    reactor.nameResolver.resolveHostName(
        _Addresses(host, found),
        host,
        port,
        addressTypes=[IPv4Address, IPv6Address],
    )
    return found


def host_endpoint(
    reactor: IReactor, host: str, port: int, timeout: float
) -> IStreamClientEndpoint:
    """Return an endpoint that connects to a host by TCP.

    :param timeout: time limit of connecting to each address, in s.
    """
    if not needs_resolving(host):
        # Imported where an endpoint is made: it takes 0.3 MiB.
        from twisted.internet.endpoints import HostnameEndpoint

        return cast(
            IStreamClientEndpoint,
            HostnameEndpoint(reactor, host, port, timeout=timeout),
        )
    return _ResolvingEndpoint(reactor, host, port, timeout)


@implementer(IStreamClientEndpoint)
@attrs.frozen
class _ResolvingEndpoint:
    """Resolves a name that ``HostnameEndpoint`` rejects, and tries its addresses."""

    _reactor: IReactor
    _host: str
    _port: int
    _timeout: float

    def connect(self, protocolFactory: Any) -> Deferred[Any]:
        """Connect to the first address that accepts the connection."""
        return Deferred.fromCoroutine(self._connect(protocolFactory))

    async def _connect(self, factory: Any) -> Any:
        *others, last = await resolve(self._reactor, self._host, self._port)
        for address in others:
            try:
                return await self._to(address).connect(factory)
            except CancelledError:
                raise
            except Exception:  # noqa: BLE001 -- the last address reports its error
                continue
        return await self._to(last).connect(factory)

    def _to(self, address: str) -> Any:
        from twisted.internet.endpoints import TCP4ClientEndpoint, TCP6ClientEndpoint

        kind: Any = TCP6ClientEndpoint if ":" in address else TCP4ClientEndpoint
        return kind(self._reactor, address, self._port, self._timeout)


class _Relay(ClientFactory):
    """The factory of one attempt of a connector; builds the protocols of another."""

    noisy = False

    def __init__(self, connector: ResolvingConnector, factory: Any) -> None:
        self._connector = connector
        self._factory = factory

    @override
    def buildProtocol(self, addr: Any) -> Any:
        return self._factory.buildProtocol(addr)

    @override
    def clientConnectionFailed(self, connector: Any, reason: Failure) -> None:
        self._connector.attempt_failed(reason)

    @override
    def clientConnectionLost(self, connector: Any, reason: Failure) -> None:
        self._connector.lost(reason)


@implementer(IConnector)
class ResolvingConnector:
    """A connector to a host that may have only IPv6 addresses.

    At each attempt, it connects like the reactor's connector, which finds only IPv4
    addresses. If there are none, it resolves the name, and tries its addresses in turn.

    :param connect_to: called with an address and a factory; connects, and returns the
        connector.
    """

    def __init__(
        self,
        reactor: IReactor,
        host: str,
        port: int,
        factory: Any,
        connect_to: Callable[[str, Any], IConnector],
    ) -> None:
        self._reactor = reactor
        self._host = host
        self._port = port
        self._factory = factory
        self._connect_to = connect_to
        self._addresses: list[str] = []
        self._inner: Any = None
        self._resolving: Deferred[list[str]] | None = None
        self._is_active = self._is_resolved = False

    def connect(self) -> None:
        """Resolve the name, and connect."""
        if self._is_active:
            raise RuntimeError("can't connect in this state")
        self._is_active = True
        self._factory.doStart()
        self._factory.startedConnecting(self)
        if not self._is_active:
            return
        self._is_resolved = False
        self._attempt(self._host)

    def _resolved(self, addresses: list[str]) -> None:
        self._resolving = None
        self._addresses = addresses
        self._attempt(self._addresses.pop(0))

    def _attempt(self, address: str) -> None:
        self._inner = self._connect_to(address, _Relay(self, self._factory))

    def attempt_failed(self, reason: Failure) -> None:
        """Try the next address, or report the failure."""
        is_unknown = isinstance(reason.value, DNSLookupError)
        if is_unknown and self._is_active and not self._is_resolved:
            self._is_resolved = True
            self._resolving = found = resolve(self._reactor, self._host, self._port)
            found.addCallbacks(self._resolved, self._end_failed)
        elif self._addresses and self._is_active:
            self._attempt(self._addresses.pop(0))
        else:
            self._end_failed(reason)

    def lost(self, reason: Failure) -> None:
        """Report that the connection was lost."""
        self._is_active = False
        self._factory.clientConnectionLost(self, reason)
        if not self._is_active:
            self._factory.doStop()

    def _end_failed(self, reason: Failure) -> None:
        self._resolving = None
        self._is_active = False
        self._factory.clientConnectionFailed(self, reason)
        if not self._is_active:
            self._factory.doStop()

    def stopConnecting(self) -> None:
        """Stop an attempt to connect."""
        self._addresses = []
        if self._resolving is not None:
            self._resolving.cancel()
        elif self._inner is not None:
            self._inner.stopConnecting()

    def disconnect(self) -> None:
        """Close the connection, or stop connecting."""
        self._addresses = []
        if self._resolving is not None:
            self._resolving.cancel()
        elif self._inner is not None:
            self._inner.disconnect()

    def getDestination(self) -> Any:
        """Return the address that is, or was, connected."""
        if self._inner is not None:
            return self._inner.getDestination()
        return IPv4Address("TCP", self._host, self._port)


def connect_to_host(
    reactor: IReactor,
    host: str,
    port: int,
    factory: Any,
    connect_to: Callable[[str, Any], IConnector],
) -> IConnector:
    """Connect a factory to a host, and return the connector.

    An IP address, or any host on a reactor without a resolver, is connected directly.

    :param connect_to: see :class:`ResolvingConnector`.
    """
    if is_ip_address(host) or getattr(reactor, "nameResolver", None) is None:
        return connect_to(host, factory)
    connector = ResolvingConnector(reactor, host, port, factory, connect_to)
    connector.connect()
    return connector
