"""The conversion of rows to JSON lines."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as sf


def as_json_lines(rows: DataFrame) -> DataFrame:
    """Convert each row to a line with a JSON object.

    The JSON text in ``row`` becomes a JSON value of the object, not a string.

    :param rows: rows with at least one column other than ``row``; ``row``, if present,
        contains JSON.
    :return: a frame with the single column ``value``.
    """
    others = [name for name in rows.columns if name != "row"]
    named = rows.select(*rows.columns)
    # Retain the order of the columns, and write null for missing values.
    plain = sf.to_json(
        sf.struct(*(sf.col(name) for name in others)), {"ignoreNullFields": "false"}
    )
    if "row" not in rows.columns:
        return named.select(plain.alias("value"))
    whole = sf.concat(
        sf.substring(plain, sf.lit(1), sf.length(plain) - 1),
        sf.lit(',"row":'),
        sf.col("row"),
        sf.lit("}"),
    )
    return named.select(whole.alias("value"))
