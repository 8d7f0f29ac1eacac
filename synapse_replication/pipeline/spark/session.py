"""Creates the Spark session of the jobs, after checking its requirements.

The session runs on a laptop (``local[*]``) or on the cluster of any ``--master``.
docs/pipeline.rst says how to run jobs on a cluster, and how to change Spark's settings.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from synapse_replication.data_files import read_table
from synapse_replication.errors import SparkMissingError
from synapse_replication.pipeline.failures import spark_error_text
from synapse_replication.pipeline.spark.java import check_java
from synapse_replication.pipeline.spark.noise import JavaErrors, filtered_stderr

if TYPE_CHECKING:
    from pyspark import SparkConf
    from pyspark.sql import SparkSession

    from synapse_replication.pipeline.progress import JobProgress

_SHUFFLE_PARTITIONS = "spark.sql.shuffle.partitions"

_FEW_OPTIMISATIONS = {"spark.driver.defaultJavaOptions": "-XX:TieredStopAtLevel=1"}

_INSTALL_SPARK = "install it with: pip install 'synapse_replication[spark]'"


def make_session(
    app_name: str,
    *,
    master: str | None = None,
    settings: Mapping[str, str] | None = None,
) -> SparkSession:
    """Create the session of this process, or return the existing one.

    The data source ``synapse_replication`` is registered with it.

    :param app_name: the name that Spark's web UI shows.
    :param master: the master URL. Without it, Spark's configuration applies if the
        environment variable ``MASTER`` or ``SPARK_HOME`` is set; otherwise
        ``local[*]``.
    :param settings: further Spark settings, which override the defaults of this module.
    :raises SparkMissingError: if Java or PySpark is missing, Java is too old or does
        not start, or the master does not answer. The message says what to do.
    """
    check_java()
    try:
        from pyspark import SparkConf
        from pyspark.sql import SparkSession
    except ModuleNotFoundError as error:
        raise SparkMissingError(
            f"PySpark is missing ({error}): {_INSTALL_SPARK}"
        ) from error
    from synapse_replication.pipeline.source.source import SynapseReplicationDataSource

    # This logger writes each exception with its Java stack on one line, although the
    # exception is raised, too.
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
    # Executors start the Python of this path, unless the user has set another one.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if master is None and not {"MASTER", "SPARK_HOME"} & os.environ.keys():
        master = "local[*]"
    options = {"spark.app.name": app_name, **_settings(), **(settings or {})}
    if master is not None:
        options["spark.master"] = master
    conf = SparkConf(loadDefaults=False).setAll(list(options.items()))
    _start_java(conf)
    try:
        session = SparkSession.builder.config(conf=conf).getOrCreate()
    except Exception as error:
        # Compare names, because py4j is only partly typed.
        if not type(error).__module__.startswith(("pyspark.", "py4j.")):
            raise
        where = options.get("spark.master", "the configured master")
        raise SparkMissingError(
            f"Spark cannot be started on {where}: {spark_error_text(error)}; is the "
            "master running, and can this machine reach it? Check --master"
        ) from error
    if not session.sparkContext.getConf().contains(_SHUFFLE_PARTITIONS):
        # With Spark's default of 200, most tasks would be empty, and starting them
        # would cost more than the work. Queries over more data set a larger number.
        tasks = str(2 * session.sparkContext.defaultParallelism)
        session.conf.set(_SHUFFLE_PARTITIONS, tasks)
    session.dataSource.register(SynapseReplicationDataSource)
    return session


def _start_java(conf: SparkConf) -> None:
    """Start Java with a filtered standard error, unless this process has started it."""
    from pyspark import SparkContext, java_gateway
    from pyspark.errors import PySparkRuntimeError

    if SparkContext._gateway is not None:
        return
    errors = JavaErrors()
    # PySpark is only partly typed.
    launch: Any = java_gateway.launch_gateway
    try:
        with filtered_stderr(errors) as stderr:
            gateway = launch(conf, {"stderr": stderr})
    except PySparkRuntimeError as error:
        raise SparkMissingError(
            f"Java did not start: {errors.cause}; check --master, "
            "PYSPARK_SUBMIT_ARGS and the memory that Spark's settings demand"
        ) from error
    errors.release()
    # The session would start Java itself, without a filter.
    SparkContext._ensure_initialized(gateway=gateway)


@contextlib.contextmanager
def job_session(app_name: str, *, master: str | None = None) -> Iterator[SparkSession]:
    """Yield the session of :func:`make_session`, and stop it at the end of the context.

    A session that existed before is yielded, but not stopped. The tasks of jobs work
    mostly in Python, so Java's optimising compiler would cost more time than it saves.
    """
    check_java()
    from pyspark.sql import SparkSession

    existed = SparkSession.getActiveSession() is not None
    session = make_session(app_name, master=master, settings=_FEW_OPTIMISATIONS)
    try:
        yield session
    finally:
        if not existed:
            session.stop()


@contextlib.contextmanager
def lazy_session(
    app_name: str,
    *,
    master: str | None,
    progress: JobProgress,
) -> Iterator[Callable[[], SparkSession]]:
    """Yield a function that returns the session of :func:`job_session`.

    The first call starts Spark, as a further step of the job, and shows Spark's tasks.
    """
    with contextlib.ExitStack() as stack:

        @functools.cache
        def spark() -> SparkSession:
            progress.expect(1)
            progress.begin("start Spark")
            session = stack.enter_context(job_session(app_name, master=master))
            stack.enter_context(progress.watching(session))
            return session

        yield spark


def _settings() -> dict[str, str]:
    """Return the settings of ``settings.csv``."""
    folder = Path(__file__).parent
    values = {
        "log_settings": folder / "log4j2.properties",
        "temporary": tempfile.gettempdir(),
    }
    rows = read_table(folder / "settings.csv")
    return {row["Setting"]: row["Value"].format(**values) for row in rows}
