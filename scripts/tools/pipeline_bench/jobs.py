"""Measures the jobs as processes, next to what Spark and the database alone cost.

*S* is a process with a Spark session that counts ten rows; *F* is a process that reads
the raw tables by ADBC into Parquet files. Both alternate with the jobs in each round,
so that a busy machine slows all of them alike.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

import attrs

from synapse_replication.cli.pipeline.options import DSN_VARIABLE

#: Spark's master for the measurement: two cores, as on a small machine.
MASTER = "local[2]"

_SESSION = f"""
from pyspark.sql import SparkSession
builder = SparkSession.builder.master({MASTER!r}).config("spark.ui.enabled", "false")
session = builder.getOrCreate()
print(session.range(10).count())
session.stop()
"""

_RAW = f"""
import os
from scripts.tools.pipeline_bench.reading import adbc_to_parquet
from synapse_replication.pipeline.settings import settings_of_dsn
print(adbc_to_parquet(settings_of_dsn(os.environ[{DSN_VARIABLE!r}])))
"""

_ARCHIVE = ("archive", "--once", "--archive", "{}/archive", "--master", MASTER)

#: The jobs in their order; ``{}`` stands for the folder of the round.
_JOBS: Mapping[str, Sequence[str]] = {
    "archive": _ARCHIVE,
    "archive, nothing new": _ARCHIVE,
    "audit": ("audit", "--master", MASTER),
    "audit with archive": ("audit", "--archive", "{}/archive", "--master", MASTER),
    "report with archive": (
        *("report", "--archive", "{}/archive", "--out", "{}/report"),
        *("--master", MASTER),
    ),
}


@attrs.frozen
class Run:
    """One run of a process.

    :ivar seconds: the duration.
    :ivar after_last_line: the time from the last line of output to the end, in s.
    """

    seconds: float
    after_last_line: float
    status: int


def measure_jobs(
    dsn: str, rounds: int, report: Callable[[str], object]
) -> dict[str, dict[str, float]]:
    """Run everything in turn, and return the medians by name.

    ``of_S`` is the duration as a multiple of S; ``of_F`` is the duration after Spark's
    start, as a multiple of F.
    """
    runs: dict[str, list[Run]] = {}
    for turn in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            commands = {
                "S": ["-c", _SESSION],
                "F": ["-c", _RAW],
                **{
                    name: ["-m", "synapse_replication", "pipeline"]
                    + [part.replace("{}", folder) for part in arguments]
                    for name, arguments in _JOBS.items()
                },
            }
            for name, arguments in commands.items():
                shutil.rmtree(f"{folder}/report", ignore_errors=True)
                run = _run([sys.executable, *arguments], dsn)
                runs.setdefault(name, []).append(run)
                report(f"round {turn + 1}: {name}: {run.seconds:.1f} s")
    of_spark, of_raw = (
        statistics.median(run.seconds for run in runs[name]) for name in ("S", "F")
    )
    figures = {}
    for name, found in runs.items():
        seconds = statistics.median(run.seconds for run in found)
        figures[name] = {
            "seconds": round(seconds, 2),
            "of_S": round(seconds / of_spark, 2),
            "of_F": round(max(seconds - of_spark, 0.0) / of_raw, 2),
            "after_last_line": round(
                statistics.median(run.after_last_line for run in found), 2
            ),
            "status": max(run.status for run in found),
        }
    return figures


def _run(command: Sequence[str], dsn: str) -> Run:
    begun = last = time.perf_counter()
    with subprocess.Popen(
        command,
        env={**os.environ, DSN_VARIABLE: dsn},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        # Java, which inherits the pipe, may outlive the process: wait for the process.
        reader = os.fdopen(os.dup(process.stdout.fileno()), "rb", buffering=0)  # type: ignore[union-attr]
        os.set_blocking(reader.fileno(), False)
        with reader:
            while process.poll() is None:
                if reader.read(65_536):
                    last = time.perf_counter()
                else:
                    time.sleep(0.01)
        ended = time.perf_counter()
    return Run(ended - begun, ended - last, process.returncode)
