"""Checks for tokens beyond the last id that the stream's sequence has allocated.

If a greater token was announced, sent or archived, then the audited database is not the
one that allocated the token, or it lost its latest changes: it was restored from a
backup, or replaced by a standby that was behind. A database that lost its latest
changes will allocate ids that have been used before.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import DataFrame, functions as sf

from synapse_replication.pipeline.audit.checks.wire import TOKEN_COLUMNS, line_text
from synapse_replication.pipeline.audit.findings import Kind, finding

#: The position of a stream that was never written, whatever its sequence's value.
_FIRST_POSITION = 1


def ahead_findings(
    tokens: DataFrame, ids: DataFrame, last_allocated: Mapping[str, int]
) -> DataFrame:
    """Find writers with tokens beyond the last allocated id of the stream.

    :param tokens: the result of :func:`.wire.wire_tokens`.
    :param ids: the result of :func:`.ids.known_ids`. It includes the last archived id
        of each writer.
    :param last_allocated: the last id that each stream's sequence has allocated, read
        after the recordings, and after the archive was opened.
    """
    limit = sf.lit(None).cast("long")
    for stream, last in last_allocated.items():
        limit = sf.when(sf.col("stream") == stream, sf.lit(last)).otherwise(limit)
    ahead = (
        _greatest_tokens(tokens)
        .unionByName(_greatest_archived_ids(ids))
        .withColumn("last_allocated", limit)
        .where(
            sf.col("farthest")
            > sf.greatest(sf.col("last_allocated"), sf.lit(_FIRST_POSITION))
        )
        # Without a sequence the value is null, and nothing can be concluded.
        .where(sf.col("last_allocated").isNotNull())
    )
    return ahead.select(
        *finding(
            Kind.TOKEN_AHEAD,
            first=sf.col("last_allocated") + 1,
            last=sf.col("farthest"),
            count=sf.col("farthest") - sf.col("last_allocated"),
            message=[
                sf.col("seen.recording"),
                " has ",
                sf.col("instance_name"),
                "'s ",
                sf.col("stream"),
                " at ",
                sf.col("farthest"),
                ", but the database has allocated ids only up to ",
                sf.col("last_allocated"),
                ": the database was restored to an earlier state, or is another one",
            ],
            evidence={
                "seen": sf.col("seen"),
                "sequence_value": sf.col("last_allocated"),
            },
        )
    )


def _greatest_tokens(tokens: DataFrame) -> DataFrame:
    """Return the greatest recorded token of each writer, with its line."""
    return (
        tokens.select(*TOKEN_COLUMNS)
        .groupBy("stream", "instance_name")
        .agg(
            sf.max("token").alias("farthest"),
            sf.max_by(
                sf.struct("recording", "line_number", line_text().alias("line")),
                "token",
            ).alias("seen"),
        )
    )


def _greatest_archived_ids(ids: DataFrame) -> DataFrame:
    """Return the greatest archived id of each writer.

    :return: a frame with the columns of :func:`_greatest_tokens`.
    """
    return (
        ids.where("archived")
        .groupBy("stream", sf.col("first_writer").alias("instance_name"))
        .agg(sf.max("stream_id").alias("farthest"))
        .withColumn(
            "seen",
            sf.struct(
                sf.lit("the archive").alias("recording"),
                sf.lit(None).cast("long").alias("line_number"),
                sf.lit(None).cast("string").alias("line"),
            ),
        )
    )
