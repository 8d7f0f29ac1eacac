"""Helpers that make and read archives for tests, without Spark."""

from __future__ import annotations

import datetime
import io
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

from synapse_replication.pipeline.archive.delta_table import ArchiveTable
from synapse_replication.pipeline.archive.files import DayWriter
from synapse_replication.pipeline.archive.purges import OldDay, purge_archive
from synapse_replication.pipeline.archive.store import ArchiveStore
from synapse_replication.pipeline.progress import JobProgress
from synapse_replication.pipeline.schemas import DatabaseTable, standard_tables
from synapse_replication.pipeline.source.offsets import StreamOffset
from synapse_replication.pipeline.source.options import SourceOptions
from synapse_replication.pipeline.source.planning import Planner
from synapse_replication.pipeline.source.reading import read_part, task_connection
from tests.support.archive_database import Key

#: The day of archiving, which is the partition of rows without a time of writing.
TODAY = datetime.date(2026, 1, 9)


class Killed(BaseException):
    """Simulates the death of the process. Nothing may catch this exception."""


def receipts(first: int, last: int, *, day: int | None = None) -> list[dict[str, Any]]:
    """Make rows of ``receipts`` with the tokens from ``first`` to ``last``, inclusive.

    :param day: the day of January 2026 on which they were written; ``None`` if unknown.
    """
    written = (
        None
        if day is None
        else datetime.datetime(2026, 1, day, 12, tzinfo=datetime.timezone.utc)
    )
    return [
        {
            "stream_id": token,
            "row_index": 0,
            "instance_name": "w1",
            "written_ts": written,
            "room_id": "!room",
            "receipt_type": "m.read",
            "user_id": f"@user{token}",
            "event_id": "$event",
            "data": '{"ts":5}',
        }
        for token in range(first, last + 1)
    ]


def open_table(
    location: Path | str | ArchiveStore,
    stream: str = "receipts",
    table: DatabaseTable | None = None,
) -> ArchiveTable:
    """Open the table of a stream, as a driver does."""
    store = (
        location if isinstance(location, ArchiveStore) else ArchiveStore.at(location)
    )
    columns = table or standard_tables()[stream]
    return ArchiveTable(store, store.stream_uri(stream), stream, columns.archive_schema)


def add_rows_to(
    location: Path | str | ArchiveStore,
    stream: str,
    rows: Iterable[Mapping[str, Any]],
    *,
    table: ArchiveTable | None = None,
    columns: DatabaseTable | None = None,
) -> ArchiveTable:
    """Commit rows to the table of a stream, with the offset of the last row."""
    store = (
        location if isinstance(location, ArchiveStore) else ArchiveStore.at(location)
    )
    columns = columns or standard_tables()[stream]
    table = table or open_table(store, stream, columns)
    writer = DayWriter(store, store.stream_uri(stream), "written_ts", TODAY)
    found = pa.Table.from_pylist(list(rows), schema=columns.arrow_schema)
    for batch in found.to_batches():
        writer.write(batch)
    last = max(found.column("stream_id").to_pylist())
    table.commit(writer.close(), StreamOffset(last))
    return table


def make_archive(folder: Path) -> Path:
    """Make an archive of two streams and two days, eight rows in all."""
    for day in (1, 2):
        add_rows_to(folder, "receipts", receipts(2 * day - 1, 2 * day, day=day))
        rows = [
            {**row, "entity": "@user"}
            for row in receipts(2 * day - 1, 2 * day, day=day)
        ]
        add_rows_to(
            folder,
            "to_device",
            [
                {
                    name: row[name]
                    for name in standard_tables()["to_device"].arrow_schema.names
                }
                for row in rows
            ],
        )
    return folder


def archive_database(
    folder: Path, dsn: str, change: Callable[[str, pa.RecordBatch], pa.Table]
) -> None:
    """Archive all rows of a database, without Spark.

    :param change: called with a stream and a batch; returns the rows to archive.
    """
    options = SourceOptions.parse({"dsn": dsn})
    store = ArchiveStore.at(folder)
    with task_connection(options.conninfo) as connection:
        for part in chain.from_iterable(
            Planner(options, continuous=False).batch().tasks
        ):
            stream = part.stream.name
            writer = DayWriter(store, store.stream_uri(stream), "written_ts", TODAY)
            for batch in read_part(connection, options.conninfo, part):
                for changed in change(stream, batch).to_batches():
                    writer.write(changed)
            open_table(store, stream).commit(writer.close(), StreamOffset(part.high))


def keys_of(folder: Path | str | ArchiveStore) -> list[Key]:
    """
    Return the key of each archived row, read from the Delta tables, in sorted order.
    """
    store = folder if isinstance(folder, ArchiveStore) else ArchiveStore.at(folder)
    keys: list[Key] = []
    for stream in store.streams():
        uri = store.stream_uri(stream)
        if not DeltaTable.is_deltatable(uri, storage_options=store.delta_options):
            continue
        table = DeltaTable(uri, storage_options=store.delta_options)
        found = table.to_pyarrow_table(columns=["instance_name", "stream_id"])
        keys += [
            (stream, row["instance_name"], row["stream_id"])
            for row in found.to_pylist()
        ]
    return sorted(keys)


def purge(folder: str, before: datetime.date) -> list[OldDay]:
    """Purge an archive, without a display."""
    return purge_archive(folder, before, JobProgress(io.StringIO(), 1))
