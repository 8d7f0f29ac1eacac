"""Converts typed columns to rows as on the wire: JSON arrays as text.

The conversion works on whole Arrow columns. Strings are processed one by one only in
columns that contain a character to escape.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from synapse_replication.pipeline.tables import KIND, DatabaseTable

#: The characters that a JSON string can contain only in escaped form.
_TO_ESCAPE = r'["\\\x00-\x1f]'


def json_rows(table: DatabaseTable, batch: pa.RecordBatch) -> pa.Array:
    """Return each row of a batch as a JSON array.

    :param batch: rows with at least the columns ``table.columns``.
    """
    if table.kinds[0][0] is None:
        return _array_of(table, batch, table.kinds[0][1])
    indices: list[pa.Array] = []
    texts: list[pa.Array] = []
    all_indices = pa.array(range(batch.num_rows), pa.int64())
    for kind, names in table.kinds:
        chosen = pc.equal(batch.column(KIND), kind)
        of_kind = batch.filter(chosen)
        if not of_kind.num_rows:
            continue
        fields = _array_of(table, of_kind, names)
        texts.append(
            pc.binary_join_element_wise(f"[{json.dumps(kind)},", fields, "]", "")
        )
        indices.append(all_indices.filter(chosen))
    if not texts:
        return pa.array([], pa.string())
    order = pc.sort_indices(pa.concat_arrays(indices))
    return pa.concat_arrays(texts).take(order)


def _array_of(
    table: DatabaseTable, batch: pa.RecordBatch, names: Sequence[str]
) -> pa.Array:
    types = {column.name: column.type for column in table.columns}
    parts: list[pa.Array | str] = []
    for name in names:
        parts += [",", _values(batch.column(name), types[name])]
    if isinstance(parts[0], str):
        parts[0] = "["
    return pc.binary_join_element_wise(*parts, "]", "")


def _values(values: pa.Array, type_: str) -> pa.Array:
    if type_ == "string":
        texts = _quoted(values)
    elif type_ == "strings":
        texts = _lists(values)
    elif type_ == "double":
        texts = _numbers(values)
    elif type_ == "json":
        texts = values
    elif type_ == "time":
        texts = values.cast(pa.timestamp("ms", tz="UTC"), safe=False)
        texts = texts.cast(pa.int64()).cast(pa.string())
    else:
        texts = values.cast(pa.string())
    return pc.fill_null(texts, "null")


def _quoted(values: pa.Array) -> pa.Array:
    if pc.any(pc.match_substring_regex(values, _TO_ESCAPE)).as_py():
        return pa.array(
            (
                None if value is None else json.dumps(value, ensure_ascii=False)
                for value in values.to_pylist()
            ),
            pa.string(),
        )
    return pc.binary_join_element_wise('"', values, '"', "")


def _lists(values: pa.Array) -> pa.Array:
    items = pc.fill_null(_quoted(values.flatten()), "null")
    lengths = pc.fill_null(pc.list_value_length(values), 0)
    ends = pc.cumulative_sum(lengths)
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), ends.cast(pa.int32())])
    joined = pc.binary_join(pa.ListArray.from_arrays(offsets, items), ",")
    texts = pc.binary_join_element_wise("[", joined, "]", "")
    return pc.if_else(values.is_valid(), texts, pa.scalar(None, pa.string()))


def _numbers(values: pa.Array) -> pa.Array:
    texts = values.cast(pa.string())
    # JSON has no infinity and no NaN: write them as the strings "inf" and "nan".
    return pc.if_else(
        pc.is_finite(values), texts, pc.binary_join_element_wise('"', texts, '"', "")
    )
