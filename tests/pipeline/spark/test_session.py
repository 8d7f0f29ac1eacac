"""Tests for :mod:`synapse_replication.pipeline.spark.session`."""

from __future__ import annotations

import io
import threading
from types import SimpleNamespace

from pyspark import SparkConf, SparkContext
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.progress import JobProgress, Tasks
from synapse_replication.pipeline.spark.session import (
    SparkJob,
    make_session,
    spark_errors_shortened,
)
from tests.pipeline.shared_session import shared_session

TRACE = """[PYTHON_DATA_SOURCE_ERROR] Failed to plan: Traceback (most recent call last):
  File "a.py", line 1, in x
psycopg2.OperationalError: no

During handling of the above exception, another exception occurred:

synapse_replication.errors.PipelineError: streams: there is no stream x; write y
 SQLSTATE: 38000
"""


class SessionTests(SynchronousTestCase):
    """Tests for the session."""

    def test_times_are_utc(self) -> None:
        """A timestamp literal is in UTC, whatever the time zone of the machine."""
        rows = shared_session().sql(
            "SELECT TIMESTAMP '1970-01-01' = timestamp_millis(0)"
        )
        self.assertEqual([list(row) for row in rows.collect()], [[True]])


class SecondSessionTests(SynchronousTestCase):
    """Tests for a session after another one of the process, whose Java goes on."""

    def test_master(self) -> None:
        """The new session has the master and the settings that it is made with."""
        shared_session()
        self.patch(SparkContext, "_active_spark_context", None)
        configured: list[tuple[str, str]] = []

        class StopError(Exception):
            """Raised instead of making the session."""

        def configure(builder: object, *, conf: SparkConf) -> None:
            configured.extend(conf.getAll())
            raise StopError

        self.patch(SparkSession.Builder, "config", configure)
        self.assertRaises(
            StopError, make_session, "second", master="local[3]", settings={"a": "b"}
        )
        self.assertLessEqual(
            {("spark.master", "local[3]"), ("a", "b"), ("spark.app.name", "second")},
            set(configured),
        )


class _Builder:
    """Makes a session that only has settings."""

    def __init__(self, settings: dict[str, str]) -> None:
        self._settings = settings

    def config(self, *, conf: SparkConf) -> _Builder:
        """Take the settings of a job."""
        self._settings.update(conf.getAll())
        return self

    def getOrCreate(self) -> SimpleNamespace:
        """Return the session."""
        context = SimpleNamespace(
            getConf=lambda: SparkConf(loadDefaults=False), defaultParallelism=2
        )
        conf = SimpleNamespace(set=self._settings.__setitem__)
        return SimpleNamespace(sparkContext=context, conf=conf, stop=lambda: None)


class SettingsTests(SynchronousTestCase):
    """Tests for the settings of a job, with the Java of the shared session."""

    def settings(self, rows: int | None) -> dict[str, str]:
        """Return the settings of the session of a job that announces its rows."""
        shared_session()
        settings: dict[str, str] = {}
        self.patch(SparkContext, "_active_spark_context", None)
        self.patch(SparkSession, "builder", _Builder(settings))
        with SparkJob("test") as spark:
            spark.start(rows)
            spark()
        return settings

    def test_few_rows(self) -> None:
        """Queries of few rows are planned once, have no shuffle and are not compiled.

        If the number of rows is not known, each core has two tasks.
        """
        names = [
            f"spark.sql.{name}"
            for name in (
                "shuffle.partitions",
                "adaptive.enabled",
                "codegen.wholeStage",
            )
        ]
        for rows, expected in (
            (0, ["1", "false", "false"]),
            (500_000, ["1", "false", "false"]),
            (500_001, ["4", None, None]),
            (None, ["4", None, None]),
            (14_000_000, ["56", None, None]),
        ):
            found = self.settings(rows)
            self.assertEqual([found.get(name) for name in names], expected, rows)


class JobTests(SynchronousTestCase):
    """Tests for the Spark of a job, in a process that has a session."""

    def test_step(self) -> None:
        """Spark's tasks are shown as those of the job's step, not of a start."""
        out = io.StringIO()
        session = shared_session()
        progress = JobProgress(out, 1)
        with progress, SparkJob("test", progress=progress) as spark:
            spark.start()
            progress.begin("count rows")
            self.assertIs(spark(), session)
            progress.show(Tasks(1, 3))
        lines = [line.partition("s  ")[2] for line in out.getvalue().splitlines()]
        self.assertEqual(
            lines,
            [
                "step 1 of 1: count rows",
                "step 1 of 1: count rows: 1 tasks done, 2 left",
            ],
        )
        # The session goes on.
        self.assertEqual(session.range(1).count(), 1)

    def test_in_a_thread(self) -> None:
        """A job in another thread than that of the session does not stop it."""
        session = shared_session()
        counts = []

        def run() -> None:
            with SparkJob("test") as spark:
                counts.append(spark().range(3).count())

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        self.assertEqual([*counts, session.range(2).count()], [3, 2])

    def test_failure(self) -> None:
        """An exception of Spark is one line."""
        with self.assertRaises(PipelineError) as caught, SparkJob("test") as spark:
            spark().sql("SELECT nothing_like_that")
        self.assertEqual(len(str(caught.exception).splitlines()), 1)


class ShortFailuresTests(SynchronousTestCase):
    """Tests for shortening Spark's exceptions."""

    def shortened(self, error: BaseException) -> str:
        """Return the shortened text of an exception."""

        def fail() -> None:
            with spark_errors_shortened():
                raise error

        return str(self.assertRaises(PipelineError, fail))

    def test_ours(self) -> None:
        """A PipelineError is reduced to its message."""
        self.assertEqual(
            self.shortened(AnalysisException(TRACE)),
            "streams: there is no stream x; write y",
        )
        self.assertEqual(self.shortened(PipelineError("as it is")), "as it is")

    def test_of_spark(self) -> None:
        """Any other exception of Spark is reduced to its first line, and truncated."""
        self.assertEqual(self.shortened(AnalysisException("\n a\nb")), "a")
        self.assertEqual(len(self.shortened(AnalysisException("x" * 9000))), 403)
        of_java = (
            "An error occurred while calling o7.count.\n: java.lang.Error: why\n at"
        )
        self.assertEqual(
            self.shortened(AnalysisException(of_java)), "java.lang.Error: why"
        )

    def test_of_a_worker(self) -> None:
        """
        A failure in a Python worker is reduced to the exception that the worker raised.
        """
        shortened = self.shortened(
            AnalysisException(
                "[PYTHON_EXCEPTION] An exception was thrown from the Python worker: "
                "Traceback (most recent call last):\n"
                '  File "a.py", line 1, in x\n'
                "pyarrow.lib.ArrowInvalid: not a Parquet file\n"
                "OSError: cannot open it\n SQLSTATE: 38000\n"
            )
        )
        self.assertEqual(shortened, "OSError: cannot open it")
        shortened = self.shortened(
            AnalysisException(
                "Traceback (most recent call last):\n"
                "FileNotFoundError: [Errno 2] x.parquet\n"
            )
        )
        self.assertIn("run the job again", shortened)

    def test_file_gone(self) -> None:
        """
        If a compaction removed a file of the archive, the error says to run the job
        again.
        """
        shortened = self.shortened(
            AnalysisException(
                "Job aborted.\n[FAILED_READ_FILE.FILE_NOT_EXIST] Encountered error "
                "while reading file file:///a/rows/stream=s/day=d/x.parquet."
            )
        )
        self.assertIn("run the job again", shortened)

    def test_others_pass(self) -> None:
        """Exceptions that are not from Spark are unchanged."""

        def fail() -> None:
            with spark_errors_shortened():
                raise KeyError("x")

        self.assertRaises(KeyError, fail)
