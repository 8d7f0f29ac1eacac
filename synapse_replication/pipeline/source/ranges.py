"""Parts of a stream, and the SQL queries that read them: columns cast to their types.

The functions only build text. Numbers are inserted unchanged; names of writers, which
come from a database or a configuration, are quoted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import attrs

from synapse_replication.pipeline.schemas import KIND, TYPES, Column
from synapse_replication.pipeline.source.catalog import CatalogStream
from synapse_replication.pipeline.source.offsets import StreamOffset
from synapse_replication.storage.queries import identifier, literal
from synapse_replication.storage.row_queries import LookupJoin, RowQuery

#: The minimum number of ids in a part for which details (columns of further tables) are
#: joined. For a smaller part, they are looked up row by row. In a part of this size, up
#: to five lookups per row would take several times as long as all other work.
IDS_TO_JOIN = 20_000

#: The work of reading a row with details, as a multiple of a row without details. It
#: was measured with typed columns of events and of receipts.
_DETAILS_WORK: Final = 3


@attrs.frozen
class AvailableQuery:
    """A query for a table that the database has.

    An older database may lack the column or the indexes.

    :ivar rows: the query.
    :ivar has_written: whether the table has a column for the time of writing.
    :ivar by_id: whether it has an index that begins with the id.
    :ivar by_writer: whether it has only an index on writer and id. Its writers are
        looked up before a read, so that the read knows all of them.
    :ivar nullable: whether rows of such a table may have no writer.
    :ivar joinable: whether the tables of all details (further columns of the stream's
        rows) have a unique index on their key.
    """

    rows: RowQuery
    has_written: bool = False
    by_id: bool = False
    by_writer: bool = False
    nullable: bool = False
    joinable: bool = False


@attrs.frozen
class Selection:
    """A stream to read, and its queries that the database can answer.

    :ivar sole_writer: the writer of rows whose table does not record the writer; empty
        if it is unknown, because the stream has several known writers or none.
    """

    stream: CatalogStream
    queries: tuple[AvailableQuery, ...]
    sole_writer: str

    def between(self, start: StreamOffset, end: StreamOffset) -> Part:
        """Return the rows between two offsets.

        The ids of the part begin at the first offset of a writer that has advanced.
        """
        writers = {*start.writers, *end.writers}
        positions = [
            (start.minimum, end.minimum),
            *((start.position(writer), end.position(writer)) for writer in writers),
        ]
        advanced = [(low, high) for low, high in positions if low < high]
        low = min((low for low, _ in advanced), default=0)
        high = max((high for _, high in advanced), default=0)
        queries, sole = self.queries, self.sole_writer
        return Part(self.stream, queries, sole, start, end, low, high)


@attrs.frozen
class Part(Selection):
    """The rows of a stream between two offsets that are also between two ids.

    :ivar start: the offset after which the rows are.
    :ivar end: the offset up to which they are.
    :ivar low: the exclusive lower bound of the ids.
    :ivar high: the inclusive upper bound of the ids.
    :ivar writers: the writers whose rows are read; ``None`` for all.
    :ivar names: the columns of the stream's table to read, in addition to those that
        all streams have; ``None`` for all of them.
    """

    start: StreamOffset
    end: StreamOffset
    low: int
    high: int
    writers: frozenset[str] | None = None
    names: frozenset[str] | None = None

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of the stream's table to read."""
        return tuple(
            column
            for column in self.stream.table.columns
            if self.names is None or column.name in self.names
        )

    @property
    def size(self) -> int:
        """The number of ids between the bounds, including ids without a row."""
        return self.high - self.low

    @property
    def work(self) -> int:
        """The work of reading the part, in units of a row without details."""
        return self.size * (_DETAILS_WORK if self.joins_details else 1)

    @property
    def is_indexed(self) -> bool:
        """Whether every table has an index on the id, or on the writer and the id."""
        return all(query.by_id or query.by_writer for query in self.queries)

    @property
    def joins_details(self) -> bool:
        """Whether joining details is faster than looking them up row by row."""
        return self.size >= IDS_TO_JOIN and any(
            self.details_of(query) for query in self.stream.queries
        )

    def details_of(self, query: RowQuery) -> tuple[LookupJoin, ...]:
        """Return the further tables that the columns of a query need."""
        found = _expressions(self, query)
        used = [found.get(column.name, "") for column in self.columns]
        return tuple(
            detail
            for detail in query.details
            if any(f"{detail.alias}." in expression for expression in used)
        )

    @property
    def walks_indexes(self) -> bool:
        """Whether the server is forced to use index scans.

        If an index is missing, or details are joined, other plans may be faster.
        """
        return self.is_indexed and not self.joins_details

    def within(self, low: int, high: int) -> Part:
        """Return the rows of the part between two ids."""
        return attrs.evolve(self, low=low, high=high)


@attrs.frozen
class Wanted:
    """The rows that a query can use.

    :ivar streams: the streams; ``None`` for all.
    :ivar writers: the writers; ``None`` for all.
    :ivar low: the lower bound of the tokens, exclusive.
    :ivar high: the upper bound of the tokens, inclusive.
    """

    streams: frozenset[str] | None = None
    writers: frozenset[str] | None = None
    low: int = -1
    high: int = 2**63 - 1

    def only(self, other: Wanted) -> Wanted:
        """Return the rows that both queries can use."""
        return Wanted(
            _both(self.streams, other.streams),
            _both(self.writers, other.writers),
            max(self.low, other.low),
            min(self.high, other.high),
        )

    def of(self, part: Part) -> Part:
        """Return the rows of a part that are needed."""
        low, high = max(part.low, self.low), min(part.high, self.high)
        return attrs.evolve(part, low=low, high=high, writers=self.writers)


#: All rows: no condition.
EVERYTHING = Wanted()


def _both(
    some: frozenset[str] | None, others: frozenset[str] | None
) -> frozenset[str] | None:
    if some is None or others is None:
        return others if some is None else some
    return some & others


def range_sql(part: Part) -> str:
    """Return the query for the rows of a part.

    The columns are ``stream_id``, ``instance_name``, ``written_us`` (µs since 1970)
    and the part's columns. Rows are ordered by token, then by query, then by the values
    of these columns, so that every read of the same columns returns them in the same
    order.

    If the part joins details, those of each query are joined that are
    ``joinable``. Other details are looked up row by row.
    """
    stream = part.stream
    columns = part.columns
    names = "".join(f", {identifier(column.name)}" for column in columns)
    plain: list[str] = []
    distinct: list[str] = []
    for query_index, query in enumerate(part.queries):
        distinct_rows = query.rows.distinct
        of_query = stream.table.columns if distinct_rows else columns
        select = _select(part, query, of_query, query_index)
        joins = part.joins_details and query.joinable
        for detail in part.details_of(query.rows):
            select += f" {detail.join if joins else detail.lookup}"
        # If each query is sorted by the index, the final sort is incremental.
        order = ""
        if not query.rows.negative and not part.joins_details:
            order = f" ORDER BY {_column(query, query.rows.ids.id_column)}"
        (distinct if distinct_rows else plain).extend(
            f"{select} WHERE {condition}{order}"
            for condition in _conditions(
                part, query, [_is_one_of(_writer(query), part.end.writers)]
            )
        )
    if distinct:
        found = "\nUNION ALL\n".join(f"({select})" for select in distinct)
        grouped = "".join(
            f", {identifier(column.name)}" for column in stream.table.columns
        )
        plain.append(
            "SELECT stream_id, instance_name, min(written_us) AS written_us, "
            f"min(query_index) AS query_index{names} FROM ({found}) AS found "
            f"GROUP BY stream_id, instance_name{grouped} ORDER BY stream_id"
        )
    rows = "\nUNION ALL\n".join(f"({select})" for select in plain)
    order = "".join(f", {_sort_key(column)}" for column in columns)
    return (
        f"SELECT stream_id, instance_name, written_us{names} FROM ({rows}) AS rows "
        f"ORDER BY stream_id, query_index{order}"
    )


def _select(
    part: Part, query: AvailableQuery, columns: Sequence[Column], query_index: int
) -> str:
    rows = query.rows
    written = "NULL::bigint"
    if rows.written_ms_column is not None and query.has_written:
        written = f"{_column(query, rows.written_ms_column)} * 1000"
    found = _expressions(part, rows)
    values = "".join(
        f", {_typed(found.get(column.name, 'NULL'), column)}" for column in columns
    )
    return (
        f"SELECT {_token(query)}::bigint AS stream_id, "
        f"coalesce({_writer(query)}, {literal(part.sole_writer)}) AS instance_name, "
        f"{written} AS written_us, "
        f"{query_index} AS query_index{values} "
        f"FROM {identifier(rows.ids.table)} AS {rows.alias} {rows.joined}"
    )


def _expressions(part: Part, rows: RowQuery) -> dict[str, str]:
    """Return the expressions of the columns that a query has."""
    names = dict(part.stream.table.kinds)[rows.kind]
    found = dict(zip(names, rows.columns, strict=True))
    if rows.kind is not None:
        found[KIND] = literal(rows.kind)
    return found


def _typed(expression: str, column: Column) -> str:
    if column.type == "time":
        expression = f"({expression})::bigint * 1000"
    return f"({expression})::{TYPES[column.type].sql} AS {identifier(column.name)}"


def _sort_key(column: Column) -> str:
    name = identifier(column.name)
    if column.type == "strings":
        name += "::text"
    elif column.type not in ("string", "json"):
        return name
    return f'{name} COLLATE "C"'


def _column(query: AvailableQuery, column: str) -> str:
    return f"{query.rows.alias}.{identifier(column)}"


def _token(query: AvailableQuery) -> str:
    sign = "-" if query.rows.negative else ""
    return sign + _column(query, query.rows.ids.id_column)


def _writer(query: AvailableQuery) -> str:
    column = query.rows.ids.writer_column
    return "NULL::text" if column is None else _column(query, column)


def _conditions(
    part: Part, query: AvailableQuery, by_writer: Iterable[str]
) -> list[str]:
    """Return the conditions for the rows of a part in one table.

    Each row matches one of them. If rows may have no writer, one is for these: the
    server could not use the index for a disjunction.

    :param by_writer: the conditions of the writers, if the table has an index by writer
        and id. All writers in the table are known: they were looked up.
    """
    rows = query.rows
    if rows.ids.writer_column is None and part.start.minimum >= part.end.minimum:
        return ["FALSE"]
    id_ = _column(query, rows.ids.id_column)
    token, writer = _token(query), _writer(query)
    conditions = (
        [f"{id_} < {-part.low}", f"{id_} >= {-part.high}"]
        if rows.negative
        else [f"{id_} > {part.low}", f"{id_} <= {part.high}"]
    )
    if part.low < part.start.furthest:
        conditions.append(f"{token} > {_position(writer, part.start)}")
    if part.high > part.end.least:
        conditions.append(f"{token} <= {_position(writer, part.end)}")
    if part.writers is not None:
        name = f"coalesce({writer}, {literal(part.sole_writer)})"
        conditions.append(_is_one_of(name, part.writers))
    common = " AND ".join(conditions)
    if not query.by_writer:
        return [common]
    found = [f"{common} AND {condition}" for condition in by_writer]
    if query.nullable:
        found.append(f"{common} AND {writer} IS NULL")
    return found or ["FALSE"]


def _position(writer: str, offset: StreamOffset) -> str:
    """Return an expression for the position of a row's writer in an offset."""
    if not offset.writers:
        return str(offset.minimum)
    cases = " ".join(
        f"WHEN {literal(name)} THEN {position}"
        for name, position in offset.writers.items()
    )
    return f"CASE {writer} {cases} ELSE {offset.minimum} END"


def _is_one_of(writer: str, names: Iterable[str]) -> str:
    return f"{writer} = ANY(ARRAY[{', '.join(map(literal, sorted(names)))}]::text[])"


def ids_sql(
    part: Part, query: AvailableQuery, limit: int, *, last: bool = False
) -> str:
    """Return the query for the tokens of a part in one table, in order.

    If the table has an index on the id, the query returns at most ``limit`` tokens. If
    it has an index by writer and id, as many of each writer, one writer after another.
    The server can scan the index, and stop after ``limit`` tokens.

    :param last: whether to return the greatest token first.
    """
    rows, writer = query.rows, _writer(query)
    order = "DESC" if last is not rows.negative else "ASC"
    end = f"ORDER BY {_column(query, rows.ids.id_column)} {order} LIMIT {limit}"
    return " UNION ALL ".join(
        f"(SELECT {_token(query)}::bigint AS stream_id "
        f"FROM {identifier(rows.ids.table)} AS {rows.alias} "
        f"WHERE {condition} {end})"
        for condition in _conditions(
            part,
            query,
            [f"{writer} = {literal(name)}" for name in sorted(part.end.writers)],
        )
    )
