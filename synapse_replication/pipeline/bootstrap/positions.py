"""A query for the greatest token of each writer."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as sf


def farthest_tokens(parts: DataFrame) -> DataFrame:
    """Return the greatest token for each combination of stream, table and writer.

    :param parts: ``stream``, ``table``, ``instance_name`` (null for rows without a
        writer), ``token``.
    :return: the same columns.
    """
    found = parts.select("stream", "table", "instance_name", "token")
    farthest = found.groupBy("stream", "table", "instance_name").agg(
        sf.max("token").alias("token")
    )
    return farthest.select("stream", "table", "instance_name", "token")
