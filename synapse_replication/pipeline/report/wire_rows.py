"""The report's queries over recordings: arrivals, lags, catch-ups and resets.

Each parameter ``wire`` has WIRE_SCHEMA. Lines are numbered within a recording.
"""

from __future__ import annotations

from pyspark.sql import DataFrame, Window, functions as sf

from synapse_replication.pipeline.report.row_counts import ACCURACY, window_start


def since_beginning(wire: DataFrame) -> DataFrame:
    """Set ``received_ts`` to the time since the beginning of the line's recording.

    In the result, each recording begins on 1970-01-01. Use this function for recordings
    without a date. The time of a damaged line is null.
    """
    recording = Window.partitionBy("recording")
    # A damaged line is empty, and its ``t`` means nothing.
    known = sf.when(sf.col("line") != "", sf.col("t"))
    passed = known - sf.min(known).over(recording)
    return wire.select(
        *(
            sf.timestamp_micros((passed * 1_000_000).cast("long")).alias(name)
            if name == "received_ts"
            else sf.col(name)
            for name in wire.columns
        )
    )


def arrived_rows(wire: DataFrame) -> DataFrame:
    """Return the rows that arrived, each with the token of its batch.

    The token and the time are those of the line that ends the batch, because a reader
    cannot deliver the batch before that line. If the recording ends within a batch, the
    rows of that batch have no token and are omitted.

    :return: ``recording``, ``stream``, ``instance_name``, ``stream_id``, ``row``,
        ``received_ts``.
    """
    lines = wire.select(
        "recording",
        "line_number",
        "command",
        "stream",
        "instance_name",
        "token",
        "row",
        "received_ts",
    ).where(sf.col("command") == "RDATA")
    to_end = (
        Window.partitionBy("recording", "stream", "instance_name")
        .orderBy("line_number")
        .rowsBetween(Window.currentRow, Window.unboundedFollowing)
    )
    end = sf.when(
        sf.col("token").isNotNull(),
        sf.struct(sf.col("token"), sf.col("received_ts")),
    )
    ended = lines.select("*", sf.first(end, ignorenulls=True).over(to_end).alias("end"))
    return ended.where(sf.col("end").isNotNull()).select(
        "recording",
        "stream",
        "instance_name",
        sf.col("end.token").alias("stream_id"),
        "row",
        sf.col("end.received_ts").alias("received_ts"),
    )


def lags(arrived: DataFrame, rows: DataFrame | None) -> DataFrame:
    """Return the time between the writing and the arrival of each token.

    The time of writing comes from the row in the table or, for ``caches``, from the row
    on the wire. Tokens whose time of writing is unknown are omitted. A lag includes the
    difference between the clocks of the writer and of the recorder.

    :param arrived: the result of :func:`arrived_rows`.
    :param rows: the rows in the tables, with ``stream``, ``instance_name``,
        ``stream_id`` and ``written_ts``; ``None`` to return only lags of ``caches``.
    :return: ``stream``, ``instance_name``, ``received_ts``, ``lag_ms``.
    """
    key = ["stream", "instance_name", "stream_id"]
    tokens = (
        arrived.select("recording", *key, "row", "received_ts")
        .groupBy("recording", *key)
        .agg(
            sf.min("received_ts").alias("received_ts"),
            sf.max(
                sf.when(
                    sf.col("stream") == "caches",
                    sf.timestamp_millis(sf.get_json_object("row", "$[2]").cast("long")),
                )
            ).alias("wire_ts"),
        )
    )
    if rows is None:
        timed = tokens.select("*", sf.col("wire_ts").alias("written_ts"))
    else:
        written = (
            rows.select(*key, "written_ts")
            .where(sf.col("written_ts").isNotNull() & (sf.col("stream") != "caches"))
            .groupBy(*key)
            .agg(sf.max("written_ts").alias("table_ts"))
        )
        timed = tokens.join(written, on=key, how="left").select(
            *key,
            "received_ts",
            sf.coalesce("wire_ts", "table_ts").alias("written_ts"),
        )
    lag = (sf.unix_micros("received_ts") - sf.unix_micros("written_ts")) / 1000
    return timed.select(
        "stream", "instance_name", "received_ts", lag.alias("lag_ms")
    ).where(sf.col("lag_ms").isNotNull())


def lag_percentiles(late: DataFrame, window_s: int | None) -> DataFrame:
    """Return percentiles of lags, by stream and window, or only by stream.

    :param late: the result of :func:`lags`.
    :param window_s: the length of a window, in s; ``None`` for one window per stream.
    :return: ``stream``, ``start`` (s since 1970; null without windows), ``tokens`` (the
        number of lags), and, in ms, ``p50``, ``p95``, ``p99`` and ``least``.
    """
    measured = late.select("stream", "received_ts", "lag_ms")
    start = (
        sf.lit(None).cast("long").alias("start")
        if window_s is None
        else window_start(sf.col("received_ts"), window_s)
    )
    grouped = measured.groupBy("stream", start).agg(
        sf.count(sf.lit(1)).alias("tokens"),
        sf.percentile_approx("lag_ms", [0.5, 0.95, 0.99], ACCURACY).alias("lag"),
        sf.min("lag_ms").alias("least"),
    )
    return grouped.select(
        "stream",
        "start",
        "tokens",
        sf.col("lag")[0].alias("p50"),
        sf.col("lag")[1].alias("p95"),
        sf.col("lag")[2].alias("p99"),
        "least",
    )


def stream_events(wire: DataFrame) -> DataFrame:
    """Find the POSITION lines that reset a stream, or make a reader catch up.

    Each line is compared with ``known``: the greatest token that a reader has received
    from the writer in the previous POSITION and since then. If ``token`` is less than
    ``known``, the writer has reset the stream (``reset``). Otherwise, if ``prev_token``
    is greater than ``known``, the reader has to fetch the rows above ``known``
    (``catch-up``). A POSITION before which the recording has no token of the writer in
    the stream is neither.

    :return: ``kind``, ``stream``, ``instance_name``, ``received_ts``, ``recording``,
        ``line_number``, ``known`` (the token that the line is compared with),
        ``prev_token``, ``token``.
    """
    writer = ["recording", "stream", "instance_name"]
    in_order = Window.partitionBy(*writer).orderBy("span")
    following = _spans(wire).select(
        *writer, "position.*", sf.lag("reached").over(in_order).alias("known")
    )
    kind = sf.when(sf.col("token") < sf.col("known"), sf.lit("reset")).when(
        sf.col("prev_token") > sf.col("known"), sf.lit("catch-up")
    )
    return (
        following.select("*", kind.alias("kind"))
        .where(sf.col("kind").isNotNull())
        .select(
            "kind",
            "stream",
            "instance_name",
            "received_ts",
            "recording",
            "line_number",
            "known",
            "prev_token",
            "token",
        )
    )


def _spans(wire: DataFrame) -> DataFrame:
    """Return each POSITION with the greatest token until the writer's next POSITION.

    The token of the POSITION itself is included.

    :return: ``recording``, ``stream``, ``instance_name``, ``span`` (the number of
        POSITION lines so far), ``reached`` (the greatest token), and ``position``, a
        struct that is null for the tokens before the first POSITION.
    """
    lines = wire.select(
        "recording",
        "line_number",
        "received_ts",
        "command",
        "stream",
        "instance_name",
        "prev_token",
        "token",
    ).where(sf.col("command").isin("RDATA", "POSITION") & sf.col("token").isNotNull())
    writer = ["recording", "stream", "instance_name"]
    so_far = (
        Window.partitionBy(*writer)
        .orderBy("line_number")
        .rowsBetween(Window.unboundedPreceding, Window.currentRow)
    )
    is_position = sf.col("command") == "POSITION"
    # The greatest token need not be the last one: caches may have late rows.
    return (
        lines.select("*", sf.count_if(is_position).over(so_far).alias("span"))
        .groupBy(*writer, "span")
        .agg(
            sf.max("token").alias("reached"),
            sf.first(
                sf.when(
                    is_position,
                    sf.struct("line_number", "received_ts", "prev_token", "token"),
                ),
                ignorenulls=True,
            ).alias("position"),
        )
    )


def commands(wire: DataFrame) -> DataFrame:
    """Count the lines of each command.

    :return: ``command`` (null for lines that cannot be parsed), ``lines``.
    """
    named = wire.select("command")
    counted = named.groupBy("command").agg(sf.count(sf.lit(1)).alias("lines"))
    return counted.select("command", "lines")
