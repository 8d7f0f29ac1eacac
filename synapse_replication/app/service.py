"""The wiring of a process, as a Twisted service: :class:`Replication`.

The parts start in this order and stop in the reverse order: database, sinks, streams,
modules, HTTP, links, sending, the child services. So whenever a peer can request rows,
all streams exist; and whenever rows are announced, they can be requested. On a stop,
the process first stops the child services. It delivers pending rows, waits for running
transactions, refuses further rows of its own, and sends the last ones. It then
withdraws its syncing users (unless it is the main process), and closes the links. Each
step takes at most
:data:`~synapse_replication.app.stop_steps.DRAIN_TIMEOUT` s.
"""

from __future__ import annotations

import enum
import random
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, overload

from prometheus_client import CollectorRegistry
from twisted.application.service import MultiService, Service
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorCore
from twisted.logger import Logger, LogLevel
from twisted.python.failure import Failure
from typing_extensions import override

from synapse_replication.app.database_start import (
    lock_name,
    make_database,
    wait_for_database,
)
from synapse_replication.app.host import PositionsOnlySink, StandaloneHost
from synapse_replication.app.links import connect_direct_tcp, connect_redis
from synapse_replication.app.modules import add_service, check_sink, load_factories
from synapse_replication.app.observers import ProcessObservers
from synapse_replication.app.stop_steps import CLOSING, StopSteps, describe_unfinished
from synapse_replication.app.stream_setup import StreamSetup
from synapse_replication.app.wiring import ResyncParts, StoredStreams, Wiring
from synapse_replication.config.process import ProcessConfig
from synapse_replication.config.replication_options import ReplicationOptions
from synapse_replication.errors import (
    ConfigError,
    LocalProtocolError,
    StorageError,
    StreamConfigurationError,
)
from synapse_replication.handlers import interfaces
from synapse_replication.handlers.accepted_writers import DeclaredWriters
from synapse_replication.handlers.command_handler import ReplicationCommandHandler
from synapse_replication.handlers.host_parts import ReactorClock
from synapse_replication.handlers.sending.streamer import (
    ReplicationStreamer,
    StreamerOptions,
)
from synapse_replication.handlers.waiters import Waiters
from synapse_replication.http.client import HttpCatchUpClient, with_retries
from synapse_replication.instrumentation.prometheus import ReplicationMetrics
from synapse_replication.instrumentation.status.model import ProcessStatus
from synapse_replication.instrumentation.status.status_observer import StatusObserver
from synapse_replication.redis.external_cache import ExternalCache
from synapse_replication.redis.fencing import PublisherName
from synapse_replication.redis.link import RedisReplicationLink
from synapse_replication.redis.options import RedisOptions
from synapse_replication.storage.database import Database
from synapse_replication.streams.backlog import BacklogOptions
from synapse_replication.streams.standard.registry import MAIN_INSTANCE
from synapse_replication.text import outgoing_label
from synapse_replication.transport.reactor import as_reactor
from synapse_replication.wire.commands import ClearUserSyncsCommand

if TYPE_CHECKING:
    from twisted.web.resource import Resource

    from synapse_replication.app.tracing_export import SpanExport
    from synapse_replication.storage.postgres_stream import PostgresStream
    from synapse_replication.streams.memory import InMemory, MemoryStream
    from synapse_replication.streams.rows import RowT
    from synapse_replication.streams.table import TableStream
    from synapse_replication.tcp.factory import DirectTcpReplicationClientFactory


class ServiceState(enum.Enum):
    """How far a :class:`Replication` is; it only advances."""

    CREATED = enum.auto()
    #: Started, but the reactor does not run yet.
    WAITING_FOR_REACTOR = enum.auto()
    STARTING = enum.auto()
    UP = enum.auto()
    #: The start has failed, and everything that was started has been stopped.
    FAILED = enum.auto()
    STOPPING = enum.auto()
    STOPPED = enum.auto()


class Replication(Service):
    """Replication in one process, as a Twisted service.

    The service starts once, when the reactor runs. If the start fails, everything that
    was started is stopped, and :attr:`started` fails.

    :param options: the options of the process.
    :param sink: receives the rows of other instances; ``None`` to track only their
        positions. If it has a method ``close()``, that is called at the end.
    :param command_sink: receives the commands of other instances that carry no rows;
        by default, a :class:`.SyncingUsers`.
    :param modules: functions ``(host) -> IService | None``, which are called when the
        streams exist, before replication starts. The services are added to
        :attr:`services`.
    :ivar sink: see above. It may be assigned until the service is started.
    :ivar started: a Deferred that fires when all parts are up; fails if the process
        cannot start, with ``CancelledError`` if the service is stopped before it is up.
    :ivar lost: a Deferred that fails with ``StorageError`` if another process has
        acquired this one's name. ``run_service`` then ends the process with status 1;
        without a callback, the reactor is stopped.
    :ivar services: child services, which are started when replication is up, and
        stopped before it stops.
    :ivar host: the host that is passed to the modules.
    :raises ConfigError: if the options cannot be used together; lists all problems.
    """

    log = Logger()

    def __init__(
        self,
        reactor: IReactorCore,
        options: ReplicationOptions,
        sink: interfaces.RowSink | None = None,
        *,
        command_sink: interfaces.CommandSink | None = None,
        modules: Sequence[Callable[[StandaloneHost], Any]] = (),
    ) -> None:
        if problems := options.find_problems():
            raise ConfigError(problems)
        self._options = options
        for module in _modules_needed(options):
            import_module(module)
        self._reactor = as_reactor(reactor)
        self._modules = modules
        self._clock = ReactorClock(self._reactor)
        #: The registry of this process's metrics.
        self.metrics_registry = CollectorRegistry()
        self._spans = _make_spans(options)
        self._observers = _make_observers(
            options, self._clock, self.metrics_registry, self._spans
        )
        self._observer, self._status = self._observers.observer, self._observers.status
        #: Delivers events to subscribed callbacks.
        self.hooks = self._observers.hooks
        self.host = self._make_host()
        self.sink: interfaces.RowSink = PositionsOnlySink() if sink is None else sink
        if command_sink is not None:
            self.host.commands = command_sink
        self._stops = StopSteps(self._reactor)
        self._parts = ResyncParts(
            self._clock, self._observers, options, serves_backlog=True
        )
        #: Exists when the streams do.
        self._wiring: Wiring
        self._client, self._http_pool = self._make_client()
        self._database = make_database(options, self._reactor)
        self.services = MultiService()  # type: ignore[no-untyped-call]
        self.started: Deferred[None] = Deferred()
        self.lost: Deferred[None] = Deferred()
        self._state = ServiceState.CREATED
        #: Whether the start succeeded; exists from STARTING on.
        self._starting: Deferred[bool]
        self._stop_waiters = Waiters()
        #: The streams whose received rows were not delivered when a stop gave up.
        self._undelivered: list[str] = []
        #: The work that a stop did not finish, for the exit status; empty if none.
        self.unfinished = ""

    def _make_host(self) -> StandaloneHost:
        """Return the host, whose streams are added when the service starts."""
        options = self._options
        return StandaloneHost(
            interfaces.Identity(
                options.server_name, options.instance_name, secrets.token_urlsafe(12)
            ),
            self._clock,
            self._observer,
            self.hooks,
            lambda name: with_retries(
                self._client.for_stream(name), self._clock, random.random
            ),
            options.stores_user_ips,
        )

    def _make_client(self) -> tuple[HttpCatchUpClient, Any]:
        """Return the client of other instances, and its connections, if any."""
        options, agent, pool = self._options, None, None
        if options.instances:
            # Importing Twisted's web client takes 1 MiB, and its server 2 MiB.
            from synapse_replication.http.agent import make_agent

            agent, pool = make_agent(
                self._reactor, options.instances, options.tls.for_connecting
            )
        client = HttpCatchUpClient(
            agent,
            options.instances,
            options.secret,
            self._reactor,
            epoch_of=self._parts.epochs.epoch_of if options.backlog else None,
            observer=self._observer,
        )
        return client, pool

    # -- for the service's own code ---------------------------------------------------

    @overload
    def __getitem__(self, stream: TableStream[RowT]) -> PostgresStream[RowT]: ...

    @overload
    def __getitem__(self, stream: InMemory[RowT]) -> MemoryStream[RowT]: ...

    @overload
    def __getitem__(self, stream: str) -> Any: ...

    def __getitem__(self, stream: str | TableStream | InMemory) -> Any:
        """Return a stream; the streams exist when :attr:`started` has fired.

        :param stream: its declaration, from which type checkers know the types of the
            stream and of its rows; or its name.
        :raises KeyError: if there is no such stream.
        """
        name = stream if isinstance(stream, str) else stream.name
        return self.host.streams.get_streams()[name]

    @property
    def database(self) -> Database:
        """The pool of connections to PostgreSQL.

        :raises StreamConfigurationError: if the options name no database.
        """
        if self._database is None:
            raise StreamConfigurationError(
                "this process has no database; set the option database"
            )
        return self._database

    @property
    def cache(self) -> ExternalCache:
        """The cache in Redis that all processes share; see ``host.cache``."""
        return self.host.cache

    def status_resource(self) -> Resource:
        """Return a resource for a site of one's own.

        Its children are ``status`` (the page), ``status.json``, ``metrics``, ``health``
        and ``ready``. They show names and counts, but no rows, to any client.
        """
        from synapse_replication.app.http_site import make_root

        return make_root(
            frozenset({"health", "metrics"}),
            self.metrics_registry,
            self._status.snapshot,
        )

    # -- IService -------------------------------------------------------------------

    @override
    def startService(self) -> None:
        """Start the service as soon as the reactor runs.

        :raises LocalProtocolError: if it was started or stopped before.
        """
        if self._state is not ServiceState.CREATED:
            raise LocalProtocolError(
                "a Replication can be started only once; create a new one"
            )
        self._state = ServiceState.WAITING_FOR_REACTOR
        super().startService()  # type: ignore[no-untyped-call]
        # A callback of the result may stop the reactor, which must therefore run.
        self._reactor.callWhenRunning(self._start_now)

    def _start_now(self) -> None:
        if self._state is ServiceState.WAITING_FOR_REACTOR:
            self._state = ServiceState.STARTING
            self._starting = Deferred.fromCoroutine(self._start_or_clean_up())

    @override
    def stopService(self) -> Deferred[None]:
        """Stop the service.

        It may be called again, and from the sink: then the step that waits for the sink
        is abandoned after :data:`~synapse_replication.app.stop_steps.DRAIN_TIMEOUT`.

        :return: a Deferred that fires when the service has stopped. Cancelling it does
            not end the stop.
        """
        super().stopService()  # type: ignore[no-untyped-call]
        waiting = self._stop_waiters.add()
        if self._state is ServiceState.STOPPED:
            self._stop_waiters.fire()
        elif self._state is not ServiceState.STOPPING:
            reached, self._state = self._state, ServiceState.STOPPING
            Deferred.fromCoroutine(self._stop(reached)).addBoth(self._stopped)
        return waiting

    def _stopped(self, failure: Failure | None) -> None:
        self._state = ServiceState.STOPPED
        self._stop_waiters.fire(failure)

    # -- for SupervisedProcess --------------------------------------------------------

    def snapshot(self) -> ProcessStatus:
        """Return the current replication status."""
        return self._status.snapshot()

    def resize_backlog(self, options: BacklogOptions) -> None:
        """Change the limits of the backlogs."""
        if self._parts.backlog is not None:
            self._parts.backlog.resize(options)

    # -- start ----------------------------------------------------------------------

    async def _start_or_clean_up(self) -> bool:
        """Start all parts, and fire :attr:`started`; return whether they are up."""
        try:
            await self._start()
        except BaseException:  # noqa: BLE001 -- started fails with it
            failure = Failure()  # type: ignore[no-untyped-call]
            await self._stop_parts()
            self._start_ended(ServiceState.FAILED)
            self.started.errback(failure)
            return False
        self._start_ended(ServiceState.UP)
        self.started.callback(None)
        return True

    def _start_ended(self, state: ServiceState) -> None:
        if self._state is ServiceState.STARTING:
            self._state = state

    async def _start(self) -> None:
        options, host = self._options, self.host
        if (spans := self._spans) is not None:
            self._stops.add("sending spans", lambda: spans.stop(self._reactor))
        if (pool := self._http_pool) is not None:
            self._stops.add("closing HTTP connections", pool.closeCachedConnections)
        if self._database is not None:
            await self._use_database(self._database)
        setup = StreamSetup(options, host, self._database, self._reactor)
        self._add_sinks(setup)
        await setup.add_streams(self.sink)
        if (backlog := self._parts.backlog) is not None:
            for name, (start, token) in setup.empty_ranges.items():
                backlog.of(name).skip_range(start, token)
        self._stops.add("reporting unloaded modules", self.hooks.unload_modules)
        for make in self._modules:
            add_service(make(host), self.services, options)
            self.hooks.module_loaded(make)
        self._status.expect(_pairs(host.streams.writers))
        handler = self._make_handler()
        self._wiring = Wiring(
            handler, self._parts, self._observers, options, self._stops
        )
        host.outgoing.connect(handler)
        ids = setup.ids(handler.readers)
        damage = (
            self.sink.damage if isinstance(self.sink, interfaces.DamageSink) else ""
        )
        self._wiring.start_observers(self._reactor, lambda: ids, damage)
        # Before the links, because it is notified whenever one of them is ready.
        streamer = ReplicationStreamer(
            host,
            handler.sender,
            self._observer,
            options=StreamerOptions(torture_level=options.torture_level),
        )
        await self._open_links(handler.start_replication())
        self._wiring.start_extension()
        self._stops.add("withdrawing syncing users", self._clear_users)
        self._wiring.start_sending(streamer, self._stored_streams())
        self._stops.add(CLOSING, setup.close_streams)
        if self._database is not None:
            self._stops.add("waiting for transactions", self._database.settled)
        # Added last, so that it runs first: the sink may write rows.
        self._stops.add("handling received commands", self._deliver_received)
        self.services.startService()  # type: ignore[no-untyped-call]
        self.log.info(
            "{instance_name} of {server_name} is up",
            instance_name=options.instance_name,
            server_name=options.server_name,
        )

    async def _use_database(self, database: Database) -> None:
        """Wait until the database is available, and acquire this process's name."""
        options, host = self._options, self.host
        self._stops.add("closing the database", database.close)
        self._stops.add("ending background work", host.run_as_background_process.wait)
        if not options.stored:
            return
        role = await wait_for_database(options, database, self._clock)
        if not role.is_read_only:
            await lock_name(
                options, database, self._reactor, self._stops, self._name_lost
            )

    def _name_lost(self, error: StorageError) -> None:
        if not self.lost.called:
            self.log.critical("Stopping, so as to write no more: {error}", error=error)
            # run_service() handles it first.
            self.lost.addErrback(lambda _: self._reactor.stop())
            self.lost.errback(error)

    def _stored_streams(self) -> StoredStreams | None:
        options = self._options
        if self._database is None:
            return None
        return StoredStreams(
            self._database, options.stored, options.writers, options.instances
        )

    def _add_sinks(self, setup: StreamSetup) -> None:
        host, sink = self.host, self.sink
        check_sink(sink, interfaces.RowSink, self._options, "sink")
        check_sink(host.commands, interfaces.CommandSink, self._options, "command_sink")
        host.set_sink(sink, setup.largest_token)
        for each in (sink, host.commands):
            if isinstance(each, interfaces.ClosableSink):
                self._stops.add(f"closing {type(each).__name__}", each.close)

    def _make_handler(self) -> ReplicationCommandHandler:
        options = self._options
        handler_options = self._parts.handler_options(
            self._client.get_backlog,
            expects_links=options.has_links,
            writers=DeclaredWriters(
                {**options.writers, **self.host.streams.writers},
                [MAIN_INSTANCE, options.instance_name, *options.instances],
            ),
        )
        return ReplicationCommandHandler(
            self.host, self._observer, options=handler_options
        )

    async def _open_links(self, channels: tuple[str, ...]) -> None:
        options = self._options
        if options.serves_http:
            # Importing Twisted's web server takes 2 MiB.
            from synapse_replication.app.http_site import make_sites
            from synapse_replication.app.listening import Listening

            listening = Listening(self._reactor, options, self._stops)
            for listener, site in make_sites(
                options,
                self.host,
                self._parts.backlog,
                self.metrics_registry,
                self._status.snapshot,
            ):
                await listening.open(listener, site)
        if options.has_direct_tcp:
            await self._serve_direct_tcp()
            connect_direct_tcp(
                self._make_tcp_client, self._reactor, options, self._stops
            )
        if options.redis is not None:
            self._connect_redis(options.redis, channels)

    async def _serve_direct_tcp(self) -> None:
        # Importing both ends of direct TCP, and Twisted's endpoints, takes 0.5 MiB.
        from synapse_replication.app.listening import Listening
        from synapse_replication.tcp.factory import ReplicationStreamProtocolFactory

        options = self._options
        listeners = [each for each in options.listeners if each.direct_tcp]
        if not (options.tcp_listen or listeners):
            return
        factory = ReplicationStreamProtocolFactory(
            options.server_name,
            self._clock,
            self._wiring.handler,
            self._observer,
            limit=options.tcp_limit,
            extension=self._wiring.extension,
            max_connections=options.max_tcp_connections,
        )
        self._status.watch_buffers(factory.buffers)
        self._stops.add("closing direct TCP connections", factory.close_connections)
        listening = Listening(self._reactor, options, self._stops)
        for description in options.tcp_listen:
            await listening.listen(description, factory)
        for listener in listeners:
            await listening.open(listener, factory)

    def _make_tcp_client(self) -> DirectTcpReplicationClientFactory:
        from synapse_replication.tcp.factory import DirectTcpReplicationClientFactory

        options = self._options
        client = DirectTcpReplicationClientFactory(
            options.instance_name,
            options.server_name,
            self._clock,
            self._wiring.handler,
            self._observer,
            limit=options.tcp_limit,
            extension=self._wiring.extension,
        )
        self._status.watch_buffers(client.buffers)
        return client

    def _connect_redis(self, redis: RedisOptions, channels: tuple[str, ...]) -> None:
        handler = self._wiring.handler
        link = RedisReplicationLink(
            self._reactor,
            redis,
            self._options.server_name,
            handler,
            self._observer,
            lambda lost: handler.sender.announce_positions(),
            channels,
            extension=self._wiring.extension,
            publisher=PublisherName(
                self._observer,
                self._options.server_name,
                self._options.instance_name,
                self._find_name_check,
            ),
        )
        connect_redis(link, self._options, self._stops)
        self.host.set_cache(link.cache)
        self._status.watch_buffers(link.buffers)

    def _find_name_check(self) -> Callable[[], Deferred[None]] | None:
        database = self._database
        if database is None or database.admission is None:
            return None
        return database.confirm_name

    def _clear_users(self) -> None:
        sender = self._wiring.handler.sender
        # Clients of this process's own listener know none of its users.
        is_known = any(not each.relays for each in sender.links)
        if is_known and not self._options.is_main:
            sender.send(ClearUserSyncsCommand(self.host.identity.instance_id))

    # -- stop -----------------------------------------------------------------------

    async def _stop(self, reached: ServiceState) -> None:
        """Stop what runs.

        :param reached: the state before the stop.
        """
        is_up = reached is ServiceState.UP
        if reached is ServiceState.STARTING:
            self._starting.cancel()
            # The start succeeds nevertheless if its last step cannot be cancelled.
            is_up = await self._starting
        if not is_up:
            # Everything that was started has been stopped.
            self._give_up()
            return
        self.hooks.stopping()
        links = self._status.snapshot().links
        outcome = "everything received was handled and everything written was sent"
        if links and not any(link.up for link in links):
            outcome = "no link was up: readers will fetch what they have not received"
        if failed := await self._stop_parts():
            outcome = self.unfinished = describe_unfinished(failed, self._undelivered)
        self.log.emit(
            LogLevel.error if self.unfinished else LogLevel.info,
            "{instance_name} has stopped; {outcome}",
            instance_name=self._options.instance_name,
            outcome=outcome,
        )

    async def _deliver_received(self) -> None:
        try:
            await self._wiring.handler.wait_until_idle()
        except CancelledError:
            # The next steps cancel the sink, if it is still busy.
            self._undelivered = self._wiring.handler.busy_streams()
            raise

    def _give_up(self) -> None:
        """Fail :attr:`started` because the service was stopped before it was up."""
        if not self.started.called:
            self.started.errback(CancelledError())
        # The caller of stopService() need not handle this.
        self.started.addErrback(_ignore_cancellation)

    async def _stop_parts(self) -> list[str]:
        if self.services.running:
            Service.stopService(self.services)  # type: ignore[no-untyped-call]
            for service in self.services:
                self._stops.add(f"stopping {service!r}", service.stopService)
        return await self._stops.run()


def _make_observers(
    options: ReplicationOptions,
    clock: ReactorClock,
    registry: CollectorRegistry,
    spans: SpanExport | None,
) -> ProcessObservers:
    status = StatusObserver(
        options.server_name,
        options.instance_name,
        _pairs(options.writers),
        needs_link=options.redis is not None or bool(options.tcp_connect),
        own_links=[outgoing_label(each) for each in options.tcp_connect],
    )
    return ProcessObservers(
        options.server_name,
        clock,
        status,
        ReplicationMetrics(registry),
        Logger("synapse_replication"),
        spans,
    )


def _pairs(writers: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    """Return the (stream, writer) pairs of streams with declared writers."""
    return [(stream, writer) for stream, names in writers.items() for writer in names]


def _modules_needed(options: ReplicationOptions) -> Iterator[str]:
    """Iterate over the modules that are imported where they are used.

    A start may wait for hours, for instance for PostgreSQL. If they were imported
    afterwards, a package that was upgraded meanwhile would be imported in part.
    """
    if options.serves_http:
        yield "synapse_replication.app.http_site"
    if options.serves_http or options.has_direct_tcp:
        yield "synapse_replication.app.listening"
    if options.has_direct_tcp:
        yield "synapse_replication.tcp.factory"
    if any(map(options.writes, options.writers)):
        yield "synapse_replication.storage.id_generators"


def _make_spans(options: ReplicationOptions) -> SpanExport | None:
    """Return the export of spans.

    :return: ``None`` if no collector is configured and this process has not loaded
        OpenTelemetry, so that it cannot have a provider of its own.
    """
    if options.tracing is None and "opentelemetry.trace" not in sys.modules:
        return None
    from synapse_replication.app.tracing_export import SpanExport

    return SpanExport(options.tracing, options.server_name, options.instance_name)


def _ignore_cancellation(failure: Failure) -> None:
    failure.trap(CancelledError)  # type: ignore[no-untyped-call]


def make_process(config: ProcessConfig, reactor: IReactorCore) -> Replication:
    """Return the service of a main process or a worker.

    :raises ConfigError: if a function that the configuration names cannot be imported,
        or does not return a sink.
    """
    for warning in config.warnings:
        Replication.log.warn("{text}", text=warning)
    make_row_sink, make_command_sink, modules = load_factories(config)
    process = Replication(reactor, config, modules=modules)
    if make_row_sink is not None:
        process.sink = make_row_sink(process.host)
    if make_command_sink is not None:
        process.host.commands = make_command_sink(process.host)
    return process
