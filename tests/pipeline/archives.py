"""Archives for tests: rows to put in, and what is in, by Spark and by pyarrow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pyarrow import dataset
from pyspark.sql import DataFrame, functions

from synapse_replication.pipeline.archive.layout import read_archive
from synapse_replication.pipeline.archive.writer import Batch, Point
from synapse_replication.pipeline.schemas import ARCHIVE_SCHEMA
from tests.pipeline.shared_session import shared_session

__all__ = [
    "Killed",
    "kill_at",
    "make_batch",
    "make_rows",
    "rows_by_pyarrow",
    "rows_by_spark",
]

#: What a row of these tests is known by.
Key = tuple[str, int]


class Killed(BaseException):
    """The process ends here: nothing may catch it."""


def kill_at(point: Point, nth: int = 1) -> Callable[[Point], None]:
    """Make a watch that ends the process when it comes to a point the nth time."""
    left = nth

    def watch(reached: Point) -> None:
        nonlocal left
        if reached is point:
            left -= 1
            if left == 0:
                raise Killed(point)

    return watch


def make_rows(first: int, last: int, *, streams: int = 2, days: int = 2) -> DataFrame:
    """Make rows with ids from first to last; both inclusive, over streams and days."""
    session = shared_session()
    number = functions.col("id")
    return (
        session.range(first, last + 1, numPartitions=2)
        .select(
            functions.concat(functions.lit("s"), number % streams).alias("stream"),
            functions.lit("w1").alias("instance_name"),
            number.alias("stream_id"),
            functions.lit(0).alias("row_index"),
            functions.lit('["x"]').alias("row"),
            functions.lit(None).cast("timestamp").alias("written_ts"),
            functions.lit("2026-01-09 12:00:00").cast("timestamp").alias("archived_ts"),
            functions.date_add(
                functions.lit("2026-01-01").cast("date"),
                functions.floor(number / streams % days).cast("int"),
            ).alias("day"),
        )
        .select(*ARCHIVE_SCHEMA.names)
    )


def make_batch(number: int, *, origin: str = "q", inputs: object = None) -> Batch:
    """Make the name of a batch."""
    return Batch(number, origin, f"offsets {number}" if inputs is None else inputs)


def rows_by_spark(folder: Path) -> list[Key]:
    """Give what Spark reads, in order."""
    frame = read_archive(shared_session(), folder).select("stream", "stream_id")
    return sorted((row["stream"], row["stream_id"]) for row in frame.collect())


def rows_by_pyarrow(folder: Path) -> list[Key]:
    """Give what any other reader sees who is pointed at the folder, in order."""
    table = dataset.dataset(folder / "rows", partitioning="hive").to_table(
        columns=["stream", "stream_id"]
    )
    return sorted((row["stream"], row["stream_id"]) for row in table.to_pylist())
