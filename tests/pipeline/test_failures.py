"""Tests for :mod:`synapse_replication.pipeline.failures`."""

from __future__ import annotations

from pyspark.errors import AnalysisException
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.failures import (
    spark_errors_shortened,
    storage_error_text,
)

TRACE = """[PYTHON_DATA_SOURCE_ERROR] Failed to plan: Traceback (most recent call last):
  File "a.py", line 1, in x
psycopg2.OperationalError: no

During handling of the above exception, another exception occurred:

synapse_replication.errors.PipelineError: streams: there is no stream x; write y
 SQLSTATE: 38000
"""


_CHAIN = (
    "Kernel error -> Generic S3 error\n \x1b[31m\u21b3\x1b[0m Error performing GET "
    "http://127.0.0.1:9/bucket in 2 s\n  \x1b[31m\u21b3\x1b[0m {}\n"
)


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


class ReasonTests(SynchronousTestCase):
    """Tests for the cause and the hint of an error."""

    def test_answer(self) -> None:
        """The answer of an S3 server is the cause."""
        answer = (
            '404 Not Found <?xml version="1.0"?>\n<Error><Code>NoSuchBucket</Code>'
            "<Message>The specified bucket does not exist</Message></Error>"
        )
        self.assertEqual(
            storage_error_text(_CHAIN.format(answer)),
            "NoSuchBucket: The specified bucket does not exist; create the bucket, or "
            "correct --archive",
        )

    def test_end_of_chain(self) -> None:
        """The last elements of a chain are the cause, in one line."""
        reason = storage_error_text(
            _CHAIN.format("error sending request\n \u21b3 refused")
        )
        self.assertEqual(
            reason,
            "Error performing GET http://127.0.0.1:9/bucket in 2 s: error sending "
            "request: refused; check AWS_ENDPOINT_URL, or Amazon's default, and the "
            "network",
        )

    def test_hints(self) -> None:
        """Typical causes have a hint."""
        for text, hint in {
            "SignatureDoesNotMatch": "AWS_SECRET_ACCESS_KEY",
            "AccessDenied": "rights of these credentials",
            "PUT http://169.254.169.254/latest/api/token": "no credentials",
            "PermanentRedirect": "AWS_REGION",
            "[Errno 13] Permission denied: '/srv'": "rights of this user",
            "[Errno 28] No space left on device": "free some space",
        }.items():
            self.assertIn(hint, storage_error_text(text))

    def test_long(self) -> None:
        """The end of a long cause is shown."""
        reason = storage_error_text("a" * 5000 + " the cause")
        self.assertTrue(reason.endswith(" the cause"))
        self.assertLess(len(reason), 400)
