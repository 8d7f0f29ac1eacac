"""Runs each job with Spark's event log, and shows what its executors did.

The log has the tasks, the rows that pass between Spark and the Python code of tasks,
the bytes that are shuffled and spilled, and the bytes of results that the driver
collects, which must not grow with the number of rows.

On a cluster, each job runs three times: on this machine alone, on the cluster, and on
the cluster while a worker and its executor are killed. All results must be equal.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from scripts.tools.pipeline_bench.memory import TreeMemory
from scripts.tools.pipeline_bench.results import damage_a_file, result_of
from synapse_replication.cli.pipeline.options import DSN_VARIABLE
from tests.external.cluster.cluster import StandaloneCluster

#: The jobs in their order; ``{}`` stands for a folder, and ``RECORDING`` for the
#: options that name recordings.
_JOBS: Final[Mapping[str, tuple[str, ...]]] = {
    "archive": ("archive", "--once", "--archive", "{}/archive", "--json"),
    "archive, nothing new": ("archive", "--once", "--archive", "{}/archive", "--json"),
    "repair": ("archive", "--repair", "--archive", "{}/archive", "--json"),
    "audit": ("audit", "--json", "RECORDING"),
    "audit with archive": ("audit", "--json", "--archive", "{}/archive"),
    "report without audit": ("report", "--no-audit", "--out", "{}/report", "RECORDING"),
    "report with archive": (
        *("report", "--archive", "{}/archive", "--out", "{}/report-archive"),
    ),
    "export": ("export", "--archive", "{}/archive", "--out", "{}/export", "--json"),
}

#: The jobs that run while a worker is killed: those of all rows.
_DISTURBED: Final = (
    *("archive", "audit with archive", "report without audit", "export"),
)

#: The nodes of Spark's plans that run this package's Python code for batches of rows.
_PYTHON_NODES: Final = ("MapInArrow", "BatchScan", "ArrowEvalPython")

_MIB: Final = 2**20


@attrs.define
class JobEvents:
    """What the executors of one job did.

    :ivar seconds: how long the job took.
    :ivar tasks: the number of tasks; 0 if the job did not start Spark.
    :ivar by_executor: the number of tasks of each executor.
    :ivar python_rows: the rows that Python code of tasks returned to Spark.
    :ivar shuffled: the bytes that tasks wrote for other tasks.
    :ivar spilled: the bytes that tasks wrote to disks for lack of memory.
    :ivar collected: the bytes of results that the driver received.
    :ivar driver_mib: the peak of the memory of the driver's Python and Java, in MiB;
        without a cluster, also of the executors.
    :ivar result: a digest of what the job has printed and written.
    """

    status: int = 0
    seconds: float = 0.0
    tasks: int = 0
    python_rows: int = 0
    shuffled: int = 0
    spilled: int = 0
    collected: int = 0
    driver_mib: float = 0.0
    by_executor: Counter[str] = attrs.Factory(Counter)
    result: str = ""


def measure_events(
    dsn: str,
    master: str,
    recordings: Sequence[str] = (),
    *,
    jobs: Sequence[str] = (),
    settings: Mapping[str, str] | None = None,
    disturb: Callable[[str], contextlib.AbstractContextManager[object]] | None = None,
) -> Iterator[tuple[str, JobEvents]]:
    """Run jobs once, and yield their names and what their executors did.

    :param jobs: the names of the jobs; empty for all.
    :param settings: further settings of Spark.
    :param disturb: called with the name of each job; the job runs in the context.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name in jobs or _JOBS:
            log = Path(folder, "events", name.replace(" ", "-"))
            log.mkdir(parents=True)
            if name == "repair":
                damage_a_file(Path(folder, "archive"))
            given = {
                "spark.eventLog.enabled": "true",
                "spark.eventLog.dir": str(log),
                "spark.eventLog.compress": "false",
                "spark.eventLog.rolling.enabled": "false",
                "spark.master": master,
                **(settings or {}),
            }
            options = " ".join(f"--conf {k}={v}" for k, v in given.items())
            words = [word.replace("{}", folder) for word in _JOBS[name]]
            if words[-1] == "RECORDING":
                words.pop()
                words += [f"--recording={each}" for each in recordings]
            with disturb(name) if disturb is not None else contextlib.nullcontext():
                begun = time.perf_counter()
                with (
                    Path(folder, "output").open("wb") as output,
                    subprocess.Popen(
                        [
                            *(sys.executable, "-m", "synapse_replication", "pipeline"),
                            *words,
                        ],
                        env={
                            **os.environ,
                            DSN_VARIABLE: dsn,
                            "PYSPARK_SUBMIT_ARGS": f"{options} pyspark-shell",
                        },
                        stdout=output,
                    ) as process,
                    TreeMemory(process.pid) as memory,
                ):
                    process.wait()
                seconds = time.perf_counter() - begun
            found = read_events(log)
            found.status, found.seconds = process.returncode, seconds
            found.driver_mib = memory.most_mib
            found.result = result_of(words[0], Path(folder), words)
            yield name, found


def measure_on_cluster(
    dsn: str,
    master: str,
    recordings: Sequence[str],
    jobs: Sequence[str],
    report: Callable[[str], object],
) -> Iterator[str]:
    """Run jobs locally and on a cluster, and yield the lines of two tables.

    :param master: the master without a cluster.
    :param jobs: the names of the jobs; empty for all.
    """
    settings = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.executor.memory": "512m",
        # A lost executor is noticed when its connection ends.
        "spark.network.timeout": "60s",
    }

    def shown(way: str, runs: Iterator[tuple[str, JobEvents]]) -> dict[str, JobEvents]:
        found = {}
        for name, each in runs:
            found[name] = each
            report(
                f"{way}: {name}: {each.seconds:.1f} s, exit status {each.status}, "
                f"tasks {dict(each.by_executor)}, driver {each.driver_mib:.0f} MiB, "
                f"result {each.result[:8]}"
            )
        return found

    local = shown("local", measure_events(dsn, master, recordings, jobs=jobs))
    with tempfile.TemporaryDirectory() as folder:
        cluster = StandaloneCluster(Path(folder))
        try:
            cluster.start()
            run = measure_events(
                dsn, cluster.url, recordings, jobs=jobs, settings=settings
            )
            shared = shown("cluster", run)

            @contextlib.contextmanager
            def worker_killed(name: str) -> Iterator[None]:
                killer = threading.Timer(
                    shared[name].seconds * 0.6, cluster.kill_worker, [1]
                )
                killer.start()
                try:
                    yield
                finally:
                    killer.join()
                    cluster.replace_worker(1)

            run = measure_events(
                *(dsn, cluster.url, recordings),
                jobs=[name for name in _DISTURBED if name in shared],
                settings=settings,
                disturb=worker_killed,
            )
            disturbed = shown("a worker killed", run)
        finally:
            cluster.stop()
    yield from event_lines(local)
    yield (
        f"{'job':21} {'tasks of executors':>18} {'driver':>9} {'local':>8} "
        f"{'cluster':>8} {'killed':>8}   results"
    )
    for name, each in shared.items():
        tasks = " + ".join(str(each.by_executor[e]) for e in sorted(each.by_executor))
        runs = [of[name] for of in (local, shared, disturbed) if name in of]
        seconds = " ".join(f"{run.seconds:>6.1f} s" for run in runs)
        yield (
            f"{name:21} {tasks:>18} {each.driver_mib:>5.0f} MiB {seconds:26}   "
            f"{_verdict(runs)}"
        )


def _verdict(runs: Sequence[JobEvents]) -> str:
    statuses = {run.status for run in runs}
    if statuses != {0}:
        return f"exit status {max(statuses)}"
    return "equal" if len({run.result for run in runs}) == 1 else "DIFFERENT"


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
    found.by_executor[event["Task Info"]["Executor ID"]] += 1
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
