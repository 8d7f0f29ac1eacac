"""The job that removes old days from an archive."""

from __future__ import annotations

import datetime

from synapse_replication.pipeline.archive.purges import (
    OldDay,
    find_old_days,
    purge_days,
)
from synapse_replication.pipeline.archive.store import open_archive

__all__ = ["purge_archive"]


def purge_archive(
    archive: str, before: datetime.date, *, dry_run: bool = False
) -> list[OldDay]:
    """Remove all days before a date, and return them.

    :raises PipelineError: if the archive does not exist or cannot be written.
    """
    store = open_archive(archive)
    return find_old_days(store, before) if dry_run else purge_days(store, before)
