"""Rounds of runs that are killed, and the checks after each run."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs

from scripts.tools.archive_kills.kills import PATIENCE_SECONDS, Kill, kill_process
from scripts.tools.archive_kills.reading import (
    checksum_of,
    read_by_duckdb,
    read_by_pyarrow,
    read_by_spark,
)
from scripts.tools.archive_kills.work import DSN_VARIABLE, STATUS_REFUSED
from tests.support.archive_database import (
    Key,
    add_rows,
    make_tables,
    read_keys,
)

_ROWS_BEFORE_A_RUN = 200

#: Starting Java takes most of the time of a run, so the optimizing compiler does not
#: pay off. The timeout is for starting a worker, which takes long on a busy machine.
_ENVIRON = {
    "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "PYSPARK_SUBMIT_ARGS": "--conf spark.sql.shuffle.partitions=2 "
    "--conf spark.python.authenticate.socketTimeout=120s pyspark-shell",
}


@attrs.define
class Result:
    """The result of a test.

    :ivar problems: the detected problems; empty if there are none.
    """

    kills: int = 0
    rows: int = 0
    problems: list[str] = attrs.Factory(list)


class _Points(threading.Thread):
    """Counts the points that a run reaches, and performs a kill at no named point."""

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
            kill_process(self._process.pid, self._kill.victims)


class KillTest:
    """Starts runs, kills them and checks the archive.

    :param dsn: the dsn of an empty database.
    :param folder: the folder of the archive.
    :param print_line: called with a description of each step.
    """

    def __init__(self, dsn: str, folder: Path, print_line: Any) -> None:
        self._dsn = dsn
        self._folder = folder
        self._print_line = print_line
        self.result = Result()

    def run(self, kills: Sequence[Kill]) -> Result:
        """Run all rounds; return the result."""
        make_tables(self._dsn)
        for kill in kills:
            add_rows(self._dsn, _ROWS_BEFORE_A_RUN)
            started = time.monotonic()
            status, points = self._start(kill)
            # After a kill of Java, Python ends by itself, or commits the written files.
            if status < 0 or (points and kill.victims == "java"):
                self.result.kills += 1
            elif status != 0:
                self.result.problems.append(f"{kill}: the run failed without a kill")
            elif kill.point is not None:
                self.result.problems.append(f"{kill}: the run never reached this point")
            seen = self._check_rows(str(kill))
            self._print_line(
                f"{kill}: status {status} after {time.monotonic() - started:.1f} s, "
                f"{points} points; the archive has {seen} rows"
            )
        return self._finish()

    def _finish(self) -> Result:
        """Run once more without a kill, and compare the archive with the database."""
        status, _ = self._start(None)
        if status != 0:
            self.result.problems.append(f"the last run ended with status {status}")
        self._compare()
        return self.result

    def _start(self, kill: Kill | None) -> tuple[int, int]:
        """Start a run, and wait until it ends.

        :return: the exit status, and the number of points that the run reached.
        """
        arguments = ["--child", str(self._folder)]
        if kill is not None and kill.point is not None:
            arguments += ["--point", kill.point.value, "--nth", str(kill.nth)]
            arguments += ["--victims", kill.victims]
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
                env={**os.environ, **_ENVIRON, DSN_VARIABLE: self._dsn},
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                text=True,
            )
        # Read in a thread, because Java has inherited the pipe and may outlive Python.
        points = _Points(process, kill)
        points.start()
        try:
            return process.wait(PATIENCE_SECONDS), points.count
        finally:
            process.kill()
            process.wait()

    def _check_rows(self, when: str) -> int:
        """Check for rows that are duplicated or were never written.

        :return: the number of rows in the archive.
        """
        found = [key[:3] for key in read_by_pyarrow(self._folder)]
        duplicated = [key for key, count in Counter(found).items() if count > 1]
        unwritten = set(found) - set(read_keys(self._dsn))
        if duplicated:
            self.result.problems.append(
                f"{when}: {len(duplicated)} rows are duplicated"
            )
        if unwritten:
            self.result.problems.append(
                f"{when}: {len(unwritten)} rows were never written"
            )
        return len(found)

    def _compare(self) -> None:
        by_source, by_spark = read_by_spark(self._folder, self._dsn)
        by_pyarrow = read_by_pyarrow(self._folder)
        keys: list[Key] = [row[:3] for row in by_pyarrow]
        self.result.rows = len(keys)
        expected = read_keys(self._dsn)
        for reader, found in (
            ("pyarrow", keys),
            ("DuckDB", read_by_duckdb(self._folder)),
        ):
            if found != expected:
                self.result.problems.append(
                    f"{reader} does not return the rows of the database"
                )
        for name, rows in (
            ("the database, read with the data source", by_source),
            ("the archive, read with Spark", by_spark),
            ("the archive, read with pyarrow", by_pyarrow),
        ):
            self._print_line(f"{name}: {len(rows)} rows, checksum {checksum_of(rows)}")
            if rows != by_pyarrow:
                self.result.problems.append(f"{name}: differs from pyarrow")


class TwoDriversTest(KillTest):
    """Runs two drivers concurrently, and checks the archive."""

    def run_rounds(self, rounds: int, rng: random.Random) -> Result:
        """Run all rounds; return the result."""
        make_tables(self._dsn)
        for number in range(1, rounds + 1):
            add_rows(self._dsn, _ROWS_BEFORE_A_RUN)
            # In every third round, the first driver is killed.
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
            refused = statuses.count(STATUS_REFUSED)
            self.refused += refused
            if any(status not in (0, STATUS_REFUSED, -9) for status in statuses):
                self.result.problems.append(f"round {number}: statuses {statuses}")
            seen = self._check_rows(f"round {number}")
            self._print_line(
                f"round {number}, {delay:.1f} s apart, killed: {kill}: statuses "
                f"{statuses}, {refused} refused; the archive has {seen} rows"
            )
        return self._finish()

    refused = 0
