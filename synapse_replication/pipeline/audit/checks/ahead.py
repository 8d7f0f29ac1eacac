"""Tokens that were announced, sent or archived, and that no sequence has given out.

The database is older than what was heard: restored from a backup, or failed over to a
standby that was behind. Its next ids were used before.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import DataFrame
from pyspark.sql import functions as sf

from synapse_replication.pipeline.audit.checks.wire import TOKEN_COLUMNS, line_text
from synapse_replication.pipeline.audit.findings import Kind, finding

__all__ = ["ahead_findings"]

#: A stream that nobody has written is announced at this, whatever its sequence says.
_FIRST_POSITION = 1


def ahead_findings(
    tokens: DataFrame, archive: DataFrame, given_out: Mapping[str, int]
) -> DataFrame:
    """Find streams that were farther than their sequences are.

    :param tokens: of :func:`.audit_wire.wire_tokens`.
    :param archive: of ROWS_SCHEMA; may have more columns.
    :param given_out: the last id that each stream's sequence gave out, read later
        than the two others.
    """
    heard = (
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
    archived = (
        archive.groupBy("stream", "instance_name")
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
    limit = sf.lit(None).cast("long")
    for stream, last in given_out.items():
        limit = sf.when(sf.col("stream") == stream, sf.lit(last)).otherwise(limit)
    ahead = (
        heard.unionByName(archived)
        .withColumn("given_out", limit)
        .where(
            sf.col("farthest")
            > sf.greatest(sf.col("given_out"), sf.lit(_FIRST_POSITION))
        )
        # Null where there is no sequence: nothing is known then.
        .where(sf.col("given_out").isNotNull())
    )
    return ahead.select(
        *finding(
            Kind.TOKEN_AHEAD,
            first=sf.col("given_out") + 1,
            last=sf.col("farthest"),
            count=sf.col("farthest") - sf.col("given_out"),
            message=[
                sf.col("seen.recording"),
                " has ",
                sf.col("instance_name"),
                "'s ",
                sf.col("stream"),
                " at ",
                sf.col("farthest"),
                ", but the database has given out ids up to ",
                sf.col("given_out"),
                ": it was set back, or is not the one that was recorded",
            ],
            evidence={
                "seen": sf.col("seen"),
                "sequence_value": sf.col("given_out"),
            },
        )
    )
