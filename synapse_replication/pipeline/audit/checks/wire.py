"""Checks of recordings: rows out of order or repeated, resets and damage.

The checks follow the behaviour of readers. In a stream that is stored in the database,
a row advances a reader to the row's token. A POSITION whose previous token is lower
than its new token is a *claim* that its writer has no rows above the previous token, up
to and including the new one; it advances a reader that has reached the previous token
to the new token. Readers discard rows at or below their position, except those of
idempotent streams. A POSITION whose two tokens are equal is not a claim: readers that
are behind the token query the database. A row with that token may follow the POSITION,
or the recorder may have missed the row; neither is reported as a fault.

Streams held in memory are reset when their writer restarts, so their order is not
checked.
"""

from __future__ import annotations

from collections.abc import Collection

from pyspark.sql import Column, DataFrame, Window, functions as sf

from synapse_replication.pipeline.audit.findings import Kind, finding, sample

#: The columns of :func:`wire_tokens`.
TOKEN_COLUMNS = (
    "recording",
    "line_number",
    "t",
    "stream",
    "instance_name",
    "is_row",
    "prev_token",
    "token",
)

_WRITER_KEYS = ("recording", "stream", "instance_name")

_ORDER_TEXTS = {
    Kind.LATE_INVALIDATION: "out of order or repeatedly; late rows of this stream are "
    "delivered",
    Kind.ROW_TWICE_ON_WIRE: "repeatedly; readers discard the repetitions",
    Kind.ROW_OUT_OF_ORDER: "after readers had advanced to their tokens or beyond; "
    "readers have lost them",
}


def wire_lines(wire: DataFrame) -> DataFrame:
    """Return the recorded lines, with only the columns that an audit needs.

    :param wire: the recorded lines, with WIRE_SCHEMA.
    :return: TOKEN_COLUMNS and ``is_damaged``. ``is_row`` is null for commands other
        than RDATA and POSITION; ``is_damaged`` is true for invalid records.
    """
    command = sf.col("command")
    return wire.select(
        "recording",
        "line_number",
        "t",
        "stream",
        "instance_name",
        sf.when(command.isin("RDATA", "POSITION"), command == "RDATA").alias("is_row"),
        "prev_token",
        "token",
        (command.isNull() & (sf.col("line") == "")).alias("is_damaged"),
    )


def wire_tokens(lines: DataFrame) -> DataFrame:
    """Return the lines with a token: each POSITION, and the last row of each batch.

    :param lines: the result of :func:`wire_lines`.
    :return: TOKEN_COLUMNS.
    """
    chosen = lines.select(*TOKEN_COLUMNS)
    placed = chosen.where(sf.col("is_row").isNotNull() & sf.col("token").isNotNull())
    return placed.select(*TOKEN_COLUMNS)


def line_text(prefix: str = "") -> Column:
    """Return an expression for the text of a line, with ``...`` for the row of RDATA.

    :param prefix: a prefix of the names of the line's columns.
    """

    def of(name: str) -> Column:
        return sf.col(prefix + name)

    row = sf.concat_ws(
        " ", sf.lit("RDATA"), of("stream"), of("instance_name"), of("token")
    )
    position = sf.concat_ws(
        " ",
        sf.lit("POSITION"),
        of("stream"),
        of("instance_name"),
        of("prev_token"),
        of("token"),
    )
    return sf.when(of("is_row"), sf.concat(row, sf.lit(" ..."))).otherwise(position)


def order_findings(
    tokens: DataFrame, persisted: Collection[str], idempotent: Collection[str]
) -> DataFrame:
    """Find late rows: rows at or below a token that readers have already reached.

    Readers discard late rows, except those of idempotent streams. A claim whose
    previous token is at or above a row's token does not make the row late: a reader
    that has not received the row queries the database when the claim arrives.

    :param tokens: the result of :func:`wire_tokens`.
    :param persisted: the names of the streams that are stored in the database.
    :param idempotent: the names of those persisted streams whose late rows are
        delivered.
    """
    columns = tokens.select(*TOKEN_COLUMNS)
    known = columns.where(sf.col("stream").isin(*persisted))
    before = (
        Window.partitionBy(*_WRITER_KEYS)
        .orderBy("line_number")
        .rowsBetween(Window.unboundedPreceding, -1)
    )
    claim = ~sf.col("is_row") & (sf.col("prev_token") < sf.col("token"))
    here = sf.struct("token", "line_number")
    passed = known.withColumn(
        "row_before", sf.max(sf.when(sf.col("is_row"), here)).over(before)
    ).withColumn("claimed", sf.max(sf.when(claim, sf.col("token"))).over(before))
    late = passed.where(
        sf.col("is_row")
        & (
            (sf.col("token") <= sf.col("row_before.token"))
            | (sf.col("token") <= sf.col("claimed"))
        )
    )
    # Usually only a few lines are left, so the joins are cheap.
    with_first = _with_first_line(late, known.where("is_row"))
    with_claim = _with_claim(with_first, known.where(claim))
    twice = sf.col("first_line").isNotNull()
    passed_by_row = sf.col("token") < sf.col("row_before.token")
    judged = with_claim.withColumn(
        "passed_by",
        sf.when(twice, sf.col("first_line"))
        .when(passed_by_row, sf.col("row_before.line_number"))
        .otherwise(sf.col("claim_line")),
    ).where(sf.col("passed_by").isNotNull())
    kind = (
        sf.when(sf.col("stream").isin(*idempotent), Kind.LATE_INVALIDATION.value)
        .when(twice, Kind.ROW_TWICE_ON_WIRE.value)
        .otherwise(Kind.ROW_OUT_OF_ORDER.value)
    )
    return _order_findings(judged.withColumn("kind", kind))


def _with_first_line(late: DataFrame, rows: DataFrame) -> DataFrame:
    earlier = rows.select(
        *_WRITER_KEYS, "token", sf.col("line_number").alias("earlier_line")
    )
    keys = [*_WRITER_KEYS, "token", "line_number"]
    first = (
        late.select(*keys)
        .join(earlier, on=[*_WRITER_KEYS, "token"], how="inner")
        .where(sf.col("earlier_line") < sf.col("line_number"))
        .groupBy(*keys)
        .agg(sf.min("earlier_line").alias("first_line"))
    )
    return late.join(first, on=keys, how="left")


def _with_claim(late: DataFrame, claims: DataFrame) -> DataFrame:
    announced = claims.select(
        *_WRITER_KEYS,
        sf.col("prev_token").alias("claimed_from"),
        sf.col("token").alias("claimed_to"),
        sf.col("line_number").alias("announced_line"),
    )
    keys = [*_WRITER_KEYS, "token", "line_number"]
    first = (
        late.where(sf.col("token") <= sf.col("claimed"))
        .select(*keys)
        .join(announced, on=list(_WRITER_KEYS), how="inner")
        .where(
            (sf.col("announced_line") < sf.col("line_number"))
            & (sf.col("claimed_from") < sf.col("token"))
            & (sf.col("token") <= sf.col("claimed_to"))
        )
        .groupBy(*keys)
        .agg(sf.min("announced_line").alias("claim_line"))
    )
    return late.join(first, on=keys, how="left")


def _order_findings(judged: DataFrame) -> DataFrame:
    keys = ["kind", *_WRITER_KEYS]
    by_line = Window.partitionBy(*keys).orderBy("line_number")
    ranked = judged.withColumn("rank", sf.row_number().over(by_line))
    grouped = ranked.groupBy(*keys).agg(
        sf.min("token").alias("first"),
        sf.max("token").alias("last"),
        sf.count("*").alias("count"),
        sample(
            sf.col("rank"),
            sf.col("line_number"),
            line_text().alias("line"),
            sf.col("passed_by").alias("behind_line"),
        ).alias("lines"),
    )
    what = sf.lit(None).cast("string")
    for kind, text in _ORDER_TEXTS.items():
        what = sf.when(sf.col("kind") == kind.value, text).otherwise(what)
    return grouped.select(
        *finding(
            sf.col("kind"),
            message=[
                sf.col("recording"),
                ": ",
                sf.col("count"),
                " of ",
                sf.col("instance_name"),
                "'s ",
                sf.col("stream"),
                " rows were sent ",
                what,
            ],
            evidence={"recording": sf.col("recording"), "lines": sf.col("lines")},
        )
    )


def reset_findings(tokens: DataFrame, in_memory: Collection[str]) -> DataFrame:
    """Find the lines at which a writer reset a stream to a lower token.

    :param tokens: the result of :func:`wire_tokens`.
    :param in_memory: the names of the streams that are held in memory.
    """
    columns = tokens.select(*TOKEN_COLUMNS)
    in_order = Window.partitionBy(*_WRITER_KEYS).orderBy("line_number")
    before = in_order.rowsBetween(Window.unboundedPreceding, -1)
    seen = columns.withColumn(
        "line_before",
        sf.lag(sf.struct("token", "line_number")).over(in_order),
    ).withColumn(
        "row_before", sf.max(sf.when(sf.col("is_row"), sf.col("token"))).over(before)
    )
    announced = ~sf.col("is_row") & (sf.col("prev_token") == sf.col("token"))
    back = sf.col("token") < sf.col("line_before.token")
    is_reset = sf.when(sf.col("stream").isin(*in_memory), back).otherwise(
        # In any other stream, a POSITION that meets this condition shows that the
        # writer had sent a greater token, and restarted from its persisted position.
        announced & back & (sf.col("token") < sf.col("row_before"))
    )
    resets = seen.where(is_reset)
    return resets.select(
        *finding(
            Kind.STREAM_RESET,
            first=sf.col("token"),
            last=sf.col("line_before.token"),
            count=sf.lit(1),
            message=[
                sf.col("recording"),
                " line ",
                sf.col("line_number"),
                ": ",
                sf.col("instance_name"),
                " reset ",
                sf.col("stream"),
                " to ",
                sf.col("token"),
                " from ",
                sf.col("line_before.token"),
            ],
            evidence={
                "recording": sf.col("recording"),
                "line_number": sf.col("line_number"),
                "line": line_text(),
                "line_number_before": sf.col("line_before.line_number"),
                "token_before": sf.col("line_before.token"),
            },
        )
    )


def damage_findings(lines: DataFrame) -> DataFrame:
    """Find the recordings that contain invalid records.

    If the only invalid record is the last one, the finding has a kind of its own: the
    file was still being written, or its recorder was killed.

    :param lines: the result of :func:`wire_lines`.
    """
    columns = lines.select("recording", "line_number", "is_damaged")
    damaged = sf.when(sf.col("is_damaged"), sf.col("line_number"))
    grouped = columns.groupBy("recording").agg(
        sf.max("line_number").alias("end"),
        sf.count(damaged).alias("count"),
        sf.min(damaged).alias("first"),
        sf.max(damaged).alias("last"),
    )
    at_end = (sf.col("count") == 1) & (sf.col("last") == sf.col("end"))
    nothing = sf.lit(None)
    text = sf.when(
        at_end,
        "the last line is incomplete; the recorder was still writing, or was killed",
    ).otherwise("not a record; its content is unknown")
    kind = sf.when(at_end, Kind.RECORDING_CUT_OFF.value).otherwise(
        Kind.RECORDING_DAMAGED.value
    )
    return grouped.where(sf.col("count") > 0).select(
        *finding(
            kind,
            stream=nothing,
            instance_name=nothing,
            first=nothing,
            last=nothing,
            message=[sf.col("recording"), " line ", sf.col("first"), ": ", text],
            evidence={
                "recording": sf.col("recording"),
                "first_line_number": sf.col("first"),
                "last_line_number": sf.col("last"),
                "lines": sf.col("end"),
            },
        )
    )
