"""The tasks of the archive job, which write rows and recordings to Parquet files."""

from __future__ import annotations

import datetime
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import pyarrow as pa

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive.failures import reason_of
from synapse_replication.pipeline.archive.files import DayWriter, WrittenFile
from synapse_replication.pipeline.archive.store import ArchiveStore
from synapse_replication.pipeline.scan import Batches
from synapse_replication.pipeline.source.partitions import Part
from synapse_replication.pipeline.source.reading import SkippedId, connected, read_part
from synapse_replication.pipeline.wire_lines import scan_recordings

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession


@attrs.frozen
class WrittenRows:
    """The rows that a task wrote.

    :ivar files: the files of each stream.
    :ivar skipped: the ids whose rows cannot be read because of their content.
    """

    files: dict[str, list[WrittenFile]] = attrs.Factory(dict)
    skipped: list[SkippedId] = attrs.Factory(list)


def write_rows(
    session: SparkSession,
    store: ArchiveStore,
    conninfo: Mapping[str, Any],
    tasks: Sequence[Sequence[Part]],
    today: datetime.date,
) -> WrittenRows:
    """Write rows from the database to files, on the executors.

    If a task fails, an exception of Spark is raised; see
    :func:`~synapse_replication.pipeline.spark.failures.short_failures`.

    :param tasks: the parts of each task.
    :param today: the day to assign to rows whose time of writing is unknown.
    """

    def write(parts: Sequence[Part]) -> WrittenRows:
        return write_parts(store, conninfo, parts, today)

    found = WrittenRows()
    context = session.sparkContext
    for written in context.parallelize(tasks, len(tasks)).map(write).collect():
        for stream, files in written.files.items():
            found.files.setdefault(stream, []).extend(files)
        found.skipped.extend(written.skipped)
    return found


def write_parts(
    store: ArchiveStore,
    conninfo: Mapping[str, Any],
    parts: Iterable[Part],
    today: datetime.date,
) -> WrittenRows:
    """Write rows from the database to files, in this process.

    :param today: the day to assign to rows whose time of writing is unknown.
    :raises PipelineError: if the database cannot be read, or a file cannot be written.
    """
    writers: dict[str, DayWriter] = {}
    skipped: list[SkippedId] = []
    try:
        with connected(conninfo) as connection:
            for part in parts:
                stream = part.stream.name
                if stream not in writers:
                    writers[stream] = DayWriter(
                        store, store.stream_uri(stream), "written_ts", today
                    )
                for batch in read_part(connection, conninfo, part, skipped=skipped):
                    writers[stream].write(batch)
        files = {stream: writer.close() for stream, writer in writers.items()}
        return WrittenRows(files, skipped)
    except OSError as error:
        raise PipelineError(
            f"the archive {store.uri} cannot be written: {reason_of(error)}"
        ) from error


def write_recordings(
    spark: Callable[[], SparkSession],
    store: ArchiveStore,
    paths: Sequence[Path],
    today: datetime.date,
) -> list[WrittenFile]:
    """Write recordings to files of the table of recorded commands.

    Few lines are written by this process, others on executors. If a task fails, an
    exception of Spark is raised; see
    :func:`~synapse_replication.pipeline.spark.failures.short_failures`.

    :param spark: returns the session.
    :param today: the day to assign to commands whose time is unknown.
    """
    uri = store.wire_uri
    schema = pa.schema([("file", pa.binary())])

    def write(batches: Batches) -> Batches:
        writer = DayWriter(store, uri, "received_ts", today)
        for batch in batches:
            if batch.num_rows:
                writer.write(batch)
        files = [pickle.dumps(file) for file in writer.close()]
        yield pa.RecordBatch.from_pydict({"file": files}, schema=schema)

    written = scan_recordings(paths).then(write, schema).collect(spark)
    return [
        pickle.loads(file)
        for batch in written
        for file in batch.column("file").to_pylist()
    ]
