"""Checks of ids: ids of two writers, ids without a row, and rows that were removed.

All writers of a stream take ids from one sequence, so a gap between the ids of one
writer usually contains ids of other writers. :func:`known_ids` combines what the
tables, the archive and the recordings contain about each id; the checks use its result.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Final

from pyspark.sql import DataFrame, Window, functions as sf

from synapse_replication.pipeline.audit.checks.notable import (
    Bounds,
    notable,
)
from synapse_replication.pipeline.audit.checks.sightings import (
    BUCKET_BITS,
    PACKED_SCHEMA,
    Source,
    pack,
    unpack,
)
from synapse_replication.pipeline.audit.findings import Kind, finding, sample
from synapse_replication.pipeline.local import FEW_IDS, local_batches

if TYPE_CHECKING:
    import pyarrow as pa

#: The columns of :func:`known_ids` that describe where an id was seen, and with which
#: writers.
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

#: The number of a stream's newest gaps that are reported individually. One finding
#: summarises all other gaps of the stream.
MAX_GAPS: Final = 1000


def known_ids(
    tables: DataFrame,
    archive: DataFrame,
    tokens: DataFrame,
    persisted: Collection[str],
    *,
    received: Bounds | None = None,
    archived: Bounds | None = None,
    last_ids: int = 0,
) -> DataFrame:
    """Return where the notable ids were seen, and with which writers.

    Most healthy ids are omitted; see :func:`.notable.notable`.

    :param tables: the sightings in the tables, with PACKED_SCHEMA.
    :param archive: the sightings in the archive, with PACKED_SCHEMA.
    :param tokens: the result of :func:`.wire.wire_tokens`.
    :param persisted: names of the streams that are stored in the database.
    :param received: for each stream, the range in which an id that was not sent is
        unhealthy; by default, all ids of all streams.
    :param archived: for each stream, the range in which an id that is not archived is
        unhealthy; by default, all ids of all streams.
    :param last_ids: the approximate number of ids of all streams together, which
        determines the number of tasks. Few ids are compared in this process, before
        the function returns.
    :return: a row for each id that :func:`.notable.notable` selects. ``first_writer``
        and ``last_writer`` are the least and the greatest name of the id's writers in
        tables and archive: they differ only if several writers used the id, and are
        null if the writer is unknown. ``sender`` is the instance that sent the id, the
        one with the least name if there are several, and null if the id was not sent.
        It is not always the writer, because some instances send the rows of all
        instances. ``repeated`` is whether two archived rows have the id and the same
        ``row_index``; they may be of two writers. ``run_last`` is the last id of a run
        of consecutive ids, and ``run_last_writer`` is the writer of that id, or its
        sender if the writer is unknown; both are set only for the first id of the run.
    """
    sent = tokens.where("is_row").select(
        "stream",
        "instance_name",
        sf.col("token").alias("stream_id"),
        sf.lit(0).alias("row_index"),
    )
    seen = (
        tables.unionByName(archive)
        .unionByName(packed(sent, Source.WIRE))
        .where(sf.col("stream").isin(*persisted))
    )

    def choose(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        found = notable(unpack(batches), received=received, archived=archived)
        yield from found.to_batches()

    if last_ids <= FEW_IDS:
        packed_ids = seen.toArrow().to_batches()
        return local_batches(seen.sparkSession, _IDS_SCHEMA, choose(iter(packed_ids)))
    # Use at least the session's number of shuffle partitions, and enough tasks that
    # the ids of each task fit into the memory of a worker.
    default = int(seen.sparkSession.conf.get("spark.sql.shuffle.partitions") or 1)
    tasks = max(default, last_ids // FEW_IDS)
    return seen.repartition(tasks, "stream", "bucket").mapInArrow(choose, _IDS_SCHEMA)


def packed(
    rows: DataFrame,
    source: Source,
    nameless: Collection[str] = (),
    *,
    bucket_bits: int = BUCKET_BITS,
) -> DataFrame:
    """Pack the rows of a frame; see :func:`.sightings.pack` for the parameters.

    :return: the sightings, with PACKED_SCHEMA.
    """
    work = functools.partial(
        pack, source=source, nameless=frozenset(nameless), bucket_bits=bucket_bits
    )
    columns = ("stream", "instance_name", "stream_id", "row_index")
    return rows.select(*columns).mapInArrow(work, PACKED_SCHEMA)


def two_writers_findings(ids: DataFrame) -> DataFrame:
    """Find ids that two writers have used: a sequence has allocated them twice.

    :param ids: the result of :func:`known_ids`.
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
                ": the sequence allocated them twice",
            ],
            evidence={
                "writers": sf.array("first_writer", "last_writer"),
                "ids": sf.col("ids"),
            },
        )
    )


def gone_findings(ids: DataFrame) -> DataFrame:
    """Count the ids that were sent or archived, but have no row in a table any more.

    :param ids: the result of :func:`known_ids`.
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
                " wrote or sent have no rows any more: the rows were replaced by newer "
                "rows, or deleted",
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
    """Find gaps between ids: ids that have no row of any writer in any source.

    Ids above the greatest known id are not reported: their transactions may be in
    progress.

    :param ids: the result of :func:`known_ids`.
    """
    newest = Window.partitionBy("stream").orderBy(sf.desc("first"))
    ranked = _gaps(ids).withColumn("rank", sf.row_number().over(newest))
    # The newest gaps are reported individually, all other gaps of a stream together.
    reported = (
        ranked.withColumn("group", sf.least(sf.col("rank"), sf.lit(MAX_GAPS + 1)))
        .groupBy("stream", "group")
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


def _gaps(ids: DataFrame) -> DataFrame:
    """Return the ranges of ids without a row, with the ids before and after them."""
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
    # The runs of two tasks may be adjacent, with no gap between them.
    return (
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
