"""Up to where an archive is, by Spark's checkpoint; and how far that is behind.

Spark notes the offsets of a batch before the batch begins. This reads that note, and
writes nothing: the checkpoint is Spark's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from synapse_replication.durable import sync_folder
from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive.layout import (
    ArchiveLayout,
)
from synapse_replication.pipeline.archive.writer import (
    ArchiveWriter,
    Manifest,
    sync_file,
)
from synapse_replication.pipeline.source.completeness import (
    last_given_out,
    stored_positions,
)
from synapse_replication.pipeline.source.database import PLAN_TIMEOUT, reading
from synapse_replication.pipeline.source.offsets import StreamOffset, offsets_from_json
from synapse_replication.pipeline.source.options import SourceOptions
from synapse_replication.pipeline.source.planning import Planner

__all__ = [
    "archived_offsets",
    "check_checkpoint",
    "database_offsets",
    "lag_of",
    "noted_offsets",
    "query_id",
]


def query_id(layout: ArchiveLayout) -> str | None:
    """Give the id of Spark's query; ``None`` if there is no checkpoint yet.

    :raises PipelineError: the checkpoint is damaged.
    """
    path = layout.checkpoint / "metadata"
    try:
        return str(json.loads(path.read_bytes())["id"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise PipelineError(
            f"{path} is damaged: {error!r}; restore archive and checkpoint from the "
            "same backup"
        ) from error


def check_checkpoint(layout: ArchiveLayout, writer: ArchiveWriter) -> None:
    """Refuse a checkpoint that is not the one which the archive was made by.

    :raises PipelineError: rows would be archived twice.
    """
    newest = writer.newest()
    if newest is None:
        return
    found = query_id(layout)
    if found != newest.batch.origin:
        what = "is gone" if found is None else "is not the one it was made by"
        raise PipelineError(
            f"{layout.folder} holds rows, but its checkpoint {layout.checkpoint} "
            f"{what}: all rows would be archived again. Restore archive and "
            "checkpoint from the same backup, or start a new archive"
        )


def noted_offsets(layout: ArchiveLayout, number: int) -> Any:
    """Give the offsets of a batch as Spark noted them, synced to disk.

    :return: a JSON value, the same each time.
    :raises PipelineError: the note cannot be read.
    """
    path = layout.checkpoint / "offsets" / str(number)
    try:
        sync_file(path)
        sync_folder(path.parent)
        version, _, *offsets = path.read_text().splitlines()
        if version != "v1":
            raise ValueError(f"version {version}")
        return [json.loads(offset) for offset in offsets]
    except (OSError, ValueError) as error:
        raise PipelineError(
            f"{path} cannot be read as this version of Spark is known to write it: "
            f"{error}"
        ) from error


def archived_offsets(manifest: Manifest) -> dict[str, StreamOffset]:
    """Tell up to where the rows of a batch go.

    :raises PipelineError: they come from another source.
    """
    (offsets,) = manifest.batch.inputs
    return offsets_from_json(offsets)


def database_offsets(options: SourceOptions) -> dict[str, StreamOffset]:
    """Tell where the database is, without waiting for anything.

    :raises PipelineError: it cannot be reached.
    """
    planner = Planner(options, continuous=True)
    found = {}
    with reading(options.conninfo, PLAN_TIMEOUT) as txn:
        for selection in planner.select(txn):
            stream = selection.stream
            positions = stored_positions(txn, stream)
            last = 0 if positions else last_given_out(txn, stream) or 0
            found[stream.name] = StreamOffset(last, positions)
    return found


def lag_of(
    archived: Mapping[str, StreamOffset], database: Mapping[str, StreamOffset]
) -> dict[tuple[str, str], int]:
    """Tell how many ids each ``(stream, writer)`` is behind the database.

    Rows of a stream without positions are of the writer ``""``.
    """
    lag = {}
    for stream, latest in database.items():
        done = archived.get(stream, StreamOffset())
        for writer in latest.writers or {"": 0}:
            behind = latest.position(writer) - done.position(writer)
            lag[stream, writer] = max(0, behind)
    return lag
