"""Kill an archive's driver at every point, and check that each row is there once.

::

    python -m scripts.tools.archive_kills --kills 24 --seed 1
    python -m scripts.tools.archive_kills --two-drivers 8 --seed 1

A private PostgreSQL gets new rows before each run. A run is a process of its own, with
Spark; it is killed with SIGKILL at each named point of the writing first, then at
random moments: its Python alone, its Java alone, or both. The next run starts at once,
while Java of the last one may still be alive. After each kill the Delta tables are read
and searched for rows that are doubled, or that no table of the database has. At the end
a run is left alone; then Spark's reader, DuckDB's, pyarrow's and the tables must agree
in every row.

With ``--two-drivers`` two runs archive to one place at the same time, round after
round, and one of them is killed now and then. A run that another one was ahead of must
end with a message that says so.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import click

from synapse_replication.pipeline.archive.table import Point
from synapse_replication.testing.servers import PrivatePostgres
from tests.support.archive_database import (
    Key,
    add_rows,
    make_tables,
    read_keys,
)

__all__ = ["main"]

#: Stream, writer, token, place, row.
Row: TypeAlias = tuple[Any, ...]

_KEYS = ("instance_name", "stream_id", "row_index")

#: Who is killed.
WHOM = ("python", "both", "java")

#: Points that a run comes to once.
_ONCE = (Point.PLANNED, Point.COMPACTING, Point.COMPACTED, Point.VACUUMED)

_DSN_VARIABLE = "SYNAPSE_REPLICATION_DSN"
_RETENTION_VARIABLE = "ARCHIVE_KILLS_RETENTION_HOURS"

#: How a run ends that another one was ahead of.
_STATUS_REFUSED = 3
_REFUSED = "refused: "
_FIRST = "first: one driver at a time"
_ROWS_BEFORE_A_RUN = 200
_BATCH_IDS = 150
_COMPACT_FILES = 3
_PATIENCE_SECONDS = 300.0

#: Most of a run is Java's start: no time for its better compiler. A busy machine takes
#: long to start a worker.
_ENVIRON = {
    "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "PYSPARK_SUBMIT_ARGS": "--conf spark.sql.shuffle.partitions=2 "
    "--conf spark.python.authenticate.socketTimeout=120s pyspark-shell",
}


@attrs.frozen
class Kill:
    """When and whom to kill.

    :ivar point: a named point, and the how-manieth time it is reached; or else
    :ivar after: so many points of any name, and
    :ivar delay: so many s more.
    """

    whom: str
    point: Point | None = None
    nth: int = 1
    after: int = 0
    delay: float = 0.0

    def __str__(self) -> str:
        if self.point is not None:
            return f"{self.whom} at {self.point.value} {self.nth}"
        return f"{self.whom} {self.delay:.2f} s after point {self.after}"


def plan_kills(count: int, rng: random.Random) -> list[Kill]:
    """Plan each named point once, and the rest at random."""
    kills = [
        Kill(WHOM[index % len(WHOM)], point, 1 if point in _ONCE else rng.randint(1, 2))
        for index, point in enumerate(Point)
    ]
    while len(kills) < count:
        kills.append(
            Kill(
                rng.choice(WHOM), after=rng.randint(1, 12), delay=rng.uniform(0.0, 0.6)
            )
        )
    return kills[:count]


# -- in the process that is killed -------------------------------------------------


def _work(folder: str, kill: Kill | None) -> None:
    """Archive once; at each point, say so, and maybe die."""
    from synapse_replication.errors import PipelineError
    from synapse_replication.pipeline.archive.progress import PlainReporter
    from synapse_replication.pipeline.archive.run import ArchiveSettings, run_archive
    from synapse_replication.pipeline.settings import settings_of_dsn

    reached: Counter[Point] = Counter()

    def watch(point: Point) -> None:
        reached[point] += 1
        print(point.value, flush=True)  # noqa: T201 -- for the process that started this
        if kill is not None and point is kill.point and reached[point] == kill.nth:
            _kill(os.getpid(), kill.whom)

    try:
        run_archive(
            ArchiveSettings(
                folder,
                settings_of_dsn(os.environ[_DSN_VARIABLE]),
                once=True,
                batch_ids=_BATCH_IDS,
                compact_files=_COMPACT_FILES,
                retention_hours=int(os.environ.get(_RETENTION_VARIABLE, "168")),
                master="local[2]",
            ),
            PlainReporter(sys.stderr),
            watch=watch,
        )
    except PipelineError as error:
        print(f"{_REFUSED}{error}", flush=True)  # noqa: T201
        sys.exit(_STATUS_REFUSED if _FIRST in str(error) else 1)


def _kill(python: int, whom: str) -> None:
    """Kill a process of its own group, its Java, or both."""
    if whom == "both":
        os.killpg(python, signal.SIGKILL)
        return
    victim = python if whom == "python" else _java_of(python)
    if victim is not None:
        os.kill(victim, signal.SIGKILL)
    if whom == "java" and python == os.getpid():
        # What the point leads to must not happen any more.
        time.sleep(_PATIENCE_SECONDS if victim is None else 2)


def _java_of(python: int) -> int | None:
    children = Path(f"/proc/{python}/task").glob("*/children")
    for child in " ".join(path.read_text() for path in children).split():
        if b"java" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")[0]:
            return int(child)
    return None


# -- in the process that looks on --------------------------------------------------


@attrs.define
class Result:
    """What was seen.

    :ivar problems: empty if all is well.
    """

    kills: int = 0
    rows: int = 0
    problems: list[str] = attrs.Factory(list)


class _Points(threading.Thread):
    """Counts the points that a run comes to, and kills it at random ones."""

    def __init__(self, process: subprocess.Popen[str], kill: Kill | None) -> None:
        super().__init__(daemon=True)
        self._process = process
        self._after = kill.after if kill is not None and kill.point is None else None
        self._kill = kill
        self.count = 0

    def run(self) -> None:
        process = self._process
        assert process.stdout is not None
        with process.stdout:
            self._maybe_kill()
            for _ in process.stdout:
                self.count += 1
                self._maybe_kill()

    def _maybe_kill(self) -> None:
        if self._kill is None or self.count != self._after:
            return
        time.sleep(self._kill.delay)
        if self._process.poll() is None:
            _kill(self._process.pid, self._kill.whom)


class KillTest:
    """Runs, kills and checks.

    :param dsn: of an empty database.
    :param folder: of the archive.
    :param say: is told each step.
    """

    def __init__(self, dsn: str, folder: Path, say: Any) -> None:
        self._dsn = dsn
        self._folder = folder
        self._say = say
        self.result = Result()

    def run(self, kills: Sequence[Kill]) -> Result:
        """Do it all."""
        make_tables(self._dsn)
        for kill in kills:
            add_rows(self._dsn, _ROWS_BEFORE_A_RUN)
            started = time.monotonic()
            status, points = self._start(kill)
            # Without its Java, Python ends by itself, or commits what is written.
            if status < 0 or (points and kill.whom == "java"):
                self.result.kills += 1
            elif status != 0:
                self.result.problems.append(f"{kill}: the run failed by itself")
            elif kill.point is not None:
                self.result.problems.append(f"{kill}: the run never came there")
            seen = self._look(str(kill))
            self._say(
                f"{kill}: status {status} after {time.monotonic() - started:.1f} s, "
                f"{points} points; {seen} rows are there"
            )
        status, _ = self._start(None)
        if status != 0:
            self.result.problems.append(f"the last run ended with status {status}")
        self._compare()
        return self.result

    def _start(self, kill: Kill | None) -> tuple[int, int]:
        """Run until it ends or is killed; tell its status and how many points."""
        arguments = ["--child", str(self._folder)]
        if kill is not None and kill.point is not None:
            arguments += ["--point", kill.point.value, "--nth", str(kill.nth)]
            arguments += ["--whom", kill.whom]
        log = self._folder.with_suffix(".log")
        with log.open("ab") as errors:
            process = subprocess.Popen(
                [
                    *(
                        sys.executable,
                        "-m",
                        "scripts.tools.archive_kills",
                    ),
                    *arguments,
                ],
                env={**os.environ, **_ENVIRON, _DSN_VARIABLE: self._dsn},
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                text=True,
            )
        # In a thread, since Java has the pipe, too, and lives on for a while.
        points = _Points(process, kill)
        points.start()
        try:
            return process.wait(_PATIENCE_SECONDS), points.count
        finally:
            process.kill()
            process.wait()

    def _look(self, when: str) -> int:
        """Look for rows that are doubled or that nobody wrote."""
        seen = [key[:3] for key in self._by_pyarrow()]
        doubled = [key for key, count in Counter(seen).items() if count > 1]
        strangers = set(seen) - set(read_keys(self._dsn))
        if doubled:
            self.result.problems.append(f"{when}: {len(doubled)} rows are doubled")
        if strangers:
            self.result.problems.append(f"{when}: {len(strangers)} rows of nobody")
        return len(seen)

    def _by_pyarrow(self) -> list[Row]:
        """Read the tables by their logs and files."""
        from deltalake import DeltaTable

        from synapse_replication.pipeline.archive.store import open_store
        from synapse_replication.pipeline.json_rows import json_rows
        from synapse_replication.pipeline.tables import standard_tables

        store = open_store(self._folder)
        rows: list[Row] = []
        for stream in store.streams():
            if not DeltaTable.is_deltatable(store.stream_uri(stream)):
                continue
            found = DeltaTable(store.stream_uri(stream)).to_pyarrow_dataset()
            for batch in found.to_batches():
                texts = json_rows(standard_tables()[stream], batch).to_pylist()
                columns = [batch.column(name).to_pylist() for name in _KEYS]
                rows += [(stream, *row) for row in zip(*columns, texts, strict=True)]
        return sorted(rows)

    def _by_duckdb(self) -> list[Key]:
        """Read the tables as an analyst does."""
        import duckdb
        from deltalake import DeltaTable

        keys: list[Key] = []
        for folder in sorted((self._folder / "streams").iterdir()):
            table = DeltaTable(folder).to_pyarrow_dataset()
            with duckdb.connect() as connection:
                connection.register("archived", table)
                found = connection.execute(
                    "SELECT instance_name, stream_id FROM archived"
                ).fetchall()
            keys += [(folder.name, *row) for row in found]
        return sorted(keys)

    def _compare(self) -> None:
        from synapse_replication.pipeline.archive.frames import read_archive
        from synapse_replication.pipeline.spark.session import job_session

        columns = ("stream", *_KEYS, "row")
        with job_session("archive_kills", master="local[2]") as session:
            archived = read_archive(session, self._folder).rows().select(*columns)
            by_spark = sorted(map(tuple, archived.collect()))
            source = session.read.format("synapse_replication")
            source = source.option("dsn", self._dsn)
            by_source = sorted(map(tuple, source.load().select(*columns).collect()))
        by_pyarrow = self._by_pyarrow()
        keys: list[Key] = [row[:3] for row in by_pyarrow]
        self.result.rows = len(keys)
        expected = read_keys(self._dsn)
        for reader, found in (("pyarrow", keys), ("DuckDB", self._by_duckdb())):
            if found != expected:
                self.result.problems.append(f"{reader}'s rows are not the tables'")
        for name, rows in (
            ("the tables, by the data source", by_source),
            ("the archive, by Spark", by_spark),
            ("the archive, by pyarrow", by_pyarrow),
        ):
            self._say(f"{name}: {len(rows)} rows, checksum {_checksum(rows)}")
            if rows != by_pyarrow:
                self.result.problems.append(f"{name} has other rows than pyarrow reads")


class TwoDriversTest(KillTest):
    """Runs two drivers at once, and checks."""

    def run_rounds(self, rounds: int, rng: random.Random) -> Result:
        """Do it all."""
        make_tables(self._dsn)
        for number in range(1, rounds + 1):
            add_rows(self._dsn, _ROWS_BEFORE_A_RUN)
            # Every third round one of them is killed.
            kill = (
                Kill("both", after=rng.randint(2, 10), delay=rng.uniform(0, 0.3))
                if number % 3 == 0
                else None
            )
            delay = rng.uniform(0.0, 1.0)
            with ThreadPoolExecutor(2) as pool:
                first = pool.submit(self._start, kill)
                time.sleep(delay)
                second = pool.submit(self._start, None)
                statuses = [first.result()[0], second.result()[0]]
            self.result.kills += statuses[0] < 0
            refused = statuses.count(_STATUS_REFUSED)
            self.refused += refused
            if any(status not in (0, _STATUS_REFUSED, -9) for status in statuses):
                self.result.problems.append(f"round {number}: statuses {statuses}")
            seen = self._look(f"round {number}")
            self._say(
                f"round {number}, {delay:.1f} s apart, killed: {kill}: statuses "
                f"{statuses}, {refused} refused; {seen} rows are there"
            )
        status, _ = self._start(None)
        if status != 0:
            self.result.problems.append(f"the last run ended with status {status}")
        self._compare()
        return self.result

    refused = 0


def _checksum(rows: Iterable[object]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(repr(row).encode())
    return digest.hexdigest()[:16]


@click.command()
@click.option("--kills", default=24, show_default=True, help="How many.")
@click.option("--two-drivers", default=0, help="Rounds of two drivers at once instead.")
@click.option("--skip", default=0, help="So many of them; the first are the named.")
@click.option("--seed", default=1, show_default=True, help="Of what is random.")
@click.option("--child", hidden=True)
@click.option("--point", type=click.Choice([p.value for p in Point]), hidden=True)
@click.option("--nth", default=1, hidden=True)
@click.option("--whom", type=click.Choice(WHOM), default="python", hidden=True)
def main(
    kills: int,
    two_drivers: int,
    skip: int,
    seed: int,
    child: str | None,
    point: str | None,
    nth: int,
    whom: str,
) -> None:
    """Kill an archive's driver again and again; exit with 1 if a row is amiss."""
    if child is not None:
        _work(child, None if point is None else Kill(whom, Point(point), nth))
        return
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="archive-kills-") as folder:
        server = PrivatePostgres()
        server.start()
        try:
            place = Path(folder, "archive")
            dsn = server.new_database()
            if two_drivers:
                test = TwoDriversTest(dsn, place, click.echo)
                result = test.run_rounds(two_drivers, rng)
                click.echo(f"{test.refused} drivers were refused")
            else:
                # Alone, a run may remove what no commit names at once.
                os.environ[_RETENTION_VARIABLE] = "0"
                planned = plan_kills(kills, rng)[skip:]
                result = KillTest(dsn, place, click.echo).run(planned)
        finally:
            server.stop()
    click.echo(f"{result.kills} kills, {result.rows} rows")
    for problem in result.problems:
        click.echo(f"PROBLEM: {problem}", err=True)
    sys.exit(1 if result.problems else 0)


if __name__ == "__main__":
    main()
