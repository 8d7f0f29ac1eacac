"""The Spark session that all tests share, because starting one takes 4 s."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from typing import TYPE_CHECKING

from synapse_replication.pipeline.spark.session import make_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@functools.cache
def shared_session() -> SparkSession:
    """Return the session.

    :raises SparkMissingError: if Java is missing. The message says what to install.
    """
    folder = tempfile.mkdtemp(prefix="synapse-replication-spark-")
    session = make_session(
        "tests",
        master="local[2]",
        settings={
            "spark.local.dir": folder,
            "spark.sql.warehouse.dir": f"{folder}/warehouse",
            # As in a job of few rows.
            "spark.sql.shuffle.partitions": "1",
            "spark.sql.adaptive.enabled": "false",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.memory": "1g",
            # The tests run about a hundred queries of a few rows each: compiling them
            # costs far more than it saves, and so do parallel garbage collectors.
            "spark.driver.defaultJavaOptions": (
                "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
            ),
            "spark.sql.codegen.wholeStage": "false",
            "spark.sql.codegen.factoryMode": "NO_CODEGEN",
            # Spark would describe each plan for its web UI, and check itself after each
            # rule of its optimiser.
            "spark.sql.ui.explainMode": "simple",
            "spark.sql.lightweightPlanChangeValidation": "false",
        },
    )

    def stop() -> None:
        session.stop()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(stop)
    return session
