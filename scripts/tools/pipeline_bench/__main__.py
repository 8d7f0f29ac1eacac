"""``scripts/bench-pipeline``: the pipeline with five million rows.

Reading is compared with Spark's JDBC reader and with COPY in one process, in the same
run. The jobs are run through the command line, and timed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import attrs
import click

from scripts.tools.pipeline_bench.reading import DEBIAN_JAR, measure_reading
from synapse_replication.cli.pipeline.options import DSN_VARIABLE
from synapse_replication.pipeline.settings import settings_of_dsn
from synapse_replication.pipeline.spark.session import make_session
from synapse_replication.testing.servers import PrivatePostgres
from tests.support.big_database import fill_database

#: Spark's master for the measurement: two cores, as on a small machine.
_MASTER = "local[2]"

#: The arguments of the jobs; ``{}`` stands for a folder.
_JOBS: tuple[tuple[str, ...], ...] = (
    ("archive", "--once", "--archive", "{}/archive"),
    ("audit", "--archive", "{}/archive"),
    # By default, this job only shows the positions, and writes nothing.
    ("bootstrap",),
    ("report", "--archive", "{}/archive", "--out", "{}/report"),
)

_GROWTH: dict[str, tuple[str, ...]] = {
    "archive of nothing new": ("archive", "--once", "--archive", "{}/archive"),
    "archive on one core": (
        *("archive", "--once", "--archive", "{}/archive1"),
        *("--master", "local[1]"),
    ),
}


@click.command()
@click.option(
    "--rows",
    default=5_000_000,
    show_default=True,
    help="The approximate number of rows.",
)
@click.option(
    "--rounds", default=2, show_default=True, help="How often to read all rows."
)
@click.option(
    "--dsn", help="A filled database to use; by default a private one is filled."
)
@click.option("--jobs/--no-jobs", default=True, help="Also run the jobs.")
@click.option("--json", "as_json", is_flag=True, help="Print figures as JSON.")
def main(rows: int, rounds: int, dsn: str | None, jobs: bool, as_json: bool) -> None:
    """Measure the pipeline on a database of five million rows."""

    def report(text: str) -> None:
        click.echo(text, err=True)

    server = None
    if dsn is None:
        server = PrivatePostgres(tcp=True, settings={"shared_buffers": "256MB"})
        server.start()
    try:
        if server is not None:
            server.new_database("big")
            dsn = server.dsn("big", tcp=True)
            begun = time.perf_counter()
            fill_database(dsn, rows)
            report(f"database filled in {time.perf_counter() - begun:.0f} s")
        assert dsn is not None
        figures = _measure(dsn, rounds, report, jobs=jobs)
    finally:
        if server is not None:
            server.stop()
    click.echo(json.dumps(figures) if as_json else _table(figures))


def _measure(dsn: str, rounds: int, report: object, *, jobs: bool) -> dict[str, object]:
    assert callable(report)
    jars = {"spark.jars": str(DEBIAN_JAR)} if DEBIAN_JAR.is_file() else {}
    session = make_session("bench", master=_MASTER, settings=jars)
    try:
        readings = measure_reading(session, settings_of_dsn(dsn), rounds, report)
    finally:
        session.stop()
    figures: dict[str, object] = {
        reading.name: {**attrs.asdict(reading), "rate": round(reading.rate)}
        for reading in readings
    }
    if jobs:
        with tempfile.TemporaryDirectory() as folder:
            for job in _JOBS:
                arguments = [part.replace("{}", folder) for part in job]
                seconds, status = _run(arguments, dsn, Path(folder))
                figures[f"pipeline {job[0]}"] = {"seconds": seconds, "status": status}
                report(f"pipeline {job[0]}: {seconds:.1f} s, exit status {status}")
            # An archive of nothing new takes the time that Spark needs to start;
            # subtract it to compare the times on one core and on two.
            for name, growth in _GROWTH.items():
                given = [part.replace("{}", folder) for part in growth]
                seconds, status = _run(given, dsn, Path(folder))
                figures[name] = {"seconds": seconds, "status": status}
                report(f"{name}: {seconds:.1f} s, exit status {status}")
    return figures


def _run(arguments: Sequence[str], dsn: str, folder: Path) -> tuple[float, int]:
    command = [sys.executable, "-m", "synapse_replication", "pipeline", *arguments]
    if "--master" not in arguments:
        command += ["--master", _MASTER]
    begun = time.perf_counter()
    done = subprocess.run(
        command,
        env={**os.environ, DSN_VARIABLE: dsn},
        cwd=folder,
        stdout=subprocess.DEVNULL,
        check=False,
    )
    return round(time.perf_counter() - begun, 1), done.returncode


def _table(figures: dict[str, object]) -> str:
    lines = []
    for name, values in figures.items():
        assert isinstance(values, dict)
        if "rate" in values:
            memory = values["worker_mib"]
            lines.append(
                f"{name:22} {values['rate']:>10,} rows/s   "
                + " ".join(f"{seconds:.1f} s" for seconds in values["seconds"])
                + (f"   worker at most {memory:.0f} MiB" if memory else "")
            )
        else:
            lines.append(
                f"{name:22} {values['seconds']:>10} s   exit status {values['status']}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
