"""Counts rows within the tasks that read them.

A task returns *tallies*: counts of its rows by writer and index, by time, by room and
by user. Spark's SQL adds up those of all tasks. Otherwise, every row would pass from
Python to Java, and would be stored there between the queries, which takes longer than
reading.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from synapse_replication.pipeline.report.windows import unit_of_windows
from synapse_replication.pipeline.scan import Batches

#: The columns of the rows to count, in addition to ``stream``.
COLUMNS: Final = (
    *("instance_name", "stream_id", "row_index", "written_ts", "room_id", "user_id"),
)

#: The columns of tallies. ``counted`` says what a tally is of:
#:
#: * ``rows``: the rows with an index among the rows of their token; ``timed`` is the
#:   number of those whose time of writing is known;
#: * ``time``: the rows that were written in the seconds from ``start``, which is in s
#:   since 1970, to the next tally;
#: * ``room`` and ``user``: the rows that refer to ``name``.
SCHEMA: Final = pa.schema(
    [
        ("counted", pa.string()),
        ("stream", pa.string()),
        ("instance_name", pa.string()),
        ("row_index", pa.int64()),
        ("start", pa.int64()),
        ("name", pa.string()),
        ("rows", pa.int64()),
        ("timed", pa.int64()),
        ("first_token", pa.int64()),
        ("last_token", pa.int64()),
        ("first_ts", pa.timestamp("us", "UTC")),
        ("last_ts", pa.timestamp("us", "UTC")),
    ]
)

#: The number of rows that are counted together.
_ROWS: Final = 250_000

#: The number of rows for a tally, about: fewer if rows refer to more rooms and users.
ROWS_PER_TALLY: Final = 20

_MICROSECONDS: Final = 1_000_000


def tally(batches: Iterable[pa.RecordBatch], window: int | None) -> Batches:
    """Count rows.

    :param batches: rows with ``stream`` and :data:`COLUMNS`.
    :param window: the length in s of the windows by which rows will be counted;
        ``None`` if it will be chosen by the time from the first row to the last.
    """
    for rows in _joined(batches):
        yield from _counted(rows, window)


def _joined(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    found: list[pa.RecordBatch] = []
    for batch in batches:
        found.append(batch)
        if sum(each.num_rows for each in found) >= _ROWS:
            yield pa.Table.from_batches(found)
            found = []
    if found:
        yield pa.Table.from_batches(found)


def _counted(rows: pa.Table, window: int | None) -> Batches:
    by_index = rows.group_by(["stream", "instance_name", "row_index"]).aggregate(
        [
            ([], "count_all"),
            *(("written_ts", way) for way in ("count", "min", "max")),
            *(("stream_id", way) for way in ("min", "max")),
        ]
    )
    names = {
        "count_all": "rows",
        "written_ts_count": "timed",
        "written_ts_min": "first_ts",
        "written_ts_max": "last_ts",
        "stream_id_min": "first_token",
        "stream_id_max": "last_token",
    }
    yield from _tallies("rows", by_index, names)
    timed = rows.filter(pc.is_valid(rows["written_ts"]))
    if timed.num_rows:
        if window is None:
            ends = pc.min_max(timed["written_ts"])
            window = unit_of_windows(ends["min"].as_py(), ends["max"].as_py())
        micros = timed["written_ts"].cast(pa.int64())
        length = window * _MICROSECONDS
        start = pc.multiply(pc.divide(micros, length), length // _MICROSECONDS)
        by_time = timed.select(["stream", "instance_name"]).append_column(
            "start", start
        )
        keys = ["stream", "instance_name", "start"]
        counted = by_time.group_by(keys).aggregate([([], "count_all")])
        yield from _tallies("time", counted, {"count_all": "rows"})
    for kind in ("room", "user"):
        column = f"{kind}_id"
        counted = rows.group_by([column]).aggregate([([], "count_all")])
        counted = counted.filter(pc.is_valid(counted[column]))
        yield from _tallies(kind, counted, {column: "name", "count_all": "rows"})


def _tallies(counted: str, found: pa.Table, names: dict[str, str]) -> Batches:
    columns = {names.get(name, name): found[name] for name in found.column_names}
    columns["counted"] = pa.repeat(pa.scalar(counted), found.num_rows)
    yield from pa.table(
        [
            columns[field.name].cast(field.type)
            if field.name in columns
            else pa.nulls(found.num_rows, field.type)
            for field in SCHEMA
        ],
        schema=SCHEMA,
    ).to_batches()
