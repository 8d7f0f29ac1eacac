"""The data source ``synapse_replication``."""

from __future__ import annotations

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from synapse_replication.pipeline.schemas import ROWS_SCHEMA

__all__ = ["SynapseReplicationDataSource"]


class SynapseReplicationDataSource(DataSource):
    """Rows of streams, from Postgres."""

    @classmethod
    def name(cls) -> str:
        return "synapse_replication"

    def schema(self) -> StructType:
        return ROWS_SCHEMA
