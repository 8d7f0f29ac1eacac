"""What recordings show by themselves: rows out of order, twice, and resets.

What is wrong follows from what readers do. A reader of a stream that is stored in the
database has reached, for good, the token of each row that was sent, and the new token
of each POSITION whose previous token is lower (a *claim*: "I wrote nothing between
them"). A row at or below is dropped. A POSITION that repeats its token claims nothing:
whoever is behind asks the database, and a row that its writer was just sending may
follow it. So may anything that the recorder did not hear.

Streams held in memory begin again when their writer does; nothing is out of order
there.
"""

from __future__ import annotations

from collections.abc import Collection

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as sf

from synapse_replication.pipeline.audit.findings import Kind, finding, sample

__all__ = [
    "TOKEN_COLUMNS",
    "damage_findings",
    "line_text",
    "order_findings",
    "reset_findings",
    "wire_lines",
    "wire_tokens",
]

#: Of :func:`wire_tokens`.
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

_PLACE = ("recording", "stream", "instance_name")

_ORDER_TEXTS = {
    Kind.LATE_INVALIDATION: "behind newer ones, or again; such rows are delivered "
    "whenever they come",
    Kind.ROW_TWICE_ON_WIRE: "again; readers drop them",
    Kind.ROW_OUT_OF_ORDER: "when readers were past them, and are lost to those",
}


def wire_lines(wire: DataFrame) -> DataFrame:
    """Keep of each line of recordings what an audit asks for: no row's text.

    :param wire: of WIRE_SCHEMA.
    :return: TOKEN_COLUMNS, where ``is_row`` is null but for RDATA and POSITION; and
        ``is_damaged``, of what is no record.
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
    """Keep what says where a writer is: last rows of tokens, and positions.

    :param lines: of :func:`wire_lines`.
    :return: TOKEN_COLUMNS.
    """
    chosen = lines.select(*TOKEN_COLUMNS)
    placed = chosen.where(sf.col("is_row").isNotNull() & sf.col("token").isNotNull())
    return placed.select(*TOKEN_COLUMNS)


def line_text(prefix: str = "") -> Column:
    """Write the line again, without the row of RDATA."""

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
    tokens: DataFrame, kept: Collection[str], idempotent: Collection[str]
) -> DataFrame:
    """Find rows that readers drop because they are past them, in each recording.

    :param tokens: of :func:`wire_tokens`.
    :param kept: names of the streams that are kept in the database: their tokens
        never go back.
    :param idempotent: those of them whose late rows are delivered.
    """
    columns = tokens.select(*TOKEN_COLUMNS)
    known = columns.where(sf.col("stream").isin(*kept))
    before = (
        Window.partitionBy(*_PLACE)
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
    # Few: what follows may join.
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
    earlier = rows.select(*_PLACE, "token", sf.col("line_number").alias("earlier_line"))
    keys = [*_PLACE, "token", "line_number"]
    first = (
        late.select(*keys)
        .join(earlier, on=[*_PLACE, "token"], how="inner")
        .where(sf.col("earlier_line") < sf.col("line_number"))
        .groupBy(*keys)
        .agg(sf.min("earlier_line").alias("first_line"))
    )
    return late.join(first, on=keys, how="left")


def _with_claim(late: DataFrame, claims: DataFrame) -> DataFrame:
    said = claims.select(
        *_PLACE,
        sf.col("prev_token").alias("claimed_from"),
        sf.col("token").alias("claimed_to"),
        sf.col("line_number").alias("said_line"),
    )
    keys = [*_PLACE, "token", "line_number"]
    first = (
        late.where(sf.col("token") <= sf.col("claimed"))
        .select(*keys)
        .join(said, on=list(_PLACE), how="inner")
        .where(
            (sf.col("said_line") < sf.col("line_number"))
            & (sf.col("claimed_from") < sf.col("token"))
            & (sf.col("token") <= sf.col("claimed_to"))
        )
        .groupBy(*keys)
        .agg(sf.min("said_line").alias("claim_line"))
    )
    return late.join(first, on=keys, how="left")


def _order_findings(judged: DataFrame) -> DataFrame:
    keys = ["kind", *_PLACE]
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
    """Find where a writer began again below where it was.

    :param tokens: of :func:`wire_tokens`.
    :param in_memory: names of the streams that begin again with their writer.
    """
    columns = tokens.select(*TOKEN_COLUMNS)
    in_order = Window.partitionBy(*_PLACE).orderBy("line_number")
    before = in_order.rowsBetween(Window.unboundedPreceding, -1)
    seen = columns.withColumn(
        "line_before",
        sf.lag(sf.struct("token", "line_number")).over(in_order),
    ).withColumn(
        "row_before", sf.max(sf.when(sf.col("is_row"), sf.col("token"))).over(before)
    )
    announced = ~sf.col("is_row") & (sf.col("prev_token") == sf.col("token"))
    back = sf.col("token") < sf.col("line_before.token")
    began_again = sf.when(sf.col("stream").isin(*in_memory), back).otherwise(
        # Elsewhere, more was announced than was stored when its process ended.
        announced & back & (sf.col("token") < sf.col("row_before"))
    )
    resets = seen.where(began_again)
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
                " began ",
                sf.col("stream"),
                " again at ",
                sf.col("token"),
                ", it had been at ",
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
    """Find lines of recordings that are no records.

    A torn last line is how a file ends that is being written, or whose recorder was
    killed.

    :param lines: of :func:`wire_lines`.
    """
    columns = lines.select("recording", "line_number", "is_damaged")
    wrong = sf.when(sf.col("is_damaged"), sf.col("line_number"))
    grouped = columns.groupBy("recording").agg(
        sf.max("line_number").alias("end"),
        sf.count(wrong).alias("count"),
        sf.min(wrong).alias("first"),
        sf.max(wrong).alias("last"),
    )
    at_end = (sf.col("count") == 1) & (sf.col("last") == sf.col("end"))
    nothing = sf.lit(None)
    text = sf.when(
        at_end, "the recording breaks off; it was being written, or its recorder killed"
    ).otherwise("no record of a command; what was there is not known")
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
