"""Redis behind Sentinel: the master is asked for, and followed when it changes.

Theory of operation. :class:`SentinelMaster` asks the Sentinels in turn, each on a
connection of its own that lives for one question, until one knows the master; the
one that knew is asked first the next time. It is asked

- each time a connection to Redis is opened, so that a lost connection comes back to
  whoever is the master then; :class:`MasterConnector` stands where a connector of
  the reactor would, and the factories' delays, timers and reports are as ever;
- every :data:`CHECK_INTERVAL` s meanwhile: a connection to what is the master no
  longer is cut, though it works. A former master, or a replica, takes what is
  published and tells nobody.

Rejected: a lasting subscription to ``+switch-master``. It can be half-open, and
says nothing of what was missed; a question has an answer within its time or not.
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
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.redis.factory import SynapseRedisFactory
from synapse_replication.redis.options import HostPort, RedisOptions, SentinelOptions
from synapse_replication.redis.resp import encode, new_reader
from synapse_replication.transport.failures import one_line

__all__ = ["CHECK_INTERVAL", "MasterConnector", "SentinelError", "SentinelMaster"]

#: How often it is asked who the master is while the connections are up, in s.
CHECK_INTERVAL = 5.0
#: How long one Sentinel may take to be reached and to answer, in s.
ANSWER_TIMEOUT = 3.0
#: The longest answer that is read, in bytes: a host and a port.
MAX_ANSWER_LENGTH = 4096
#: For the observer.
NAME = "redis_sentinel"


class SentinelError(ReplicationError):
    """The Sentinels did not tell where the master is."""


class SentinelMaster:
    """Knows where the master is, for all connections of a process.

    :param reactor: opens the connections, and is the clock.
    :param options: those of Redis; with ``sentinel``.
    :param observer: told when no Sentinel answers.
    """

    def __init__(
        self,
        reactor: Any,
        options: RedisOptions,
        sentinel: SentinelOptions,
        observer: ReplicationObserver,
    ) -> None:
        self._reactor = reactor
        self._options = attrs.evolve(options, sentinel=None, path=None)
        self._sentinel = sentinel
        self._observer = observer
        # The one that knew comes first.
        self._places = list(sentinel.places)
        self._connectors: list[MasterConnector] = []
        self._waiters: list[Deferred[HostPort]] = []
        self._search: Deferred[HostPort] | None = None
        self._checks = LoopingCall(self._check)
        self._checks.clock = reactor

    def connect(self, factory: SynapseRedisFactory, timeout: float) -> IConnector:
        """Open one connection to the master, and have it follow the master.

        :param timeout: for the connection to be made, in s.
        :raises OSError: if a file of the TLS options cannot be read.
        :raises ValueError: if a file of the TLS options holds no certificate.
        """
        if self._options.tls is not None:
            # Later it would only be found when the master was.
            self._options.tls.context_factory(self._places[0][0])
        connector = MasterConnector(
            self, self._reactor, self._options, factory, timeout
        )
        self._connectors.append(connector)
        if not self._checks.running:
            self._checks.start(CHECK_INTERVAL, now=False)
        connector.connect()
        return connector

    def stop(self) -> None:
        """Ask no more."""
        if self._checks.running:
            self._checks.stop()
        for waiter in list(self._waiters):
            waiter.cancel()
        if self._search is not None:
            self._search.cancel()

    # -- asking ---------------------------------------------------------------------

    def locate(self) -> Deferred[HostPort]:
        """Ask where the master is, all that ask at once by one question.

        Fails with :class:`~synapse_replication.errors.SentinelError`.
        """
        waiter: Deferred[HostPort] = Deferred(self._forget)
        self._waiters.append(waiter)
        if self._search is None:
            self._search = Deferred.fromCoroutine(self._ask_all())
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
                # Another one's answer made somebody give up.
                continue
            if isinstance(result, Failure):
                waiter.errback(result)
            else:
                waiter.callback(result)

    async def _ask_all(self) -> HostPort:
        reasons = []
        for place in list(self._places):
            try:
                return await self._ask(place)
            except TimeoutError:
                why = f"no answer within {ANSWER_TIMEOUT:g} s"
            except (SentinelError, OSError, ValueError) as error:
                why = str(error)
            reasons.append(f"{place[0]}:{place[1]}: {why}")
            # The next question is the next one's.
            self._places.remove(place)
            self._places.append(place)
        raise SentinelError(
            f"no Sentinel tells where the master {self._sentinel.master!r} is: "
            + "; ".join(reasons)
        )

    def _ask(self, place: HostPort) -> Deferred[HostPort]:
        question = _MasterQuery(self._sentinel)
        host, port = place
        options = attrs.evolve(self._options, host=host, port=port)
        question.connector = options.connect(self._reactor, question, ANSWER_TIMEOUT)
        question.answer.addTimeout(ANSWER_TIMEOUT, self._reactor)
        return question.answer

    # -- following ------------------------------------------------------------------

    def _check(self) -> None:
        def failed(failure: Failure) -> None:
            if not isinstance(failure.value, CancelledError):
                why = one_line(failure.value)
                self._observer.connection_failed(NAME, why, CHECK_INTERVAL)

        # While one is under way, another would learn nothing else.
        if self._search is None:
            self.locate().addCallbacks(self._follow, failed)

    def _follow(self, master: HostPort) -> None:
        for connector in self._connectors:
            connector.follow(master)


@implementer(IConnector)
class MasterConnector:
    """Connects one factory to whoever is the master at the time."""

    def __init__(
        self,
        master: SentinelMaster,
        reactor: Any,
        options: RedisOptions,
        factory: SynapseRedisFactory,
        timeout: float,
    ) -> None:
        self._master = master
        self._reactor = reactor
        self._options = options
        self._timeout = timeout
        self._search: Deferred[HostPort] | None = None
        self._inner: IConnector | None = None
        self.factory = factory

    def connect(self) -> None:
        """Begin an attempt to connect."""
        self.factory.startedConnecting(self)
        self._search = search = self._master.locate()
        search.addCallbacks(self._found, self._not_found)

    def _found(self, place: HostPort) -> None:
        self._search = None
        host, port = place
        self._options = attrs.evolve(self._options, host=host, port=port)
        try:
            self._inner = self._options.connect(
                self._reactor, _ToMaster(self), self._timeout
            )
        except (OSError, ValueError) as error:
            # A file of the TLS options was changed meanwhile.
            self.lost(Failure(error))  # type: ignore[no-untyped-call]

    def _not_found(self, failure: Failure) -> None:
        self._search = None
        if not isinstance(failure.value, CancelledError):
            self.lost(failure)

    def lost(self, reason: Failure) -> None:
        """Let the factory try again: the connection did not come up, or is gone."""
        self._inner = None
        self.factory.clientConnectionFailed(self, reason)

    def closed(self, reason: Failure) -> None:
        """Let the factory try again: the connection ended."""
        self._inner = None
        self.factory.clientConnectionLost(self, reason)

    def follow(self, master: HostPort) -> None:
        """Leave what is the master no longer; the factory connects again."""
        if self._inner is None or master == (self._options.host, self._options.port):
            return
        if not self.factory.links:
            self._inner.stopConnecting()
        for link in list(self.factory.links):
            link.cut(f"Sentinel says that the master is {master[0]}:{master[1]} now")

    def stopConnecting(self) -> None:
        """Stop the attempt in progress."""
        if self._search is not None:
            self._search.cancel()
        elif self._inner is not None:
            self._inner.stopConnecting()
        else:
            raise NotConnectingError("there is no attempt to stop")

    def disconnect(self) -> None:
        """Disconnect, or stop the attempt in progress."""
        if self._inner is not None:
            self._inner.disconnect()
        elif self._search is not None:
            self._search.cancel()

    def getDestination(self) -> Any:
        """Return the address that is connected to; None before that."""
        return None if self._inner is None else self._inner.getDestination()


class _ToMaster(ClientFactory):
    """Stands between a connection and the factory, which knows one connector only."""

    noisy = False

    def __init__(self, connector: MasterConnector) -> None:
        self._connector = connector

    def buildProtocol(self, addr: IAddress | None) -> Any:
        return self._connector.factory.buildProtocol(addr)

    def clientConnectionFailed(self, connector: IConnector, reason: Failure) -> None:
        self._connector.lost(reason)

    def clientConnectionLost(self, connector: IConnector, reason: Failure) -> None:
        self._connector.closed(reason)


class _MasterQuery(ClientFactory):
    """Asks one Sentinel for the master, once.

    :ivar answer: fires with the host and the port.
    """

    noisy = False

    def __init__(self, options: SentinelOptions) -> None:
        self.options = options
        self.connector: IConnector | None = None
        self.answer: Deferred[HostPort] = Deferred(lambda _: self._hang_up())

    def buildProtocol(self, addr: IAddress | None) -> Protocol:
        return _MasterQueryProtocol(self)

    def clientConnectionFailed(self, connector: IConnector, reason: Failure) -> None:
        self.failed(one_line(reason.value))

    def failed(self, why: str) -> None:
        """Return up, unless there was an answer."""
        if not self.answer.called:
            self.answer.errback(SentinelError(why))

    def _hang_up(self) -> None:
        if self.connector is not None:
            self.connector.disconnect()


class _MasterQueryProtocol(Protocol):
    """The connection of one question."""

    def __init__(self, question: _MasterQuery) -> None:
        self._question = question
        self._reader = new_reader()
        self._length = 0
        self._waits_for_auth = False

    def connectionMade(self) -> None:
        options = self._question.options
        data = b""
        if options.password is not None:
            self._waits_for_auth = True
            credentials = [options.username, options.password]
            words = [word.encode() for word in credentials if word is not None]
            data = encode(b"AUTH", *words)
        name = options.master.encode()
        self._write(data + encode(b"SENTINEL", b"get-master-addr-by-name", name))

    def _write(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(data)

    def dataReceived(self, data: bytes) -> None:
        self._length += len(data)
        try:
            self._reader.feed(data)
            reply = self._reader.gets()
            if self._waits_for_auth and reply == b"OK":
                self._waits_for_auth = False
                reply = self._reader.gets()
        except InvalidData as error:
            self._end(f"it does not speak Redis' protocol: {error}")
            return
        if reply is not False:
            self._take(reply)
        elif self._length > MAX_ANSWER_LENGTH:
            self._end(f"the answer is longer than {MAX_ANSWER_LENGTH} bytes")

    def _take(self, reply: Any) -> None:
        name = self._question.options.master
        if isinstance(reply, ResponseError):
            self._end(f"{safe_str(reply)}; are these a Sentinel and its password?")
        elif reply is None:
            self._end(f"it knows no master {name!r}; see `sentinel monitor` there")
        elif (place := _read_place(reply)) is None:
            self._end("it answers something else than a host and a port")
        else:
            if not self._question.answer.called:
                self._question.answer.callback(place)
            self._close()

    def _end(self, why: str) -> None:
        password = self._question.options.password
        if password:
            # A server that does not know AUTH repeats what stood behind it.
            why = why.replace(password, "***")
        self._question.failed(why)
        self._close()

    def _close(self) -> None:
        assert self.transport is not None
        self.transport.loseConnection()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._question.failed(one_line(reason.value))


def _read_place(reply: Sequence[Any]) -> HostPort | None:
    try:
        host, port = (word.decode("ascii") for word in reply)
        number = int(port)
    except (AttributeError, TypeError, ValueError):
        return None
    return (host, number) if host and 0 < number < 65536 else None
