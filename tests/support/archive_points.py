"""Points of an archive run at which tests interrupt it, or kill its process."""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from synapse_replication.pipeline.archive import row_archive
from synapse_replication.pipeline.archive.delta_table import ArchiveTable
from synapse_replication.pipeline.archive.job import _ArchiveJob
from synapse_replication.pipeline.archive.row_archive import RowsArchiver
from synapse_replication.pipeline.spark.session import SparkJob


class Point(enum.Enum):
    """A point of a run, in the order in which the first batch reaches them."""

    PLANNED = "planned"
    STARTED = "started"
    WRITTEN = "written"
    COMMITTED = "committed"
    ALL_COMMITTED = "all-committed"
    COMPACTING = "compacting"
    COMPACTED = "compacted"
    VACUUMED = "vacuumed"


@contextlib.contextmanager
def watched(watch: Callable[[Point], object]) -> Iterator[None]:
    """Call a function at each point of the runs within the context."""
    with contextlib.ExitStack() as stack:

        def surround(
            owner: Any, name: str, after: Point, before: Point | None = None
        ) -> None:
            original = getattr(owner, name)

            @functools.wraps(original)
            def call(*args: Any, **kwargs: Any) -> Any:
                if before is not None:
                    watch(before)
                result = original(*args, **kwargs)
                watch(after)
                return result

            stack.enter_context(mock.patch.object(owner, name, call))

        surround(RowsArchiver, "_plan", Point.PLANNED)
        surround(SparkJob, "__call__", Point.STARTED)
        surround(row_archive, "run_tasks", Point.WRITTEN)
        surround(_ArchiveJob, "_write_recordings", Point.WRITTEN)
        surround(ArchiveTable, "commit", Point.COMMITTED)
        surround(RowsArchiver, "_write", Point.ALL_COMMITTED)
        surround(_ArchiveJob, "_compact", Point.COMPACTED, before=Point.COMPACTING)
        surround(_ArchiveJob, "_vacuum", Point.VACUUMED)
        yield
