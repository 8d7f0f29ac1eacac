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
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from synapse_replication.errors import PipelineError, SparkMissingError
from synapse_replication.pipeline.progress import JobProgress
from synapse_replication.pipeline.spark.settings import own_settings
from synapse_replication.pipeline.spark.start import JavaStart, check_master, spark_home
from synapse_replication.pipeline.spark.user_settings import UserSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SHUFFLE_PARTITIONS = "spark.sql.shuffle.partitions"
_ADAPTIVE = "spark.sql.adaptive.enabled"

#: The number of rows up to which compiling a query, and planning it again after each of
#: its stages, takes longer than running it.
_SHORT = 500_000

#: The settings of such a query.
_SHORT_SETTINGS = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}

#: The number of rows that a task can sort and store within a gigabyte that two tasks
#: share, and the most tasks of a shuffle.
_ROWS_OF_TASK = 250_000
_MOST_PARTITIONS = 2_000

#: The settings with which queries of few rows are planned.
_FEW_ROWS_SETTINGS = {_SHUFFLE_PARTITIONS: "1", _ADAPTIVE: "false"}

#: The sessions with which the data source is registered.
_WITH_SOURCE: WeakSet[SparkSession] = WeakSet()

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
    :param master: the master URL. Without it, Spark's configuration applies; if that
        names none, ``local[*]``.
    :param settings: further Spark settings, which override the defaults of this module.
    :raises SparkMissingError: if Java or PySpark is missing, Java is too old or does
        not start, or the master does not answer. The message says what to do.
    """
    session = _Session(app_name, master, settings or {}).get()
    if session not in _WITH_SOURCE:
        # Jobs do without: it takes Spark as long as a query.
        from synapse_replication.pipeline.source.source import (
            SynapseReplicationDataSource,
        )

        session.dataSource.register(SynapseReplicationDataSource)
        _WITH_SOURCE.add(session)
    return session


class _Session:
    """The session of this process, whose Java can be started before it is needed."""

    def __init__(
        self, app_name: str, master: str | None, settings: Mapping[str, str]
    ) -> None:
        self._app_name = app_name
        self._master = master
        self._settings = settings
        self._is_short = False
        self._partitions = 0
        self._options: dict[str, str] = {}
        self._start: JavaStart | None = None
        self._made: SparkSession | None = None

    def start_java(self, rows: int | None = None) -> None:
        """Begin to start Java, unless it is running; return at once.

        A session of this process is used as it is.

        :param rows: see :meth:`SparkJob.start`.
        """
        if self._options or _spark_context("_active_spark_context") is not None:
            return
        self._is_short = rows is not None and rows <= _SHORT
        self._partitions = min((rows or 0) // _ROWS_OF_TASK, _MOST_PARTITIONS)
        options = {"spark.app.name": self._app_name}
        options |= {setting.name: setting.value for setting in own_settings()}
        if self._is_short:
            options |= _SHORT_SETTINGS
        options |= self._settings
        home = spark_home()
        user = UserSettings.read(home)
        if self._master is not None:
            options["spark.master"] = self._master
        check_master(user.master(self._master))
        # Executors start the Python of this path, unless the user has set another one.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        self._options = options
        # Java goes on after the end of a session that make_session() has returned.
        if _spark_context("_gateway") is None:
            self._start = JavaStart(home, options, user, is_short=self._is_short)

    def get(self) -> SparkSession:
        """Return the session; wait for Java if it is starting."""
        self.start_java()
        try:
            from pyspark import SparkConf, SparkContext
            from pyspark.sql import SparkSession
        except ModuleNotFoundError as error:
            raise SparkMissingError(
                f"PySpark is missing ({error}): {_INSTALL_SPARK}"
            ) from error
        # This logger writes each exception with its Java stack on one line, although
        # the exception is raised, too.
        logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
        if self._start is not None:
            self._start.connect()
        # A thread need not have an active session, although there is one.
        existed = SparkContext._active_spark_context is not None
        conf = SparkConf(loadDefaults=False).setAll(list(self._options.items()))
        try:
            with spark_errors_shortened():
                session = SparkSession.builder.config(conf=conf).getOrCreate()
        except PipelineError as error:
            where = self._options.get("spark.master", "the configured master")
            raise SparkMissingError(
                f"Spark cannot be started on {where}: {error}; is the "
                "master running, and can this machine reach it? Check --master"
            ) from error
        if not existed:
            self._made = session
        given = session.sparkContext.getConf()
        if not given.contains(_SHUFFLE_PARTITIONS):
            # With Spark's default of 200, most tasks of a small job would be empty, and
            # starting them would cost more than the work.
            few = 2 * session.sparkContext.defaultParallelism
            tasks = 1 if self._is_short else max(few, self._partitions)
            session.conf.set(_SHUFFLE_PARTITIONS, str(tasks))
        if self._is_short and not given.contains(_ADAPTIVE):
            session.conf.set(_ADAPTIVE, "false")
        return session

    def end(self) -> None:
        """End the Java that was started, and the session that was made."""
        if self._start is not None:
            self._start.end()
        elif self._made is not None:
            self._made.stop()
        self._start = self._made = None


def _spark_context(name: str) -> Any:
    """Return an attribute of ``SparkContext``, without importing PySpark."""
    pyspark = sys.modules.get("pyspark")
    return None if pyspark is None else getattr(pyspark.SparkContext, name)


def own_session(session: SparkSession) -> SparkSession:
    """Return a session with settings and temporary views of its own.

    It uses the same executors.
    """
    own = session.newSession()
    for name in _FEW_ROWS_SETTINGS:
        own.conf.set(name, session.conf.get(name) or "")
    return own


@contextlib.contextmanager
def few_rows(session: SparkSession) -> Iterator[None]:
    """Within the context, plan each query once, and without parallel tasks.

    For queries of few rows, this is several times as fast. What the user configured
    remains.
    """
    given = session.sparkContext.getConf()
    before: dict[str, str] = {}
    for name, value in _FEW_ROWS_SETTINGS.items():
        if not given.contains(name):
            before[name] = session.conf.get(name) or ""
            session.conf.set(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            session.conf.set(name, value)


class SparkJob(contextlib.AbstractContextManager["SparkJob"]):
    """The Spark of one job: Java starts in the background, the session when needed.

    Calling the object returns the session. Nothing starts before :meth:`start` or the
    first call. Within its context, exceptions of Spark are shortened. All results must
    be stored when the context ends: Java is killed then, if nothing is left to stop
    (see :mod:`~synapse_replication.pipeline.spark.start`). Not thread-safe.

    :param app_name: the name that Spark's web UI shows.
    :param master: see :func:`make_session`.
    :param progress: shows Spark's tasks as soon as there is a session; ``None`` if the
        job shows them itself.
    :ivar started: called when the session has been made.
    """

    def __init__(
        self,
        app_name: str,
        *,
        master: str | None = None,
        progress: JobProgress | None = None,
    ) -> None:
        self.started: Callable[[], object] = lambda: None
        self._own = _Session(app_name, master, {})
        self._progress = progress
        self._session: SparkSession | None = None
        self._stack = contextlib.ExitStack()
        self._stack.callback(self._own.end)
        self._stack.enter_context(spark_errors_shortened())

    def start(self, rows: int | None = None) -> None:
        """Begin to start Java, and return at once.

        The first call counts. Call it as soon as it is certain that the job reads rows,
        so that Java starts while the job does other things.

        :param rows: the number of rows that Spark's queries read, which determines how
            Java compiles and Spark plans them; 0 if Python tasks read all rows;
            ``None`` if it is not known.
        :raises SparkMissingError: if Java is missing or too old, or nothing listens at
            the master's address.
        """
        self._own.start_java(rows)

    def __call__(self) -> SparkSession:
        """Wait for Java, and return the session.

        :raises SparkMissingError: as :func:`make_session`.
        """
        if self._session is None:
            self.start()
            self._session = self._own.get()
            if self._progress is not None:
                self._stack.enter_context(self._progress.watching(self._session))
            self.started()
        return self._session

    def __exit__(self, *exception: Any) -> bool | None:
        """End what this object has started. A session that existed before goes on."""
        return self._stack.__exit__(*exception)


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
