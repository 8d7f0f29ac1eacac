"""Reads all rows of an archive with several libraries, and sorts them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

from tests.support.archive_database import Key

#: Stream, writer, token, index, row.
Row: TypeAlias = tuple[Any, ...]

KEYS = ("instance_name", "stream_id", "row_index")


def read_by_pyarrow(folder: Path) -> list[Row]:
    """Read the tables from their logs and files."""
    from deltalake import DeltaTable

    from synapse_replication.pipeline.archive.store import ArchiveStore
    from synapse_replication.pipeline.schemas import json_rows, standard_tables

    store = ArchiveStore.at(folder)
    rows: list[Row] = []
    for stream in store.streams():
        if not DeltaTable.is_deltatable(store.stream_uri(stream)):
            continue
        found = DeltaTable(store.stream_uri(stream)).to_pyarrow_dataset()
        for batch in found.to_batches():
            texts = json_rows(standard_tables()[stream], batch).to_pylist()
            columns = [batch.column(name).to_pylist() for name in KEYS]
            rows += [(stream, *row) for row in zip(*columns, texts, strict=True)]
    return sorted(rows)


def read_by_duckdb(folder: Path) -> list[Key]:
    """Read the tables with DuckDB."""
    import duckdb
    from deltalake import DeltaTable

    keys: list[Key] = []
    for path in sorted((folder / "streams").iterdir()):
        table = DeltaTable(path).to_pyarrow_dataset()
        with duckdb.connect() as connection:
            connection.register("archived", table)
            found = connection.execute(
                "SELECT instance_name, stream_id FROM archived"
            ).fetchall()
        keys += [(path.name, *row) for row in found]
    return sorted(keys)


def read_by_spark(folder: Path, dsn: str) -> tuple[list[Row], list[Row]]:
    """Read the database with the data source, and the archive with Spark.

    :return: the rows of the database, and those of the archive.
    """
    from synapse_replication.pipeline.archive.snapshot import read_archive
    from synapse_replication.pipeline.spark.session import make_session

    columns = ("stream", *KEYS, "row")
    session = make_session("archive_kills", master="local[2]")
    try:
        archived = read_archive(session, folder).rows().select(*columns)
        by_spark = sorted(map(tuple, archived.collect()))
        source = session.read.format("synapse_replication").option("dsn", dsn)
        by_source = sorted(map(tuple, source.load().select(*columns).collect()))
    finally:
        session.stop()
    return by_source, by_spark


def checksum_of(rows: Iterable[object]) -> str:
    """Return a checksum of the rows in their order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(repr(row).encode())
    return digest.hexdigest()[:16]
