"""Tests for :mod:`synapse_replication.pipeline.spark.user_settings`."""

from __future__ import annotations

import os
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline.spark.user_settings import UserSettings


class UserSettingsTests(SynchronousTestCase):
    """Tests for what the user configured."""

    def setUp(self) -> None:
        self.home = Path(self.mktemp()).absolute()
        (self.home / "conf").mkdir(parents=True)
        self.defaults = self.home / "conf" / "spark-defaults.conf"

    def read(self, **environ: str) -> UserSettings:
        """Read the settings in an environment."""
        self.patch(os, "environ", environ)
        return UserSettings.read(self.home)

    def test_nothing(self) -> None:
        """Without any configuration, Java can be started, and killed at the end."""
        user = self.read()
        self.assertEqual((user.settings, user.is_known), ({}, True))
        self.assertTrue(user.has_nothing_to_stop)
        self.assertEqual(user.master(None), "local[*]")
        self.assertEqual(user.master("local[2]"), "local[2]")

    def test_arguments(self) -> None:
        """Arguments, as the manual shows them, are settings."""
        user = self.read(
            PYSPARK_SUBMIT_ARGS="--driver-memory 4g --conf spark.x='a b' "
            "--master=local[3] pyspark-shell"
        )
        self.assertTrue(user.is_known)
        self.assertEqual(
            user.settings,
            {
                "spark.driver.memory": "4g",
                "spark.x": "a b",
                "spark.master": "local[3]",
            },
        )
        self.assertEqual(user.master(None), "local[3]")
        self.assertEqual(self.read(MASTER="local[5]").master(None), "local[5]")

    def test_defaults(self) -> None:
        """A file of defaults is read, with each form of a line."""
        self.defaults.write_text(
            "# a comment\n\nspark.a  1 2\nspark.b=2\nspark.c : 3\n"
            "spark.driver.memory 3g"
        )
        user = self.read(PYSPARK_SUBMIT_ARGS="--driver-memory 4g pyspark-shell")
        self.assertTrue(user.is_known)
        self.assertEqual(
            user.settings,
            {
                "spark.a": "1 2",
                "spark.b": "2",
                "spark.c": "3",
                "spark.driver.memory": "4g",
            },
        )

    def test_left_to_spark(self) -> None:
        """What this package does not know is left to ``spark-submit``."""
        for arguments in (
            "--verbose pyspark-shell",
            "--properties-file x pyspark-shell",
            "--deploy-mode=client pyspark-shell",
            "--driver-library-path x pyspark-shell",
            "--conf spark.driver.extraLibraryPath=x pyspark-shell",
            "--conf x pyspark-shell",
            "--driver-memory",
            "other.py",
            "",
            "'",
        ):
            user = self.read(PYSPARK_SUBMIT_ARGS=arguments)
            self.assertFalse(user.is_known, arguments)
            self.assertFalse(user.has_nothing_to_stop, arguments)
        self.assertFalse(self.read(HADOOP_CONF_DIR="x").is_known)
        self.defaults.write_text("spark.a 1\\\n2")
        self.assertFalse(self.read().is_known)
        self.defaults.unlink()
        (self.home / "conf" / "spark-env.sh").touch()
        self.assertFalse(self.read().is_known)

    def test_something_to_stop(self) -> None:
        """Java is not killed if the user configured what writes at its end."""
        for name in (
            *("spark.eventLog.enabled", "spark.extraListeners", "spark.plugins"),
            *("spark.sql.queryExecutionListeners", "spark.metrics.conf"),
            *("spark.local.dir", "spark.driver.extraJavaOptions"),
        ):
            user = self.read(PYSPARK_SUBMIT_ARGS=f"--conf {name}=x pyspark-shell")
            self.assertTrue(user.is_known)
            self.assertFalse(user.has_nothing_to_stop, name)
        agent = self.read(JAVA_TOOL_OPTIONS="-javaagent:x.jar")
        self.assertFalse(agent.has_nothing_to_stop)
        memory = self.read(PYSPARK_SUBMIT_ARGS="--driver-memory 4g pyspark-shell")
        self.assertTrue(memory.has_nothing_to_stop)
        # Spark reads it without being told to; the sinks write at the end.
        (self.home / "conf" / "metrics.properties").write_text("*.sink.csv.class=x")
        sinks = self.read()
        self.assertTrue(sinks.is_known)
        self.assertFalse(sinks.has_nothing_to_stop)
