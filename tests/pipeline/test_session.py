"""Tests for :mod:`synapse_replication.pipeline.session`."""

from __future__ import annotations

import os
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import SparkMissingError
from synapse_replication.pipeline.session import check_java
from tests.pipeline.spark import shared_session


class CheckJavaTests(SynchronousTestCase):
    """Tests for Java that is missing, too old or broken."""

    def _fake_java(self, script: str) -> Path:
        home = Path(self.mktemp()).absolute()
        (home / "bin").mkdir(parents=True)
        java = home / "bin" / "java"
        java.write_text(f"#!/bin/sh\n{script}\n")
        java.chmod(0o755)
        self.patch(os, "environ", {**os.environ, "JAVA_HOME": str(home)})
        return home

    def test_missing(self) -> None:
        """Without Java the message says what to install."""
        self.patch(os, "environ", {"PATH": "/nonexistent"})
        error = self.assertRaises(SparkMissingError, check_java)
        self.assertIn("apt-get install openjdk-17-jre-headless", str(error))

    def test_wrong_home(self) -> None:
        """A JAVA_HOME without Java is named."""
        self.patch(os, "environ", {**os.environ, "JAVA_HOME": "/nonexistent"})
        error = self.assertRaises(SparkMissingError, check_java)
        self.assertIn("JAVA_HOME is /nonexistent", str(error))

    def test_too_old(self) -> None:
        """A Java that Spark does not run on is refused with both versions."""
        self._fake_java("""echo 'openjdk version "11.0.2" 2019-01-15' >&2""")
        error = self.assertRaises(SparkMissingError, check_java)
        self.assertIn("is Java 11, Spark needs 17", str(error))

    def test_no_version(self) -> None:
        """Something else of that name is no Java."""
        self._fake_java("echo hello")
        error = self.assertRaises(SparkMissingError, check_java)
        self.assertIn("does not tell its version", str(error))

    def test_present(self) -> None:
        """The version of a Java that works is told."""
        self.assertGreaterEqual(check_java(), 17)


class SessionTests(SynchronousTestCase):
    """Tests for the session itself."""

    def test_times_are_utc(self) -> None:
        """A moment reads the same wherever the session runs."""
        rows = shared_session().sql(
            "SELECT TIMESTAMP '1970-01-01' = timestamp_millis(0)"
        )
        self.assertEqual([list(row) for row in rows.collect()], [[True]])
