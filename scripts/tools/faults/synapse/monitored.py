"""Judges ``synapse-replication monitor`` beside stock processes, under faults.

Every alarm of the monitor must have a cause, each process that is killed must be named
within :data:`NAMED_WITHIN`, and the rows that no process received must be counted. The
monitor has the deployment's file only.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
from prometheus_client.parser import text_string_to_metric_families

from scripts.tools.faults.synapse.alarms import Fault
from scripts.tools.faults.synapse.cluster import Cluster
from scripts.tools.faults.synapse.deployments import DEPLOYMENTS, PROCESSES
from scripts.tools.faults.synapse.evidence import Evidence
from scripts.tools.faults.synapse.nemeses import MIXABLE, Scene, cause
from scripts.tools.faults.synapse.traffic import Traffic
from scripts.tools.faults.synapse.verdict import Committed
from synapse_replication.errors import ServerStartError
from synapse_replication.testing.private_process import die_with_parent, free_port

#: The time within which the monitor names a process that was killed, in s.
NAMED_WITHIN = 15.0
#: The interval at which the monitor is asked, in s.
POLL = 0.5
#: The time of traffic without a fault in each round, in s.
QUIET = 10.0
#: For how long an alarm may be raised after a fault has ended, in s: the monitor asks
#: every 3 s, and some requests that it made before the end time out.
AFTER = 10.0
#: The least time after which a row counts as unannounced, and how long the alarm lasts.
PATIENCE, UNANNOUNCED_FOR = 30.0, 900.0

#: The time before and after a fault of the link in which rows are not verified, in s: a
#: row is reported when two checks have found it and the patience is over.
UNVERIFIED_BEFORE, UNVERIFIED_AFTER = PATIENCE + 20.0, 20.0
#: The metric that counts the rows that were not announced.
UNANNOUNCED_ROWS = "synapse_replication_unannounced_rows_total"

#: The kinds of alarms that are not about an instance.
LINK, DATABASE, UNANNOUNCED = "link", "database", "unannounced"
#: The faults of the monitor's link, by the beginnings of their names.
LINK_FAULTS = ("redis", "client")


@attrs.define
class Alarm:
    """A problem that the monitor showed.

    :ivar about: an instance, or what else has a problem.
    :ivar begin: when it was first seen, in s since the Unix epoch; ``end``: last seen.
    """

    about: str
    text: str
    begin: float
    end: float

    def __str__(self) -> str:
        begin, seconds = _clock_time(self.begin), self.end - self.begin
        return f"{begin}, {seconds:.0f} s: {self.about}: {self.text}"


def read_alarms(status: Any) -> dict[str, str]:
    """Return what a status shows as wrong: texts by what they are about."""
    found = {
        each["instance_name"]: each["problem"]
        for each in status["instances"]
        if each["problem"]
    }
    for text in status["not_ready"]:
        about = text.partition(": ")[0]
        if text == "no link is up":
            about = LINK
        elif text.startswith("cannot read the database"):
            about = DATABASE
        found.setdefault(about.removesuffix(" has not answered yet"), text)
    if status["unannounced"]:
        found[UNANNOUNCED] = f"{status['unannounced']} rows"
    for name in ("stuck_ids", "duplicates"):
        if status[name]:
            found[name] = str(status[name])
    return found


def is_caused(alarm: Alarm, faults: Sequence[Fault], lost_at: Sequence[float]) -> bool:
    """Return whether a fault explains an alarm.

    :param lost_at: when the rows were written that no process received, in s since the
        Unix epoch.
    """
    if alarm.about == UNANNOUNCED:
        return any(
            at + PATIENCE - 1 <= alarm.begin <= at + UNANNOUNCED_FOR for at in lost_at
        )
    for fault in faults:
        if not fault.start <= alarm.begin <= fault.end + AFTER:
            continue
        if (
            alarm.about in fault.victims
            or (alarm.about == LINK and _has(fault, LINK_FAULTS))
            or (alarm.about == DATABASE and _has(fault, ("postgres",)))
        ):
            return True
    return False


def _has(fault: Fault, kinds: tuple[str, ...]) -> bool:
    return any(name.startswith(kinds) for name in fault.names)


def read_counts(metrics: str) -> dict[tuple[str, str], int]:
    """Return how many rows were not announced, by stream and writer."""
    return {
        (labels["stream_name"], labels["instance_name"]): int(sample.value)
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name == UNANNOUNCED_ROWS and (labels := sample.labels)
    }


def find_wrong_counts(
    counts: Mapping[tuple[str, str], int],
    missed: Sequence[Committed],
    late: Sequence[Committed],
    faults: Sequence[Fault],
) -> list[str]:
    """Return which counts differ from the rows that no process received.

    :param counts: what the monitor counted.
    :param missed: the rows that no process received, and that still exist. Those that
        were written around a fault of the monitor's link may be missing.
    :param late: the rows that no process received in time, or that were removed since,
        which may be counted: ``missed`` among them.
    """
    unverified = [
        (fault.start - UNVERIFIED_BEFORE, fault.end + UNVERIFIED_AFTER)
        for fault in faults
        if _has(fault, LINK_FAULTS)
    ]
    least = Counter(
        (row.stream, row.writer)
        for row in missed
        if not any(start <= row.at <= end for start, end in unverified)
    )
    most = Counter((row.stream, row.writer) for row in late)
    wrong = []
    for key in sorted({*counts, *least}):
        count = counts.get(key, 0)
        if not least[key] <= count <= most[key]:
            tokens = ", ".join(
                f"{row.token} at {_clock_time(row.at)}"
                for row in late
                if (row.stream, row.writer) == key
            )
            wrong.append(
                f"{key[0]} of {key[1]}: {count} rows counted, and {least[key]} to "
                f"{most[key]} reached no process in time: {tokens or 'none'}"
            )
    return wrong


def _clock_time(moment: float) -> str:
    """Return the time of day of a moment, in UTC."""
    return time.strftime("%H:%M:%S", time.gmtime(moment))


class Watch:
    """A monitor as a process of its own, which is asked for its alarms at intervals.

    :param cluster: a running cluster.
    :ivar alarms: all alarms, in the order in which they began.
    :ivar polls: how often the monitor was asked.
    :ivar shown: the alarms that it shows now.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.alarms: list[Alarm] = []
        self.polls = 0
        self.shown: dict[str, str] = {}
        self._open: dict[str, Alarm] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        config = cluster.deployment.config_file
        redis = cluster.redis
        own = config.parent / "monitor.yaml"
        # The deployment's file has the proxy of the main process.
        settings = {"enabled": True, "host": redis.host, "port": redis.port}
        own.write_text(json.dumps({"redis": settings}))
        self._log = config.parent / "monitor.log"
        port = free_port()
        self._url = f"http://127.0.0.1:{port}/"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "synapse_replication.cli.main", "monitor"),
                    *("-c", str(config), "-c", str(own), "--port", str(port)),
                ],
                stdin=subprocess.DEVNULL,
                stderr=log,
                preexec_fn=die_with_parent(signal.SIGKILL),
            )

    def start(self) -> None:
        """Wait until the monitor finds nothing wrong, and begin to ask it.

        :raises ServerStartError: if it does not.
        """
        deadline = time.monotonic() + 60.0
        while self._fetch() != {}:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise ServerStartError(f"the monitor: {self._log.read_text()[-2000:]}")
            time.sleep(POLL)
        self._thread.start()

    def stop(self) -> int:
        """Stop the monitor, and return its exit status."""
        self._ended.set()
        self._thread.join()
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(30)

    def kill(self) -> None:
        """Stop the monitor at once."""
        self._ended.set()
        self._process.kill()
        self._process.wait()

    def wait_until(self, done: Callable[[], bool], seconds: float) -> float | None:
        """Wait for a condition; return for how long, or ``None`` if it was in vain."""
        start = time.monotonic()
        while not done():
            if time.monotonic() - start > seconds:
                return None
            time.sleep(POLL / 5)
        return time.monotonic() - start

    def _fetch(self) -> dict[str, str] | None:
        try:
            return read_alarms(json.loads(self._get("status.json")))
        except OSError:
            return None

    def counts(self) -> dict[tuple[str, str], int]:
        """Return how many rows were not announced, by stream and writer.

        :raises OSError: if the monitor does not respond.
        """
        return read_counts(self._get("metrics").decode())

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(self._url + path, timeout=10) as response:
            return bytes(response.read())

    def _poll(self) -> None:
        while not self._ended.wait(POLL):
            shown = self._fetch()
            now = time.time()
            if shown is None:
                shown = {"monitor": "it does not answer"}
            self.polls += 1
            for about, text in shown.items():
                if about not in self._open:
                    self._open[about] = Alarm(about, text, now, now)
                    self.alarms.append(self._open[about])
                self._open[about].end = now
            for about in set(self._open) - set(shown):
                del self._open[about]
            self.shown = shown


@attrs.frozen
class MonitoredResult:
    """The result of a run.

    :ivar named: by process, the times in s until a killed one was named; ``None`` if
        it was not.
    :ivar false: the alarms without a cause.
    :ivar polls: how often the monitor was asked.
    :ivar missed: the number of rows that no process received although they exist.
    :ivar removed: the number of those that were removed since.
    :ivar counted: the number of those that the monitor counted.
    :ivar wrong_counts: its counts that differ from these rows.
    """

    seconds: float
    faults: int
    requests: int
    polls: int
    named: dict[str, list[float | None]]
    alarms: tuple[str, ...]
    false: tuple[str, ...]
    missed: int
    removed: int
    counted: int
    wrong_counts: tuple[str, ...]
    exit_status: int

    @property
    def is_good(self) -> bool:
        """Whether nothing was false, and every killed process was named in time."""
        times = [each for times in self.named.values() for each in times]
        return (
            not self.false
            and not self.wrong_counts
            and None not in times
            and self.exit_status == 0
        )

    def lines(self) -> Iterator[str]:
        """Yield a summary."""
        yield (
            f"{self.seconds / 60:.0f} minutes, {self.faults} faults, {self.requests} "
            f"requests, {self.polls} looks at the monitor"
        )
        for name, times in self.named.items():
            texts = ["never" if each is None else f"{each:.1f}" for each in times]
            yield f"{name} killed, named after {', '.join(texts)} s"
        yield (
            f"{self.missed} rows reached no process, and {self.removed} more that were "
            f"removed since; {self.counted} rows counted"
        )
        yield from self.wrong_counts
        yield f"{len(self.alarms)} alarms, {len(self.false)} of them false"
        yield from self.false
        yield f"exit status of the monitor: {self.exit_status}"


def run_monitored(
    minutes: float, seed: int, print_line: Callable[[str], None]
) -> MonitoredResult:
    """Run a monitor beside five stock processes, with traffic and faults.

    :raises ReplicationError: if the deployment or the monitor does not start.
    """
    cluster = Cluster(DEPLOYMENTS["stock"])
    with contextlib.ExitStack() as stack:
        stack.callback(cluster.close)
        cluster.start()
        evidence, traffic = Evidence(cluster), Traffic(cluster)
        traffic.make_rooms()
        traffic.start()
        stack.callback(traffic.stop)
        watch = Watch(cluster)
        stack.callback(watch.kill)
        watch.start()
        return _Hour(cluster, watch, evidence, traffic, print_line).run(
            60.0 * minutes, random.Random(seed)
        )


@attrs.define(eq=False)
class _Hour:
    """Causes faults in turn, and collects what the monitor shows."""

    cluster: Cluster
    watch: Watch
    evidence: Evidence
    traffic: Traffic
    print_line: Callable[[str], None]
    faults: list[Fault] = attrs.Factory(list)
    named: dict[str, list[float | None]] = attrs.Factory(
        lambda: {name: [] for name in PROCESSES}
    )

    def run(self, seconds: float, chance: random.Random) -> MonitoredResult:
        start = time.monotonic()
        # Until now, the monitor verified nothing.
        connecting = Fault(("redis-connect",), frozenset(), 0.0, time.time())
        others = [name for name in MIXABLE if not name.startswith("kill-")]
        turns = itertools.cycle(range(len(PROCESSES) + len(others)))
        with self.traffic.writing(chance.getrandbits(32)):
            while time.monotonic() - start < seconds:
                time.sleep(QUIET)
                turn = next(turns)
                if turn < len(PROCESSES):
                    self._kill(PROCESSES[turn])
                else:
                    self._cause(others[turn - len(PROCESSES)], chance)
                self._collect()
            # A lost row is found when its writer has stored a later position.
            time.sleep(QUIET)
        # Until the rows of the last faults are judged.
        time.sleep(2 * PATIENCE)
        counts = self.watch.counts()
        exit_status = self.watch.stop()
        self.evidence.collect()
        missed, removed = self.evidence.unannounced()
        late = [row for rows in self.evidence.unannounced(PATIENCE) for row in rows]
        lost_at = [row.at for row in late]
        alarms = self.watch.alarms
        return MonitoredResult(
            time.monotonic() - start,
            len(self.faults),
            self.traffic.requests,
            self.watch.polls,
            self.named,
            tuple(map(str, alarms)),
            tuple(str(a) for a in alarms if not is_caused(a, self.faults, lost_at)),
            len(missed),
            len(removed),
            sum(counts.values()),
            tuple(find_wrong_counts(counts, missed, late, [connecting, *self.faults])),
            exit_status,
        )

    def _collect(self) -> None:
        # Every process is killed in each cycle. What was written until now is due to
        # those that run now, also after that.
        self.evidence.collect()
        self.evidence.judge_until(time.time())

    def _kill(self, name: str) -> None:
        began = time.time()
        self.cluster.process(name).kill()
        named = self.watch.wait_until(lambda: name in self.watch.shown, NAMED_WITHIN)
        self.cluster.start_process(name)
        self.faults.append(Fault((f"kill-{name}",), {name}, began, time.time()))
        self.named[name].append(named)
        well = self.watch.wait_until(lambda: name not in self.watch.shown, 30.0)
        self._report(f"kill {name}: named after {named}, well after {well}")

    def _cause(self, what: str, chance: random.Random) -> None:
        scene = Scene(self.cluster, self.traffic, self.evidence, chance)
        began = time.time()
        cause((what,), scene)
        self.faults.append(Fault((what,), scene.victims, began, time.time()))
        self._report(f"{what} {' '.join(sorted(scene.victims))}")

    def _report(self, text: str) -> None:
        self.print_line(f"{text}; shown: {self.watch.shown}")
