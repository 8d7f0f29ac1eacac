"""Small data frames of values that are in the driver's memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["local_frame"]


def local_frame(
    session: SparkSession, schema: StructType | str, rows: Iterable[Sequence[Any]] = ()
) -> DataFrame:
    """Return a frame of a few rows, which are part of the query plan.

    A frame created from a list is evaluated in a Python worker, once for each query,
    even if it is empty. This frame is a local relation instead: Spark knows its rows
    when it plans a query, and removes operations on an empty frame.
    """
    typed = StructType.fromDDL(schema) if isinstance(schema, str) else schema
    assert isinstance(typed, StructType)
    arrow = to_arrow_schema(typed, timezone="UTC")
    columns = list(zip(*rows, strict=True)) or [()] * len(arrow)
    table = pa.Table.from_arrays(
        [
            pa.array(values, field.type)
            for values, field in zip(columns, arrow, strict=True)
        ],
        schema=arrow,
    )
    return session.createDataFrame(table, typed)
