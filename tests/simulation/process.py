"""A simulated process: the real code on doubles of its environment.

The id generators, the command handler, the streamer, the Redis link and the wire code
are real; so are the data handler and the creation of the streams, except in a simulated
homeserver. Time, the network, Redis, PostgreSQL and the HTTP requests for rows are
doubles.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, cast

import attrs
import psycopg2
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater

from synapse_replication.app.host import StandaloneHost
from synapse_replication.app.position_check import StoredPositionCheck
from synapse_replication.app.stream_setup import StreamSetup
from synapse_replication.config.replication_options import ReplicationOptions
from synapse_replication.dropin.host_streams import HostStream
from synapse_replication.errors import (
    CatchUpError,
    CommitUnknownError,
    HttpCatchUpError,
    NameLostError,
    SequenceBehindError,
    StorageError,
)
from synapse_replication.handlers.command_handler import (
    HandlerOptions,
    ReplicationCommandHandler,
)
from synapse_replication.handlers.epochs import PeerEpochs
from synapse_replication.handlers.extension.extension import ReplicationExtension
from synapse_replication.handlers.host_parts import ReactorClock
from synapse_replication.handlers.interfaces import Identity
from synapse_replication.handlers.receiving.context import ReceiverOptions
from synapse_replication.handlers.receiving.partial_resync import PartialResync
from synapse_replication.handlers.sending.streamer import (
    ReplicationStreamer,
    StreamerOptions,
)
from synapse_replication.handlers.timer import Backoff
from synapse_replication.redis.fencing import PublisherName
from synapse_replication.redis.link import RedisReplicationLink
from synapse_replication.redis.options import RedisOptions
from synapse_replication.storage.admission import Admission
from synapse_replication.storage.database import Database
from synapse_replication.storage.id_generators import (
    MultiWriterIdGenerator,
    load_id_generator,
)
from synapse_replication.storage.id_streams import row_stream_of
from synapse_replication.storage.postgres_stream import PostgresStream
from synapse_replication.storage.row_queries import insert_sql
from synapse_replication.storage.writer_lock import LOCK_CHECK_INTERVAL
from synapse_replication.streams.backlog import Backlog, BacklogOptions
from synapse_replication.streams.memory import MemoryStream
from synapse_replication.streams.stream import StreamUpdateResult
from synapse_replication.streams.table import TableStream
from synapse_replication.tcp.factory import (
    DirectTcpReplicationClientFactory,
    ReplicationStreamProtocolFactory,
)
from tests.simulation.database import DatabaseClient
from tests.simulation.environment import Environment, Neighbour
from tests.simulation.homeserver import HomeserverStream, make_rows
from tests.simulation.invariants import Reader, SimulatedRow
from tests.simulation.reactor import PEER_PORT
from tests.simulation.sink import ProcessSink
from tests.simulation.topology import (
    CACHES,
    IN_MEMORY,
    MEMORY_STREAM,
    TABLES,
    WRITERS,
    SavedState,
    describe,
)
from tests.simulation.watcher import Watcher
from tests.support.hooks import silent_hooks


class Process:
    """One epoch of a process, from start to crash.

    :param cluster: the resources that the processes share.
    :param name: the instance name.
    :param saved: the saved state, which the process loads and updates.
    """

    def __init__(self, cluster: Environment, name: str, saved: SavedState) -> None:
        self.cluster = cluster
        self.name = name
        self.saved = saved
        self.is_up = False
        self.epoch = cluster.next_epoch()
        self.reader = Reader(name)
        self.reactor = cluster.make_reactor(name)
        self.watcher = Watcher(
            name,
            cluster.counts,
            cluster.trace,
            self._unexpected,
            self._if_judged(cluster.ledger.cut_off),
            self._if_judged(cluster.ledger.reset),
            self._if_judged(cluster.ledger.moved_back),
        )
        self.options, self.host = self._make_options(), self._make_host()
        self.sink = ProcessSink(self)
        self.epochs = PeerEpochs()
        self.backlog: Backlog | None = None
        if name in cluster.speak_extension:
            page_rows = cluster.links.page_rows + 1
            self.backlog = Backlog(BacklogOptions(max_rows=40, page_rows=page_rows))
        database = cluster.database
        if name == "reader2" and cluster.standby is not None:
            database = cluster.standby
        self.database = DatabaseClient(database, self.reactor)
        self.generators: dict[str, MultiWriterIdGenerator] = {}
        self.written: dict[str, PostgresStream | MemoryStream] = {}
        self._has_begun = False
        self._admission: Admission | None = None
        self.handler: ReplicationCommandHandler
        cluster.run(f"starting {name}", self._start())

    @property
    def is_judged(self) -> bool:
        """Whether the ledger has its epoch, and not that of a successor."""
        return self._has_begun and self not in self.cluster.replaced

    def _if_judged(self, record: Callable[..., object]) -> Callable[..., None]:
        def call(*args: Any, **more: Any) -> None:
            if self.is_judged:
                record(*args, **more)

        return call

    def _make_options(self) -> ReplicationOptions:
        cluster = self.cluster
        receiving = ReceiverOptions(backoff=Backoff(jitter=cluster.random.random))
        if cluster.has_small_queues:
            receiving = attrs.evolve(receiving, max_queue_size=1500, max_batch_rows=4)
        return ReplicationOptions(
            server_name="hs",
            instance_name=self.name,
            streams=(*TABLES, IN_MEMORY),
            # Every instance may write a stream without declared writers.
            writers={**cluster.writers, CACHES: ()},
            creates_tables=False,
            torture_level=cluster.torture_level,
            receiving=receiving,
        )

    def _make_host(self) -> StandaloneHost:
        clock = ReactorClock(self.reactor, self.cluster.clock.seconds)
        return StandaloneHost(
            Identity("hs", self.name, f"{self.name}-{self.epoch}"),
            clock,
            self.watcher,
            silent_hooks(clock, self.watcher),
            lambda stream_name: self._fetch,
        )

    def save(self, key: tuple[str, str], token: int) -> None:
        """Save a position across crashes, if this process saves its state."""
        if self.cluster.retains_rows(self.name):
            self.saved.positions[key] = token

    async def _start(self) -> None:
        cluster = self.cluster
        if cluster.replaces and self.name in WRITERS:
            await self._acquire_name()
        await self._make_streams()
        self._begin_epoch()
        host = self.host
        self.handler = self._make_handler()
        extension = None
        if self.backlog is not None:
            extension = ReplicationExtension(self.handler, self.epochs, self.backlog)
        streamer = ReplicationStreamer(
            host,
            self.handler.sender,
            self.watcher,
            options=StreamerOptions(
                max_rows=5, torture_level=self.options.torture_level
            ),
            random_source=cluster.random,
        )
        self._start_links(extension)
        if extension is not None:
            extension.start()
        streamer.start()
        if cluster.discards:
            self._make_position_check().start()
        self.is_up = True
        cluster.trace(f"{self.name} is up")

    def _unexpected(self, what: str, error: BaseException) -> None:
        if not isinstance(error, NameLostError):
            self.cluster.unexpected(what, error)

    async def _acquire_name(self) -> None:
        """Acquire the name of this process, when its holder commits nothing more."""
        database, term = self.cluster.database, None
        while term is None:
            with suppress(psycopg2.Error):
                term = await self.database.transact(
                    "acquire_name",
                    lambda txn: database.acquire_name(self.name),
                    autocommit=True,
                )
            await deferLater(self.reactor, 0.2)
        self._admission = Admission(self.name, term)
        self.database.admit(self._admission, self._name_lost)
        self._check_name_later()

    def _check_name_later(self) -> None:
        self.reactor.callLater(
            LOCK_CHECK_INTERVAL,
            lambda: self.cluster.run("checking the name", self._check_name()),
        )

    async def _check_name(self) -> None:
        """Notice that the name is lost, even if this process writes nothing.

        A real one notices it when it checks its lock.
        """
        with suppress(psycopg2.Error, NameLostError):
            await self.database.confirm_name()
        self._check_name_later()

    def _find_name_check(self) -> Callable[[], Deferred[None]] | None:
        return None if self._admission is None else self.database.confirm_name

    def _name_lost(self, error: NameLostError) -> None:
        # It runs on until it has stopped.
        seconds = self.cluster.random.random()
        self.reactor.callLater(seconds, self.cluster.leave, self)

    def _start_links(self, extension: ReplicationExtension | None) -> None:
        links, handler, watcher = self.cluster.links, self.handler, self.watcher
        clock = self.host.clock
        if "tcp" in links.roles:
            server = ReplicationStreamProtocolFactory(
                "hs", clock, handler, watcher, extension=extension
            )
            self.cluster.network.listen(self.reactor, server)
        for peer in links.peers[self.name]:
            client = DirectTcpReplicationClientFactory(
                self.name,
                "hs",
                clock,
                handler,
                watcher,
                extension=extension,
                jitter=lambda: 0.0,
            )
            self.reactor.connectTCP(peer, PEER_PORT, client)
        if links.has_redis:
            RedisReplicationLink(
                self.reactor,
                RedisOptions(password="secret"),
                "hs",
                handler,
                watcher,
                self._announce_again,
                handler.start_replication(),
                publisher=PublisherName(
                    watcher,
                    "hs",
                    self.name,
                    self._find_name_check,
                ),
                ping_interval=5.0,
                reply_timeout=5.0,
                extension=extension,
                # Simultaneous reconnects are the harder case.
                jitter=lambda: 0.0,
            ).start()

    def _make_position_check(self) -> StoredPositionCheck:
        writers = self.cluster.writers
        seconds = self.host.clock.seconds
        return StoredPositionCheck(
            self.database,
            {
                table.name: row_stream_of(
                    table, () if table.name == CACHES else writers[table.name]
                )
                for table in TABLES
                if set(writers[table.name]) != {self.name}
            },
            writers[CACHES],
            self.handler,
            lambda name: self.epochs.is_reporting(name, seconds()),
            self.host.clock,
            self.watcher,
            me=self.name,
            interval=5.0,
            uniform=lambda least, most: (least + most) / 2,
        )

    async def _make_streams(self) -> None:
        """Create the streams, as often as a supervisor starts the process again."""
        cluster = self.cluster
        while True:
            try:
                if cluster.shares_tokens:
                    await self._make_homeserver()
                else:
                    await self._make_stand_alone()
                return
            except SequenceBehindError as error:
                # Like an operator, follow the hint of the error.
                cluster.trace(f"{self.name} refuses to start: {error}")
                cluster.database.set_sequence(error.sequence_name, error.value)
            except (StorageError, CatchUpError, psycopg2.Error) as error:
                cluster.trace(f"{self.name} cannot start: {error!r}")
                await deferLater(self.reactor, 0.5)
            self.options, self.host = self._make_options(), self._make_host()

    async def _make_stand_alone(self) -> None:
        """Create the host's streams, as the service of a process does."""
        host = self.host
        # DatabaseClient has what the parts that run here use of a Database.
        database = cast(Database, self.database)
        setup = StreamSetup(self.options, host, database, self.reactor)
        host.set_sink(self.sink, setup.largest_token)
        await setup.add_streams(self.sink)
        self.generators = setup.generators
        self.written = cast(
            "dict[str, PostgresStream | MemoryStream]", dict(host.streams.get_streams())
        )
        for stream in self.written.values():
            stream._page_rows = self.cluster.links.page_rows
        for table in TABLES:
            self.written[table.name].description = describe(table)
        if self.backlog is not None:
            for name, (start, token) in setup.empty_ranges.items():
                self.backlog.of(name).skip_range(start, token)

    def _begin_epoch(self) -> None:
        """Record the initial positions in the ledger."""
        cluster = self.cluster
        positions = {
            (stream, writer): self._token_at_start(stream, writer)
            for stream in cluster.writers
            # Include processes that are no longer writers, or not yet writers.
            for writer in (WRITERS if stream != MEMORY_STREAM else ("main",))
            if writer != self.name
        }
        self.reader = cluster.begin_epoch(self.name, positions, self.epoch)
        self.reader.epoch_of = self._epoch_of
        self._has_begun = True

    def _epoch_of(self, writer: str) -> int | None:
        """Return the epoch that a reader knows, or is about to begin, if any."""
        reader = self.handler.receivers[MEMORY_STREAM].readers().get(writer)
        if reader is None:
            return None
        begun = None if reader._catch_up is None else reader._catch_up.epoch
        epoch = begun or reader.epoch
        return None if epoch is None else int(epoch.rpartition("-")[2])

    def _make_handler(self) -> ReplicationCommandHandler:
        host, partial = self.host, None
        if self.backlog is not None:
            partial = PartialResync(
                self.epochs, self._ask_backlog, host.clock, self.watcher
            )
        return ReplicationCommandHandler(
            host,
            self.watcher,
            options=HandlerOptions(receiver=self.options.receiving, partial=partial),
        )

    def _token_at_start(self, stream_name: str, writer: str) -> int:
        """Return the position from which this process reads a writer's rows."""
        generator = self.generators.get(stream_name)
        if (
            self.cluster.shares_tokens
            and writer not in self.cluster.writers[stream_name]
        ):
            # All caches of a new process are empty, so it needs no earlier rows.
            return self.cluster.ledger.last_token(stream_name, writer)
        if self.cluster.shares_tokens and generator is not None:
            return generator.get_current_token_for_writer(writer)
        return self.written[stream_name].current_token(writer)

    async def _make_homeserver(self) -> None:
        """Create the streams of a simulated homeserver, each with an id generator."""
        cluster, host = self.cluster, self.host
        hosted: dict[str, HostStream] = {}
        for table in TABLES:
            self.written[table.name] = await self._make_in_table(table)
        self.written[MEMORY_STREAM] = self._make_in_memory()
        for name, stream in self.written.items():
            writers = cluster.writers[name]
            generator = self.generators.get(name)
            added: Any = HostStream(
                HomeserverStream(stream, self.name, generator),
                self.name,
                () if name == CACHES else writers,
                trusts_ids=True,
                ids=generator,
                seconds=host.clock.seconds,
            )
            hosted[name] = added
            host.streams.add(added, is_written_here=self.name in writers)
        host.rows = make_rows(self.sink, hosted, self._shows, host.clock)  # type: ignore[assignment]

    def _make_in_memory(self) -> MemoryStream:
        return MemoryStream(
            IN_MEMORY.description,
            instance_name=self.name,
            fetch=self._fetch,
            key=IN_MEMORY.key,
            max_rows=IN_MEMORY.max_rows,
            page_rows=self.cluster.links.page_rows,
            on_write=self.host.notifier.notify,
        )

    async def _make_in_table(self, table: TableStream) -> PostgresStream:
        name = table.name
        ids = self.generators[name] = await load_id_generator(
            self.database,
            self.options.id_streams[name],
            self.name,
            self.reactor,
            self.host.clock,
            on_finished=self.host.notifier.notify,
            observer=self.watcher,
            admission=self._admission,
        )
        stream = PostgresStream(
            table,
            self.database,
            ids,
            instance_name=self.name,
            page_rows=self.cluster.links.page_rows,
            writers=self.cluster.writers[name],
        )
        stream.description = describe(table)
        # A homeserver reads its pages without reading the sequence.
        stream._sequence = None
        return stream

    def _shows(self, stream_name: str, token: int) -> None:
        if self.is_judged:
            self.cluster.ledger.shown(self.reader, stream_name, token)

    def _announce_again(self, lost: int) -> None:
        self.cluster.trace(f"{self.name} announces again: {lost} publishes were lost")
        self.cluster.counts.announcements[self.name] += 1
        self.handler.sender.announce_positions()

    async def _fetch(
        self, instance_name: str, from_token: int, upto_token: int, limit: int
    ) -> StreamUpdateResult:
        """Request rows in memory from another process, as over HTTP."""
        process = await self._connect_to(instance_name)
        # Like the writer's HTTP resource, reject a request with another epoch.
        epoch = self.epochs.epoch_of(instance_name)
        if epoch is not None and epoch != process.host.identity.instance_id:
            raise HttpCatchUpError("GET", instance_name, 409, "another epoch")
        stream = process.host.streams.get_streams()[MEMORY_STREAM]
        result = await stream.get_updates_since(instance_name, from_token, upto_token)
        await deferLater(self.reactor, self.cluster.network.latency(self.name))
        if process.backlog is not None and self.backlog is not None:
            return attrs.evolve(result, epoch=process.host.identity.instance_id)
        return result

    async def _ask_backlog(
        self,
        stream_name: str,
        instance_name: str,
        epoch: str,
        from_token: int,
        upto_token: int,
    ) -> StreamUpdateResult:
        """Request rows from another process's backlog, as over HTTP."""
        process = await self._connect_to(instance_name)
        if epoch != process.host.identity.instance_id:
            raise HttpCatchUpError("GET", instance_name, 409, "another epoch")
        found = None
        if process.backlog is not None:
            found = process.backlog.read(stream_name, from_token, upto_token)
        await deferLater(self.reactor, self.cluster.network.latency(self.name))
        if found is None:
            raise HttpCatchUpError("GET", instance_name, 410, "not in the backlog")
        self.cluster.counts.partial_resyncs += 1
        return found

    async def _connect_to(self, instance_name: str) -> Neighbour:
        """Return the process to which a request is sent, after the network latency.

        :raises HttpCatchUpError: if the process does not respond.
        """
        cluster = self.cluster
        await deferLater(self.reactor, cluster.network.latency(self.name))
        process = cluster.processes.get(instance_name)
        if (
            process is None
            or not process.is_up
            or cluster.random.random() < cluster.http_failure_chance
        ):
            raise HttpCatchUpError("GET", instance_name, None, "no response")
        return process

    async def write(self, stream_name: str, rows: list[SimulatedRow]) -> None:
        """Write rows; an error of the database is not a failure of the simulation."""
        stream: Any = self.written[stream_name]
        if stream_name == MEMORY_STREAM:
            stream.write(rows)
            return
        # A homeserver writes in the blocks of its id generators.
        write = stream.write
        if self.cluster.shares_tokens or rows[0].row_id % 2:
            write = partial(self._write_in_block, stream_name)
        try:
            await write(rows)
        except (psycopg2.Error, CommitUnknownError, NameLostError) as error:
            self.cluster.trace(f"{self.name} could not write {stream_name}: {error}")
        self.host.notifier.notify()

    async def _write_in_block(self, stream_name: str, rows: list[SimulatedRow]) -> None:
        (table,) = (each for each in TABLES if each.name == stream_name)
        sql = insert_sql(table.id_columns[0], table.column_names)
        async with self.generators[stream_name].get_next() as id_:
            values = {
                "id": id_,
                "instance_name": self.name,
                "rows": json.dumps([attrs.asdict(row) for row in rows]),
            }
            await self.database.transact(
                f"write_{stream_name}", lambda txn: txn.execute(sql, values)
            )

    def position(self, stream_name: str, writer: str) -> int:
        """Return the position of this process in a writer's rows."""
        return self.host.streams.get_streams()[stream_name].current_token(writer)
