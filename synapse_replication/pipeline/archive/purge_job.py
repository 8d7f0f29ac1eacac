"""The job that removes old days from an archive."""

from __future__ import annotations

import datetime

from synapse_replication.pipeline.archive.purges import (
    OldDay,
    find_old_days,
    purge_days,
)
from synapse_replication.pipeline.archive.store import open_archive
from synapse_replication.pipeline.progress import JobProgress


def purge_archive(
    archive: str,
    before: datetime.date,
    *,
    dry_run: bool = False,
    progress: JobProgress | None = None,
) -> list[OldDay]:
    """Remove the rows of all days before a date, and return these days.

    :param dry_run: whether to only return the days, without removing rows.
    :param progress: shows a step for each table and, if rows are removed, counts files.
    :raises PipelineError: if the archive does not exist, or cannot be read or written.
    """
    store = open_archive(archive)
    act = find_old_days if dry_run else purge_days
    return act(store, before, progress)
