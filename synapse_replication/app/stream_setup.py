"""Creation of a process's streams: declared and standard, in tables and in memory.

The initial position of another writer is the first of these that exists:

1. the position that the sink saved (its optional ``saved_positions()``); for a stream
   in memory only if the writer has not restarted since the position was saved, see
   :class:`~synapse_replication.handlers.interfaces.EpochSink`;
2. if the sink saved no position of the stream, the writer's position in
   ``stream_positions``: a new sink receives the rows that are written from now on. With
   the option ``fill_sink``, the beginning of the stream instead;
3. for a stream in the database, the lowest of the positions that rules 1 and 2 yield
   for its writers;
4. in a stream without declared writers, the last id that its sequence has allocated;
5. otherwise, the beginning of the stream.

A position beyond every allocated id is lowered. If the sink has ``saved_positions()``,
the initial positions of declared writers that it has not saved are reported to it, so
that it resumes from them even if the process is killed before the first row.

The rows of a removed writer are fetched from the position that the sink saved. A new
sink does not receive rows of writers that were removed before the start. If no rows of
a removed writer need to be fetched, this process's position for that writer is advanced
and, if the sink has ``saved_positions()``, reported to it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import psycopg2
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorFromThreads
from twisted.logger import Logger

from synapse_replication.app.host import StandaloneHost
from synapse_replication.app.reader_ids import ReaderIds, ReadStreamIds
from synapse_replication.config.replication_options import (
    DeclaredStream,
    ReplicationOptions,
)
from synapse_replication.errors import (
    CatchUpError,
    DatabaseBehindError,
    RowDecodeError,
    StorageError,
)
from synapse_replication.handlers.data_handler import AdvancingStream
from synapse_replication.handlers.events import RemovedWriterFound, StreamAbsent
from synapse_replication.handlers.interfaces import PositionSink, RowSink
from synapse_replication.handlers.waiters import wait_for_all
from synapse_replication.storage.database import Database, first_line, until_available
from synapse_replication.storage.id_streams import IdStream, check_tables, read_sequence
from synapse_replication.storage.postgres_stream import PostgresStream, WriterIds
from synapse_replication.storage.removed_writer_search import RemovedWriterFinder
from synapse_replication.storage.row_pages import query_page
from synapse_replication.storage.row_queries import queries_of
from synapse_replication.storage.schema import prepare_database
from synapse_replication.storage.sequences import limit_positions, read_stored_positions
from synapse_replication.streams.memory import InMemory, MemoryStream
from synapse_replication.streams.standard import registry
from synapse_replication.streams.table import TableStream
from synapse_replication.streams.writer_positions import FIRST_POSITION

if TYPE_CHECKING:
    from synapse_replication.storage.id_generators import MultiWriterIdGenerator
    from synapse_replication.storage.stuck_id_watch import StreamIds
    from synapse_replication.streams.reader import Reader

_log = Logger()

#: The number of ids, counted back from the newest, among which a new writer of a stream
#: searches for earlier rows of its own.
OWN_ROWS_LOOK_BACK = 100_000

#: The stream that the database of each version of Synapse has. If all standard streams
#: are configured, those that an older version does not have are left out.
_OF_EACH_VERSION = "events"

#: ``stream -> writer -> token``.
_Positions: TypeAlias = defaultdict[str, dict[str, int]]


@attrs.define(eq=False, repr=False)
class StreamSetup:
    """Adds the configured streams to a host, once.

    :param database: ``None`` if the configuration needs none.
    :param reactor: the reactor to which the database's threads return results.
    :ivar generators: the id generators of the streams that this process writes, by the
        name of the stream.
    :ivar empty_ranges: by stream, a range ``(start, end]`` of tokens in which this
        process has no rows; only for streams in the database that this process begins
        to write.
    """

    _options: ReplicationOptions
    _host: StandaloneHost
    _database: Database | None
    _reactor: IReactorFromThreads
    _id_streams: Mapping[str, IdStream] = attrs.field(init=False)
    empty_ranges: dict[str, tuple[int, int]] = attrs.field(factory=dict, init=False)
    generators: dict[str, MultiWriterIdGenerator] = attrs.field(
        factory=dict, init=False
    )
    #: The streams in the database that this process only reads.
    _read: dict[str, PostgresStream] = attrs.field(factory=dict, init=False)
    _first_seen: dict[str, float] = attrs.field(factory=dict, init=False)
    #: The positions that the sink saved.
    _saved: _Positions = attrs.field(factory=lambda: defaultdict(dict), init=False)
    #: The positions in ``stream_positions``; tokens as on the wire.
    _stored: dict[str, dict[str, int]] = attrs.field(factory=dict, init=False)
    #: The tokens up to which rows of removed writers are skipped.
    _skipped: _Positions = attrs.field(factory=lambda: defaultdict(dict), init=False)

    def __attrs_post_init__(self) -> None:
        self._id_streams = self._options.id_streams

    async def largest_token(self, stream_name: str) -> int | None:
        """Return the last id that a stream's sequence allocated.

        :return: the first id minus one if the sequence has allocated none; ``None`` if
            the stream is not configured or has no sequence.
        """
        stream = self._id_streams.get(stream_name)
        if stream is None:
            return None
        return await self._get_database().transact(
            f"largest_token_{stream_name}",
            lambda txn: read_sequence(txn, stream.sequence),
            autocommit=True,
        )

    def ids(
        self, readers: Callable[[], Mapping[tuple[str, str], Reader]]
    ) -> Mapping[str, StreamIds]:
        """Return what is known of the ids of the streams, by name.

        :param readers: returns the readers of all writers, by (stream, writer).
        """
        read = {
            name: ReadStreamIds(
                self._options.instance_name,
                self._id_streams[name],
                self._get_database(),
                stream,
                readers,
            )
            for name, stream in self._read.items()
        }
        return {**read, **self.generators}

    async def close_streams(self) -> None:
        """Refuse further rows, and wait until all earlier ones can be announced.

        Streams in memory are closed last: the rows that ``call_after`` writes to them
        come when a transaction has ended.
        """
        try:
            closing = [ids.close() for ids in self.generators.values()]
            await wait_for_all(map(Deferred.fromCoroutine, closing))
        finally:
            for stream in self._host.streams.get_streams_to_replicate():
                if isinstance(stream, MemoryStream):
                    stream.close()

    async def add_streams(self, sink: RowSink) -> None:
        """Create the streams, and report their initial positions to the sink.

        :raises SequenceBehindError: if a sequence is behind a table, or far behind the
            stored positions.
        :raises StreamConfigurationError: if a stream is declared twice.
        :raises ConfigError: if the database's role lacks a privilege, or the table, a
            column or the sequence of a stream is missing. Other errors of the search
            for removed writers are only reported to the observer.
        :raises CatchUpError: if the search for this process's earlier rows fails.
        :raises psycopg2.Error: if another query fails.
        """
        try:
            await self._make_all(sink)
        except psycopg2.errors.InsufficientPrivilege as error:
            raise self._options.error(
                "database",
                f"PostgreSQL refuses access: {first_line(error)}",
                "use the role that owns the tables and sequences, or GRANT the "
                "configured role SELECT on them, USAGE on the sequences and ALL on "
                "stream_positions",
            ) from error
        except (
            psycopg2.errors.UndefinedTable,
            psycopg2.errors.UndefinedColumn,
        ) as error:
            raise self._options.error(
                "streams",
                f"a replicated stream is not in this database: {first_line(error)}",
                self._missing_table_hint(),
            ) from error
        except psycopg2.Error as error:
            raise StorageError(
                "PostgreSQL rejected a query at the start of replication: "
                f"{first_line(error)}"
            ) from error

    def _missing_table_hint(self) -> str:
        create = "create the tables and sequences of the streams that you declared"
        if not any(isinstance(stream, str) for stream in self._options.streams):
            return f"{create}, or connect to the database that has them"
        # Without a list of streams, all streams of a homeserver are configured.
        return (
            "point database.args at the homeserver's database; or, if there is no "
            "homeserver, list the streams to replicate, for instance `streams: "
            f"[typing]`, or `streams: []` if your modules add them; or {create}"
        )

    async def _make_all(self, sink: RowSink) -> None:
        if isinstance(sink, PositionSink):
            for (name, writer), token in sink.saved_positions().items():
                self._saved[name][writer] = token
        await self._read_stored()
        for name, declared in self._options.declared.items():
            try:
                stream = await self._make(declared)
            except psycopg2.errors.UndefinedTable:
                if not self._may_be_absent(name):
                    raise
                self._host.observer.observe(StreamAbsent(name))
                continue
            if isinstance(declared, TableStream):
                await self._check_columns(declared)
            self._host.streams.add(stream, is_written_here=self._options.writes(name))
            await self._find_own_earlier_rows(stream)
            if isinstance(stream, PostgresStream):
                if not self._options.writes(name):
                    self._read[name] = stream
                await self._settle_delivered_rows(stream)
            if self._options.fill_sink:
                await self._deliver_own_rows(stream, sink)
            if isinstance(sink, PositionSink):
                await self._report_initial_positions(stream, sink)

    def _may_be_absent(self, name: str) -> bool:
        is_default = self._options.streams == registry.DEFAULT_STREAMS
        return is_default and name != _OF_EACH_VERSION

    async def _check_columns(self, declared: TableStream) -> None:
        """Read one row; otherwise, only the first new row would need all columns."""
        queries = queries_of(declared)
        await self._get_database().transact(
            f"columns_of_{declared.name}",
            lambda txn: query_page(txn, queries, self._options.instance_name, 0, 1, 1),
        )

    async def _deliver_own_rows(self, stream: AdvancingStream, sink: RowSink) -> None:
        """Deliver the rows that this process wrote before its start."""
        name, me = stream.description.name, self._options.instance_name
        if me not in self._options.writers[name]:
            return
        reached, end = self._saved[name].get(me, 0), stream.current_token(me)
        while reached < end:
            page = await stream.get_updates_since(me, reached, end)
            for token, updates in itertools.groupby(page.updates, lambda row: row[0]):
                await self._deliver(stream, sink, token, [row for _, row in updates])
            reached = page.upto_token
        await _wait_for(sink.on_position(name, me, end))

    async def _deliver(
        self, stream: AdvancingStream, sink: RowSink, token: int, values: list[Any]
    ) -> None:
        name, me = stream.description.name, self._options.instance_name
        rows = []
        for value in values:
            try:
                rows.append(stream.description.codec.from_json(value))
            except RowDecodeError as error:
                self._host.observer.failure(f"reading row {token} of {name}", error)
        if rows:
            await _wait_for(sink.on_rdata(name, me, token, rows))

    async def _find_own_earlier_rows(self, stream: AdvancingStream) -> None:
        """Search for earlier rows of this process in a stream that it begins to write.

        Readers that learn of a new writer request its rows from their own positions. If
        the search finds no rows, the backlog answers these requests from
        :attr:`empty_ranges`, without the database. The search is limited to
        :data:`OWN_ROWS_LOOK_BACK` ids: readers are rarely farther behind, and scanning
        all of a big table might take minutes.
        """
        name, me = stream.description.name, self._options.instance_name
        # An instance that may have written the stream before has a stored position.
        if not self._options.writes(name) or me in self._stored.get(name, {me: 0}):
            return
        token = stream.current_token(me)
        if token > 0:
            start = max(0, token - OWN_ROWS_LOOK_BACK)
            page = await stream.get_updates_since(me, start, token)
            if not page.updates and page.upto_token == token:
                self.empty_ranges[name] = start, token

    async def _settle_delivered_rows(self, stream: PostgresStream) -> None:
        """Settle the ids of rows that were delivered before this start.

        The position of all writers can then advance although one of them is down. At
        most one page of rows of each writer is read. If it is too short, or if the
        database is too far behind, the position waits for the writer that is behind.
        """
        writers = self._options.writers[stream.description.name]
        positions = {writer: stream.current_token(writer) for writer in writers}
        lowest = min(positions.values(), default=0)
        for writer, position in positions.items():
            if position > lowest:
                with contextlib.suppress(DatabaseBehindError):
                    page = await stream.get_updates_since(writer, lowest, position)
                    for token, _ in page.updates:
                        stream.row_delivered(token)

    async def _report_initial_positions(
        self, stream: AdvancingStream, sink: RowSink
    ) -> None:
        name, me = stream.description.name, self._options.instance_name
        removed = self._skipped[name]
        known = {me, *self._saved[name]} - removed.keys()
        for writer in dict.fromkeys((*self._options.writers[name], *removed)):
            if writer not in known:
                token = stream.current_token(writer)
                await _wait_for(sink.on_position(name, writer, token))

    async def _make(self, declared: DeclaredStream) -> AdvancingStream:
        if isinstance(declared, InMemory):
            return self._make_in_memory(
                declared, max_rows=declared.max_rows, max_bytes=declared.max_bytes
            )
        if isinstance(declared, registry.StandardStream) and declared.held_in_memory:
            return self._make_in_memory(declared)
        ids, finder = await self._make_ids(declared)
        return PostgresStream(
            declared,
            self._get_database(),
            ids,
            instance_name=self._options.instance_name,
            writers=self._options.writers[declared.name],
            find_removed_writers=finder.find,
            plausible_distance=self._options.receiving.plausible_distance,
        )

    async def _make_ids(
        self, declared: registry.StandardStream | TableStream
    ) -> tuple[ReaderIds, RemovedWriterFinder]:
        stream = self._id_streams[declared.name]
        await self._get_database().transact(
            "tables_at_start", lambda txn: check_tables(txn, stream)
        )
        ids = await self._ids(declared.name, stream)
        finder = RemovedWriterFinder(
            self._get_database(),
            self._host.clock,
            stream,
            self._options.instance_name,
            ids.get_delivered,
            ids.unknown,
            is_new=self._is_new(declared.name),
        )
        if stream.writers:
            await self._survey(declared.name, stream, ids, finder)
        return ids, finder

    async def _survey(
        self, name: str, stream: IdStream, ids: ReaderIds, finder: RemovedWriterFinder
    ) -> None:
        """Report the removed writers to drain, and skip the other removed writers."""
        try:
            survey = await finder.survey()
        except (psycopg2.Error, CatchUpError) as error:
            # The search is repeated as soon as a link is up.
            self._host.observer.failure(f"looking for removed writers of {name}", error)
            return
        found = {} if self._is_new(name) else finder.select(survey)
        for writer, removed in found.items():
            self._host.observer.observe(
                RemovedWriterFound(
                    name,
                    writer,
                    ids.get_delivered().get(writer, ids.unknown),
                    removed.upto_token,
                )
            )
        for writer in survey.absent - found.keys():
            if writer not in stream.writers or writer in survey.greatest:
                delivered = ids.get_delivered().get(writer, ids.unknown)
                token = max(survey.last_row, delivered)
                ids.advance(writer, stream.sign * token)
                self._skipped[name][writer] = token

    def _is_new(self, name: str) -> bool:
        """Return whether the sink is new to a stream, and needs only its new rows."""
        return not (self._options.fill_sink or self._saved[name])

    def _get_database(self) -> Database:
        assert self._database is not None, "the configuration was checked"
        return self._database

    def _make_in_memory(
        self, declared: registry.StandardStream | InMemory, **bounds: int
    ) -> MemoryStream:
        stream = MemoryStream(
            declared.description,
            instance_name=self._options.instance_name,
            fetch=self._host.fetch_from_writer(declared.name),
            key=declared.key,
            on_write=self._host.notifier.notify,
            plausible_distance=self._options.receiving.plausible_distance,
            acknowledged_by=self._options.federation_senders,
            writers=self._options.writers[declared.name],
            **bounds,
        )
        for writer, token in self._saved[declared.name].items():
            if writer != self._options.instance_name:
                stream.advance(writer, token)
        return stream

    async def _ids(self, name: str, stream: IdStream) -> ReaderIds:
        own: WriterIds | None = None
        if self._options.writes(name):
            own = self.generators[name] = await self._generator(stream)
        saved = self._saved[name]
        fills = self._options.fill_sink and not saved
        initial = saved or ({} if fills else self._stored[name])
        delivered = dict(await self._without_impossible(stream, initial))
        unknown = min(delivered.values(), default=0 if fills else FIRST_POSITION)
        if not delivered and not stream.writers and not fills:
            # The positions of undeclared writers are not stored. Begin with new rows,
            # whose tokens are greater.
            unknown = await self._get_database().transact(
                "sequence_at_start", lambda txn: read_sequence(txn, stream.sequence)
            )
        me = self._options.instance_name
        return ReaderIds(name, me, delivered, unknown, own, sign=stream.sign)

    async def _without_impossible(
        self, stream: IdStream, tokens: dict[str, int]
    ) -> dict[str, int]:
        """Return the positions, but lower those that exceed every allocated id.

        No row can have been delivered at such a position. If it were used, all new rows
        up to it would be discarded. If the query fails for any reason other than a
        missing privilege, the positions are returned unchanged.

        :raises psycopg2.errors.InsufficientPrivilege: if the database's role lacks a
            privilege.
        """
        if max(tokens.values(), default=FIRST_POSITION) <= FIRST_POSITION:
            return tokens
        try:
            limited = await self._get_database().transact(
                "limit_positions",
                lambda txn: limit_positions(txn, stream, tokens),
                autocommit=True,
            )
        except psycopg2.errors.InsufficientPrivilege:
            raise
        except psycopg2.Error as error:
            name = stream.stream_name
            self._host.observer.failure(f"checking saved positions of {name}", error)
            return tokens
        for writer, token in tokens.items():
            if limited[writer] < token:
                _log.warn(
                    "The position {token} of {writer} in {stream} is beyond every "
                    "allocated id; {limit} is used instead. Rows may be missing: see "
                    "ReplicationAheadOfWriter in the runbook",
                    token=token,
                    writer=writer,
                    stream=stream.stream_name,
                    limit=limited[writer],
                )
        return limited

    async def _generator(self, stream: IdStream) -> MultiWriterIdGenerator:
        # Imported here, because it takes 0.3 MiB and only writers need it.
        from synapse_replication.storage.id_generators import load_id_generator

        return await load_id_generator(
            self._get_database(),
            stream,
            self._options.instance_name,
            self._reactor,
            self._host.clock,
            on_finished=self._host.notifier.notify,
            observer=self._host.observer,
            admission=self._get_database().admission,
            first_seen=self._first_seen,
        )

    async def _read_stored(self) -> None:
        """Read the stored positions; retry until database and table are available."""
        streams = self._id_streams
        if not streams:
            return

        def read(txn: Any) -> dict[str, dict[str, int]]:
            if self._options.creates_tables:
                prepare_database(txn)
            return {
                name: read_stored_positions(txn, stream) if stream.writers else {}
                for name, stream in streams.items()
            }

        self._stored = await until_available(
            self._host.clock,
            "read the stored positions",
            lambda: self._get_database().transact("positions_at_start", read),
        )


async def _wait_for(waiting: Awaitable[None] | None) -> None:
    if waiting is not None:
        await waiting
