"""What a report says of rows: how many, when, by whom, in which batches.

``rows`` are of ROWS_SCHEMA, or have at least its columns. The time of a row is when it
was written, where its table tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as sf

from synapse_replication.streams.standard.registry import STANDARD_STREAMS

__all__ = [
    "ACCURACY",
    "batch_sizes",
    "by_token",
    "hottest",
    "over_time",
    "totals",
    "window_start",
]

#: Percentiles are exact to one in so many.
ACCURACY = 10_000


def by_token(rows: DataFrame) -> DataFrame:
    """Put together the rows of each token: what costs most, for others to share.

    :return: ``stream``, ``instance_name``, ``stream_id``, ``rows``, ``timed`` (rows
        whose time is known), ``first_ts``, ``last_ts``.
    """
    counted = rows.select("stream", "instance_name", "stream_id", "written_ts")
    return counted.groupBy("stream", "instance_name", "stream_id").agg(
        sf.count(sf.lit(1)).alias("rows"),
        sf.count("written_ts").alias("timed"),
        sf.min("written_ts").alias("first_ts"),
        sf.max("written_ts").alias("last_ts"),
    )


def totals(tokens: DataFrame) -> DataFrame:
    """Count the rows of each writer, and say between which tokens and times.

    :param tokens: of :func:`by_token`.
    :return: ``stream``, ``instance_name``, ``rows``, ``tokens``, ``first_token``,
        ``last_token``, ``timed``, ``first_ts``, ``last_ts``.
    """
    by_writer = tokens.groupBy("stream", "instance_name").agg(
        sf.sum("rows").alias("rows"),
        sf.count(sf.lit(1)).alias("tokens"),
        sf.min("stream_id").alias("first_token"),
        sf.max("stream_id").alias("last_token"),
        sf.sum("timed").alias("timed"),
        sf.min("first_ts").alias("first_ts"),
        sf.max("last_ts").alias("last_ts"),
    )
    return by_writer.select(
        "stream",
        "instance_name",
        "rows",
        "tokens",
        "first_token",
        "last_token",
        "timed",
        "first_ts",
        "last_ts",
    )


def over_time(rows: DataFrame, window_s: int) -> DataFrame:
    """Count rows by the window in which they were written.

    :param window_s: how long a window is, s.
    :return: ``stream``, ``instance_name``, ``start`` (s since 1970), ``rows``.
    """
    timed = rows.select("stream", "instance_name", "written_ts").where(
        sf.col("written_ts").isNotNull()
    )
    counted = timed.groupBy(
        "stream", "instance_name", window_start(sf.col("written_ts"), window_s)
    ).agg(sf.count(sf.lit(1)).alias("rows"))
    return counted.select("stream", "instance_name", "start", "rows")


def batch_sizes(tokens: DataFrame) -> DataFrame:
    """Count tokens by the number of rows that share them.

    :param tokens: of :func:`by_token`.
    :return: ``stream``, ``bucket`` (1, 2, 4, 8 ...: sizes from there to below the
        next), ``tokens``, ``p50``, ``p99``, ``largest`` (of the stream, rows).
    """
    sizes = (
        tokens.select("stream", sf.col("rows").alias("size"))
        .groupBy("stream", "size")
        .agg(sf.count(sf.lit(1)).alias("tokens"))
    )
    of_stream = Window.partitionBy("stream").rowsBetween(
        Window.unboundedPreceding, Window.unboundedFollowing
    )
    whole = sf.percentile("size", [0.5, 0.99], sf.col("tokens")).over(of_stream)
    described = sizes.select(
        "stream",
        _bucket(sf.col("size")),
        "tokens",
        whole.alias("whole"),
        sf.max("size").over(of_stream).alias("largest"),
    )
    return (
        described.groupBy("stream", "bucket", "whole", "largest")
        .agg(sf.sum("tokens").alias("tokens"))
        .select(
            "stream",
            "bucket",
            "tokens",
            sf.ceil(sf.col("whole")[0]).alias("p50"),
            sf.ceil(sf.col("whole")[1]).alias("p99"),
            "largest",
        )
    )


def hottest(rows: DataFrame, limit: int) -> DataFrame:
    """Find the rooms and the users that most rows are about.

    :param limit: rooms at most, and as many users.
    :return: ``kind`` (``room`` or ``user``), ``name``, ``rows``.
    """
    about = rows.select("stream", "row")
    named = about.select(
        sf.explode(
            sf.array(
                _named("room", _place(_ROOMS, events=True)),
                _named("user", _place(_USERS, events=False)),
            )
        ).alias("about")
    ).select("about.kind", "about.name")
    counted = (
        named.where(sf.col("name").isNotNull())
        .groupBy("kind", "name")
        .agg(sf.count(sf.lit(1)).alias("rows"))
    )
    by_rows = Window.partitionBy("kind").orderBy(sf.desc("rows"), "name")
    ranked = counted.select("*", sf.row_number().over(by_rows).alias("rank"))
    return ranked.where(sf.col("rank") <= limit).select("kind", "name", "rows")


def window_start(time: Column, window_s: int) -> Column:
    """Return the beginning of the window that a time lies in, s since 1970."""
    return (sf.floor(sf.unix_micros(time) / (window_s * 1_000_000)) * window_s).alias(
        "start"
    )


def _bucket(size: Column) -> Column:
    """Return the greatest power of two that is no greater."""
    return sf.pow(sf.lit(2), sf.floor(sf.log2(size))).cast("long").alias("bucket")


def _places(field: str) -> dict[str, str]:
    """Find where the rows of each stream name something: a path into their JSON."""
    found = {}
    for stream in STANDARD_STREAMS.values():
        # Those of events are of several types.
        row_type: Any = getattr(stream.description.codec, "row_type", None)
        names = list(attrs.fields_dict(row_type)) if row_type else []
        if field in names:
            found[stream.name] = f"$[{names.index(field)}]"
    return found


_ROOMS = _places("room_id")
_USERS = _places("user_id")


def _place(paths: Mapping[str, str], *, events: bool) -> Column:
    found = sf.lit(None).cast("string")
    for stream, path in paths.items():
        found = sf.when(
            sf.col("stream") == stream, sf.get_json_object("row", path)
        ).otherwise(found)
    if events:
        # ["ev", [event_id, room_id, ...]], ["state", [room_id, ...]].
        of_event = sf.when(
            sf.get_json_object("row", "$[0]") == "ev",
            sf.get_json_object("row", "$[1][1]"),
        ).otherwise(sf.get_json_object("row", "$[1][0]"))
        found = sf.when(sf.col("stream") == "events", of_event).otherwise(found)
    return found


def _named(kind: str, name: Column) -> Column:
    return sf.struct(sf.lit(kind).alias("kind"), name.alias("name"))
