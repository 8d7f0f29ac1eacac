"""Tests for :mod:`synapse_replication.pipeline.spark.start`."""

from __future__ import annotations

import os
import pwd
import socket
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import SparkMissingError
from synapse_replication.pipeline.spark.start import (
    JavaStart,
    _class_path,
    check_master,
    spark_home,
)
from synapse_replication.pipeline.spark.user_settings import UserSettings
from tests.pipeline.shared_session import shared_session
from tests.pipeline.started_jobs import StartedJobCase


class SparkHomeTests(SynchronousTestCase):
    """Tests for the variable ``SPARK_HOME``."""

    def make_home(self, jar: str) -> Path:
        """Make a folder like Spark's, and name it in the environment."""
        home = Path(self.mktemp()).absolute()
        for path in (home / "bin" / "spark-submit", home / "jars" / jar):
            path.parent.mkdir(parents=True)
            path.touch()
        self.patch(os, "environ", {**os.environ, "SPARK_HOME": str(home)})
        return home

    def test_unset(self) -> None:
        """Without the variable, it is the folder of PySpark."""
        self.patch(os, "environ", {})
        self.assertTrue((spark_home() / "jars").is_dir())

    def test_wrong(self) -> None:
        """A folder that is not Spark's is named in the error."""
        self.patch(os, "environ", {"SPARK_HOME": "/nonexistent"})
        error = self.assertRaises(SparkMissingError, spark_home)
        self.assertIn("SPARK_HOME is /nonexistent", str(error))

    def test_other_version(self) -> None:
        """The error for another version of Spark names both versions."""
        self.make_home("spark-core_2.13-3.5.1.jar")
        error = self.assertRaises(SparkMissingError, spark_home)
        self.assertIn("with Spark 3.5.1, but the installed PySpark is 4", str(error))

    def test_same_version(self) -> None:
        """A folder with the same version of Spark is used."""
        (own,) = (spark_home() / "jars").glob("spark-core_*.jar")
        home = self.make_home(own.name)
        self.assertEqual(spark_home(), home)


class ClassPathTests(SynchronousTestCase):
    """Tests for the jars in which Java looks for classes."""

    def test_order(self) -> None:
        """The jars of Spark and Scala, which have most classes, are the first."""
        folder = Path(self.mktemp()).absolute()
        (folder / "jars").mkdir(parents=True)
        for name in ("zookeeper", "scala-library", "avro", "spark-core"):
            (folder / "jars" / f"{name}.jar").touch()
        conf, *jars = _class_path(folder).split(os.pathsep)
        self.assertEqual(conf, f"{folder}/conf/")
        self.assertEqual(
            [Path(jar).stem for jar in jars],
            ["scala-library", "spark-core", "avro", "zookeeper"],
        )


class EnvironmentTests(SynchronousTestCase):
    """Tests for environments in which Java cannot start; the error says what to do."""

    def start(self) -> str:
        """Return the error of a start."""
        home = spark_home()
        error = self.assertRaises(
            SparkMissingError, JavaStart, home, {}, UserSettings.read(home)
        )
        return str(error)

    def test_unknown_user(self) -> None:
        """A user without an entry in the user database is named."""

        def unknown(user: int) -> None:
            raise KeyError(user)

        self.patch(pwd, "getpwuid", unknown)
        self.assertIn(f"no entry for user id {os.geteuid()}", self.start())

    def test_host_name(self) -> None:
        """Spark does not look up the machine's name, which need not resolve."""
        home = spark_home()
        started = JavaStart(home, {}, UserSettings.read(home))
        assert started.process is not None
        path = Path(f"/proc/{started.process.pid}/environ")
        while not (environ := path.read_bytes()):
            # The process has not yet become Java.
            time.sleep(0.01)
        started.end()
        self.assertIn(b"SPARK_LOCAL_HOSTNAME=localhost", environ.split(b"\0"))

    def test_no_execution(self) -> None:
        """Native libraries are in the cache folder if /tmp does not allow them."""
        session = shared_session()
        folder = Path(self.mktemp()).absolute()
        (folder / "tmp").mkdir(parents=True)
        self.patch(tempfile, "tempdir", str(folder / "tmp"))
        environ = {
            "XDG_CACHE_HOME": str(folder / "cache"),
            # With an option of the user, Java ends in order.
            "SPARK_SUBMIT_OPTS": "-XX:TieredStopAtLevel=1",
        }
        self.patch(os, "environ", {**os.environ, **environ})

        def statvfs(path: str | Path) -> SimpleNamespace:
            found = os.ST_NOEXEC if str(path).endswith("/tmp") else 0
            return SimpleNamespace(f_flag=found)

        self.patch(os, "statvfs", statvfs)
        home = spark_home()
        started = JavaStart(home, {}, UserSettings.read(home))
        assert started.process is not None
        command = " ".join(map(str, started.process.args))  # type: ignore[arg-type]
        started.end()
        # The session of another Java goes on.
        self.assertEqual(session.range(3).count(), 3)
        self.assertIn(f"-Djava.io.tmpdir={folder}/cache/", command)
        self.assertEqual(list((folder / "tmp").iterdir()), [])
        (folder / "cache" / "synapse-replication").chmod(0o777)
        self.assertIn("set TMPDIR", self.start())

    def test_bad_option(self) -> None:
        """What Java says about an option that it does not know is in the error."""
        arguments = "--driver-java-options=-Xmx1x pyspark-shell"
        self.patch(os, "environ", {**os.environ, "PYSPARK_SUBMIT_ARGS": arguments})
        home = spark_home()
        started = JavaStart(home, {}, UserSettings.read(home))
        error = self.assertRaises(SparkMissingError, started.connect)
        started.end()
        self.assertIn("Invalid maximum heap size", str(error))


class MasterTests(SynchronousTestCase):
    """Tests for a master that cannot be reached."""

    def test_unreachable(self) -> None:
        """The error names the master, at once."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            check_master(f"spark://127.0.0.1:1,127.0.0.1:{port}")
        for master in (
            f"spark://127.0.0.1:{port}",
            "spark://no-such-host.invalid:7077",
            "spark://no-port",
        ):
            error = self.assertRaises(SparkMissingError, check_master, master)
            self.assertIn(f"the Spark master {master} cannot be reached", str(error))
        check_master("local[2]")


class JobTests(StartedJobCase):
    """A test that starts Java, in a process of its own.

    :mod:`tests.external.long.test_started_jobs` has a job at whose end Java is killed.
    """

    def test_event_log(self) -> None:
        """An event log that the user configured is complete; no file is left over."""
        folder = Path(self.mktemp()).absolute()
        (folder / "log").mkdir(parents=True)
        self.patch(os, "environ", {**os.environ, "TMPDIR": str(folder)})
        found = self.run_job(
            f"--conf spark.eventLog.dir={folder}/log "
            "--conf spark.eventLog.enabled=true --conf spark.x=y "
            "--conf spark.eventLog.compress=false "
            "--conf spark.sql.shuffle.partitions=7 "
            "--conf spark.sql.adaptive.enabled=true"
        )
        # Other settings are those of the user, too.
        self.assertEqual(found["sql.shuffle.partitions"], "7")
        self.assertEqual(found["few"], "7")
        self.assertEqual(found["sql.adaptive.enabled"], "true")
        self.assertEqual((found["status"], found["x"]), (0, "y"), found)
        events = "".join(
            path.read_text()
            for path in (folder / "log").rglob("*")
            if path.name.startswith(("events_", "local-"))
        )
        self.assertIn("SparkListenerApplicationEnd", events)
        self.assertEqual([path.name for path in folder.iterdir()], ["log"])
