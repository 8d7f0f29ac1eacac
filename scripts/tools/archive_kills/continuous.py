"""A continuous archive beside a running deployment, with kills of both."""

from __future__ import annotations

import random
import re
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import attrs
from deltalake import DeltaTable

from scripts.tools.archive_kills.kills import (
    PATIENCE_SECONDS,
    VICTIMS,
    java_of,
    kill_process,
)
from scripts.tools.faults.deployment import FaultDeployment, Needs
from synapse_replication.demo.deployment import DemoPlan, wait_until_ready
from synapse_replication.demo.script import STREAMS
from synapse_replication.pipeline.archive.store import ArchiveStore
from synapse_replication.recordings.reader import shipped_recording
from synapse_replication.streams.standard.registry import MAIN_INSTANCE
from synapse_replication.testing.private_process import free_port

#: The rate of all writers together, in rows per second.
RATE = 60.0
#: The pause of the archive between two searches for rows, in s.
EVERY = 10.0
#: The time from one kill to the next, in s.
BETWEEN_KILLS = (90.0, 150.0)
#: The interval of the samples, in s.
SAMPLE = 5.0
#: The greatest lag of an archive that has caught up, in s: two triggers.
MAX_LAG = 2 * EVERY

_POSITION = re.compile(
    r"^synapse_replication_archive_position{([^}]*)} (\S+)$", re.MULTILINE
)
_LABEL = re.compile(r'(\w+)="([^"]*)"')

Positions: TypeAlias = dict[tuple[str, str], int]


@attrs.define
class Sample:
    """What was measured at one moment.

    :ivar at: since the start of the test, in s.
    :ivar age: since the start of the archive's process, in s.
    :ivar lag: of the stream that lags most, in s; ``None`` if it was not served.
    :ivar python: the memory (PSS) of Python, in MiB.
    :ivar java: the memory (PSS) of Java, in MiB.
    """

    at: float
    age: float
    lag: float | None
    python: float
    java: float


class ContinuousTest:
    """Runs the archive for some time, and compares every row at the end.

    :param folder: a folder for the archive and its log.
    :param print_line: called with a description of each step.
    :ivar samples: the measurements.
    """

    def __init__(
        self, folder: Path, rng: random.Random, print_line: Callable[[str], object]
    ) -> None:
        self._archive = folder / "archive"
        self._log = folder / "archive.log"
        self._rng = rng
        self._print_line = print_line
        self._port = free_port()
        plan = DemoPlan(shipped_recording(), 0, RATE, use_redis=True)
        self._deployment = FaultDeployment(plan, Needs(), 0)
        self._started = 0.0
        self._stored: list[tuple[float, Positions]] = []
        self.samples: list[Sample] = []

    def run(self, minutes: float) -> list[str]:
        """Run the test; return the problems."""
        deployment = self._deployment
        try:
            deployment.start_servers()
            deployment.start_processes()
            wait_until_ready(deployment.processes.values())
            deployment.let_writers_begin()
            problems = self._follow(time.monotonic() + minutes * 60)
            deployment.end_writers()
            deployment.stop_processes()
            last = self._start("--once")
            if (status := last.wait(PATIENCE_SECONDS)) != 0:
                problems.append(f"the last run ended with status {status}")
            return problems + self._compare() + self._judge()
        finally:
            deployment.close()

    def _follow(self, end: float) -> list[str]:
        begun = time.monotonic()
        process, self._started = self._start(), begun
        kill_at = begun + self._rng.uniform(*BETWEEN_KILLS)
        kills = 0
        try:
            while (now := time.monotonic()) < end:
                time.sleep(SAMPLE)
                if process.poll() is None and now < kill_at:
                    self._sample(process.pid, begun)
                    continue
                if process.poll() is None:
                    victims = self._rng.choice(VICTIMS)
                    kill_process(process.pid, victims)
                    writer = self._rng.random() < 0.5
                    if writer:
                        self._deployment.kill("event_writer1")
                        self._deployment.restart("event_writer1")
                    status = process.wait(PATIENCE_SECONDS)
                    kills += 1
                    self._print_line(
                        f"{now - begun:.0f} s: killed {victims}"
                        f"{' and a writer' if writer else ''}: status {status}"
                    )
                    kill_at = time.monotonic() + self._rng.uniform(*BETWEEN_KILLS)
                else:
                    return [f"the archive ended with status {process.returncode}"]
                process, self._started = self._start(), time.monotonic()
            process.send_signal(signal.SIGTERM)
            status = process.wait(PATIENCE_SECONDS)
            self._print_line(f"{kills} kills; SIGTERM: status {status}")
            return [] if status == 0 else [f"SIGTERM ended it with status {status}"]
        finally:
            process.kill()
            process.wait()

    def _start(self, *options: str) -> subprocess.Popen[bytes]:
        folder = self._deployment.directory
        configs = (folder / "homeserver.yaml", folder / f"{MAIN_INSTANCE}.yaml")
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [
                    *(sys.executable, "-m", "synapse_replication"),
                    *("pipeline", "archive", "--archive", str(self._archive)),
                    *(part for path in configs for part in ("-c", str(path))),
                    *("--every", str(EVERY), "--metrics-port", str(self._port)),
                    *options,
                ],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _sample(self, pid: int, begun: float) -> None:
        java = java_of(pid)
        now = time.monotonic()
        sample = Sample(
            now - begun,
            now - self._started,
            self._lag(),
            _pss(pid),
            0.0 if java is None else _pss(java),
        )
        self.samples.append(sample)

    def _lag(self) -> float | None:
        """Return for how long the archive has lacked a position of a writer."""
        now = time.monotonic()
        self._stored.append((now, self._deployment.stored_positions()))
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self._port}/metrics", timeout=5
            ) as response:
                archived = read_positions(response.read().decode())
        except OSError:
            return None
        if not archived:
            return None
        for at, stored in self._stored:
            if any(token > archived.get(key, 0) for key, token in stored.items()):
                return now - at
        return 0.0

    def _compare(self) -> list[str]:
        """Compare the archived rows with those of the database."""
        problems, total = [], 0
        store = ArchiveStore.existing(str(self._archive))
        for stream in STREAMS.values():
            if stream.in_memory:
                continue
            table = DeltaTable(store.stream_uri(stream.name)).to_pyarrow_table(
                columns=["instance_name", "stream_id"]
            )
            found = Counter(zip(*table.to_pydict().values(), strict=True))
            expected = Counter(
                (writer, token)
                for writer in self._deployment.all_writers_of(stream)
                for token, _ in self._deployment.written_rows(stream, writer)
            )
            total += expected.total()
            if found != expected:
                problems.append(
                    f"{stream.name}: {(expected - found).total()} rows are missing, "
                    f"{(found - expected).total()} are duplicated or were never written"
                )
        self._print_line(f"{total} rows compared")
        return problems

    def _judge(self) -> list[str]:
        """Judge the lag and the memory."""
        judged: list[Sample] = []
        recoveries: dict[int, float] = {}
        for sample in self.samples:
            # The first samples of a process are those before it has caught up.
            process = round(sample.at - sample.age)
            if sample.lag is not None and sample.lag <= MAX_LAG:
                recoveries.setdefault(process, sample.age)
            if process in recoveries:
                judged.append(sample)
        lags = [s.lag for s in judged if s.lag is not None]
        if not lags:
            return ["the archive never caught up"]
        self._print_line(
            f"after each start, caught up within {max(recoveries.values()):.0f} s; "
            f"then, lag of {len(lags)} samples: median {statistics.median(lags):.1f} "
            f"s, greatest {max(lags):.1f} s"
        )
        problems = []
        if max(lags) > MAX_LAG:
            problems.append(f"a lag of {max(lags):.1f} s is more than two triggers")
        half = self.samples[-1].at / 2
        first = [s for s in judged if s.at < half]
        second = [s for s in judged if s.at >= half]
        for name in ("python", "java"):
            before, after = (
                statistics.median(getattr(s, name) for s in part)
                for part in (first, second)
            )
            self._print_line(
                f"memory of {name}: {before:.0f} MiB in the first half of the time, "
                f"{after:.0f} MiB in the second"
            )
            if after > 1.1 * before:
                problems.append(f"the memory of {name} grows")
        return problems


def read_positions(metrics: str) -> Positions:
    """Return the archived position of each writer of a stream."""
    found: Positions = {}
    for labels, value in _POSITION.findall(metrics):
        named = dict(_LABEL.findall(labels))
        found[named["stream"], named["instance_name"]] = int(float(value))
    return found


def _pss(pid: int) -> float:
    """Return the memory of a process, in MiB; 0 if it has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0.0
    found = re.search(r"^Pss:\s+(\d+)", text, re.MULTILINE)
    return int(found[1]) / 1024 if found else 0.0
