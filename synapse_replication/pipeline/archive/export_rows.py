"""Rows in the form of files that other programs read."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as sf

__all__ = ["as_json_lines"]


def as_json_lines(rows: DataFrame) -> DataFrame:
    """Make each row a JSON object on a line; ``row`` is an array, and no text.

    :param rows: any columns; ``row``, if it is there, holds JSON.
    :return: ``value``.
    """
    others = [name for name in rows.columns if name != "row"]
    named = rows.select(*rows.columns)
    # In the order of the columns, and null where there is no value.
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
