"""Kill an archive's driver at every point, and check that each row is there once.

::

    python -m scripts.tools.archive_kills --kills 24 --seed 1

A private PostgreSQL gets new rows before each run. A run is a process of its own, with
Spark; it is killed with SIGKILL at each named point of the writing protocol first, then
at random moments: its Python alone, its Java alone, or both. The next run starts at
once, while Java of the last one may still be alive. After each kill a reader of Parquet
that knows nothing of the protocol looks for rows that are doubled, or that no table
has. At the end a run is left alone; then Spark's reader, pyarrow's and the tables must
agree in every row.
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
from pathlib import Path
from typing import Any

import attrs
import click

from synapse_replication.pipeline.archive.writer import Point
from synapse_replication.testing.servers import PrivatePostgres
from tests.support.archive_database import (
    Key,
    add_rows,
    make_tables,
    read_keys,
)

__all__ = ["main"]

#: Who is killed.
WHOM = ("python", "both", "java")

#: Points that a run only comes to where folders cannot be exchanged.
_WITHOUT_EXCHANGE = (Point.SWAP_WRITTEN, Point.SWAP_OLD_AWAY)

#: Points that a run comes to once, or twice at most.
_ONCE = (Point.COMPACTION_STAGED, Point.COMPACTED)

_DSN_VARIABLE = "SYNAPSE_REPLICATION_DSN"
_ROWS_BEFORE_A_RUN = 200
_MAX_ROWS = 150
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
                rng.choice(WHOM), after=rng.randint(1, 16), delay=rng.uniform(0.0, 0.6)
            )
        )
    return kills[:count]


# -- in the process that is killed -------------------------------------------------


def _work(folder: str, kill: Kill | None, *, exchange: bool) -> None:
    """Archive once; at each point, say so, and maybe die."""
    from synapse_replication.pipeline.archive import compaction as archive_compaction
    from synapse_replication.pipeline.archive.progress import PlainReporter
    from synapse_replication.pipeline.archive.run import ArchiveSettings, run_archive
    from synapse_replication.pipeline.settings import settings_of_dsn

    if not exchange:
        archive_compaction.exchange_folders = _cannot
    reached: Counter[Point] = Counter()

    def watch(point: Point) -> None:
        reached[point] += 1
        print(point.value, flush=True)  # noqa: T201 -- for who started this
        if kill is not None and point is kill.point and reached[point] == kill.nth:
            _kill(os.getpid(), kill.whom)

    run_archive(
        ArchiveSettings(
            folder,
            settings_of_dsn(os.environ[_DSN_VARIABLE]),
            once=True,
            max_rows=_MAX_ROWS,
            compact_files=_COMPACT_FILES,
            master="local[2]",
        ),
        PlainReporter(sys.stderr),
        watch=watch,
    )


def _cannot(one: Path, other: Path) -> None:
    raise OSError(95, "Operation not supported")


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
            # Without its Java, Python ends by itself.
            if status < 0 or (status != 0 and kill.whom == "java"):
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
        if kill is not None and kill.point in _WITHOUT_EXCHANGE:
            arguments.append("--no-exchange")
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

    def _by_pyarrow(self) -> list[tuple[str, str, int, int, str]]:
        from pyarrow import dataset

        columns = ["stream", "instance_name", "stream_id", "row_index", "row"]
        rows = self._folder / "rows"
        if not any(rows.rglob("*.parquet")):
            return []
        table = dataset.dataset(rows, partitioning="hive").to_table(columns=columns)
        return sorted(zip(*(table[name].to_pylist() for name in columns), strict=True))

    def _compare(self) -> None:
        from synapse_replication.pipeline.archive.layout import read_archive
        from synapse_replication.pipeline.spark.session import job_session

        columns = ("stream", "instance_name", "stream_id", "row_index", "row")
        with job_session("archive_kills", master="local[2]") as session:
            archived = read_archive(session, self._folder).select(*columns)
            by_spark = sorted(map(tuple, archived.collect()))
            source = session.read.format("synapse_replication")
            source = source.option("dsn", self._dsn)
            by_source = sorted(map(tuple, source.load().select(*columns).collect()))
        by_pyarrow = self._by_pyarrow()
        keys: list[Key] = [row[:3] for row in by_pyarrow]
        self.result.rows = len(keys)
        if keys != read_keys(self._dsn):
            self.result.problems.append("pyarrow's rows are not the tables'")
        for name, rows in (
            ("the tables, by the data source", by_source),
            ("the archive, by Spark", by_spark),
            ("the archive, by pyarrow", by_pyarrow),
        ):
            self._say(f"{name}: {len(rows)} rows, checksum {_checksum(rows)}")
            if rows != by_pyarrow:
                self.result.problems.append(f"{name} has other rows than pyarrow reads")


def _checksum(rows: Iterable[object]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(repr(row).encode())
    return digest.hexdigest()[:16]


@click.command()
@click.option("--kills", default=24, show_default=True, help="How many.")
@click.option("--skip", default=0, help="So many of them; the first are the named.")
@click.option("--seed", default=1, show_default=True, help="Of what is random.")
@click.option("--child", hidden=True)
@click.option("--point", type=click.Choice([p.value for p in Point]), hidden=True)
@click.option("--nth", default=1, hidden=True)
@click.option("--whom", type=click.Choice(WHOM), default="python", hidden=True)
@click.option("--no-exchange", is_flag=True, hidden=True)
def main(
    kills: int,
    skip: int,
    seed: int,
    child: str | None,
    point: str | None,
    nth: int,
    whom: str,
    no_exchange: bool,
) -> None:
    """Kill an archive's driver again and again; exit with 1 if a row is amiss."""
    if child is not None:
        kill = None if point is None else Kill(whom, Point(point), nth)
        _work(child, kill, exchange=not no_exchange)
        return
    with tempfile.TemporaryDirectory(prefix="archive-kills-") as folder:
        server = PrivatePostgres()
        server.start()
        try:
            test = KillTest(server.new_database(), Path(folder, "archive"), click.echo)
            result = test.run(plan_kills(kills, random.Random(seed))[skip:])
        finally:
            server.stop()
    click.echo(f"{result.kills} kills, {result.rows} rows")
    for problem in result.problems:
        click.echo(f"PROBLEM: {problem}", err=True)
    sys.exit(1 if result.problems else 0)


if __name__ == "__main__":
    main()
