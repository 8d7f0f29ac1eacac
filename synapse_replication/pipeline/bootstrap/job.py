"""The job that computes positions from the rows in the tables."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.bootstrap.plan import (
    Change,
    Found,
    StreamHistory,
    check_histories,
    plan_positions,
)
from synapse_replication.pipeline.bootstrap.store import (
    IdRange,
    check_no_writers,
    connected,
    id_ranges,
    read_farthest,
    read_histories,
    write_positions,
)
from synapse_replication.pipeline.progress import JobProgress
from synapse_replication.pipeline.settings import PipelineSettings
from synapse_replication.pipeline.source.database import pinned
from synapse_replication.pipeline.spark.session import SCHEDULES_ONLY, job_session

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import SparkSession

#: A function that returns the greatest token of each writer in ranges of ids. Its first
#: argument is the database's connection parameters.
Reader = Callable[[Mapping[str, Any], Sequence[IdRange]], "list[Found]"]

_FOUND_SCHEMA = "stream string, table string, instance_name string, token long"

#: The number of partitions per core. With more than one, a core that finishes early
#: reads further partitions.
_PARTITIONS_PER_CORE = 2


@attrs.frozen
class Bootstrap:
    """The state of the streams, and the plan for each position.

    :ivar without_writer: for each stream that has rows without a writer, in a table
        with a column for the writer, the greatest token of these rows.
    """

    histories: Sequence[StreamHistory]
    changes: Sequence[Change]
    without_writer: Mapping[str, int]


def run_bootstrap(settings: PipelineSettings, *, master: str | None) -> Bootstrap:
    """Compute the positions of all writers with Spark.

    If a Spark session is active, it is used; otherwise, a session is created.

    :param master: the URL of the Spark master; ``None`` for the default of
        :func:`~synapse_replication.pipeline.spark.session.make_session`.
    :raises PipelineError: if Java or PySpark cannot be used, or
        :func:`read_bootstrap` raises it.
    """
    with (
        JobProgress(sys.stderr, 2) as progress,
        job_session(
            "synapse-replication bootstrap",
            master=master,
            settings=SCHEDULES_ONLY,
            progress=progress,
        ) as session,
    ):
        progress.begin("find the last row of each writer")
        return read_bootstrap(settings, functools.partial(read_with_spark, session))


def read_bootstrap(settings: PipelineSettings, read: Reader) -> Bootstrap:
    """Compute the positions of the writers of all streams.

    :param read: reads ranges of ids.
    :raises PipelineError: if writers are active, a sequence is behind its tables or a
        stored position, ``stream_positions`` has two rows for a writer of a stream, or
        the database cannot be read or has no table of any stream. A writer that is
        running but idle is not detected.
    """
    with connected(settings.conninfo, readonly=True) as connection:
        # Each query has a new snapshot, so that active writers are detected.
        connection.autocommit = True
        with connection.cursor() as cursor:
            before = read_histories(cursor, settings)
            if not before:
                raise PipelineError(
                    "the database has no table of a homeserver's stream; is it the "
                    "homeserver's database?"
                )
            check_no_writers(cursor, before, before)
            ranges = id_ranges(cursor, before)
            found = read(pinned(settings.conninfo, connection), ranges)
            now = read_histories(cursor, settings)
            check_no_writers(cursor, before, now)
    histories = [history.with_found(found) for history in now]
    check_histories(histories)
    columns = {(h.name, c.table): c.writer_column for h in now for c in h.tables}
    without_writer: dict[str, int] = {}
    for stream, table, writer, token in found:
        if writer is None and columns[stream, table] is not None:
            without_writer[stream] = max(token, without_writer.get(stream, 0))
    return Bootstrap(histories, plan_positions(histories), without_writer)


def write_bootstrap(settings: PipelineSettings, found: Bootstrap) -> None:
    """Write the changes in one transaction.

    :raises PipelineError: if writers are active, a position would decrease, or the
        database cannot be written. In each case, nothing is written. A writer that is
        running but idle is not detected.
    """
    with (
        connected(settings.conninfo, readonly=False) as connection,
        connection,
        connection.cursor() as cursor,
    ):
        write_positions(cursor, settings, found.histories, found.changes)


def read_with_spark(
    session: SparkSession, conninfo: Mapping[str, Any], ranges: Sequence[IdRange]
) -> list[Found]:
    """Read the greatest tokens in all ranges, on the executors."""
    if not ranges:
        return []
    parallelism = session.sparkContext.defaultParallelism * _PARTITIONS_PER_CORE
    indexes = session.range(0, len(ranges), numPartitions=min(len(ranges), parallelism))

    def read(batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        import pyarrow

        names = ["stream", "table", "instance_name", "token"]
        with connected(conninfo, readonly=True) as connection:
            for batch in batches:
                parts = [ranges[index] for index in batch.column(0).to_pylist()]
                found = list(read_farthest(connection, parts))
                columns = zip(*found, strict=True) if found else [[]] * len(names)
                types = [pyarrow.string()] * 3 + [pyarrow.int64()]
                yield pyarrow.RecordBatch.from_arrays(
                    [
                        pyarrow.array(list(values), type_)
                        for values, type_ in zip(columns, types, strict=True)
                    ],
                    names=names,
                )

    from pyspark.sql import functions as sf

    found = indexes.mapInArrow(read, _FOUND_SCHEMA)
    farthest = found.groupBy("stream", "table", "instance_name").agg(
        sf.max("token").alias("token")
    )
    return [
        (row["stream"], row["table"], row["instance_name"], row["token"])
        for row in farthest.collect()
    ]
