"""Runs each job with Spark's event log, and shows what its executors did.

The log has the tasks, the rows that pass between Spark and the Python code of tasks,
the bytes that are shuffled and spilled, and the bytes of results that the driver
collects, which must not grow with the number of rows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from synapse_replication.cli.pipeline.options import DSN_VARIABLE

#: The jobs in their order; ``{}`` stands for a folder.
_JOBS: Final[Mapping[str, tuple[str, ...]]] = {
    "archive": ("archive", "--once", "--archive", "{}/archive", "--json"),
    "archive, nothing new": ("archive", "--once", "--archive", "{}/archive", "--json"),
    "repair": ("archive", "--repair", "--archive", "{}/archive", "--json"),
    "audit": ("audit",),
    "audit with archive": ("audit", "--archive", "{}/archive"),
    "report without audit": ("report", "--no-audit", "--out", "{}/report"),
    "report with archive": (
        *("report", "--archive", "{}/archive", "--out", "{}/report-archive"),
    ),
    "export": ("export", "--archive", "{}/archive", "--out", "{}/export", "--json"),
}

#: The nodes of Spark's plans that run this package's Python code for batches of rows.
_PYTHON_NODES: Final = ("MapInArrow", "BatchScan", "ArrowEvalPython")

_MIB: Final = 2**20


@attrs.define
class JobEvents:
    """What the executors of one job did.

    :ivar tasks: the number of tasks; 0 if the job did not start Spark.
    :ivar python_rows: the rows that Python code of tasks returned to Spark.
    :ivar shuffled: the bytes that tasks wrote for other tasks.
    :ivar spilled: the bytes that tasks wrote to disks for lack of memory.
    :ivar collected: the bytes of results that the driver received.
    """

    status: int = 0
    tasks: int = 0
    python_rows: int = 0
    shuffled: int = 0
    spilled: int = 0
    collected: int = 0


def measure_events(dsn: str, master: str) -> Iterator[tuple[str, JobEvents]]:
    """Run each job once, and yield its name and what its executors did."""
    with tempfile.TemporaryDirectory() as folder:
        for name, arguments in _JOBS.items():
            log = Path(folder, "events", name.replace(" ", "-"))
            log.mkdir(parents=True)
            settings = {
                "spark.eventLog.enabled": "true",
                "spark.eventLog.dir": str(log),
                "spark.eventLog.compress": "false",
                "spark.eventLog.rolling.enabled": "false",
                "spark.master": master,
            }
            given = " ".join(f"--conf {k}={v}" for k, v in settings.items())
            done = subprocess.run(
                [
                    *(sys.executable, "-m", "synapse_replication", "pipeline"),
                    *(part.replace("{}", folder) for part in arguments),
                ],
                env={
                    **os.environ,
                    DSN_VARIABLE: dsn,
                    "PYSPARK_SUBMIT_ARGS": f"{given} pyspark-shell",
                },
                stdout=subprocess.DEVNULL,
            )
            found = read_events(log)
            found.status = done.returncode
            yield name, found


def read_events(folder: Path) -> JobEvents:
    """Read the event logs in a folder."""
    found = JobEvents()
    python_metrics: set[int] = set()
    for path in (path for path in folder.rglob("*") if path.is_file()):
        for line in path.read_text("utf-8").splitlines():
            event = json.loads(line)
            if "sparkPlanInfo" in event:
                python_metrics |= set(_row_metrics(event["sparkPlanInfo"]))
            if event["Event"] == "SparkListenerTaskEnd":
                _add_task(found, event, python_metrics)
    return found


def _row_metrics(plan: Mapping[str, Any]) -> Iterator[int]:
    """Yield the accumulators with the numbers of rows of a plan's Python nodes."""
    if plan["nodeName"].startswith(_PYTHON_NODES):
        for metric in plan["metrics"]:
            if metric["name"] == "number of output rows":
                yield metric["accumulatorId"]
    for child in plan["children"]:
        yield from _row_metrics(child)


def _add_task(
    found: JobEvents, event: Mapping[str, Any], python_metrics: set[int]
) -> None:
    metrics = event.get("Task Metrics") or {}
    found.tasks += 1
    shuffle = metrics.get("Shuffle Write Metrics", {})
    found.shuffled += shuffle.get("Shuffle Bytes Written", 0)
    found.spilled += metrics.get("Disk Bytes Spilled", 0)
    if event["Task Type"] == "ResultTask":
        found.collected += metrics.get("Result Size", 0)
    for accumulable in event["Task Info"]["Accumulables"]:
        if accumulable["ID"] in python_metrics:
            found.python_rows += int(accumulable.get("Update", 0))


def event_lines(found: Mapping[str, JobEvents]) -> Iterator[str]:
    """Yield the lines of a table."""
    yield (
        f"{'job':21} {'tasks':>6} {'rows from Python':>17} {'shuffled':>10} "
        f"{'spilled':>9} {'collected':>10}"
    )
    for name, each in found.items():
        status = "" if each.status == 0 else f"   exit status {each.status}"
        yield (
            f"{name:21} {each.tasks:>6} {each.python_rows:>17,} "
            f"{each.shuffled / _MIB:>6.1f} MiB {each.spilled / _MIB:>5.1f} MiB "
            f"{each.collected / _MIB:>6.2f} MiB{status}"
        )
