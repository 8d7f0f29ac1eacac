"""Rows that a writer announced as absent, though it had written them.

``POSITION stream writer prev new`` states that the writer has no rows in ``(prev,
new]``. If the tables or the archive have a row of the writer in that range, and the
writer never sent it, then every reader whose position was ``prev`` has permanently
skipped that row. The POSITION and the row prove this even if the recording is
incomplete, because ``prev`` is at or above every token that the writer has sent before.
A row that a recording contains is not reported. A POSITION whose ``prev`` equals its
``new`` makes no such statement: readers that are behind it query the database.

Late rows of an idempotent stream (``caches``) are still delivered. A POSITION of such a
stream is therefore checked only if the recording continues for :data:`PATIENCE` after
it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from pyspark.sql import Column, DataFrame, Window, functions as sf

from synapse_replication.pipeline.audit.checks.ids import ID_COLUMNS
from synapse_replication.pipeline.audit.checks.wire import TOKEN_COLUMNS, line_text
from synapse_replication.pipeline.audit.findings import Kind, finding, sample

#: The columns of :func:`announced_absent`: an id and the line that skipped it.
LOST_COLUMNS = (
    "stream",
    "instance_name",
    "stream_id",
    "recording",
    "line_number",
    "t",
    "is_row",
    "prev_token",
    "token",
)

#: How long after a POSITION a late row of an idempotent stream may arrive, in s.
PATIENCE: Final = 60.0

_WRITER = ("stream", "instance_name")


def announced_absent(
    ids: DataFrame,
    tokens: DataFrame,
    idempotent: Collection[str],
    sole_writers: Mapping[str, str],
) -> DataFrame:
    """Find committed rows that were never sent, but were announced as absent.

    :param ids: the result of :func:`.ids.known_ids`.
    :param tokens: the result of :func:`.wire.wire_tokens`.
    :param idempotent: names of streams whose late rows are delivered.
    :param sole_writers: the writer of each stream that has a single writer and whose
        tables do not record the writer.
    :return: the lost ids, each with the POSITION that skipped it: LOST_COLUMNS.
    """
    columns = tokens.select(*TOKEN_COLUMNS)
    ends = columns.groupBy("recording").agg(sf.max("t").alias("end"))
    claims = (
        columns.where(~sf.col("is_row") & (sf.col("prev_token") < sf.col("token")))
        .join(sf.broadcast(ends), on="recording", how="inner")
        .where(
            ~sf.col("stream").isin(*idempotent)
            | (sf.col("end") - sf.col("t") >= PATIENCE)
        )
        .select(*TOKEN_COLUMNS)
    )
    lost = _covered(_never_sent(ids, sole_writers), claims)
    return lost.select(*LOST_COLUMNS)


def announced_findings(
    lost: DataFrame, rows: DataFrame, tables: Mapping[str, Sequence[str]]
) -> DataFrame:
    """Return a finding for each POSITION that skipped rows.

    :param lost: the result of :func:`announced_absent`.
    :param rows: at least the rows of each line's first few lost ids: ``stream``,
        ``stream_id``, ``row_index``, ``row``, and ``source`` (where the row was found).
    :param tables: the tables of each stream.
    """
    columns = lost.select(*LOST_COLUMNS)
    line = ["recording", "line_number", "t", "stream", "is_row", "prev_token", "token"]
    keys = [*line, "instance_name"]
    texts = rows.select("stream", "stream_id", "row_index", "row", "source")
    of_line = Window.partitionBy(*keys).orderBy("stream_id", "source", "row_index")
    found = columns.join(texts, on=["stream", "stream_id"], how="left").withColumn(
        "rank", sf.row_number().over(of_line)
    )
    grouped = found.groupBy(*keys).agg(
        sf.min("stream_id").alias("first"),
        sf.max("stream_id").alias("last"),
        sf.countDistinct("stream_id").alias("count"),
        sample(
            sf.col("rank"),
            *(sf.col(name) for name in ("stream_id", "source", "row_index", "row")),
        ).alias("rows"),
    )
    return grouped.select(
        *finding(
            Kind.ANNOUNCED_ABSENT,
            message=[
                sf.col("recording"),
                " line ",
                sf.col("line_number"),
                ": '",
                line_text(),
                "' skips ",
                sf.col("count"),
                " ids with committed rows that were never sent; the first is ",
                sf.col("first"),
                ": readers have lost these rows",
            ],
            evidence={
                "recording": sf.col("recording"),
                "line_number": sf.col("line_number"),
                "t": sf.col("t"),
                "line": line_text(),
                "tables": _lookup(sf.col("stream"), tables),
                "rows": sf.col("rows"),
            },
        )
    )


def not_seen_findings(
    ids: DataFrame,
    tokens: DataFrame,
    idempotent: Collection[str],
    sole_writers: Mapping[str, str],
) -> DataFrame:
    """Find rows that were never recorded, although later rows of their writer were.

    A reader that received a later row, but not the missing row, has skipped the missing
    row. However, the recorder may be the only one that did not receive it.

    :param ids: the result of :func:`.ids.known_ids`.
    :param tokens: the result of :func:`.wire.wire_tokens`.
    :param idempotent: names of streams whose late rows are delivered. These streams are
        not checked.
    :param sole_writers: the writer of each stream that has a single writer and whose
        tables do not record the writer.
    """
    jumps = _jumps(tokens, idempotent)
    seen = _covered(_never_sent(ids, sole_writers), jumps)
    by_id = Window.partitionBy("recording", *_WRITER).orderBy("stream_id")
    grouped = (
        seen.withColumn("rank", sf.row_number().over(by_id))
        .groupBy("recording", *_WRITER)
        .agg(
            sf.min("stream_id").alias("first"),
            sf.max("stream_id").alias("last"),
            sf.count("*").alias("count"),
            sample(
                sf.col("rank"),
                sf.col("stream_id"),
                sf.col("prev_token").alias("token_before"),
                sf.col("line_number"),
                line_text().alias("line"),
            ).alias("ids"),
        )
    )
    return grouped.select(
        *finding(
            Kind.ROW_NOT_SEEN,
            message=[
                sf.col("recording"),
                ": ",
                sf.col("count"),
                " ids of ",
                sf.col("instance_name"),
                "'s ",
                sf.col("stream"),
                " are missing between recorded ids: the recorder was disconnected, or "
                "the rows were lost in transit",
            ],
            evidence={"recording": sf.col("recording"), "ids": sf.col("ids")},
        )
    )


def _jumps(tokens: DataFrame, idempotent: Collection[str]) -> DataFrame:
    """Return the rows before which ids were skipped, as lines that cover these ids.

    :return: TOKEN_COLUMNS, where ``prev_token`` is the greatest token that the
        recording has of the writer before the row.
    """
    columns = tokens.select(*TOKEN_COLUMNS)
    before = (
        Window.partitionBy("recording", *_WRITER)
        .orderBy("line_number")
        .rowsBetween(Window.unboundedPreceding, -1)
    )
    return (
        columns.where(~sf.col("stream").isin(*idempotent))
        .withColumn("prev_token", sf.max("token").over(before))
        .where(sf.col("is_row") & (sf.col("prev_token") < sf.col("token") - 1))
    )


def _never_sent(ids: DataFrame, sole_writers: Mapping[str, str]) -> DataFrame:
    columns = ids.select(*ID_COLUMNS)
    written = columns.where(
        ~sf.col("sent") & (sf.col("in_tables") | sf.col("archived"))
    )
    named_writer = sf.when(
        sf.col("first_writer") == sf.col("last_writer"), sf.col("first_writer")
    )
    writer = sf.coalesce(named_writer, _lookup(sf.col("stream"), sole_writers))
    return (
        written.withColumn("instance_name", writer)
        .where(sf.col("instance_name").isNotNull())
        .select(*_WRITER, "stream_id")
    )


def _covered(ids: DataFrame, spans: DataFrame) -> DataFrame:
    """Find the ids that a line of their writer covers, with that line.

    A line covers the ids in ``(prev_token, token]``. If any line covers an id, then the
    line with the greatest ``token`` of those that begin below the id covers it. So one
    pass in the order of ids suffices, even if lines overlap.
    """
    reach = spans.groupBy(*_WRITER).agg(
        sf.min("prev_token").alias("low"), sf.max("token").alias("high")
    )
    near = (
        ids.join(sf.broadcast(reach), on=list(_WRITER), how="inner")
        .where(
            (sf.col("stream_id") > sf.col("low"))
            & (sf.col("stream_id") <= sf.col("high"))
        )
        .select(
            *_WRITER,
            sf.col("stream_id").alias("at_id"),
            sf.lit(None).alias("span"),
        )
    )
    fields = ("token", "recording", "line_number", "t", "is_row", "prev_token")
    begun = spans.select(
        *_WRITER, sf.col("prev_token").alias("at_id"), sf.struct(*fields).alias("span")
    )
    # A line that begins at an id does not cover the id, so sort the id first.
    in_order = (
        Window.partitionBy(*_WRITER)
        .orderBy("at_id", sf.col("span").isNotNull())
        .rowsBetween(Window.unboundedPreceding, Window.currentRow)
    )
    swept = near.unionByName(begun).withColumn("over", sf.max("span").over(in_order))
    return swept.where(
        sf.col("span").isNull() & (sf.col("over.token") >= sf.col("at_id"))
    ).select(*_WRITER, sf.col("at_id").alias("stream_id"), "over.*")


def _lookup(
    key: Column, values: Mapping[str, str] | Mapping[str, Sequence[str]]
) -> Column:
    found = sf.lit(None)
    for name, value in values.items():
        literal = (
            sf.lit(value)
            if isinstance(value, str)
            else sf.array(*(sf.lit(each) for each in value))
        )
        found = sf.when(key == name, literal).otherwise(found)
    return found
