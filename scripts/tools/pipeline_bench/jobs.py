"""Measures the jobs as processes, next to what Spark and the database alone cost.

*S* is a process with a Spark session that counts ten rows; *F* is a process that reads
the raw tables by ADBC into Parquet files. Both alternate with the jobs in each round,
so that a busy machine slows all of them alike.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

import attrs

from scripts.tools.pipeline_bench.memory import TreeMemory
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

#: The session of a job, alone and with a Python task.
_START = f"""
from synapse_replication.pipeline.spark.session import SparkJob
with SparkJob("bench", master={MASTER!r}) as spark:
    spark.start(0)
    print(spark().range(10).count())
"""
_START_WITH_TASK = f"""
from synapse_replication.pipeline.spark.session import SparkJob
with SparkJob("bench", master={MASTER!r}) as spark:
    spark.start(0)
    numbers = spark().range(0, 2, numPartitions=2)
    print(numbers.mapInArrow(lambda batches: batches, "id long").toArrow().num_rows)
"""

_RAW = f"""
import os
from scripts.tools.pipeline_bench.reading import adbc_to_parquet
from synapse_replication.pipeline.settings import PipelineSettings
print(adbc_to_parquet(PipelineSettings.of_dsn(os.environ[{DSN_VARIABLE!r}])))
"""

_ARCHIVE = ("archive", "--once", "--archive", "{}/archive", "--master", MASTER)

#: The jobs in their order; ``{}`` stands for the folder of the round.
_JOBS: Mapping[str, Sequence[str]] = {
    "archive": _ARCHIVE,
    "archive, nothing new": _ARCHIVE,
    "audit": ("audit", "--master", MASTER),
    "audit with archive": ("audit", "--archive", "{}/archive", "--master", MASTER),
    "report without audit": (
        *("report", "--no-audit", "--out", "{}/rows", "--master", MASTER),
    ),
    "report with audit": ("report", "--out", "{}/report", "--master", MASTER),
}


#: The most that each job may take: so many times S, and so many times F. With a small
#: database, and with a large one.
_SMALL_GOALS: Mapping[str, tuple[float, float]] = {
    "start": (0.4, 0),
    "start with a task": (0.6, 0),
    "archive": (0.7, 0),
    "archive, nothing new": (0.1, 0),
    "audit": (1.3, 0),
    "report with audit": (1.8, 0),
    "audit of recordings": (40, 0),
}
_LARGE_GOALS: Mapping[str, tuple[float, float]] = {
    "start": (0.4, 0),
    "start with a task": (0.6, 0),
    "archive": (1, 2),
    "archive, nothing new": (0.1, 0),
    "audit": (1, 3),
    "audit with archive": (1, 5),
    "report without audit": (1, 1.5),
    "audit of recordings": (40, 0),
}

#: The most time from the last line of output to the end of a job, in s.
_END_GOAL = 0.5


@attrs.frozen
class Run:
    """One run of a process.

    :ivar seconds: the duration.
    :ivar after_last_line: the time from the last line of output to the end, in s.
    :ivar memory_mib: the peak of the memory of the process and of all that it has
        started, in MiB; shared pages count once.
    """

    seconds: float
    after_last_line: float
    status: int
    memory_mib: float


@attrs.frozen
class JobFigures:
    """The medians of a job's runs, beside its goal.

    :ivar seconds: the duration.
    :ivar of_S: the duration as a multiple of S.
    :ivar of_F: the duration that exceeds S, as a multiple of F.
    :ivar goal: the greatest duration that meets the goal, in s; ``None`` without one.
    :ivar status: the greatest exit status.
    :ivar memory_mib: the peak of the memory, in MiB.
    """

    seconds: float
    of_S: float  # noqa: N815 the name of the unit
    of_F: float  # noqa: N815 the name of the unit
    after_last_line: float
    status: int
    memory_mib: float
    goal: float | None

    @property
    def verdict(self) -> str:
        """The values that miss their goals; ``ok`` if none does."""
        missed = {
            f"exit status {self.status}": self.status != 0,
            "too slow": self.goal is not None and self.seconds > self.goal,
            "ends too late": self.goal is not None and self.after_last_line > _END_GOAL,
        }
        return ", ".join(text for text, is_missed in missed.items() if is_missed) or (
            "ok" if self.goal is not None else ""
        )


def measure_jobs(
    dsn: str,
    rounds: int,
    report: Callable[[str], object],
    *,
    recordings: Sequence[str] = (),
    small: bool,
) -> dict[str, JobFigures]:
    """Run everything in turn, and return the medians by name.

    :param recordings: recordings that a further job audits.
    :param small: whether the database is that of a small homeserver, for the goals.
    """
    jobs = dict(_JOBS)
    if recordings:
        options = [f"--recording={each}" for each in recordings]
        jobs["audit of recordings"] = ("audit", "--master", MASTER, *options)
    runs: dict[str, list[Run]] = {}
    for turn in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            commands = {
                "S": ["-c", _SESSION],
                "F": ["-c", _RAW],
                "start": ["-c", _START],
                "start with a task": ["-c", _START_WITH_TASK],
                **{
                    name: ["-m", "synapse_replication", "pipeline"]
                    + [part.replace("{}", folder) for part in arguments]
                    for name, arguments in jobs.items()
                },
            }
            for name, arguments in commands.items():
                run = _run([sys.executable, *arguments], dsn)
                runs.setdefault(name, []).append(run)
                report(f"round {turn + 1}: {name}: {run.seconds:.1f} s")
    seconds = {
        name: statistics.median(run.seconds for run in found)
        for name, found in runs.items()
    }
    of_spark, of_raw = seconds["S"], seconds["F"]
    goals = _SMALL_GOALS if small else _LARGE_GOALS
    return {
        name: JobFigures(
            round(seconds[name], 2),
            round(seconds[name] / of_spark, 2),
            round(max(seconds[name] - of_spark, 0.0) / of_raw, 2),
            round(statistics.median(run.after_last_line for run in found), 2),
            max(run.status for run in found),
            round(max(run.memory_mib for run in found)),
            round(goals[name][0] * of_spark + goals[name][1] * of_raw, 2)
            if name in goals
            else None,
        )
        for name, found in runs.items()
    }


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
        with reader, TreeMemory(process.pid) as memory:
            while process.poll() is None:
                if reader.read(65_536):
                    last = time.perf_counter()
                else:
                    time.sleep(0.01)
        ended = time.perf_counter()
    return Run(ended - begun, ended - last, process.returncode, memory.most_mib)
