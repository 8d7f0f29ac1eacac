"""The wiring of a process, as a Twisted service.

The parts start in this order and stop in the reverse order: database, the user's
sinks, streams, the user's modules, HTTP, links, sending, the services that the modules
returned. So whenever a peer can request rows, all streams exist; and whenever rows are
announced, they can be requested. On a stop, the process first stops the services that
the modules returned. It then sends and delivers pending rows, withdraws its syncing
users (unless it is the main process), and closes the links. Each step takes at most
:data:`DRAIN_TIMEOUT` s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
from twisted.application.service import Service
from twisted.internet.defer import Deferred
from twisted.internet.error import CannotListenError
from twisted.internet.interfaces import IProtocolFactory
from twisted.logger import Logger
from twisted.protocols.tls import TLSMemoryBIOFactory
from typing_extensions import override

from synapse_replication.app.host import (
    PositionsOnlySink,
    StandaloneHost,
    process_label,
)
from synapse_replication.app.http_limits import served_hosts
from synapse_replication.app.http_site import make_site
from synapse_replication.app.modules import Factories, load_factories
from synapse_replication.app.observers import ProcessObservers
from synapse_replication.app.sources import declared_streams, make_sources
from synapse_replication.app.stops import StopSteps
from synapse_replication.app.streams import StreamSetup
from synapse_replication.clock import ReactorClock
from synapse_replication.config.endpoints import (
    client_endpoint,
    explained_redis_files,
    listener_descriptions,
    server_endpoint,
)
from synapse_replication.config.process import ProcessConfig
from synapse_replication.errors import ConfigError
from synapse_replication.handlers.admission import DeclaredWriters
from synapse_replication.handlers.epochs import PeerEpochs
from synapse_replication.handlers.extension.extension import ReplicationExtension
from synapse_replication.handlers.handler import (
    HandlerOptions,
    ReplicationCommandHandler,
)
from synapse_replication.handlers.interfaces import ClosableSink, RowSink
from synapse_replication.handlers.receiving.partial_resync import PartialResync
from synapse_replication.handlers.sending.streamer import (
    ReplicationStreamer,
    StreamerOptions,
)
from synapse_replication.http.client import HttpCatchUpClient, make_agent
from synapse_replication.http.resource import ReplicationResource
from synapse_replication.instrumentation.status.model import (
    ProcessStatus,
    encode_status,
)
from synapse_replication.redis.link import RedisReplicationLink
from synapse_replication.redis.options import RedisOptions
from synapse_replication.storage.database import Database
from synapse_replication.storage.id_generators import MultiWriterIdGenerator
from synapse_replication.storage.stored_positions import StoredPositionCheck
from synapse_replication.storage.stuck_ids import StuckIdWatch
from synapse_replication.streams.backlog import Backlog, BacklogOptions
from synapse_replication.streams.standard.registry import MAIN_INSTANCE
from synapse_replication.tcp.factory import (
    DirectTcpReplicationClientFactory,
    ReplicationStreamProtocolFactory,
)
from synapse_replication.wire.commands.users import ClearUserSyncsCommand

#: The most time that each step of a stop may take, in s.
DRAIN_TIMEOUT = 10.0


class ProcessService(Service):
    """A main process or a worker, as a Twisted service.

    :ivar started: fires when all parts are up; fails if the process cannot start.
    :ivar host: the host that is passed to the user's code.
    """

    log = Logger()

    def __init__(self, config: ProcessConfig, reactor: Any) -> None:
        self._config = config
        self._reactor = reactor
        self._clock = ReactorClock(reactor)
        self._observers = ProcessObservers(config, self._clock)
        self._observer = self._observers.observer
        self._status = self._observers.status
        self._hooks = self._observers.hooks
        self._epochs = PeerEpochs()
        agent, self._http_pool = make_agent(
            reactor, config.instances, config.tls.for_connecting
        )
        self._client = HttpCatchUpClient(
            agent,
            config.instances,
            config.secret,
            reactor,
            epoch_of=self._epochs.epoch_of,
            observer=self._observer,
        )
        self._database: Database | None = None
        if (database := config.database) is not None:
            self._database = Database(
                database.conninfo, reactor, max_connections=database.max_connections
            )
        self.host = StandaloneHost.from_config(
            config,
            self._clock,
            self._observer,
            self._hooks,
            make_sources(config, self._clock, self._database, self._client),
        )
        self._backlog: Backlog | None = None
        if config.backlog is not None:
            self._backlog = Backlog(config.backlog)
            self._observers.metrics.watch_backlog(self._backlog)
        self.started: Deferred[None] = Deferred()
        self._stops = StopSteps(reactor, DRAIN_TIMEOUT)
        self._starting: Deferred[None] | None = None

    # -- IService -------------------------------------------------------------------

    @override
    def startService(self) -> None:
        super().startService()  # type: ignore[no-untyped-call]
        self._starting = Deferred.fromCoroutine(self._start())
        self._starting.chainDeferred(self.started)

    @override
    def stopService(self) -> Deferred[None]:
        super().stopService()  # type: ignore[no-untyped-call]
        return Deferred.fromCoroutine(self._stop())

    # -- for SupervisedProcess --------------------------------------------------------

    def snapshot(self) -> ProcessStatus:
        """Return the current replication status."""
        return self._status.snapshot()

    def resize_backlog(self, options: BacklogOptions) -> None:
        """Change the limits of the backlogs."""
        if self._backlog is not None:
            self._backlog.resize(options)

    def configuration_reloaded(
        self, problem: str, needs_restart: Sequence[str]
    ) -> None:
        """Report to the hooks a reload of the configuration, or why it failed."""
        self._hooks.configuration_reloaded(problem, needs_restart)

    # -- start ----------------------------------------------------------------------

    async def _start(self) -> None:
        config, host = self._config, self.host
        for warning in config.warnings:
            self.log.warn("{warning}", warning=warning)
        factories = load_factories(config)
        self._stops.add(
            "sending spans", lambda: self._observers.spans.stop(self._reactor)
        )
        self._stops.add(
            "closing HTTP connections", self._http_pool.closeCachedConnections
        )
        if self._database is not None:
            self._stops.add("closing the database", self._database.close)
            background = host.run_as_background_process
            self._stops.add("ending background work", background.wait)
        sink = self._make_sinks(factories)
        setup = StreamSetup(config, host, self._database, self._reactor)
        await setup.run(sink)
        if self._backlog is not None:
            for name, (start, token) in setup.empty_ranges.items():
                self._backlog.of(name).skip_range(start, token)
        services = [service for make in factories.modules if (service := make(host))]
        handler, extension = self._make_handler()
        host.outgoing.connect(handler)
        self._start_observers(handler, setup.generators)
        streamer = ReplicationStreamer(
            host,
            handler.sender,
            self._observer,
            options=StreamerOptions(torture_level=config.torture_level),
        )
        await self._listen_http()
        channels = handler.start_replication()
        await self._start_links(handler, extension, channels)
        if extension is not None:
            extension.start()
            self._stops.add("announcing the exit", extension.stop)
        self._stops.add("dropping unsent commands", handler.sender.drop_unsent)
        self._stops.add("withdrawing syncing users", self._clear_users(handler))
        self._stops.add("handling received commands", handler.wait_until_idle)
        self._stops.add("sending written rows", streamer.stop)
        streamer.start()
        self._start_position_check(handler)
        for service in services:
            self._start_service(service)
        self.log.info(
            "{instance_name} of {server_name} is up",
            instance_name=config.instance_name,
            server_name=config.server_name,
        )

    def _start_position_check(self, handler: ReplicationCommandHandler) -> None:
        config = self._config
        interval = config.receiving.position_check_seconds
        writers = {
            (stream.positions_name or name, writer): name
            for name, stream in declared_streams(config).items()
            if not stream.description.held_in_memory
            for writer in config.writers[name]
            if writer != config.instance_name
        }
        if self._database is None or not interval or not writers:
            return
        check = StoredPositionCheck(
            self._database,
            writers,
            handler.known_position,
            handler.stored_position,
            self._clock,
            self._observer,
            interval=interval,
        )
        check.start()
        self._stops.add("stopping the reads of positions", check.stop)

    def _make_sinks(self, factories: Factories) -> RowSink:
        host = self.host
        sink: RowSink = PositionsOnlySink()
        if factories.row_sink is not None:
            sink = factories.row_sink(host)
        host.set_sink(sink)
        if factories.command_sink is not None:
            host.set_command_sink(factories.command_sink(host))
        for each in (sink, host.commands):
            if isinstance(each, ClosableSink):
                self._stops.add(f"closing {type(each).__name__}", each.close)
        return sink

    def _make_handler(
        self,
    ) -> tuple[ReplicationCommandHandler, ReplicationExtension | None]:
        host, observer = self.host, self._observer
        config = self._config
        options = HandlerOptions(
            expects_links=_has_links(config),
            writers=DeclaredWriters(
                config.writers,
                [MAIN_INSTANCE, config.instance_name, *config.instances],
            ),
            receiver=config.receiving,
        )
        if self._backlog is None:
            return ReplicationCommandHandler(host, observer, options=options), None
        partial = PartialResync(
            self._epochs, self._client.get_backlog, self._clock, observer
        )
        handler = ReplicationCommandHandler(
            host, observer, options=attrs.evolve(options, partial=partial)
        )
        extension = ReplicationExtension(
            host,
            handler,
            observer,
            self._epochs,
            self._backlog,
            where=process_label(),
        )
        return handler, extension

    async def _listen_http(self) -> None:
        config = self._config
        replication = ReplicationResource(
            self.host.streams,
            config.instance_name,
            config.secret,
            self._observer,
            epoch=self.host.identity.instance_id if self._backlog is not None else None,
            backlog=self._backlog,
            status=lambda: encode_status(self._status.snapshot()),
        )
        for listener in config.listeners:
            if not listener.direct_tcp:
                site = make_site(
                    listener.resources,
                    replication,
                    self._observers.registry,
                    self._status.snapshot,
                    hosts=served_hosts(
                        listener.addresses,
                        [
                            *config.allowed_hosts,
                            *(at.host for at in config.instances.values() if at.host),
                        ],
                    ),
                    has_secret=config.secret is not None,
                    max_connections=config.max_http_connections,
                    refused=self._observer.request_refused,
                )
                for description in listener_descriptions(listener):
                    await self._listen(description, site, listener.tls)

    async def _start_links(
        self,
        handler: ReplicationCommandHandler,
        extension: ReplicationExtension | None,
        channels: tuple[str, ...],
    ) -> None:
        config = self._config
        descriptions = [
            *((description, False) for description in config.tcp_listen),
            *(
                (description, listener.tls)
                for listener in config.listeners
                if listener.direct_tcp
                for description in listener_descriptions(listener)
            ),
        ]
        if descriptions:
            factory = ReplicationStreamProtocolFactory(
                config.server_name,
                self._clock,
                handler,
                self._observer,
                limit=config.tcp_limit,
                extension=extension,
                max_connections=config.max_tcp_connections,
            )
            self._observers.watch_buffers(factory.buffers)
            self._stops.add("closing direct TCP connections", factory.close_connections)
            for description, tls in descriptions:
                await self._listen(description, factory, tls)
        for description in config.tcp_connect:
            client = DirectTcpReplicationClientFactory(
                config.instance_name,
                config.server_name,
                self._clock,
                handler,
                self._observer,
                limit=config.tcp_limit,
                extension=extension,
            )
            self._observers.watch_buffers(client.buffers)
            client.connect(
                client_endpoint(self._reactor, description, config),
                description,
            )
            self._stops.add("closing the direct TCP connection", client.stop)
        if config.redis is not None:
            self._start_redis(config.redis, handler, extension, channels)

    def _start_redis(
        self,
        redis: RedisOptions,
        handler: ReplicationCommandHandler,
        extension: ReplicationExtension | None,
        channels: tuple[str, ...],
    ) -> None:
        link = RedisReplicationLink(
            self._reactor,
            redis,
            self._config.server_name,
            handler,
            self._observer,
            lambda lost: handler.sender.announce_positions(),
            channels,
            extension=extension,
        )
        with explained_redis_files(self._config):
            link.start()
        self._observers.watch_buffers(link.buffers)
        self._stops.add("closing the Redis connections", link.stop)

    def _start_observers(
        self,
        handler: ReplicationCommandHandler,
        generators: Mapping[str, MultiWriterIdGenerator],
    ) -> None:
        written = self.host.streams.get_streams_to_replicate()
        self._observers.start(
            lambda: {
                stream.description.name: handler.sender.last_sent_token(stream)
                for stream in written
            },
            handler.readers,
            StuckIdWatch(lambda: generators, self._clock),
        )
        self._stops.add("stopping the hooks", self._hooks.stop)
        self._stops.add("stopping the sampling", self._observers.stop_sampling)

    async def _listen(
        self, description: str, factory: IProtocolFactory, tls: bool
    ) -> None:
        if tls:
            factory = TLSMemoryBIOFactory(
                self._config.tls.for_listening(), False, factory
            )
        endpoint = server_endpoint(self._reactor, description, self._config)
        try:
            port = await endpoint.listen(factory)
        except CannotListenError as error:
            is_tcp = description in self._config.tcp_listen
            problem = self._config.problem(
                "tcp_listen" if is_tcp else "listeners",
                f"cannot listen on {description}: {error.socketError}",
                "choose a free port, and an address of this machine",
            )
            raise ConfigError([problem]) from error
        self._stops.add(f"closing {description}", port.stopListening)

    def _start_service(self, service: Any) -> None:
        service.startService()
        self._stops.add(f"stopping {service!r}", service.stopService)

    def _clear_users(self, handler: ReplicationCommandHandler) -> Callable[[], None]:
        def clear() -> None:
            if not self._config.is_main:
                handler.sender.send(
                    ClearUserSyncsCommand(self.host.identity.instance_id)
                )

        return clear

    # -- stop -----------------------------------------------------------------------

    async def _stop(self) -> None:
        if self._starting is not None and not self._starting.called:
            self._starting.cancel()
        self._hooks.stopping()
        links = self._status.snapshot().links
        outcome = "everything received was handled and everything written was sent"
        if links and not any(link.up for link in links):
            outcome = "no link was up: readers will fetch what they have not received"
        if not await self._stops.run():
            outcome = "the warnings above name the steps that did not finish"
        self.log.info(
            "{instance_name} has stopped; {outcome}",
            instance_name=self._config.instance_name,
            outcome=outcome,
        )


def _has_links(config: ProcessConfig) -> bool:
    return bool(
        config.redis is not None
        or config.tcp_connect
        or config.tcp_listen
        or any(listener.direct_tcp for listener in config.listeners)
    )
