"""The work of the process that is to be killed: it archives rows once."""

from __future__ import annotations

import os
import sys
from collections import Counter

from scripts.tools.archive_kills.kills import Kill, kill_process
from tests.support.archive_points import Point, watched

DSN_VARIABLE = "SYNAPSE_REPLICATION_DSN"
RETENTION_VARIABLE = "ARCHIVE_KILLS_RETENTION_HOURS"

#: The exit status of a run if another run committed first.
STATUS_REFUSED = 3
_REFUSED = "refused: "
#: A part of the error that a run raises if another run committed first.
_CONFLICT = "Only one driver may write"
_BATCH_IDS = 150
_COMPACT_FILES = 3


def work(folder: str, kill: Kill | None) -> None:
    """Archive once, print each point that is reached, and perform the kill.

    :param folder: the folder of the archive.
    :param kill: a kill at a named point; ``None`` if this process performs none.
    """
    from synapse_replication.errors import PipelineError
    from synapse_replication.pipeline.archive.job import (
        ArchiveProgress,
        ArchiveSettings,
        run_archive,
    )
    from synapse_replication.pipeline.settings import PipelineSettings

    reached: Counter[Point] = Counter()

    def watch(point: Point) -> None:
        reached[point] += 1
        print(point.value, flush=True)  # noqa: T201 -- for the process that started this
        if kill is not None and point is kill.point and reached[point] == kill.nth:
            kill_process(os.getpid(), kill.victims)

    try:
        with watched(watch):
            run_archive(
                ArchiveSettings(
                    folder,
                    PipelineSettings.of_dsn(os.environ[DSN_VARIABLE]),
                    once=True,
                    batch_ids=_BATCH_IDS,
                    compact_files=_COMPACT_FILES,
                    retention_hours=int(os.environ.get(RETENTION_VARIABLE, "168")),
                    master="local[2]",
                ),
                ArchiveProgress(sys.stderr),
            )
    except PipelineError as error:
        print(f"{_REFUSED}{error}", flush=True)  # noqa: T201
        sys.exit(STATUS_REFUSED if _CONFLICT in str(error) else 1)
