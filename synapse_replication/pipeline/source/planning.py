"""The plan of a read, made on Spark's driver: its streams, offsets, parts and tasks.

No rows are read. The rows between two offsets are divided into parts, and these are
distributed among tasks. All rows of one token are in the same part. The bounds are
found by single lookups in the indexes of ids; a part of a stream with a table that has
no such index is not narrowed.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
from psycopg2.extensions import cursor

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.scan import Scan, grouped
from synapse_replication.pipeline.schemas import ROWS_SCHEMA, with_texts
from synapse_replication.pipeline.settings import PipelineSettings
from synapse_replication.pipeline.source import completeness, connections
from synapse_replication.pipeline.source.catalog import CatalogStream, select_streams
from synapse_replication.pipeline.source.offsets import StreamOffset
from synapse_replication.pipeline.source.options import (
    EARLIEST,
    LATEST,
    SourceOptions,
    parse_token,
    reader_options,
)
from synapse_replication.pipeline.source.ranges import (
    EVERYTHING,
    Part,
    Selection,
    Wanted,
    ids_sql,
)
from synapse_replication.pipeline.source.reading import read_parts
from synapse_replication.storage.id_streams import exists

#: The number of ids for which a separate task pays off.
IDS_PER_TASK = 250_000

#: The typical size of a row with its content, in bytes.
_ROW_BYTES = 500

#: The maximum number of tasks, unless the option ``numPartitions`` is set: that of 10
#: billion ids. It bounds the plan in the driver. It is approximate, because dividing
#: several parts may add one task for each of them.
MAX_TASKS = 40_000

#: The number of unused rows that are read rather than begin another query.
_GAP = 100

_START = StreamOffset()


@attrs.frozen
class Plan:
    """The rows to read.

    :ivar conninfo: libpq's parameters for the tasks; see :func:`.resolved_conninfo`.
    :ivar start: the offset of each stream after which the rows are.
    :ivar end: the offset up to which they are.
    :ivar parts: the parts of all tasks.
    :ivar tasks: the parts of each task.
    """

    conninfo: Mapping[str, Any] = attrs.field(repr=False)
    start: Mapping[str, StreamOffset]
    end: Mapping[str, StreamOffset]
    parts: list[Part]
    tasks: list[tuple[Part, ...]]


class Planner:
    """Plans the reads of one batch query or streaming query.

    :param options: the validated options.
    :param continuous: whether the read resumes from the end of each batch.
    """

    def __init__(self, options: SourceOptions, *, continuous: bool) -> None:
        self._options = options
        self._completeness = completeness.CompletenessReader(
            options.declared_writers, continuous=continuous
        )

    def batch(self, wanted: Wanted = EVERYTHING) -> Plan:
        """Plan the tasks of a batch query.

        :param wanted: further restrictions of the rows to read.
        :raises PipelineError: if the database cannot be reached, a query fails, or
            :meth:`select` or :meth:`resolve` raises it.
        """
        options = self._options
        with connections.read_transaction(options.conninfo) as txn:
            selections = self.select(txn)
            start = self.resolve(txn, selections, "startingToken")
            if wanted.streams is not None:
                selections = [s for s in selections if s.stream.name in wanted.streams]
            end = self.resolve(txn, selections, "endingToken")
            return self.plan(txn, selections, start, end, wanted)

    # -- streams -----------------------------------------------------------------------

    def select(self, txn: cursor) -> list[Selection]:
        """Look up the requested streams in the database.

        :raises PipelineError: if the database has no table of a stream that the option
            ``streams`` names.
        """
        options = self._options
        requested = options.streams
        streams = select_streams(options.catalog, requested or tuple(options.catalog))
        available = completeness.find_available_queries(txn, streams)
        selections = []
        for stream in streams:
            if available[stream.name]:
                sole = self._sole_writer(txn, stream)
                selections.append(Selection(stream, available[stream.name], sole))
            elif requested is not None:
                tables = ", ".join(query.ids.table for query in stream.queries)
                raise PipelineError(
                    f"stream {stream.name}: the database has no table {tables}; omit "
                    "the stream from the option streams, or read another database"
                )
        return selections

    def _sole_writer(self, txn: cursor, stream: CatalogStream) -> str:
        writers = self._options.declared_writers.get(stream.name) or tuple(
            completeness.stored_tokens(txn, stream)
        )
        return writers[0] if len(writers) == 1 else ""

    # -- offsets -----------------------------------------------------------------------

    def resolve(
        self, txn: cursor, selections: list[Selection], option: str
    ) -> dict[str, StreamOffset]:
        """Return the offset that an option specifies for each stream.

        :raises PipelineError: if the option is not a token, is ahead of the database,
            or has a stream that is not read.
        """
        options = self._options
        is_start = option == "startingToken"
        text = options.starting_token if is_start else options.ending_token
        if text == EARLIEST:
            return {s.stream.name: _START for s in selections}
        if text == LATEST:
            return self.latest(txn, selections)
        names = [s.stream.name for s in selections]
        try:
            found = parse_token(text, names, partial(_instance_name, txn))
        except PipelineError as error:
            raise PipelineError(f"option {option}: write {error}") from error
        for name in found:
            if name not in (options.streams or options.catalog):
                raise PipelineError(
                    f"option {option}: stream {name} is not read; the streams to read "
                    f"are {', '.join(options.streams or options.catalog)}"
                )
        for selection in selections:
            name = selection.stream.name
            self.check_not_ahead(txn, selection, found.get(name, _START), option)
        # Streams that the option does not name are read completely.
        others = {} if is_start else self.latest(txn, selections)
        return {name: found.get(name, others.get(name, _START)) for name in names}

    def check_not_ahead(
        self, txn: cursor, selection: Selection, offset: StreamOffset, origin: str
    ) -> None:
        """Reject an offset with ids that were never allocated.

        :param origin: where the offset comes from, for the message.
        :raises PipelineError: if the offset is ahead of the database.
        """
        stream = selection.stream
        last = completeness.last_allocated_id(txn, stream)
        if last is None:
            return
        known = max(last, 1, *completeness.stored_tokens(txn, stream).values())
        if offset.furthest > known:
            raise PipelineError(
                f"{origin}: stream {stream.name} is at {offset.furthest}, but the "
                f"database has allocated ids only up to {known}; is it the right "
                "database, or was it restored from an older backup? Use a token that "
                "the database has reached, or a new checkpoint or archive"
            )

    def latest(
        self,
        txn: cursor,
        selections: list[Selection],
        start: Mapping[str, StreamOffset] | None = None,
    ) -> dict[str, StreamOffset]:
        """Return the offset up to which each stream is complete, at least ``start``."""
        start = start or {}
        return {
            s.stream.name: self._completeness.survey(
                txn, s, start.get(s.stream.name, _START)
            )
            for s in selections
        }

    # -- tasks -------------------------------------------------------------------------

    def plan(
        self,
        txn: cursor,
        selections: list[Selection],
        start: Mapping[str, StreamOffset],
        end: Mapping[str, StreamOffset],
        wanted: Wanted = EVERYTHING,
    ) -> Plan:
        """Divide the rows between two offsets into parts and tasks.

        Ids without rows are left out, so the transaction must see all rows up to
        ``end``. That in which :meth:`latest` returned it does not see those whose
        commits it waited for, if the read is continuous.
        """
        options = self._options
        if options.writers is not None:
            wanted = wanted.only(Wanted(writers=frozenset(options.writers)))
        found = []
        for selection in selections:
            name = selection.stream.name
            part = wanted.of(_between(txn, selection, start[name], end[name]))
            if part.size > 0 and (narrowed := narrow(txn, part)) is not None:
                found += without_gaps(txn, narrowed)
        parts = split(found, options.num_partitions)
        conninfo = connections.resolved_conninfo(options.conninfo, txn.connection)
        return Plan(conninfo, start, end, parts, pack(parts, options.num_partitions))


def _between(
    txn: cursor, selection: Selection, start: StreamOffset, end: StreamOffset
) -> Part:
    """Return the rows between two offsets, also those of writers they do not name."""
    writers = completeness.find_writers(txn, selection)
    return selection.between(start.naming(writers), end.naming(writers))


def _instance_name(txn: cursor, instance_id: int) -> str:
    rows = []
    if exists(txn, "instance_map"):
        txn.execute(
            "SELECT instance_name FROM instance_map WHERE instance_id = %s",
            (instance_id,),
        )
        rows = txn.fetchall()
    if not rows:
        raise LookupError(instance_id)
    return str(rows[0][0])


def scan_rows(settings: PipelineSettings, *columns: str, **options: str) -> Scan:
    """Plan a read of rows in the database.

    :param columns: columns of ROWS_SCHEMA, and text columns such as ``room_id``, which
        are null for streams that lack them.
    :param options: options of the data source, for instance ``streams``.
    :return: ``stream`` and ``columns``.
    :raises PipelineError: if an option is invalid, or the database cannot be reached.
    """
    checked = SourceOptions.parse({**reader_options(settings), **options})
    plan = Planner(checked, continuous=False).batch()
    schema = with_texts(ROWS_SCHEMA, *columns)
    read = partial(read_parts, plan.conninfo, schema=schema)
    ids = sum(part.size for part in plan.parts)
    return Scan(schema, plan.tasks, read, ids)


def scan_ids(
    settings: PipelineSettings,
    ids: Mapping[str, Iterable[int]],
    *columns: str,
    **options: str,
) -> Scan:
    """Plan a read of the rows with some ids, and perhaps of rows next to them.

    :param ids: the ids by stream. Other parameters are those of :func:`scan_rows`.
    """
    options |= {"streams": ",".join(ids), "numPartitions": "1"}
    scan = scan_rows(settings, *columns, **options)
    pieces = [
        part.within(max(part.low, low - 1), min(part.high, high))
        for task in scan.tasks
        for part in task
        for low, high in _runs(ids[part.stream.name])
        if part.low < high and low <= part.high
    ]
    return attrs.evolve(
        scan, tasks=grouped(pieces, lambda piece: piece.size * _ROW_BYTES)
    )


def _runs(ids: Iterable[int]) -> list[tuple[int, int]]:
    """Return ranges that contain all ids, and no long gap."""
    runs: list[tuple[int, int]] = []
    for id_ in sorted(ids):
        if runs and id_ - runs[-1][1] <= _GAP:
            runs[-1] = runs[-1][0], id_
        else:
            runs.append((id_, id_))
    return runs


# -- parts and tasks ---------------------------------------------------------------


def narrow(txn: cursor, part: Part) -> Part | None:
    """Trim the ids without rows at both ends of a part.

    :return: ``None`` if the part has no rows.
    """
    if not part.is_indexed:
        # The ends cannot be looked up.
        return part
    first = _end(txn, part, last=False)
    if first is None:
        return None
    return part.within(first - 1, _end(txn, part, last=True) or first)


def _end(txn: cursor, part: Part, *, last: bool) -> int | None:
    """Return the least or the greatest id of a part; ``None`` without rows."""
    found: list[int] = []
    for query in part.queries:
        txn.execute(ids_sql(part, query, 1, last=last))
        found += [id_ for (id_,) in txn.fetchall()]
    return (max if last else min)(found, default=None)


def without_gaps(txn: cursor, part: Part) -> list[Part]:
    """Cut long gaps out of a narrowed part.

    The ids of a stream jump if its sequence is set to a far greater value, for
    instance. The ids of the gap, of which there may be 2^62, would become tasks and
    batches without rows.

    :return: the part itself, unless at least half of its ids are in gaps that are
        longer than a task.
    """
    pieces = split([part], None)
    if len(pieces) == 1:
        return [part]
    occupied: list[Part] = []
    low = part.low
    for piece in pieces:
        if piece.high <= low:
            continue
        first = _end(txn, part.within(low, part.high), last=False)
        if first is None:
            break
        low = first - 1
        if first <= piece.high:
            last = _end(txn, part.within(low, piece.high), last=True) or first
            occupied.append(part.within(low, last))
            low = piece.high
    if 2 * sum(each.size for each in occupied) > part.size:
        return [part]
    return [found for each in occupied for found in without_gaps(txn, each)]


def split(parts: Iterable[Part], count: int | None) -> list[Part]:
    """Divide parts into smaller ones with about the same number of ids.

    A part is not divided if a table has no index on the id, or on the writer and the
    id, because each piece would read the whole table.

    :param count: the desired number of parts; ``None`` to derive it from the number of
        ids. The result has at least one part for each part in ``parts``.
    """
    parts = list(parts)
    total = sum(part.size for part in parts)
    if count is None:
        count = min(-(-total // IDS_PER_TASK), MAX_TASKS)
    target = max(-(-total // max(count, 1)), 1)
    pieces: list[Part] = []
    for part in parts:
        pieces += _cut(part, target) if part.is_indexed else [part]
    return pieces


def _cut(part: Part, target: int) -> list[Part]:
    count = -(-part.size // target)
    low = part.low
    cuts = [low + part.size * index // count for index in range(count + 1)]
    return [part.within(low, high) for low, high in itertools.pairwise(cuts)]


def pack(parts: Iterable[Part], count: int | None) -> list[tuple[Part, ...]]:
    """Group small parts, so that each task has enough work.

    :param count: the desired number of tasks; ``None`` to derive it from the number of
        ids.
    """
    # Spark starts tasks in this order. If a long task were the last one, the other
    # cores would wait for it.
    largest_first = sorted(parts, key=lambda part: -part.work)
    total = sum(part.size for part in largest_first)
    if count is None:
        count = -(-total // IDS_PER_TASK)
    count = min(max(count, 1), len(largest_first))
    tasks: list[list[Part]] = [[] for _ in range(count)]
    # Assign each part to the task with the least work.
    load = [(0, index) for index in range(count)]
    for part in largest_first:
        work, index = heapq.heappop(load)
        tasks[index].append(part)
        heapq.heappush(load, (work + part.work, index))
    return [tuple(task) for task in tasks if task]


def cut_by_rows(
    txn: cursor,
    selections: Sequence[Selection],
    start: Mapping[str, StreamOffset],
    end: Mapping[str, StreamOffset],
    limit: int,
) -> dict[str, StreamOffset]:
    """Return offsets up to ``end``, with at most ``limit`` rows after ``start``.

    The limit is exceeded only if a single token has more rows, because there must be
    progress. All streams share the limit equally; the unused part of a stream's share
    is divided among the streams with more rows.

    :param start: the offset of each stream after which to count.
    :return: an offset for each stream.
    """
    tokens = {}
    counts = {}
    for selection in selections:
        name = selection.stream.name
        part = _between(txn, selection, start[name], end[name])
        first = (ids_sql(part, query, limit + 1) for query in part.queries)
        # The database counts the tokens, because there may be too many to fetch.
        tokens[name] = f"({' UNION ALL '.join(first)}) AS found"
        # If there are more rows than the limit, this is the limit plus one.
        counts[name] = _number(
            txn,
            f"SELECT count(*) FROM (SELECT FROM {tokens[name]} LIMIT {limit + 1}) "
            "AS first_of_them",
        )
    cut: dict[str, StreamOffset] = {}
    left = limit
    # Process the smallest streams first, because the larger ones get the unused parts
    # of their shares.
    waiting = sorted(counts, key=lambda name: counts[name])
    for index, name in enumerate(waiting):
        share = left // (len(waiting) - index)
        if counts[name] <= share:
            cut[name] = end[name]
            left -= counts[name]
            continue
        # The first token that exceeds the share is left for Spark's next micro-batch.
        found = f"FROM {tokens[name]}"
        beyond = _number(
            txn, f"SELECT stream_id {found} ORDER BY stream_id OFFSET {share} LIMIT 1"
        )
        used = _number(txn, f"SELECT count(*) {found} WHERE stream_id < {beyond}")
        if not used and share == left == limit:
            beyond += 1
            used = limit
        cut[name] = start[name].towards(end[name], beyond - 1)
        left -= used
    return cut


def _number(txn: cursor, sql: str) -> int:
    txn.execute(sql)
    ((value,),) = txn.fetchall()
    return int(value)
