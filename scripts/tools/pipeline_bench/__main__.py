"""``scripts/bench-pipeline``: the pipeline with five million rows.

Reading is compared with Spark's JDBC reader and with COPY in one process, in the same
run. The jobs are run through the command line, and timed.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import attrs
import click

from scripts.tools.pipeline_bench.events import (
    event_lines,
    measure_events,
    measure_on_cluster,
)
from scripts.tools.pipeline_bench.jobs import MASTER, JobFigures, measure_jobs
from scripts.tools.pipeline_bench.reading import DEBIAN_JAR, Reading, measure_reading
from scripts.tools.pipeline_bench.recorded import write_recordings
from synapse_replication.pipeline.settings import PipelineSettings
from synapse_replication.pipeline.spark.session import make_session
from synapse_replication.testing.servers import PrivatePostgres
from tests.support.big_database import fill_database

#: The number of rows with ``--small``: those of a small homeserver.
_SMALL = 28_800


@click.command()
@click.option(
    "--rows",
    default=5_000_000,
    show_default=True,
    help="The approximate number of rows.",
)
@click.option(
    "--rounds", default=3, show_default=True, help="How often to measure each case."
)
@click.option(
    "--dsn", help="A filled database to use; by default a private one is filled."
)
@click.option(
    "--small",
    is_flag=True,
    help="Only run the jobs, on the rows of a small homeserver.",
)
@click.option("--reading/--no-reading", default=True, help="Compare ways of reading.")
@click.option("--jobs/--no-jobs", default=True, help="Run the jobs.")
@click.option(
    "--events",
    is_flag=True,
    help="Instead, run each job once with Spark's event log, and show what executors "
    "did.",
)
@click.option(
    "--cluster",
    is_flag=True,
    help="Instead, compare each job on this machine, on a cluster of two workers, and "
    "on the cluster while a worker is killed.",
)
@click.option(
    "--only",
    "names",
    multiple=True,
    help="With --events or --cluster: a job to run, in the order of the table.",
)
@click.option(
    "--recording",
    "recordings",
    multiple=True,
    help="A recording to audit; with --events or --cluster, also to report.",
)
@click.option(
    "--recorded-lines",
    type=click.IntRange(min=0),
    default=0,
    help="Also write recordings of that many lines, and use them as --recording.",
)
@click.option("--json", "as_json", is_flag=True, help="Print figures as JSON.")
def main(
    rows: int,
    rounds: int,
    dsn: str | None,
    small: bool,
    reading: bool,
    jobs: bool,
    events: bool,
    cluster: bool,
    names: tuple[str, ...],
    recordings: tuple[str, ...],
    recorded_lines: int,
    as_json: bool,
) -> None:
    """Measure the pipeline on a database of five million rows.

    The jobs are compared with S, a Spark session that counts ten rows, and F, a process
    that reads the raw tables into Parquet files.
    """
    if small:
        rows = _SMALL

    def report(text: str) -> None:
        click.echo(text, err=True)

    folder = Path(tempfile.mkdtemp(prefix="pipeline-bench-"))
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
        written = write_recordings(folder, rows, recorded_lines)
        recordings = (*recordings, *map(str, written))
        readings = {}
        figures = {}
        if events:
            found = dict(measure_events(dsn, MASTER, recordings, jobs=names))
            click.echo("\n".join(event_lines(found)))
            return
        if cluster:
            for line in measure_on_cluster(dsn, MASTER, recordings, names, report):
                click.echo(line)
            return
        if reading and not small:
            readings = _measure_reading(dsn, rounds, report)
        if jobs:
            figures = measure_jobs(
                dsn, rounds, report, recordings=recordings, small=small
            )
    finally:
        shutil.rmtree(folder)
        if server is not None:
            server.stop()
    if as_json:
        both: dict[str, Reading | JobFigures] = {**readings, **figures}
        click.echo(json.dumps({name: attrs.asdict(of) for name, of in both.items()}))
    else:
        click.echo("\n".join([*_reading_lines(readings), *_job_lines(figures)]))


def _measure_reading(
    dsn: str, rounds: int, report: Callable[[str], object]
) -> dict[str, Reading]:
    jars = {"spark.jars": str(DEBIAN_JAR)} if DEBIAN_JAR.is_file() else {}
    session = make_session("bench", master=MASTER, settings=jars)
    try:
        readings = measure_reading(
            session, PipelineSettings.of_dsn(dsn), rounds, report
        )
    finally:
        session.stop()
    return {reading.name: reading for reading in readings}


def _reading_lines(readings: Mapping[str, Reading]) -> Iterator[str]:
    for name, reading in readings.items():
        memory = reading.worker_mib
        yield (
            f"{name:28} {reading.rate:>9,.0f} rows/s   "
            + " ".join(f"{seconds:.1f} s" for seconds in reading.seconds)
            + (f"   worker at most {memory:.0f} MiB" if memory else "")
        )


def _job_lines(figures: Mapping[str, JobFigures]) -> Iterator[str]:
    if figures:
        yield (
            f"{'job':21} {'median':>8} {'goal':>8} {'S':>6} {'over S':>9} "
            f"{'after the last line':>20} {'memory':>9}   verdict"
        )
    for name, each in figures.items():
        goal = "" if each.goal is None else f"{each.goal:.2f} s"
        yield (
            f"{name:21} {each.seconds:>6.2f} s {goal:>8} {each.of_S:>6.2f} "
            f"{each.of_F:>7.2f} F {each.after_last_line:>18.2f} s "
            f"{each.memory_mib:>5.0f} MiB   {each.verdict}"
        ).rstrip()


if __name__ == "__main__":
    main()
