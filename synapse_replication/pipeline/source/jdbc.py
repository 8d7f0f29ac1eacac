"""Backfill by Spark's own JDBC reader, where the driver's jar is found.

It reads history about twice as fast as anything written in Python. The queries and
their ranges are the data source's. It wants the database by TCP: Java knows no Unix
sockets. Where it cannot be had, the data source reads.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from pyspark.sql import DataFrame
from pyspark.sql import functions as sf

from synapse_replication.pipeline.schemas import ROWS_SCHEMA
from synapse_replication.pipeline.settings import PipelineSettings
from synapse_replication.pipeline.source.database import (
    PLAN_TIMEOUT,
    READ_TIMEOUT,
    reading,
    session_settings,
)
from synapse_replication.pipeline.source.offsets import offsets_to_json
from synapse_replication.pipeline.source.options import SourceOptions, reader_options
from synapse_replication.pipeline.source.planning import Planner
from synapse_replication.pipeline.source.ranges import range_sql

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from synapse_replication.pipeline.source.partitions import Part

__all__ = [
    "find_driver_jar",
    "has_driver",
    "jdbc_url",
    "latest_token",
    "read_backfill",
    "read_by_jdbc",
]

#: Where Debian's libpostgresql-jdbc-java puts it.
DEBIAN_JAR = Path("/usr/share/java/postgresql.jar")

#: The environment variable that names another.
JAR_VARIABLE = "SYNAPSE_REPLICATION_JDBC_JAR"

_DRIVER = "org.postgresql.Driver"

#: Rows that the driver asks for at once: otherwise it takes all into memory.
_FETCH_SIZE = 10_000

# What libpq is told that Java's driver understands too, or need not know.
_UNDERSTOOD = {
    "host",
    "port",
    "dbname",
    "user",
    "password",
    "sslmode",
    "sslrootcert",
    "connect_timeout",
    "application_name",
    "client_encoding",
    "keepalives",
    "keepalives_idle",
    "keepalives_interval",
    "keepalives_count",
}


def find_driver_jar() -> Path | None:
    """Find the jar of PostgreSQL's driver on this machine."""
    named = os.environ.get(JAR_VARIABLE)
    jar = Path(named) if named else DEBIAN_JAR
    return jar if jar.is_file() else None


def has_driver(session: SparkSession) -> bool:
    """Tell whether a session can load PostgreSQL's driver."""
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]

    jvm: Any = session.sparkContext._jvm
    try:
        loader = jvm.org.apache.spark.util.Utils.getContextOrSparkClassLoader()
        loader.loadClass(_DRIVER)
    except Py4JError:
        return False
    return True


def read_backfill(
    session: SparkSession, settings: PipelineSettings, **options: str
) -> DataFrame:
    """Read what is there now: by JDBC if that can be, else by the data source.

    :param options: of the data source, for instance ``streams`` or ``endingToken``.
    :return: the columns of the rows' schema.
    :raises PipelineError: an option is wrong, or the database cannot be reached.
    """
    if _reaches(settings.conninfo) and has_driver(session):
        return read_by_jdbc(session, settings, **options)
    source = session.read.format("synapse_replication")
    return source.options(**reader_options(settings), **options).load()


def latest_token(settings: PipelineSettings, **options: str) -> str:
    """Give the token up to which all is complete for good.

    A backfill that ends there, by ``endingToken``, may be followed by a continuous
    read that begins there, by ``startingToken``.

    :param options: of the data source, for instance ``streams``.
    :return: JSON.
    :raises PipelineError: an option is wrong, or the database cannot be reached.
    """
    checked = SourceOptions.parse({**reader_options(settings), **options})
    planner = Planner(checked, continuous=True)
    with reading(checked.conninfo, PLAN_TIMEOUT) as txn:
        offsets = planner.latest(txn, planner.select(txn))
    return json.dumps(offsets_to_json(offsets))


def _reaches(conninfo: Mapping[str, Any]) -> bool:
    host = str(conninfo.get("host", ""))
    return (
        bool(host)
        and "/" not in host
        and "," not in host
        and (conninfo.keys() <= _UNDERSTOOD)
    )


def read_by_jdbc(
    session: SparkSession, settings: PipelineSettings, **options: str
) -> DataFrame:
    """Read by Spark's JDBC reader, one task for each range of ids.

    :param options: of the data source.
    :raises PipelineError: an option is wrong, or the database cannot be reached.
    """
    checked = SourceOptions.parse({**reader_options(settings), **options})
    tasks = Planner(checked, continuous=False).batch()
    parts = [part for task in tasks for part in task]
    if not parts:
        return session.createDataFrame([], ROWS_SCHEMA)
    properties = _properties(settings.conninfo)
    frames = [_read_part(session, properties, part) for part in parts]
    return functools.reduce(DataFrame.unionAll, frames)


def _properties(conninfo: Mapping[str, Any]) -> dict[str, str]:
    # libpq also finds a password where Java does not look.
    with reading(conninfo, 1) as txn:
        info = txn.connection.info
        user, password = info.user, info.password
        host, port, name = info.host, info.port, info.dbname
    properties = {
        "url": jdbc_url(host, port, name),
        "driver": _DRIVER,
        "user": user,
        "password": password or "",
        "fetchsize": str(_FETCH_SIZE),
        "ApplicationName": "synapse-replication pipeline",
        "readOnly": "true",
    }
    for key in ("sslmode", "sslrootcert"):
        if key in conninfo:
            properties[key] = str(conninfo[key])
    return properties


def jdbc_url(host: str, port: int, name: str) -> str:
    """Write where a database is as Java does; without user and password.

    :param host: a name or an address.
    """
    if ":" in host:
        host = f"[{host}]"
    return f"jdbc:postgresql://{host}:{port}/{quote(name, safe='')}"


def _read_part(
    session: SparkSession, properties: Mapping[str, str], part: Part
) -> DataFrame:
    sql = range_sql(part.stream, part.span, part.present, part.sole_writer)
    settings = session_settings(READ_TIMEOUT, walk_indexes=part.walks_indexes)
    begin = "; ".join(f"SET {name} = '{value}'" for name, value in settings.items())
    frame = (
        session.read.format("jdbc")
        .options(**properties)
        .option("dbtable", f"({sql}) AS found")
        .option(
            "sessionInitStatement", f"SET default_transaction_read_only = on; {begin}"
        )
        .load()
    )
    # To Spark, any column of a JDBC table may be null.
    return frame.select(
        sf.lit(part.stream.name).alias("stream"),
        sf.coalesce("instance_name", sf.lit("")).alias("instance_name"),
        sf.coalesce("stream_id", sf.lit(0).cast("long")).alias("stream_id"),
        sf.coalesce("row_index", sf.lit(0)).alias("row_index"),
        sf.coalesce("row", sf.lit("")).alias("row"),
        sf.timestamp_micros("written_us").alias("written_ts"),
    )
