"""What ids show: those of two writers, those without a row, rows that are gone.

All writers of a stream take ids from one sequence, so that a gap between the ids of
one writer is mostly full of those of others. :func:`known_ids` puts together what is
known of each id, wherever it was seen; the rest asks that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Final

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as sf

from synapse_replication.pipeline.audit.checks.notable import (
    Bounds,
    Place,
    notable,
)
from synapse_replication.pipeline.audit.findings import Kind, finding, sample

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "ID_COLUMNS",
    "MAX_GAPS",
    "gap_findings",
    "gone_findings",
    "known_ids",
    "two_writers_findings",
]

#: Of :func:`known_ids`.
ID_COLUMNS = (
    "stream",
    "stream_id",
    "first_writer",
    "last_writer",
    "sender",
    "in_tables",
    "archived",
    "sent",
)

_IDS_SCHEMA: Final = (
    "stream string, stream_id long, first_writer string, last_writer string, "
    "sender string, in_tables boolean, archived boolean, sent boolean, "
    "repeated boolean, run_last long, run_last_writer string"
)

#: At most so many gaps of a stream, the newest, are reported one by one; the others
#: are summed up.
MAX_GAPS: Final = 1000

#: Ids that one task looks at together are those that are the same without these bits.
_BUCKET_BITS: Final = 18

#: Ids of one task, about.
_IDS_PER_TASK: Final = 250_000


def known_ids(
    rows: DataFrame,
    archive: DataFrame,
    tokens: DataFrame,
    kept: Collection[str],
    nameless: Collection[str],
    *,
    heard: Bounds | None = None,
    archived: Bounds | None = None,
    last_ids: int = 0,
) -> DataFrame:
    """Put together where each id was seen, and whose it is; leave out sound ones.

    :param rows: of ROWS_SCHEMA: what is in the tables.
    :param archive: the same, of an archive; may have more columns.
    :param tokens: of :func:`.wire.wire_tokens`.
    :param kept: names of the streams that are kept in the database.
    :param nameless: those of them whose tables do not tell the writer.
    :param heard: where an id that was not sent is no sound one; everywhere if not
        given.
    :param archived: where an id that is not archived is no sound one; likewise.
    :param last_ids: how many ids there may be, of all streams; for the number of tasks.
    :return: a row an id, with the least and the greatest name of a writer that tables
        or archive have of it: the same name, if all is well; null if nothing tells.
        ``sender`` sent it: that is not always its writer, as some processes send
        the rows of all. ``repeated``: the archive may have a row of it twice.
        ``run_last`` and its writer: the last id before a gap; only in the row of the
        first id of such a run. See :func:`.notable.notable` for which ids there are.
    """
    sent = tokens.where("is_row").select(
        "stream",
        "instance_name",
        sf.col("token").alias("stream_id"),
        sf.lit(0).alias("row_index"),
    )
    seen = (
        _seen(rows, nameless, Place.TABLES)
        .unionByName(_seen(archive, nameless, Place.ARCHIVE))
        .unionByName(_seen(sent, (), Place.WIRE))
    ).where(sf.col("stream").isin(*kept))
    bucket = sf.shiftright("stream_id", _BUCKET_BITS)

    def choose(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from notable(batches, heard=heard, archived=archived).to_batches()

    # Not fewer than Spark takes for itself, and none too large for a worker's memory.
    usual = int(seen.sparkSession.conf.get("spark.sql.shuffle.partitions") or 1)
    tasks = max(usual, last_ids // _IDS_PER_TASK)
    shared_out = seen.repartition(tasks, "stream", bucket)
    return shared_out.mapInArrow(choose, _IDS_SCHEMA)


def _seen(frame: DataFrame, nameless: Collection[str], place: Place) -> DataFrame:
    # What reads the tables gives rows of nobody an empty name.
    has_writer = (sf.col("instance_name") != "") & ~sf.col("stream").isin(*nameless)
    return frame.select(
        "stream",
        "stream_id",
        sf.when(has_writer, sf.col("instance_name")).alias("writer"),
        sf.lit(int(place)).alias("place"),
        "row_index",
    )


def two_writers_findings(ids: DataFrame) -> DataFrame:
    """Find ids that two writers have used: a sequence has given them out twice.

    :param ids: of :func:`known_ids`.
    """
    columns = ids.select(*ID_COLUMNS)
    of_two = columns.where(sf.col("first_writer") < sf.col("last_writer"))
    keys = ["stream", "first_writer", "last_writer"]
    grouped = _grouped(of_two, keys)
    return grouped.select(
        *finding(
            Kind.ID_OF_TWO_WRITERS,
            instance_name=sf.col("first_writer"),
            message=[
                sf.col("count"),
                " ids of ",
                sf.col("stream"),
                " belong to ",
                sf.col("first_writer"),
                " and to ",
                sf.col("last_writer"),
                ": they were given out twice",
            ],
            evidence={
                "writers": sf.array("first_writer", "last_writer"),
                "ids": sf.col("ids"),
            },
        )
    )


def gone_findings(ids: DataFrame) -> DataFrame:
    """Sum up rows that were sent or archived, and are in no table any more.

    :param ids: of :func:`known_ids`.
    """
    columns = ids.select(*ID_COLUMNS)
    gone = columns.where(~sf.col("in_tables")).withColumn(
        "instance_name", sf.coalesce("first_writer", "sender")
    )
    grouped = _grouped(gone, ["stream", "instance_name"])
    return grouped.select(
        *finding(
            Kind.ROW_GONE,
            message=[
                sf.col("count"),
                " ids of ",
                sf.col("stream"),
                " that ",
                sf.col("instance_name"),
                " wrote have no row any more: replaced by a newer one, or deleted",
            ],
            evidence={"ids": sf.col("ids")},
        )
    )


def _grouped(ids: DataFrame, keys: list[str]) -> DataFrame:
    by_id = Window.partitionBy(*keys).orderBy("stream_id")
    ranked = ids.withColumn("rank", sf.row_number().over(by_id))
    return ranked.groupBy(*keys).agg(
        sf.min("stream_id").alias("first"),
        sf.max("stream_id").alias("last"),
        sf.count("*").alias("count"),
        sample(
            sf.col("rank"),
            *(sf.col(name) for name in ("stream_id", "in_tables", "archived", "sent")),
        ).alias("ids"),
    )


def gap_findings(ids: DataFrame) -> DataFrame:
    """Find ids between others that have no row anywhere, of any writer.

    Those above the last row are not reported: their transactions may be under way.

    :param ids: of :func:`known_ids`.
    """
    columns = ids.select(
        "stream", "stream_id", "first_writer", "sender", "run_last", "run_last_writer"
    )
    runs = columns.where(sf.col("run_last").isNotNull())
    writer = sf.coalesce("first_writer", "sender")
    begin = sf.struct("stream_id", writer.alias("writer"))
    end = sf.struct(
        sf.col("run_last").alias("stream_id"), sf.col("run_last_writer").alias("writer")
    )
    in_order = Window.partitionBy("stream").orderBy("stream_id")
    # The runs of two tasks may meet without a gap.
    gaps = (
        runs.select(
            "stream", end.alias("before"), sf.lead(begin).over(in_order).alias("after")
        )
        .where(sf.col("after.stream_id") > sf.col("before.stream_id") + 1)
        .select(
            "stream",
            "before",
            "after",
            (sf.col("before.stream_id") + 1).alias("first"),
            (sf.col("after.stream_id") - 1).alias("last"),
        )
    )
    newest = Window.partitionBy("stream").orderBy(sf.desc("first"))
    ranked = gaps.withColumn("rank", sf.row_number().over(newest))
    # The newest are reported one by one; all others of a stream together.
    reported = (
        ranked.withColumn("place", sf.least(sf.col("rank"), sf.lit(MAX_GAPS + 1)))
        .groupBy("stream", "place")
        .agg(
            sf.min("before").alias("before"),
            sf.max("after").alias("after"),
            sf.min("first").alias("first"),
            sf.max("last").alias("last"),
            sf.sum(sf.col("last") - sf.col("first") + 1).alias("count"),
            sf.count("*").alias("gaps"),
        )
    )
    return reported.select(
        *finding(
            Kind.ID_WITHOUT_ROW,
            instance_name=sf.lit(None),
            message=[
                sf.col("count"),
                " ids of ",
                sf.col("stream"),
                " in ",
                sf.col("gaps"),
                " gaps have no row of any writer: rolled back, replaced, deleted, or "
                "lost",
            ],
            evidence={
                "before": sf.col("before"),
                "after": sf.col("after"),
                "gaps": sf.col("gaps"),
            },
        )
    )
