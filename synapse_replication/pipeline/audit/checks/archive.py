"""Checks of an archive: repeated rows and lines, and missing rows.

The archive job reads the rows of each writer in order, and only up to a token at or
below which no further row can appear. Between the least and the greatest archived token
of a writer, the archive therefore has each row of this writer that the tables contain,
except rows of purged days.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from pyspark.sql import DataFrame, Window, functions as sf

from synapse_replication.pipeline.archive.damage import DamagedFile
from synapse_replication.pipeline.audit.checks.ids import ID_COLUMNS
from synapse_replication.pipeline.audit.facts import Finding
from synapse_replication.pipeline.audit.findings import Kind, finding, sample


def damaged_files_findings(damaged: Iterable[DamagedFile]) -> list[Finding]:
    """Return a finding for each damaged file, as a row of FINDINGS_SCHEMA."""
    kind = Kind.ARCHIVE_DAMAGED
    return [
        (
            kind.value,
            kind.severity.value,
            None if each.file.tokens is None else each.file.table,
            None,
            *(each.file.tokens or (None, None)),
            each.file.rows,
            str(each),
            json.dumps({"file": f"{each.file.uri}/{each.file.path}"}),
        )
        for each in damaged
    ]


def rows_twice_findings(archive: DataFrame) -> DataFrame:
    """Find rows that an archive contains more than once.

    :param archive: the archived rows: ``stream``, ``instance_name``, ``stream_id`` and
        ``row_index``.
    """
    keys = ["stream", "instance_name", "stream_id", "row_index"]
    rows = archive.select(*keys)
    twice = rows.groupBy(*keys).agg(sf.count("*").alias("times")).where("times > 1")
    by_id = Window.partitionBy("stream", "instance_name").orderBy(
        "stream_id", "row_index"
    )
    grouped = (
        twice.withColumn("rank", sf.row_number().over(by_id))
        .groupBy("stream", "instance_name")
        .agg(
            sf.min("stream_id").alias("first"),
            sf.max("stream_id").alias("last"),
            sf.count("*").alias("count"),
            sample(
                sf.col("rank"),
                *(sf.col(name) for name in ("stream_id", "row_index", "times")),
            ).alias("rows"),
        )
    )
    return grouped.select(
        *finding(
            Kind.ROW_TWICE_IN_ARCHIVE,
            message=[
                "the archive contains ",
                sf.col("count"),
                " rows of ",
                sf.col("instance_name"),
                "'s ",
                sf.col("stream"),
                " more than once",
            ],
            evidence={"rows": sf.col("rows")},
        )
    )


def commands_twice_findings(wire: DataFrame) -> DataFrame:
    """Find lines of recordings that an archive contains more than once.

    :param wire: the archived lines, with WIRE_SCHEMA.
    """
    keys = ["recording", "line_number"]
    lines = wire.select(*keys)
    twice = lines.groupBy(*keys).agg(sf.count("*").alias("times")).where("times > 1")
    grouped = twice.groupBy("recording").agg(
        sf.min("line_number").alias("first"),
        sf.max("line_number").alias("last"),
        sf.count("*").alias("count"),
    )
    nothing = sf.lit(None)
    return grouped.select(
        *finding(
            Kind.COMMAND_TWICE_IN_ARCHIVE,
            stream=nothing,
            instance_name=nothing,
            first=nothing,
            last=nothing,
            message=[
                "the archive contains ",
                sf.col("count"),
                " lines of the recording ",
                sf.col("recording"),
                " more than once",
            ],
            evidence={
                "recording": sf.col("recording"),
                "first_line_number": sf.col("first"),
                "last_line_number": sf.col("last"),
            },
        )
    )


def not_archived_findings(ids: DataFrame, purged: DataFrame) -> DataFrame:
    """Find ids that have a row in the tables, but none in the archive.

    An id is reported only if the archive has an older id and a newer id of the same
    writer. Purged ids are not reported.

    :param ids: the result of :func:`.ids.known_ids`.
    :param purged: the ranges that were purged from the archive, as ``stream``,
        ``first_token``, ``last_token``.
    """
    writer = ["stream", "instance_name"]
    by_id = Window.partitionBy(*writer).orderBy("stream_id")
    grouped = (
        _lacking(ids, purged)
        .withColumn("rank", sf.row_number().over(by_id))
        .groupBy(*writer)
        .agg(
            sf.min("stream_id").alias("first"),
            sf.max("stream_id").alias("last"),
            sf.count("*").alias("count"),
            sample(sf.col("rank"), sf.col("stream_id")).alias("ids"),
        )
    )
    return grouped.select(
        *finding(
            Kind.ROW_NOT_ARCHIVED,
            message=[
                sf.col("count"),
                " ids of ",
                sf.col("instance_name"),
                "'s ",
                sf.col("stream"),
                " have a row in the tables but none in the archive, which has older "
                "and newer rows of this writer",
            ],
            evidence={"ids": sf.col("ids.stream_id")},
        )
    )


def _lacking(ids: DataFrame, purged: DataFrame) -> DataFrame:
    """Return the ids in the tables that the archive lacks.

    Only ids between the least and the greatest archived id of their writer are
    included, and no purged ids.
    """
    columns = ids.select(*ID_COLUMNS).withColumn(
        "instance_name", sf.col("first_writer")
    )
    reach = (
        columns.where("archived")
        .groupBy("stream", "instance_name")
        .agg(sf.min("stream_id").alias("low"), sf.max("stream_id").alias("high"))
        .select(
            sf.col("stream").alias("its_stream"),
            sf.col("instance_name").alias("its_name"),
            "low",
            "high",
        )
    )
    removed = purged.select(
        sf.col("stream").alias("its_stream"),
        sf.col("first_token").alias("low"),
        sf.col("last_token").alias("high"),
    )
    same_stream = sf.col("stream") == sf.col("its_stream")
    # Rows without a writer form a separate group.
    same_name = sf.col("instance_name").eqNullSafe(sf.col("its_name"))
    within = sf.col("stream_id").between(sf.col("low"), sf.col("high"))
    return (
        columns.where(sf.col("in_tables") & ~sf.col("archived"))
        .join(sf.broadcast(reach), on=[same_stream, same_name, within], how="left_semi")
        .join(sf.broadcast(removed), on=[same_stream, within], how="left_anti")
    )
