"""The job that removes old days from an archive."""

from __future__ import annotations

import datetime

from synapse_replication.pipeline.archive.driver import drive_archive
from synapse_replication.pipeline.archive.layout import open_archive
from synapse_replication.pipeline.archive.purges import (
    OldDay,
    find_old_days,
    purge_days,
    wait_for_java,
)

__all__ = ["purge_archive"]


def purge_archive(
    folder: str, before: datetime.date, *, dry_run: bool = False
) -> list[OldDay]:
    """Remove all days before a date, and tell which.

    :raises PipelineError: it is no archive, or somebody else changes it.
    """
    if dry_run:
        return find_old_days(open_archive(folder), before)
    with drive_archive(folder) as driver:
        wait_for_java(driver.layout)
        # What is not published yet belongs to the archive, and may be old.
        driver.recover()
        days = find_old_days(driver.layout, before)
        purge_days(driver.layout, days)
    return days
