"""A simulated process: the real code on doubles of its environment.

The id generators, the command handler, the streamer, the Redis link and the wire code
are real; so are the streams and the data handler, except in a simulated homeserver.
Time, the network, Redis, PostgreSQL and the HTTP requests for rows are doubles.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import attrs
import psycopg2
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater

from synapse_replication.app.host import StandaloneHost
from synapse_replication.app.position_check import StoredPositionCheck
from synapse_replication.app.reader_ids import ReaderIds
from synapse_replication.dropin.host_streams import HostStream
from synapse_replication.errors import (
    CommitUnknownError,
    HttpCatchUpError,
    NameLostError,
    SequenceBehindError,
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
from synapse_replication.http.client import HttpCatchUpClient
from synapse_replication.redis.fencing import PublisherName
from synapse_replication.redis.link import RedisReplicationLink
from synapse_replication.redis.options import RedisOptions
from synapse_replication.storage.admission import Admission
from synapse_replication.storage.id_generators import (
    MultiWriterIdGenerator,
    load_id_generator,
)
from synapse_replication.storage.id_streams import (
    IdStream,
    read_sequence,
    row_stream_of,
)
from synapse_replication.storage.postgres_stream import PostgresStream, WriterIds
from synapse_replication.storage.removed_writer_search import RemovedWriterFinder
from synapse_replication.storage.sequences import (
    limit_positions,
    read_stored_positions,
)
from synapse_replication.storage.writer_lock import LOCK_CHECK_INTERVAL
from synapse_replication.streams.backlog import Backlog, BacklogOptions
from synapse_replication.streams.memory import MemoryStream
from synapse_replication.streams.rows import AttrsRowCodec
from synapse_replication.streams.stream import StreamDescription, StreamUpdateResult
from synapse_replication.streams.table import TableStream
from synapse_replication.tcp.factory import (
    DirectTcpReplicationClientFactory,
    ReplicationStreamProtocolFactory,
)
from tests.simulation.database import DatabaseClient
from tests.simulation.environment import Environment, Neighbour
from tests.simulation.homeserver import (
    HomeserverStream,
    make_rows,
)
from tests.simulation.invariants import Reader, SimulatedRow
from tests.simulation.reactor import PEER_PORT
from tests.simulation.sink import ProcessSink
from tests.simulation.topology import (
    CACHES,
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
        clock = ReactorClock(self.reactor, cluster.clock.seconds)
        self.host = StandaloneHost(
            Identity("hs", name, f"{name}-{self.epoch}"),
            clock,
            self.watcher,
            silent_hooks(clock, self.watcher),
            HttpCatchUpClient(None, {}, None, self.reactor).for_stream,
        )
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
        #: The (stream, writer) pairs whose initial position is not saved.
        self._not_saved: set[tuple[str, str]] = set()
        self._admission: Admission | None = None
        self.handler: ReplicationCommandHandler
        cluster.run(f"starting {name}", self._start())

    @property
    def is_judged(self) -> bool:
        """Whether its successor has not taken its place, also in the ledger."""
        return self not in self.cluster.replaced

    def _if_judged(self, record: Callable[..., object]) -> Callable[..., None]:
        def call(*args: Any, **more: Any) -> None:
            if self.is_judged:
                record(*args, **more)

        return call

    def save(self, key: tuple[str, str], token: int) -> None:
        """Save a position across crashes, if this process saves its state."""
        if self.cluster.retains_rows(self.name):
            self.saved.positions[key] = token

    async def _start(self) -> None:
        cluster, host = self.cluster, self.host
        if cluster.replaces and self.name in WRITERS:
            await self._acquire_name()
        made = await self._make_streams()
        memory = self._make_in_memory()
        self.written = {stream.description.name: stream for stream in made}
        self.written[memory.description.name] = memory
        self._begin_epoch()
        self._fill_host()
        self.handler = self._make_handler()
        extension = None
        if self.backlog is not None:
            extension = ReplicationExtension(self.handler, self.epochs, self.backlog)
        streamer = ReplicationStreamer(
            host,
            self.handler.sender,
            self.watcher,
            options=StreamerOptions(max_rows=5, torture_level=cluster.torture_level),
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
        writers = {
            table.name: [w for w in self.cluster.writers[table.name] if w != self.name]
            for table in TABLES
        }
        instances = writers[CACHES]
        seconds = self.host.clock.seconds
        return StoredPositionCheck(
            self.database,
            {
                table.name: row_stream_of(
                    table, () if table.name == CACHES else writers[table.name]
                )
                for table in TABLES
                if writers[table.name]
            },
            instances,
            self.handler,
            lambda name: self.epochs.is_reporting(name, seconds()),
            self.host.clock,
            self.watcher,
            interval=5.0,
            uniform=lambda least, most: (least + most) / 2,
        )

    async def _make_streams(self) -> list[PostgresStream]:
        """Create the streams in tables, retrying until the database is available."""
        cluster = self.cluster
        while True:
            try:
                self._not_saved.clear()
                return [await self._make(self._declared(table)) for table in TABLES]
            except psycopg2.Error:
                await deferLater(self.reactor, 0.5)
            except SequenceBehindError as error:
                # Like an operator, follow the hint of the error.
                cluster.trace(f"{self.name} refuses to start: {error}")
                cluster.database.set_sequence(error.sequence_name, error.value)

    def _begin_epoch(self) -> None:
        """Record the initial positions in the ledger; save those that may be saved."""
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
        if cluster.retains_rows(self.name):
            for key in positions.keys() - self._not_saved:
                self.saved.positions[key] = positions[key]

    def _epoch_of(self, writer: str) -> int | None:
        """Return the epoch that a reader knows, or is about to begin, if any."""
        reader = self.handler.receivers[MEMORY_STREAM].readers().get(writer)
        if reader is None:
            return None
        begun = None if reader._catch_up is None else reader._catch_up.epoch
        epoch = begun or reader.epoch
        return None if epoch is None else int(epoch.rpartition("-")[2])

    def _make_handler(self) -> ReplicationCommandHandler:
        cluster, host = self.cluster, self.host
        receiver = ReceiverOptions(backoff=Backoff(jitter=cluster.random.random))
        if cluster.has_small_queues:
            receiver = attrs.evolve(receiver, max_queue_size=1500, max_batch_rows=4)
        partial = None
        if self.backlog is not None:
            partial = PartialResync(
                self.epochs, self._ask_backlog, host.clock, self.watcher
            )
        return ReplicationCommandHandler(
            host,
            self.watcher,
            options=HandlerOptions(receiver=receiver, partial=partial),
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

    def _fill_host(self) -> None:
        """Add the streams and the sink to the host."""
        cluster, host = self.cluster, self.host
        sink = ProcessSink(self)
        hosted: dict[str, HostStream] = {}
        for name, stream in self.written.items():
            writers = cluster.writers[name]
            generator = self.generators.get(name)
            added: Any = stream
            if cluster.shares_tokens:
                added = hosted[name] = HostStream(
                    HomeserverStream(stream, self.name, generator),
                    self.name,
                    () if name == CACHES else writers,
                    trusts_ids=True,
                    ids=generator,
                    seconds=host.clock.seconds,
                )
            host.streams.add(added, is_written_here=self.name in writers)
        if cluster.shares_tokens:
            host.rows = make_rows(sink, hosted, self._shows, host.clock)  # type: ignore[assignment]
        else:
            host.set_sink(sink, None)

    def _shows(self, stream_name: str, token: int) -> None:
        if self.is_judged:
            self.cluster.ledger.shown(self.reader, stream_name, token)

    def _announce_again(self, lost: int) -> None:
        self.cluster.trace(f"{self.name} announces again: {lost} publishes were lost")
        self.cluster.counts.announcements[self.name] += 1
        self.handler.sender.announce_positions()

    async def _make(self, table: TableStream) -> PostgresStream:
        name = table.name
        ids = IdStream(
            stream_name=table.positions_name,
            sequence=table.sequence,
            tables=table.id_columns,
            writers=() if name == CACHES else table.writers,
        )
        stored = {}
        if ids.writers:
            stored = await self.database.transact(
                "positions_at_start", lambda txn: read_stored_positions(txn, ids)
            )
        own = None
        if self.name in table.writers or self.cluster.shares_tokens:
            own = await self._make_generator(ids)
        if self.cluster.shares_tokens:
            assert own is not None
            return self._make_stream(table, own)
        saved = {
            writer: token
            for (stream, writer), token in self.saved.positions.items()
            if stream == name
        }
        delivered = saved or stored
        if saved:
            delivered = await self.database.transact(
                "limit_positions", lambda txn: limit_positions(txn, ids, saved)
            )
        unknown = min(delivered.values(), default=1)
        if not delivered and not ids.writers:
            unknown = await self.database.transact(
                "sequence_at_start", lambda txn: read_sequence(txn, table.sequence)
            )
        positions = ReaderIds(name, self.name, dict(delivered), unknown, own)
        finder = RemovedWriterFinder(
            self.database,
            self.host.clock,
            ids,
            self.name,
            positions.get_delivered,
            positions.unknown,
            is_new=not saved,
        )
        self._not_saved.update((name, w) for w in WRITERS if w not in table.writers)
        if ids.writers:
            await self._survey(name, ids, positions, finder, is_new=not saved)
        return self._make_stream(table, positions, finder)

    async def _survey(
        self,
        name: str,
        ids: IdStream,
        positions: ReaderIds,
        finder: RemovedWriterFinder,
        *,
        is_new: bool,
    ) -> None:
        """For removed writers that need not be drained, skip all rows."""
        survey = await finder.survey()
        found = {} if is_new else finder.select(survey)
        for writer in survey.absent - found.keys():
            if writer not in ids.writers or writer in survey.greatest:
                token = positions.get_current_token_for_writer(writer)
                positions.advance(writer, max(token, survey.last_row))
                self._not_saved.discard((name, writer))

    def _declared(self, table: TableStream) -> TableStream:
        """Return a table's declaration with the writers of the configuration."""
        return attrs.evolve(table, writers=self.cluster.writers[table.name])

    def _make_stream(
        self,
        table: TableStream,
        ids: WriterIds,
        finder: RemovedWriterFinder | None = None,
    ) -> PostgresStream:
        stream = PostgresStream(
            table,
            self.database,
            ids,
            instance_name=self.name,
            page_rows=self.cluster.links.page_rows,
            writers=self.cluster.writers[table.name],
            find_removed_writers=None if finder is None else finder.find,
        )
        stream.description = describe(table)
        if self.cluster.shares_tokens:
            # A homeserver reads its pages without reading the sequence.
            stream._sequence = None
        return stream

    async def _make_generator(self, ids: IdStream) -> MultiWriterIdGenerator:
        generator = self.generators[ids.stream_name] = await load_id_generator(
            self.database,
            ids,
            self.name,
            self.reactor,
            self.host.clock,
            on_finished=self.host.notifier.notify,
            observer=self.watcher,
            admission=self._admission,
        )
        return generator

    def _make_in_memory(self) -> MemoryStream:
        stream = MemoryStream(
            StreamDescription(
                MEMORY_STREAM,
                AttrsRowCodec(MEMORY_STREAM, SimulatedRow),
                resettable=True,
                held_in_memory=True,
            ),
            instance_name=self.name,
            fetch=self._fetch,
            key=lambda row: row.key,
            max_rows=10,
            page_rows=self.cluster.links.page_rows,
            on_write=self.host.notifier.notify,
        )
        if (token := self.saved.positions.get((MEMORY_STREAM, "main"))) is not None:
            stream.advance("main", token)
        return stream

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
        try:
            await stream.write(rows)
        except (psycopg2.Error, CommitUnknownError, NameLostError) as error:
            self.cluster.trace(f"{self.name} could not write {stream_name}: {error}")
        self.host.notifier.notify()

    def position(self, stream_name: str, writer: str) -> int:
        """Return the position of this process in a writer's rows."""
        return self.host.streams.get_streams()[stream_name].current_token(writer)
