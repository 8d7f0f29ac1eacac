"""The frame of the lines of recordings and of an archive."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from synapse_replication.pipeline.archive.snapshot import Snapshot
from synapse_replication.pipeline.scan import Batches
from synapse_replication.pipeline.schemas import WIRE_SCHEMA
from synapse_replication.pipeline.wire_lines import find_recordings, scan_recordings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def lines_frame(
    session: SparkSession,
    columns: Sequence[str],
    recordings: Iterable[str | os.PathLike[str]],
    archive: Snapshot | None,
) -> DataFrame | None:
    """Return the lines of recordings and of an archive.

    A recording that is in both is read only from the archive.

    :param columns: columns of WIRE_SCHEMA. The frame also has ``is_damaged``, which is
        whether a line is an invalid record.
    :return: ``None`` if there are neither recordings nor archived lines.
    """
    from pyspark.sql import functions as sf

    new = [
        path
        for path in find_recordings(recordings)
        if archive is None or archive.lacks(path)
    ]
    frames = []
    if new:
        scan = scan_recordings(new)
        fields = [WIRE_SCHEMA.field(name) for name in columns]
        schema = pa.schema([*fields, pa.field("is_damaged", pa.bool_())])

        def reduce(batches: Batches) -> Batches:
            for batch in batches:
                no_command = pc.is_null(batch.column("command"))
                damaged = pc.and_(no_command, pc.equal(batch.column("line"), ""))
                chosen = [*(batch.column(name) for name in columns), damaged]
                yield pa.RecordBatch.from_arrays(chosen, schema=schema)

        frames.append(scan.then(reduce, schema).frame(session))
    if archive is not None and archive.wire_files:
        wire = archive.wire_frame(session)
        recording = sf.concat(sf.lit("archive/wire/"), wire.recording)
        frames.append(
            wire.withColumn("recording", recording).select(
                *columns, sf.expr("command IS NULL AND line = ''").alias("is_damaged")
            )
        )
    if not frames:
        return None
    return functools.reduce(lambda some, more: some.unionAll(more), frames)
