"""The steps of the demonstration: start, write, cause faults, recover, compare."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from synapse_replication.demo.check import JournalEntry, WriterTally, compare
from synapse_replication.demo.deployment import (
    READERS,
    WRITERS,
    Deployment,
    wait_until_ready,
)
from synapse_replication.demo.display import TextScreen
from synapse_replication.demo.script import STREAMS
from synapse_replication.errors import ReplicationError

#: The interval at which the journals and the writers' logs are read, in s.
PROGRESS_INTERVAL = 0.2
#: The time within which the readers must catch up after all rows are written, in s.
CATCH_UP_TIMEOUT = 45.0
#: The time without a new row after which unfinished writers count as failed, in s.
WRITE_TIMEOUT = 60.0
#: The downtime of a reader, and of Redis, in s.
DOWNTIME = 1.0


class DemoError(ReplicationError):
    """The demonstration could not be completed."""


class Tail:
    """Counts the rows in a growing journal, or in a writer's log."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.rows = 0
        self.finished = False
        self.positions: dict[tuple[str, str], int] = {}

    def read_new_lines(self) -> None:
        """Read the lines that were appended.

        :raises DemoError: if the writer logged a failure.
        """
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            # A process that was killed may truncate its file when it restarts, but
            # removes only an incomplete last line, which is never counted here.
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                self._process(json.loads(line))

    def _process(self, value: dict[str, object]) -> None:
        if "failed" in value:
            raise DemoError(f"{self._path.stem} could not write: {value['failed']}")
        if "finished" in value:
            self.finished = True
            return
        entry = msgspec.convert(value, JournalEntry)
        self.rows += len(entry.rows)
        key = (entry.stream_name, entry.instance_name)
        self.positions[key] = max(entry.token, self.positions.get(key, 0))


#: The share (0 to 1) of the rows after which a fault is caused, and what causes it.
_Fault = tuple[float, Callable[[], None]]


class _Course:
    """Follows the writers and readers of a run through their files."""

    def __init__(self, deployment: Deployment, screen: TextScreen, total: int) -> None:
        self._deployment = deployment
        self._screen = screen
        self._total = total
        self._writers = {name: Tail(deployment.log_of(name)) for name in WRITERS}
        self._readers = {name: Tail(deployment.journal_of(name)) for name in READERS}

    def write_everything(self, faults: list[_Fault]) -> None:
        """Let the writers write all rows, and cause the faults.

        Each fault is caused when the share of the rows that it names has been written,
        or, at the latest, when the writers have finished.

        :raises DemoError: if a writer fails, or no row is written for
            :data:`WRITE_TIMEOUT` s.
        :raises ServerStartError: if a process ends, or does not start again.
        """
        self._deployment.let_writers_begin()
        for share, cause in faults:
            self._wait_for_rows(share * self._total)
            cause()
        self._wait_for_rows(math.inf)

    def _wait_for_rows(self, count: float) -> None:
        """Wait until this many rows are written, or the writers have finished."""
        before, deadline = 0, time.monotonic() + WRITE_TIMEOUT
        while self._written() < count and not all(
            tail.finished for tail in self._writers.values()
        ):
            self._update()
            if self._written() > before:
                before = self._written()
                deadline = time.monotonic() + WRITE_TIMEOUT
            elif time.monotonic() > deadline:
                raise DemoError(
                    f"no row was written for {WRITE_TIMEOUT:.0f} s, after {before} of "
                    f"{self._total} rows; see the logs of the writers"
                )
            time.sleep(PROGRESS_INTERVAL)

    def wait_for_readers(self) -> bool:
        """Wait until all readers have caught up.

        :return: ``False`` if they have not within :data:`CATCH_UP_TIMEOUT` s.
        :raises DemoError: if a writer's log reports a failure.
        :raises ServerStartError: if a process ends.
        """
        deadline = time.monotonic() + CATCH_UP_TIMEOUT
        while time.monotonic() < deadline:
            self._update()
            if self._have_caught_up():
                return True
            time.sleep(PROGRESS_INTERVAL)
        return False

    def _have_caught_up(self) -> bool:
        """Return whether each reader is at the last position of each writer.

        The writers of a stream share one sequence. At the end, each writer announces
        the last id of that sequence.
        """
        last: dict[str, int] = {}
        for writer in self._writers.values():
            for (stream, _), token in writer.positions.items():
                last[stream] = max(token, last.get(stream, 0))
        return all(
            reader.positions.get((stream.name, writer), -1) == last[stream.name]
            for reader in self._readers.values()
            for stream in STREAMS.values()
            for writer in stream.writers.values()
            if stream.name in last
        )

    def _written(self) -> int:
        return sum(tail.rows for tail in self._writers.values())

    def _update(self) -> None:
        for process in self._deployment.processes.values():
            process.check()
        for tail in (*self._writers.values(), *self._readers.values()):
            tail.read_new_lines()
        rows = {name: tail.rows for name, tail in self._readers.items()}
        self._screen.progress({"written": self._written()} | rows, self._total)


def run_demo(
    deployment: Deployment, screen: TextScreen, total: int, *, with_faults: bool
) -> list[WriterTally]:
    """Run the demonstration.

    :param total: the number of rows that will be written.
    :return: the comparison for each (stream, writer) and reader.
    :raises ReplicationError: if a server or process does not start or ends too early,
        if a writer fails, or if no row is written for :data:`WRITE_TIMEOUT` s.
    """
    screen.print_line(
        "Starting a private PostgreSQL" + " and Redis" * bool(deployment.redis)
    )
    deployment.start_servers()
    names = ", ".join(deployment.processes)
    screen.print_line(f"Starting {len(deployment.processes)} processes: {names}")
    deployment.start_processes()
    wait_until_ready(deployment.processes.values())

    screen.print_line(f"Status page of {READERS[-1]}: {deployment.status_page}")

    screen.print_line(f"Writing {total} rows of a recording of real traffic")
    course = _Course(deployment, screen, total)
    course.write_everything(_faults(deployment, screen) if with_faults else [])
    screen.print_line(
        "All rows are written; waiting until both readers have received them"
    )
    if not course.wait_for_readers():
        screen.print_line(
            f"The readers did not catch up within {CATCH_UP_TIMEOUT:.0f} s"
        )
    for name, status in deployment.stop_processes().items():
        if status:
            screen.print_line(f"{name} ended with status {status}")
    return list(_compare(deployment))


def _faults(deployment: Deployment, screen: TextScreen) -> list[_Fault]:
    reader = deployment.processes[READERS[0]]
    redis = deployment.redis

    def kill_reader() -> None:
        screen.print_line(f"Killing {reader.name} with SIGKILL, and restarting it")
        reader.kill()
        time.sleep(DOWNTIME)
        reader.start()

    def restart_redis() -> None:
        assert redis is not None
        screen.print_line("Restarting Redis")
        redis.halt()
        time.sleep(DOWNTIME)
        redis.start()

    faults: list[_Fault] = [(1 / 3, kill_reader)]
    if redis is not None:
        faults.append((2 / 3, restart_redis))
    return faults


def _compare(deployment: Deployment) -> Iterator[WriterTally]:
    journals = {name: deployment.journal(name) for name in READERS}
    for stream in STREAMS.values():
        for writer in sorted(set(stream.writers.values())):
            written = deployment.written_rows(stream, writer)
            for reader, journal in journals.items():
                yield compare(stream.name, writer, reader, written, journal)
