"""The report's queries over rows: counts by writer, time, batch size, room and user.

Unless stated otherwise, ``rows`` has the columns of ROWS_SCHEMA except ``row``. The
time of a row is the time at which it was written; null if its table does not record it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from pyspark.sql import Column, DataFrame, Window, functions as sf

from synapse_replication.streams.standard.registry import STANDARD_STREAMS

#: The columns with the room and the user to which a row refers.
ABOUT = ("room_id", "user_id")

#: The accuracy of approximate percentiles, as Spark's ``percentile_approx`` defines it.
ACCURACY = 10_000


def with_names(rows: DataFrame) -> DataFrame:
    """Replace each row's JSON by the room and the user to which it refers.

    :param rows: the columns must include ``stream`` and ``row``.
    """
    return rows.select(
        *(name for name in rows.columns if name != "row"),
        _value_at(_ROOMS, events=True).alias("room_id"),
        _value_at(_USERS, events=False).alias("user_id"),
    )


def by_row_index(rows: DataFrame) -> DataFrame:
    """Count rows by their index within their token, as input of other queries.

    The rows of a token are numbered from 0. The number of rows with index ``n`` is the
    number of tokens with more than ``n`` rows, so batch sizes can be computed without
    grouping by token.

    :return: ``stream``, ``instance_name``, ``row_index``, ``rows``, ``timed`` (rows
        whose time is known), ``first_token``, ``last_token``, ``first_ts``,
        ``last_ts``.
    """
    return rows.groupBy("stream", "instance_name", "row_index").agg(
        sf.count(sf.lit(1)).alias("rows"),
        sf.count("written_ts").alias("timed"),
        sf.min("stream_id").alias("first_token"),
        sf.max("stream_id").alias("last_token"),
        sf.min("written_ts").alias("first_ts"),
        sf.max("written_ts").alias("last_ts"),
    )


def totals(counts: DataFrame) -> DataFrame:
    """Count the rows of each writer, with their first and last token and time.

    :param counts: the result of :func:`by_row_index`.
    :return: ``stream``, ``instance_name``, ``rows``, ``tokens``, ``first_token``,
        ``last_token``, ``timed``, ``first_ts``, ``last_ts``.
    """
    begun = sf.when(sf.col("row_index") == 0, sf.col("rows")).otherwise(0)
    by_writer = counts.groupBy("stream", "instance_name").agg(
        sf.sum("rows").alias("rows"),
        sf.sum(begun).alias("tokens"),
        sf.min("first_token").alias("first_token"),
        sf.max("last_token").alias("last_token"),
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
    """Count rows by the window in which they were written; omit rows without a time.

    :param window_s: the length of a window, in s.
    :return: ``stream``, ``instance_name``, ``start`` (s since 1970), ``rows``.
    """
    timed = rows.select("stream", "instance_name", "written_ts").where(
        sf.col("written_ts").isNotNull()
    )
    counted = timed.groupBy(
        "stream", "instance_name", window_start(sf.col("written_ts"), window_s)
    ).agg(sf.count(sf.lit(1)).alias("rows"))
    return counted.select("stream", "instance_name", "start", "rows")


def batch_sizes(counts: DataFrame) -> DataFrame:
    """Count tokens by the number of rows that share them.

    :param counts: the result of :func:`by_row_index`.
    :return: ``stream``, ``bucket`` (the lower bound of sizes: 1, 2, 4, 8 ...),
        ``tokens``, and the stream's ``p50``, ``p99`` and ``largest``, in rows.
    """
    in_order = Window.partitionBy("stream").orderBy("row_index")
    longer = sf.coalesce(sf.lead("rows").over(in_order), sf.lit(0))
    sizes = (
        counts.groupBy("stream", "row_index")
        .agg(sf.sum("rows").alias("rows"))
        .select(
            "stream",
            (sf.col("row_index") + 1).alias("size"),
            (sf.col("rows") - longer).alias("tokens"),
        )
        .where(sf.col("tokens") > 0)
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
    """Find the rooms and the users to which the most rows refer.

    :param rows: rows with the columns ``room_id`` and ``user_id``.
    :param limit: the maximum number of rooms, and of users.
    :return: ``kind`` (``room`` or ``user``), ``name``, ``rows``.
    """
    rooms, users = (
        rows.select(sf.lit(kind).alias("kind"), sf.col(column).alias("name"))
        .where(sf.col("name").isNotNull())
        .groupBy("kind", "name")
        .agg(sf.count(sf.lit(1)).alias("rows"))
        for kind, column in (("room", "room_id"), ("user", "user_id"))
    )
    counted = rooms.unionByName(users)
    by_rows = Window.partitionBy("kind").orderBy(sf.desc("rows"), "name")
    ranked = counted.select("*", sf.row_number().over(by_rows).alias("rank"))
    return ranked.where(sf.col("rank") <= limit).select("kind", "name", "rows")


def window_start(time: Column, window_s: int) -> Column:
    """Return the start of the window that contains a time, in s since 1970."""
    return (sf.floor(sf.unix_micros(time) / (window_s * 1_000_000)) * window_s).alias(
        "start"
    )


def _bucket(size: Column) -> Column:
    """Return the greatest power of two that is at most the value."""
    return sf.pow(sf.lit(2), sf.floor(sf.log2(size))).cast("long").alias("bucket")


def _json_paths(field: str) -> dict[str, str]:
    """Return the path of a field in the JSON rows of each stream that has the field."""
    found = {}
    for stream in STANDARD_STREAMS.values():
        # Rows of events have several types.
        row_type: Any = getattr(stream.description.codec, "row_type", None)
        names = list(attrs.fields_dict(row_type)) if row_type else []
        if field in names:
            found[stream.name] = f"$[{names.index(field)}]"
    return found


_ROOMS = _json_paths("room_id")
_USERS = _json_paths("user_id")


def _value_at(paths: Mapping[str, str], *, events: bool) -> Column:
    found = sf.lit(None).cast("string")
    for stream, path in paths.items():
        found = sf.when(
            sf.col("stream") == stream, sf.get_json_object("row", path)
        ).otherwise(found)
    if events:
        # Rows are ["ev", [event_id, room_id, ...]], or [kind, [room_id, ...]].
        of_event = sf.when(
            sf.get_json_object("row", "$[0]") == "ev",
            sf.get_json_object("row", "$[1][1]"),
        ).otherwise(sf.get_json_object("row", "$[1][0]"))
        found = sf.when(sf.col("stream") == "events", of_event).otherwise(found)
    return found
