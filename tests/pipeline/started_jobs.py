"""A job in a process of its own, which starts Java."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from twisted.trial.unittest import SynchronousTestCase

_JOB = """
import json, os, sys
from pathlib import Path
from synapse_replication.pipeline.spark.class_archive import ClassArchive
from synapse_replication.pipeline.spark.session import few_rows, SparkJob
found = {}
if sys.argv[2:] == ["no maker"]:
    ClassArchive.start_maker = lambda archive: None
with SparkJob("test") as spark:
    spark.start(int(sys.argv[1]))
    found["early"] = "pyspark" not in sys.modules
    found["rows"] = spark().range(10).count()
    found["app"] = spark().sparkContext.applicationId
    found["x"] = spark().sparkContext.getConf().get("spark.x", "")
    with few_rows(spark()):
        found["few"] = spark().conf.get("spark.sql.shuffle.partitions")
    process = spark().sparkContext._gateway.proc
    for name in ("sql.shuffle.partitions", "sql.adaptive.enabled"):
        found[name] = spark().conf.get(f"spark.{name}")
    found["options"] = Path(f"/proc/{process.pid}/cmdline").read_text().split("\\0")
found["status"] = process.returncode
found["new"] = os.environ.get("PYSPARK_GATEWAY_PORT")
print(json.dumps(found))
"""


class StartedJobCase(SynchronousTestCase):
    """A test that starts Java, in a process of its own."""

    #: Whether a job makes the archive of Java's classes in the background, if there is
    #: none.
    makes_archive = False

    def run_job(self, arguments: str, rows: int = 0) -> dict[str, object]:
        """Run a job that counts ten rows.

        :param rows: the number of rows that it announces.
        """
        options = [] if self.makes_archive else ["no maker"]
        done = subprocess.run(
            [sys.executable, "-c", _JOB, str(rows), *options],
            env={
                **{k: v for k, v in os.environ.items() if k != "SPARK_SUBMIT_OPTS"},
                "PYSPARK_SUBMIT_ARGS": f"--master local[2] {arguments} pyspark-shell",
            },
            capture_output=True,
            text=True,
            timeout=300,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        found: dict[str, object] = json.loads(done.stdout)
        # Java has no remarks about an archive of classes.
        self.assertNotIn("[cds]", done.stderr)
        self.assertEqual(
            (found["rows"], found["early"], found["new"]), (10, True, None)
        )
        return found
