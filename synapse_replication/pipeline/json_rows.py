"""Converts typed columns to rows as on the wire: JSON arrays as text."""

from __future__ import annotations

import functools
import json

import duckdb
import pyarrow as pa

from synapse_replication.pipeline.tables import KIND, TYPES, Column, DatabaseTable
from synapse_replication.storage.queries import identifier, literal


def json_rows(table: DatabaseTable, batch: pa.RecordBatch) -> pa.Array:
    """Return each row of a batch as a JSON array.

    :param batch: rows with at least the columns ``table.columns``.
    """
    connection = _connection()
    with connection.cursor() as cursor:
        cursor.register("batch", pa.Table.from_batches([batch]))
        found = cursor.sql(_query(table)).to_arrow_table()
    return found.column(0).cast(pa.string()).combine_chunks()


@functools.cache
def _connection() -> duckdb.DuckDBPyConnection:
    return duckdb.connect(config={"threads": 1})


@functools.cache
def _query(table: DatabaseTable) -> str:
    texts = {column.name: _text(column) for column in table.columns}
    cases = []
    for kind, names in table.kinds:
        fields = " || ',' || ".join(texts[name] for name in names)
        row = f"'[' || {fields} || ']'"
        if kind is None:
            return f"SELECT {row} FROM batch"
        start = literal(f"[{json.dumps(kind)},")
        cases.append(f"WHEN {literal(kind)} THEN {start} || {row} || ']'")
    return f"SELECT CASE {KIND} {' '.join(cases)} END FROM batch"


def _text(column: Column) -> str:
    text = TYPES[column.type].text.format(identifier(column.name))
    return f"coalesce(({text})::VARCHAR, 'null')"
