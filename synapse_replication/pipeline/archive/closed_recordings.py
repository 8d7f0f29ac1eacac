"""Archives closed recordings, each only once.

A recording is identified by its name without its folder, so that it may be moved to
another folder. The archive stores the size of each recording, to detect a recording
that was continued after it had been archived.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive.files import DayWriter, WrittenFile
from synapse_replication.pipeline.archive.store import ArchiveStore
from synapse_replication.pipeline.scan import FEW_IDS, Spark, batched, run_tasks
from synapse_replication.pipeline.wire_lines import recordings_in, scan_recordings

#: The maximum size of the recordings in a batch, in bytes, unless a single recording is
#: larger.
BATCH_BYTES: Final = 1024**3


def find_closed_recordings(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """Return the closed recordings among files and folders.

    A folder may be empty. A file that a recorder is still writing has another suffix,
    and is not found in a folder. A file in ``paths`` is always included, even if it is
    not closed.

    :raises PipelineError: if a path does not exist, or if two recordings have the same
        name.
    """
    found: dict[str, Path] = {}
    for given in paths:
        for file in recordings_in(Path(given).absolute()):
            other = found.setdefault(file.name, file)
            if other != file:
                raise PipelineError(
                    f"{file} and {other} have the same name, by which the archive "
                    "identifies recordings; rename one of them"
                )
    return list(found.values())


def plan_recordings(
    recordings: Iterable[Path], archived_size: Callable[[str], int | None]
) -> Iterator[dict[Path, int]]:
    """Yield the new recordings in batches, with their sizes in bytes.

    :param archived_size: returns the archived size of a recording by its name; ``None``
        if it is not archived.
    :raises PipelineError: if a recording changed after it was archived.
    """
    # Check all recordings first: archived ones may be deleted between two batches.
    new: dict[Path, int] = {}
    for path in recordings:
        size, archived = path.stat().st_size, archived_size(path.name)
        if archived is None:
            new[path] = size
        elif archived != size:
            raise PipelineError(
                f"{path} had {archived} bytes when it was archived, and now has "
                f"{size}; the changes would not be archived. "
                "Archive only closed recordings, such as those that "
                "'synapse-replication record' writes, or rename this file"
            )
    for paths in batched(new, new.__getitem__, BATCH_BYTES):
        yield {path: new[path] for path in paths}


def write_recordings(
    spark: Spark, store: ArchiveStore, paths: Iterable[Path], today: datetime.date
) -> list[WrittenFile]:
    """Write recordings to files of the table of recorded commands.

    Few lines are written by this process, others on executors. If a task fails, an
    exception of Spark is raised; see
    :func:`~synapse_replication.pipeline.failures.spark_errors_shortened`.

    :param today: the day to assign to commands whose time is unknown.
    """
    scan = scan_recordings(paths)

    def write(task: Any) -> list[WrittenFile]:
        writer = DayWriter(store, store.wire_uri, "received_ts", today)
        for batch in scan.read(task):
            writer.write(batch)
        return writer.close()

    written = run_tasks(write, scan.tasks, spark if scan.ids > FEW_IDS else None)
    return [file for files in written for file in files]
