"""Creates the Spark session of the jobs, and shortens Spark's errors to one line.

The session runs on a laptop (``local[*]``) or on the cluster of any ``--master``.
docs/pipeline.rst says how to run jobs on a cluster, and how to change Spark's settings.
Its requirements are checked first.

This package's errors name the problem and its solution. If a Python worker raises such
an error, the driver receives the error's message within an exception of Spark, among a
hundred lines of stack traces. :func:`spark_errors_shortened` extracts that message. If
a file was removed while it was being read, it explains this. Of any other failure, it
shows the last exception of a Python traceback or, without a traceback, the first line
of the message.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from synapse_replication.data_files import read_table
from synapse_replication.errors import PipelineError, SparkMissingError
from synapse_replication.pipeline.progress import JobProgress
from synapse_replication.pipeline.spark.java import check_java, start_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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
    start_java(conf)
    try:
        with spark_errors_shortened():
            session = SparkSession.builder.config(conf=conf).getOrCreate()
    except PipelineError as error:
        where = options.get("spark.master", "the configured master")
        raise SparkMissingError(
            f"Spark cannot be started on {where}: {error}; is the "
            "master running, and can this machine reach it? Check --master"
        ) from error
    if not session.sparkContext.getConf().contains(_SHUFFLE_PARTITIONS):
        # With Spark's default of 200, most tasks would be empty, and starting them
        # would cost more than the work. Queries over more data set a larger number.
        tasks = str(2 * session.sparkContext.defaultParallelism)
        session.conf.set(_SHUFFLE_PARTITIONS, tasks)
    session.dataSource.register(SynapseReplicationDataSource)
    return session


@contextlib.contextmanager
def job_session(app_name: str, *, master: str | None = None) -> Iterator[SparkSession]:
    """Yield the session of :func:`make_session`, and stop it at the end of the context.

    A session that existed before is yielded, but not stopped. The tasks of jobs work
    mostly in Python, so Java's optimising compiler would cost more time than it saves.

    :raises PipelineError: if Spark raises an exception within the context.
    """
    from pyspark.sql import SparkSession

    existed = SparkSession.getActiveSession() is not None
    session = make_session(app_name, master=master, settings=_FEW_OPTIMISATIONS)
    try:
        with spark_errors_shortened():
            yield session
    finally:
        if not existed:
            session.stop()


@contextlib.contextmanager
def lazy_session(
    app_name: str, steps: int, *, master: str | None
) -> Iterator[tuple[JobProgress, Callable[[], SparkSession]]]:
    """Yield a job's display, and a function that returns its :func:`job_session`.

    The first call starts Spark, as a further step of the job, and shows Spark's tasks.

    :param steps: the number of the job's own steps.
    """
    with JobProgress(sys.stderr, steps) as progress, contextlib.ExitStack() as stack:

        @functools.cache
        def spark() -> SparkSession:
            progress.expect(1)
            progress.begin("start Spark")
            session = stack.enter_context(job_session(app_name, master=master))
            stack.enter_context(progress.watching(session))
            return session

        yield progress, spark


def _settings() -> dict[str, str]:
    """Return the settings of ``settings.csv``."""
    folder = Path(__file__).parent
    values = {
        "log_settings": folder / "log4j2.properties",
        "temporary": tempfile.gettempdir(),
    }
    rows = read_table(folder / "settings.csv")
    return {row["Setting"]: row["Value"].format(**values) for row in rows}


# -- errors ------------------------------------------------------------------------

# "synapse_replication.errors.PipelineError: text", up to the end of the line, without
# the SQLSTATE that Spark appends.
_OURS = re.compile(
    r"synapse_replication\.errors\.\w+Error: (.+?)(?:\s*SQLSTATE: \w+)*\s*$",
    re.MULTILINE,
)

#: Messages about a file that was removed after it was listed.
_FILE_GONE = re.compile(
    r"FAILED_READ_FILE\.FILE_NOT_EXIST|FileNotFound(?:Exception|Error)"
)

#: The last line of a Python traceback.
_RAISED = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception): .+$", re.MULTILINE)

#: A line that Py4J puts before a Java exception.
_OF_PY4J = re.compile(r"An error occurred while calling \S+\.?$")

#: The number of characters after which a message that is not from this package is cut.
_LONGEST_MESSAGE = 400


def _error_text(error: BaseException) -> str:
    """Return the message of a Spark exception, without stack traces."""
    text = str(error)
    ours = _OURS.findall(text)
    if ours:
        # Use the last one: in a Python traceback, it is the exception that was raised
        # last; after Java's "Caused by", it is the root cause.
        return str(ours[-1])
    if _FILE_GONE.search(text):
        return (
            "a file was removed while it was being read. If the archive was compacted "
            "or purged at the same time, no data is lost; run the job again"
        )
    if "Traceback (most recent call last)" in text and (
        raised := _RAISED.findall(text)
    ):
        return _cut(raised[-1])
    lines = (line.strip(": \t") for line in text.splitlines())
    first = next((line for line in lines if line and not _OF_PY4J.match(line)), "")
    return _cut(first or type(error).__name__)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_MESSAGE else text[:_LONGEST_MESSAGE] + "..."


@contextlib.contextmanager
def spark_errors_shortened() -> Iterator[None]:
    """Shorten the exceptions that Spark raises within the context.

    :raises PipelineError: if Spark raises an exception.
    """
    try:
        yield
    except Exception as error:
        # Compare names, because the classes cannot be imported without Spark.
        if not type(error).__module__.startswith(("pyspark.", "py4j.")):
            raise
        raise PipelineError(_error_text(error)) from error
