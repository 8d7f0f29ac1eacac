"""The course of the demonstration: start, write, break, repair, compare."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import attrs

from synapse_replication.demo.check import Tally, compare
from synapse_replication.demo.deployment import READERS, WRITERS, Deployment
from synapse_replication.demo.processes import wait_until_ready
from synapse_replication.demo.script import STREAMS
from synapse_replication.errors import ReplicationError

__all__ = ["DemoError", "Screen", "Tail", "run_demo"]

#: s between two looks at the files.
POLL = 0.2

#: How long readers may take to come level once everything is written, in s.
LEVEL_TIMEOUT = 45.0
#: How long writers may write nothing before they have finished, in s.
WRITE_TIMEOUT = 60.0

#: How long a reader, and Redis, stay away, in s.
AWAY = 1.0


class DemoError(ReplicationError):
    """The demonstration could not be carried out."""


class Screen(Protocol):
    """What the user sees."""

    def say(self, text: str) -> None:
        """Show a line."""
        ...

    def progress(self, rows: dict[str, int], total: int) -> None:
        """Show how many rows were written, and how many each reader has."""
        ...


class Tail:
    """Counts the rows in a growing file of lines as journals have them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.rows = 0
        self.finished = False
        self.positions: dict[tuple[str, str], int] = {}

    def read_on(self) -> None:
        """Read what was added.

        :raises DemoError: if the writer notes that it failed.
        """
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            # After a kill the file may have been cut, but never within a line that
            # was read here.
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                self._take(json.loads(line))

    def _take(self, entry: dict[str, object]) -> None:
        if "failed" in entry:
            raise DemoError(f"{self._path.stem} could not write: {entry['failed']}")
        if "finished" in entry:
            self.finished = True
            return
        rows, token = entry["rows"], entry["token"]
        assert isinstance(rows, list)
        assert isinstance(token, int)
        self.rows += len(rows)
        key = (str(entry["stream"]), str(entry["writer"]))
        self.positions[key] = max(token, self.positions.get(key, 0))


@attrs.frozen
class _Fault:
    """Something that is done when a share of the rows was written."""

    after: float
    cause: Callable[[], None]


class _Course:
    def __init__(self, deployment: Deployment, screen: Screen, total: int) -> None:
        self._deployment = deployment
        self._screen = screen
        self._total = total
        self._writers = {name: Tail(deployment.log_of(name)) for name in WRITERS}
        self._readers = {name: Tail(deployment.journal_of(name)) for name in READERS}

    def write_everything(self, faults: list[_Fault]) -> None:
        """Let the writers write, and cause the faults on the way.

        :raises DemoError: if they write no more, and have not finished.
        """
        self._deployment.let_writers_begin()
        before, deadline = 0, time.monotonic() + WRITE_TIMEOUT
        while not all(tail.finished for tail in self._writers.values()):
            self._look()
            if self._written() > before:
                before = self._written()
                deadline = time.monotonic() + WRITE_TIMEOUT
            elif time.monotonic() > deadline:
                raise DemoError(
                    f"nothing was written for {WRITE_TIMEOUT:.0f} s, and only {before} "
                    f"of {self._total} rows before; see the logs of the writers"
                )
            if faults and self._written() >= faults[0].after * self._total:
                faults.pop(0).cause()
            time.sleep(POLL)
        for fault in faults:
            fault.cause()

    def wait_until_level(self) -> bool:
        """Wait until all readers are where the writers are."""
        deadline = time.monotonic() + LEVEL_TIMEOUT
        while time.monotonic() < deadline:
            self._look()
            if self._is_level():
                return True
            time.sleep(POLL)
        return False

    def _is_level(self) -> bool:
        """Return whether each reader knows of each writer that nothing is to come.

        All writers of a stream take their ids from one sequence, so in the end all
        announce its last one.
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

    def _look(self) -> None:
        for process in self._deployment.processes.values():
            process.check()
        for tail in (*self._writers.values(), *self._readers.values()):
            tail.read_on()
        rows = {name: tail.rows for name, tail in self._readers.items()}
        self._screen.progress({"written": self._written()} | rows, self._total)


def run_demo(
    deployment: Deployment, screen: Screen, total: int, *, with_faults: bool
) -> list[Tally]:
    """Carry it out.

    :param total: rows that will be written.
    :raises ReplicationError: if something did not start, or ended too early.
    """
    screen.say("Starting a private PostgreSQL" + " and Redis" * bool(deployment.redis))
    deployment.start_servers()
    names = ", ".join(deployment.processes)
    screen.say(f"Starting {len(deployment.processes)} processes: {names}")
    deployment.start_processes()
    wait_until_ready(deployment.processes.values())

    screen.say(f"Look on, from {READERS[-1]}: {deployment.status_page}")

    screen.say(f"Writing {total} rows of a recording of real traffic")
    course = _Course(deployment, screen, total)
    course.write_everything(_faults(deployment, screen) if with_faults else [])
    screen.say("Everything is written; waiting until both readers have it")
    if not course.wait_until_level():
        screen.say(f"They did not get level within {LEVEL_TIMEOUT:.0f} s")
    for name, status in deployment.stop_processes().items():
        if status:
            screen.say(f"{name} ended with status {status}")
    return list(_compare(deployment))


def _faults(deployment: Deployment, screen: Screen) -> list[_Fault]:
    reader = deployment.processes[READERS[0]]
    redis = deployment.redis

    def kill_reader() -> None:
        screen.say(f"Killing {reader.name} with SIGKILL, starting it again")
        reader.kill()
        time.sleep(AWAY)
        reader.start()

    def restart_redis() -> None:
        assert redis is not None
        screen.say("Restarting Redis")
        redis.halt()
        time.sleep(AWAY)
        redis.start()

    faults = [_Fault(1 / 3, kill_reader)]
    if redis is not None:
        faults.append(_Fault(2 / 3, restart_redis))
    return faults


def _compare(deployment: Deployment) -> Iterator[Tally]:
    journals = {name: deployment.journal(name) for name in READERS}
    for stream in STREAMS.values():
        for writer in sorted(set(stream.writers.values())):
            written = deployment.written_rows(stream, writer)
            for reader, journal in journals.items():
                yield compare(stream.name, writer, reader, written, journal)
