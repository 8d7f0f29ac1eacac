"""Small data frames of values that are in the driver's memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: Up to this number of ids, reading in the driver's process takes less time than
#: starting Spark's Python workers.
FEW_IDS: Final = 250_000


def local_frame(
    session: SparkSession, schema: StructType | str, rows: Iterable[Sequence[Any]] = ()
) -> DataFrame:
    """Return a frame of a few rows, which are part of the query plan.

    A frame created from a list is evaluated in a Python worker, once for each query,
    even if it is empty. This frame is a local relation instead: Spark knows its rows
    when it plans a query, and removes operations on an empty frame.
    """
    arrow = _arrow(schema)
    columns = list(zip(*rows, strict=True)) or [()] * len(arrow)
    batch = pa.RecordBatch.from_arrays(
        [
            pa.array(values, field.type)
            for values, field in zip(columns, arrow, strict=True)
        ],
        schema=arrow,
    )
    return local_batches(session, schema, [batch])


def local_batches(
    session: SparkSession,
    schema: StructType | str,
    batches: Iterable[pa.RecordBatch],
) -> DataFrame:
    """Return a frame like :func:`local_frame`, of the rows in batches."""
    table = pa.Table.from_batches(list(batches), _arrow(schema))
    return session.createDataFrame(table, _typed(schema))


def _typed(schema: StructType | str) -> StructType:
    typed = StructType.fromDDL(schema) if isinstance(schema, str) else schema
    assert isinstance(typed, StructType)
    return typed


def _arrow(schema: StructType | str) -> pa.Schema:
    return to_arrow_schema(_typed(schema), timezone="UTC")
