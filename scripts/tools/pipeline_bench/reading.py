"""Measures reading with the data source, with JDBC, and without Spark.

The queries of Spark use all columns of all rows, because its readers omit unused
columns. The lower bounds are the times of the database and the libraries without Spark:
rows as JSON by ``COPY``, and the raw tables by ADBC into Parquet files, each in one
process.
"""

from __future__ import annotations

import csv
import functools
import io
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
from pyspark.sql import DataFrame, SparkSession, functions as sf

from scripts.tools.pipeline_bench.memory import WorkerMemory
from synapse_replication.pipeline.schemas import RowForm
from synapse_replication.pipeline.settings import PipelineSettings
from synapse_replication.pipeline.source.connections import (
    READ_TIMEOUT,
    read_transaction,
)
from synapse_replication.pipeline.source.options import SourceOptions, reader_options
from synapse_replication.pipeline.source.planning import Planner
from synapse_replication.pipeline.source.ranges import Part, range_sql
from synapse_replication.pipeline.source.reading import task_connection
from synapse_replication.pipeline.source.source import read_rows

#: The path of PostgreSQL's Java driver in Debian's libpostgresql-jdbc-java.
DEBIAN_JAR = Path("/usr/share/java/postgresql.jar")


@attrs.frozen
class Reading:
    """The result of one way of reading.

    :ivar seconds: the time of each round, in s.
    :ivar worker_mib: the peak memory of any Python worker, in MiB; ``None`` if none was
        used.
    """

    name: str
    rows: int
    seconds: tuple[float, ...]
    worker_mib: float | None = None

    @property
    def rate(self) -> float:
        """The rate of the fastest round, in rows per second."""
        return self.rows / min(self.seconds)


def measure_reading(
    session: SparkSession,
    settings: PipelineSettings,
    rounds: int,
    report: Callable[[str], object],
) -> list[Reading]:
    """Read all streams in each way, in several rounds.

    :param report: called with a description of each step.
    """
    ways: dict[str, Callable[[], int]] = {
        f"data source, {form.value}": functools.partial(
            _by_source, session, settings, form
        )
        for form in (RowForm.JSON, RowForm.NONE)
    }
    ways["data source, typed"] = lambda: _by_source_typed(session, settings)
    if DEBIAN_JAR.is_file():
        ways["Spark's JDBC reader"] = lambda: _by_jdbc(session, settings)
    ways["COPY of JSON, one process"] = lambda: _copy_json(settings)
    ways["ADBC to Parquet, one process"] = lambda: adbc_to_parquet(settings)
    rows: dict[str, int] = {}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    memory: dict[str, float] = {}
    for turn in range(rounds):
        for name, read in ways.items():
            with WorkerMemory() as workers:
                begun = time.perf_counter()
                rows[name] = read()
                seconds[name].append(time.perf_counter() - begun)
            if name.startswith("data source"):
                most = max(workers.most.values(), default=0) / 1024
                memory[name] = max(memory.get(name, 0), most)
            report(f"round {turn + 1}: {name}: {seconds[name][-1]:.1f} s")
    return [
        Reading(name, rows[name], tuple(seconds[name]), memory.get(name))
        for name in ways
    ]


def _by_source(session: SparkSession, settings: PipelineSettings, form: RowForm) -> int:
    return _use_all(read_rows(session, settings, form))


def _parts(settings: PipelineSettings) -> list[Part]:
    options = SourceOptions.parse(reader_options(settings))
    plan = Planner(options, continuous=False).batch()
    return [part for task in plan.tasks for part in task]


def _by_source_typed(session: SparkSession, settings: PipelineSettings) -> int:
    streams = sorted({part.stream.name for part in _parts(settings)})
    return sum(
        _use_all(read_rows(session, settings, RowForm.TYPED, streams=stream))
        for stream in streams
    )


def _by_jdbc(session: SparkSession, settings: PipelineSettings) -> int:
    """Read the same columns with the same queries, using the Java driver."""
    by_stream: dict[str, list[DataFrame]] = {}
    for part in _parts(settings):
        sql = range_sql(part)
        frame = session.read.format("jdbc").options(
            **_jdbc_options(settings), dbtable=f"({sql}) AS found"
        )
        by_stream.setdefault(part.stream.name, []).append(frame.load())
    return sum(
        _use_all(functools.reduce(DataFrame.unionAll, frames))
        for frames in by_stream.values()
    )


def _jdbc_options(settings: PipelineSettings) -> dict[str, str]:
    with read_transaction(settings.conninfo, 10) as txn:
        info = txn.connection.info
        return {
            "url": f"jdbc:postgresql://{info.host}:{info.port}/{info.dbname}",
            "driver": "org.postgresql.Driver",
            "user": info.user,
            "password": info.password or "",
            "fetchsize": "10000",
        }


def adbc_to_parquet(settings: PipelineSettings) -> int:
    """Write the raw tables to Parquet files, one after the other, and count rows."""
    from pyarrow import parquet

    tables = {
        table
        for part in _parts(settings)
        for query in part.queries
        for table in (query.rows.ids.table, *(d.table for d in query.rows.details))
    }
    rows = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        task_connection(settings.conninfo) as opened,
    ):
        for table in sorted(tables):
            with opened.cursor() as cursor:
                cursor.execute(f"SELECT * FROM {table}")
                found = cursor.fetch_record_batch()
                with parquet.ParquetWriter(
                    f"{folder}/{table}.parquet", found.schema, compression="zstd"
                ) as writer:
                    for batch in found:
                        writer.write_batch(batch)
                        rows += batch.num_rows
    return rows


def _use_all(frame: DataFrame) -> int:
    """Read every column of every row, and count the rows."""
    hashed = sf.xxhash64(*frame.columns)
    (row,) = (
        frame.select(hashed.alias("hash"))
        .agg(sf.count("*").alias("rows"), sf.bit_xor("hash"))
        .collect()
    )
    return int(row["rows"])


class _Counter(io.RawIOBase):
    """A file for writing CSV, which is split into tuples that are counted."""

    def __init__(self) -> None:
        self.rows = 0
        self._buffer: list[bytes] = []
        self._size = 0

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self._buffer.append(data)
        self._size += len(data)
        if self._size > 2**20:
            self.flush()
        return len(data)

    def flush(self) -> None:
        text = io.StringIO(b"".join(self._buffer).decode(), newline="")
        self._buffer, self._size = [], 0
        for record in csv.reader(text):
            self.rows += len(record) > 0


def _copy_json(settings: PipelineSettings) -> int:
    """Read all streams with COPY, one after the other, and split rows into tuples."""
    counter = _Counter()
    for sql, walk_indexes in _json_queries(settings):
        with read_transaction(
            settings.conninfo, READ_TIMEOUT, walk_indexes=walk_indexes
        ) as txn:
            txn.copy_expert(f"COPY ({sql}) TO STDOUT WITH (FORMAT csv)", counter)
    counter.flush()
    return counter.rows


def _json_queries(settings: PipelineSettings) -> Iterator[tuple[str, bool]]:
    """Yield queries in which the server encodes rows as JSON.

    With each query, yield whether it walks indexes.
    """
    for part in _parts(settings):
        sql = range_sql(part)
        names = ", ".join(f'"{column.name}"' for column in part.stream.table.columns)
        yield (
            f"SELECT stream_id, instance_name, json_build_array({names})::text, "
            f"written_us FROM ({sql}) AS rows",
            part.walks_indexes,
        )
