"""The Spark session that the jobs run in: one way to make it, checked beforehand.

Works on a laptop (``local[*]``) and with any ``--master``. docs/pipeline.rst says how
to run it on a cluster, and how to change Spark's settings.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from synapse_replication.errors import SparkMissingError
from synapse_replication.pipeline.spark.java import check_java
from synapse_replication.pipeline.spark.noise import quiet_start

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from synapse_replication.pipeline.progress import JobProgress

__all__ = ["SCHEDULES_ONLY", "job_session", "make_session"]

_SHUFFLE_PARTITIONS = "spark.sql.shuffle.partitions"

_INSTALL_SPARK = "install it with: pip install 'synapse_replication[spark]'"


def make_session(
    app_name: str,
    *,
    master: str | None = None,
    settings: Mapping[str, str] | None = None,
) -> SparkSession:
    """Make the session of this process, or give the one there is.

    The data source ``synapse_replication`` is registered with it.

    :param app_name: shown in Spark's own pages.
    :param master: where it runs; as Spark is configured, else ``local[*]``.
    :param settings: more of Spark's settings, which win over ours.
    :raises SparkMissingError: if Java or PySpark is missing; says what to do.
    """
    check_java()
    try:
        from pyspark.sql import SparkSession
    except ModuleNotFoundError as error:
        raise SparkMissingError(
            f"PySpark is missing ({error}): {_INSTALL_SPARK}"
        ) from error
    from synapse_replication.pipeline.source.source import SynapseReplicationDataSource

    # It prints what is raised besides, as one line with all of Java's stack.
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
    # Executors on this machine run the Python that we run.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(app_name)
    if master is not None:
        builder = builder.master(master)
    elif "MASTER" not in os.environ and "SPARK_HOME" not in os.environ:
        builder = builder.master("local[*]")
    for key, value in {**_settings(), **(settings or {})}.items():
        builder = builder.config(key, value)
    with quiet_start():
        session = builder.getOrCreate()
    if not session.sparkContext.getConf().contains(_SHUFFLE_PARTITIONS):
        # Spark's own number, 200, makes most tasks of a job idle: their starts cost
        # more than the work. What needs more, by its size, asks for more.
        tasks = str(2 * session.sparkContext.defaultParallelism)
        session.conf.set(_SHUFFLE_PARTITIONS, tasks)
    session.dataSource.register(SynapseReplicationDataSource)
    return session


@contextlib.contextmanager
def job_session(
    app_name: str,
    *,
    master: str | None = None,
    settings: Mapping[str, str] | None = None,
    progress: JobProgress | None = None,
) -> Iterator[SparkSession]:
    """Make the session of a job, as :func:`make_session`, and stop it at its end.

    A session that was there before is used, and goes on.

    :param progress: shows that Spark starts, as a step, and then Spark's tasks.
    """
    if progress is not None:
        progress.begin("start Spark")
    check_java()
    from pyspark.sql import SparkSession

    was_there = SparkSession.getActiveSession() is not None
    session = make_session(app_name, master=master, settings=settings)
    if progress is not None:
        progress.watch(session)
    try:
        yield session
    finally:
        if progress is not None:
            progress.unwatch()
        if not was_there:
            session.stop()


#: For sessions that are over soon, or whose tasks leave the work to Python: to compile
#: Java any further costs more than it saves.
SCHEDULES_ONLY = {"spark.driver.defaultJavaOptions": "-XX:TieredStopAtLevel=1"}


def _settings() -> dict[str, str]:
    log_settings = files("synapse_replication.pipeline.spark") / "log4j2.properties"
    java_options = (
        # Times are UTC everywhere. The stack: a query that is stopped within
        # foreachBatch overflows the usual one.
        f"-Duser.timezone=UTC -Xss8m -Dlog4j2.configurationFile={log_settings}"
    )
    return {
        "spark.sql.session.timeZone": "UTC",
        "spark.driver.extraJavaOptions": java_options,
        "spark.executor.extraJavaOptions": "-Duser.timezone=UTC -Xss8m",
        "spark.sql.python.filterPushdown.enabled": "true",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        # On a busy machine a worker takes longer to start than the usual 15 s.
        "spark.python.authenticate.socketTimeout": "120s",
        # Looking up files that a table's log has named already needs no job of its own.
        "spark.sql.sources.parallelPartitionDiscovery.threshold": "10000",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.warehouse.dir": str(
            Path(tempfile.gettempdir(), "synapse-replication-warehouse")
        ),
        # What a dsn holds is no business of plans, logs and pages.
        "spark.redaction.regex": "(?i)secret|password|token|dsn|access[.]?key|url",
    }
