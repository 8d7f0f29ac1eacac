"""Redis at an address or behind Sentinel, whose master is found and followed.

Theory of operation: behind Sentinel, :class:`RedisMaster` queries the Sentinels in
turn, with a new connection for each query, until one of them returns the master's
address. The Sentinel that answered is queried first the next time. The queries are made

- each time a connection to Redis is opened, so that a reconnection goes to the current
  master. :class:`MasterConnector` replaces the reactor's connector, so the factories'
  delays, timers and reports need no change;
- every :data:`MASTER_QUERY_INTERVAL` s. A connection to a former master is aborted
  although it works: a former master or a replica accepts published messages but does
  not deliver them to the subscribers of the current master.

A permanent subscription to ``+switch-master`` was considered and rejected: its
connection can be half-open, and events are missed while it is reconnecting. A query
always ends with an answer, an error or a timeout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
from twisted.internet.defer import CancelledError, Deferred, TimeoutError
from twisted.internet.error import NotConnectingError
from twisted.internet.interfaces import IAddress, IConnector
from twisted.internet.protocol import ClientFactory, Protocol, connectionDone
from twisted.internet.task import LoopingCall
from twisted.python.failure import Failure
from twisted.python.reflect import safe_str
from txredisapi import InvalidData, ResponseError
from zope.interface import implementer

from synapse_replication.errors import ReplicationError
from synapse_replication.handlers.events import ConnectFailed
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.redis.factory import SynapseRedisFactory
from synapse_replication.redis.options import HostPort, RedisOptions, SentinelOptions
from synapse_replication.redis.resp import ReplyParser, encode
from synapse_replication.transport.error_text import error_text
from synapse_replication.transport.reactor import IReactor

#: The interval between queries for the master's address, in s.
MASTER_QUERY_INTERVAL = 5.0
#: Time limit for connecting to a Sentinel and receiving its answer, in s.
ANSWER_TIMEOUT = 3.0
#: The longest accepted answer (a host and a port), in bytes.
MAX_ADDRESS_LENGTH = 4096
#: The name under which connections to Sentinels are reported to the observer.
SENTINEL_NAME = "redis_sentinel"


class SentinelError(ReplicationError):
    """A query of one Sentinel, or of all, did not return the address of the master."""


class RedisMaster:
    """Opens the connections of a process to Redis, or to the master behind Sentinel.

    :param reactor: opens the connections, and is the clock.
    :param options: the address of Redis, or the Sentinels to query for it.
    :param observer: notified if no Sentinel returns the master's address.
    """

    def __init__(
        self, reactor: IReactor, options: RedisOptions, observer: ReplicationObserver
    ) -> None:
        self._reactor = reactor
        self._options = options
        self._observer = observer
        # The address of the Sentinel that gave the latest answer, if any, is first.
        self._addresses = list(options.sentinel.addresses) if options.sentinel else []
        self._connectors: list[MasterConnector] = []
        self._waiters: list[Deferred[HostPort]] = []
        self._search: Deferred[HostPort] | None = None
        self._checks = LoopingCall(self._check)
        self._checks.clock = reactor

    def connect(self, factory: SynapseRedisFactory) -> IConnector:
        """Open a connection; behind Sentinel, reconnect it when the master changes.

        :raises OSError: if a file of the TLS options cannot be read.
        :raises ValueError: if a file of the TLS options does not contain the expected
            PEM data.
        """
        if self._options.sentinel is None:
            return self._options.connect(self._reactor, factory)
        if self._options.tls is not None:
            # Raise the errors of an invalid file now, not only after a Sentinel's
            # answer.
            self._options.tls.context_factory(self._addresses[0][0])
        options = attrs.evolve(self._options, path=None)
        connector = MasterConnector(self, self._reactor, options, factory)
        self._connectors.append(connector)
        if not self._checks.running:
            self._checks.start(MASTER_QUERY_INTERVAL, now=False)
        connector.connect()
        return connector

    def stop(self) -> None:
        """Stop the checks and cancel pending queries; connections are not affected."""
        if self._checks.running:
            self._checks.stop()
        for waiter in list(self._waiters):
            waiter.cancel()
        if self._search is not None:
            self._search.cancel()

    # -- queries --------------------------------------------------------------------

    def locate(self) -> Deferred[HostPort]:
        """Return a Deferred that fires with the master's address.

        Concurrent callers share one search. The Deferred fails with
        :class:`SentinelError` if no Sentinel returns an address.
        """
        waiter: Deferred[HostPort] = Deferred(self._forget)
        self._waiters.append(waiter)
        if self._search is None:
            self._search = Deferred.fromCoroutine(self._query_all())
            self._search.addBoth(self._searched)
        return waiter

    def _forget(self, waiter: Deferred[HostPort]) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)

    def _searched(self, result: HostPort | Failure) -> None:
        self._search = None
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if waiter.called:
                # The callback of another waiter has just cancelled this waiter.
                continue
            if isinstance(result, Failure):
                waiter.errback(result)
            else:
                waiter.callback(result)

    async def _query_all(self) -> HostPort:
        reasons = []
        for address in list(self._addresses):
            try:
                return await self._query(address)
            except TimeoutError:
                why = f"no answer within {ANSWER_TIMEOUT:g} s"
            except (SentinelError, OSError, ValueError) as error:
                why = str(error)
            reasons.append(f"{address[0]}:{address[1]}: {why}")
            # Move the address to the end: the next query begins with another Sentinel.
            self._addresses.remove(address)
            self._addresses.append(address)
        assert self._options.sentinel is not None
        raise SentinelError(
            "no Sentinel returned the address of the master "
            f"{self._options.sentinel.master!r}: " + "; ".join(reasons)
        )

    def _query(self, address: HostPort) -> Deferred[HostPort]:
        assert self._options.sentinel is not None
        query = _MasterQuery(self._options.sentinel)
        host, port = address
        options = attrs.evolve(self._options, host=host, port=port, path=None)
        query.connector = options.connect(self._reactor, query, ANSWER_TIMEOUT)
        query.answer.addTimeout(ANSWER_TIMEOUT, self._reactor)
        return query.answer

    # -- following ------------------------------------------------------------------

    def _check(self) -> None:
        def failed(failure: Failure) -> None:
            if not isinstance(failure.value, CancelledError):
                why = error_text(failure.value)
                self._observer.observe(
                    ConnectFailed(SENTINEL_NAME, why, MASTER_QUERY_INTERVAL)
                )

        # If a query is pending, a second query would have the same result.
        if self._search is None:
            self.locate().addCallbacks(self._follow, failed)

    def _follow(self, master: HostPort) -> None:
        for connector in self._connectors:
            connector.follow(master)


@attrs.define(eq=False, repr=False)
@implementer(IConnector)
class MasterConnector(ClientFactory):
    """Connector that connects a factory to the current master.

    It is also the factory of the reactor's connector, whose events it passes on.
    """

    noisy = False

    _master: RedisMaster
    _reactor: IReactor
    _options: RedisOptions
    factory: SynapseRedisFactory
    _search: Deferred[HostPort] | None = attrs.field(default=None, init=False)
    _inner: IConnector | None = attrs.field(default=None, init=False)

    def connect(self) -> None:
        """Start an attempt to connect."""
        self.factory.startedConnecting(self)
        self._search = search = self._master.locate()
        search.addCallbacks(self._found, self._not_found)

    def _found(self, address: HostPort) -> None:
        self._search = None
        host, port = address
        self._options = attrs.evolve(self._options, host=host, port=port)
        try:
            self._inner = self._options.connect(self._reactor, self)
        except (OSError, ValueError) as error:
            # A file of the TLS options has become invalid since the start.
            self._failed(Failure(error))  # type: ignore[no-untyped-call]

    def _not_found(self, failure: Failure) -> None:
        self._search = None
        if not isinstance(failure.value, CancelledError):
            self._failed(failure)

    def _failed(self, reason: Failure) -> None:
        """Notify the factory, which reconnects, that the attempt failed."""
        self._inner = None
        self.factory.clientConnectionFailed(self, reason)

    def buildProtocol(self, addr: IAddress | None) -> Any:
        """Return a protocol of the factory. Called by the reactor."""
        return self.factory.buildProtocol(addr)

    def clientConnectionFailed(self, connector: IConnector, reason: Failure) -> None:
        """Notify the factory that the attempt failed. Called by the reactor."""
        self._failed(reason)

    def clientConnectionLost(self, connector: IConnector, reason: Failure) -> None:
        """Notify the factory, which reconnects, that the connection was lost."""
        self._inner = None
        self.factory.clientConnectionLost(self, reason)

    def follow(self, master: HostPort) -> None:
        """Abort a connection or attempt that is not to ``master``, and reconnect."""
        if self._inner is None or master == (self._options.host, self._options.port):
            return
        if not self.factory.connections:
            self._inner.stopConnecting()
        for connection in list(self.factory.connections):
            connection.abort(f"Sentinel reports a new master, {master[0]}:{master[1]}")

    def stopConnecting(self) -> None:
        """Stop the attempt in progress."""
        if self._search is not None:
            self._search.cancel()
        elif self._inner is not None:
            self._inner.stopConnecting()
        else:
            raise NotConnectingError("there is no connection attempt to stop")

    def disconnect(self) -> None:
        """Disconnect, or stop the attempt in progress."""
        if self._inner is not None:
            self._inner.disconnect()
        elif self._search is not None:
            self._search.cancel()

    def getDestination(self) -> Any:
        """Return the address of the connection or attempt, if there is one."""
        return None if self._inner is None else self._inner.getDestination()


class _MasterQuery(ClientFactory, Protocol):
    """A query of one Sentinel for the master's address.

    It is the protocol of its only connection, and the factory of that protocol.

    :ivar connector: set by the caller; cancelling ``answer`` disconnects it.
    :ivar answer: a Deferred that fires with the master's host and port.
    """

    noisy = False
    connector: IConnector
    transport: Any

    def __init__(self, options: SentinelOptions) -> None:
        self._options = options
        self.answer: Deferred[HostPort] = Deferred(
            lambda _: self.connector.disconnect()
        )
        self._reader = ReplyParser()
        self._length = 0
        self._waits_for_auth = options.password is not None

    def buildProtocol(self, addr: IAddress | None) -> Protocol:
        return self

    def clientConnectionFailed(self, connector: IConnector, reason: Failure) -> None:
        self._fail(error_text(reason.value))

    def connectionMade(self) -> None:
        options = self._options
        data = b""
        if options.password is not None:
            credentials = [options.username, options.password]
            arguments = [each.encode() for each in credentials if each is not None]
            data = encode(b"AUTH", *arguments)
        name = options.master.encode()
        query = encode(b"SENTINEL", b"get-master-addr-by-name", name)
        self.transport.write(data + query)

    def dataReceived(self, data: bytes) -> None:
        self._length += len(data)
        try:
            self._reader.feed(data)
            reply = self._reader.gets()
            if self._waits_for_auth and reply == b"OK":
                self._waits_for_auth = False
                reply = self._reader.gets()
        except InvalidData as error:
            self._refuse(f"the server does not speak the Redis protocol: {error}")
            return
        if reply is not False:
            self._handle_reply(reply)
        elif self._length > MAX_ADDRESS_LENGTH:
            self._refuse(f"the answer is longer than {MAX_ADDRESS_LENGTH} bytes")

    def _handle_reply(self, reply: Any) -> None:
        name = self._options.master
        if isinstance(reply, ResponseError):
            self._refuse(
                f"{safe_str(reply)}; is the server a Sentinel, and the password right?"
            )
        elif reply is None:
            self._refuse(
                f"the Sentinel does not monitor a master {name!r}; check `sentinel "
                "monitor` in its configuration"
            )
        elif (address := _parse_address(reply)) is None:
            self._refuse("the answer is not a host and a port")
        else:
            if not self.answer.called:
                self.answer.callback(address)
            self.transport.loseConnection()

    def _refuse(self, why: str) -> None:
        if password := self._options.password:
            # The error of a server that does not know AUTH quotes the password.
            why = why.replace(password, "***")
        self._fail(why)
        self.transport.loseConnection()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._fail(error_text(reason.value))

    def _fail(self, why: str) -> None:
        """Fail the query, unless it has already ended."""
        if not self.answer.called:
            self.answer.errback(SentinelError(why))


def _parse_address(reply: Sequence[Any]) -> HostPort | None:
    try:
        host, port = (part.decode("ascii") for part in reply)
        number = int(port)
    except (AttributeError, TypeError, ValueError):
        return None
    return (host, number) if host and 0 < number < 65536 else None
