"""``scripts/bench-pipeline``: the pipeline with five million rows.

Reading is compared with Spark's JDBC reader and with COPY in one process, in the same
run. The jobs are run through the command line, and timed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import attrs
import click

from scripts.tools.pipeline_bench.jobs import MASTER, measure_jobs
from scripts.tools.pipeline_bench.reading import DEBIAN_JAR, measure_reading
from synapse_replication.pipeline.settings import settings_of_dsn
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
@click.option("--jobs/--no-jobs", default=True, help="Also run the jobs.")
@click.option("--json", "as_json", is_flag=True, help="Print figures as JSON.")
def main(
    rows: int, rounds: int, dsn: str | None, small: bool, jobs: bool, as_json: bool
) -> None:
    """Measure the pipeline on a database of five million rows.

    The jobs are compared with S, a Spark session that counts ten rows, and F, a process
    that reads the raw tables into Parquet files.
    """
    if small:
        rows = _SMALL

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
        figures: dict[str, object] = {}
        if not small:
            figures |= _measure_reading(dsn, rounds, report)
        if jobs:
            figures |= measure_jobs(dsn, rounds, report)
    finally:
        if server is not None:
            server.stop()
    click.echo(json.dumps(figures) if as_json else _table(figures))


def _measure_reading(
    dsn: str, rounds: int, report: Callable[[str], object]
) -> dict[str, object]:
    jars = {"spark.jars": str(DEBIAN_JAR)} if DEBIAN_JAR.is_file() else {}
    session = make_session("bench", master=MASTER, settings=jars)
    try:
        readings = measure_reading(session, settings_of_dsn(dsn), rounds, report)
    finally:
        session.stop()
    return {
        reading.name: {**attrs.asdict(reading), "rate": round(reading.rate)}
        for reading in readings
    }


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
                f"{name:22} {values['seconds']:>8} s  {values['of_S']:>6} S  after "
                f"Spark's start {values['of_F']:>6} F  after the last line "
                f"{values['after_last_line']:>5} s  exit status {values['status']}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
