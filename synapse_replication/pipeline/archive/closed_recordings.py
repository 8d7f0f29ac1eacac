"""Archives closed recordings, each only once.

A recording is identified by its name without its folder, so that it may be moved to
another folder. The archive stores the size of each recording, to detect a recording
that was continued after it had been archived.
"""

from __future__ import annotations

import datetime
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs
import pyarrow as pa

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive.files import DayWriter, WrittenFile
from synapse_replication.pipeline.archive.store import ArchiveStore
from synapse_replication.pipeline.scan import Batches, to_batch
from synapse_replication.pipeline.wire_lines import recordings_in, scan_recordings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: The maximum size of the recordings in a batch, in bytes, unless a single recording is
#: larger.
BATCH_BYTES: Final = 1024**3


@attrs.frozen
class Recording:
    """A closed recording.

    :ivar size: the size of the file, in bytes.
    """

    path: Path
    size: int

    @property
    def name(self) -> str:
        """The name that identifies the recording."""
        return self.path.name


def find_closed_recordings(
    paths: Iterable[str | os.PathLike[str]],
) -> list[Recording]:
    """Return the closed recordings among files and folders.

    A folder may be empty. A file that a recorder is still writing has another suffix,
    and is not found in a folder. A file in ``paths`` is always included, even if it is
    not closed.

    :raises PipelineError: if a path does not exist, or if two recordings have the same
        name.
    """
    found: dict[str, Recording] = {}
    for given in paths:
        for file in recordings_in(Path(given).absolute()):
            other = found.setdefault(file.name, Recording(file, file.stat().st_size))
            if other.path != file:
                raise PipelineError(
                    f"{file} and {other.path} have the same name, by which the archive "
                    "identifies recordings; rename one of them"
                )
    return list(found.values())


def plan_recordings(
    recordings: Sequence[Recording],
    archived_size: Callable[[str], int | None],
    batch_bytes: int = BATCH_BYTES,
) -> Iterator[list[Recording]]:
    """Yield the new recordings in batches.

    :param archived_size: returns the archived size of a recording by its name; ``None``
        if it is not archived.
    :raises PipelineError: if a recording changed after it was archived.
    """
    new: list[Recording] = []
    for recording in recordings:
        size = archived_size(recording.name)
        if size is None:
            new.append(recording)
        elif size != recording.size:
            raise PipelineError(
                f"{recording.path} had {size} bytes when it was archived, and now has "
                f"{recording.size}; the changes would not be archived. "
                "Archive only closed recordings, such as those that "
                "'synapse-replication record' writes, or rename this file"
            )
    while new:
        batch = [new.pop(0)]
        total = batch[0].size
        while new and total + new[0].size <= batch_bytes:
            total += new[0].size
            batch.append(new.pop(0))
        yield batch


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
        yield to_batch([[pickle.dumps(file)] for file in writer.close()], schema)

    written = scan_recordings(paths).then(write, schema).collect(spark)
    return [
        pickle.loads(file)
        for batch in written
        for file in batch.column("file").to_pylist()
    ]
