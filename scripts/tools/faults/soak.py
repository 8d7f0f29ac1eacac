"""A soak: faults and a liar, for minutes or hours, on one deployment under load.

A fault begins every 20 s, and a peer publishes false or invalid messages in every
second. Some processes are frozen but never killed: their memory must stay flat, and
they must not gain descriptors or delayed calls. What belongs to pools is counted apart,
because catch-ups fill them: it must not exceed the bounds of the pools.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice

import attrs

from scripts.tools import hostile
from scripts.tools.faults.attacks import false_messages
from scripts.tools.faults.deployment import (
    CONNECTIONS,
    THREADS,
    FaultDeployment,
    Needs,
)
from scripts.tools.faults.run import Result, Settings, run_scenario
from scripts.tools.faults.scenarios import SCENARIOS, Scenario
from synapse_replication.config.deployment import DEFAULT_CONNECTIONS
from synapse_replication.demo.deployment import READERS, SERVER_NAME, WRITERS

#: The interval between the beginnings of faults, in s, and between messages.
FAULT_INTERVAL, LIE_INTERVAL = 20.0, 1.0
#: The scenarios whose faults are caused.
FAULTS = (
    "main-killed",
    "writer-killed",
    "reader-killed",
    "writer-frozen",
    "reader-frozen",
    "redis-killed",
    "redis-frozen",
    "postgres-killed",
    "subscription-cut",
    "hostile-long-names",
    "hostile-bodies",
)
#: The processes that no fault kills.
SURVIVORS = ("event_writer2", "typing_writer", "reader2")
#: The time within which rows must arrive again after each fault, in s.
NEXT_ROW_TIMEOUT = 15.0
#: The share of the soak after which nothing may grow, and by how much memory may.
WARM_UP, GROWTH = 1 / 6, 1.05
#: The number of samples that are compared: one after each kind of fault, because they
#: vary with the links that it replaces.
COMPARED = len(FAULTS)
#: The idle HTTP connections that Twisted keeps to one host.
PER_HOST = 2
#: The most of what belongs to pools: the sessions of the database, with one for the
#: lock of the name; HTTP connections to and from each other process; the pair by which
#: the reactor is woken. A thread for each session, the main one, and that of the turns.
POOLS = {
    CONNECTIONS: DEFAULT_CONNECTIONS
    + 1
    + 2 * PER_HOST * (len(WRITERS) + len(READERS) - 1)
    + 2,
    THREADS: DEFAULT_CONNECTIONS + 1 + 2,
}
#: The value that is measured in MiB; the others are counts.
MEMORY = "memory"


@attrs.define
class Findings:
    """The measurements during a soak.

    :ivar faults: the number of faults.
    :ivar lies: the number of false or invalid messages.
    :ivar slowest: the longest time from the end of a fault until a row of each writer
        of events had arrived at a reader, in s, and the fault.
    :ivar samples: by survivor and what is measured: its value after each fault.
    """

    faults: int = 0
    lies: int = 0
    slowest: tuple[float, str] = (0.0, "")
    samples: dict[tuple[str, str], list[float]] = attrs.Factory(dict)

    def measure(self, name: str, what: str, value: float) -> None:
        """Add a sample."""
        self.samples.setdefault((name, what), []).append(value)

    def problems(self) -> list[str]:
        """Return what must not be: growth, and a late row."""
        found = []
        seconds, fault = self.slowest
        if seconds >= NEXT_ROW_TIMEOUT:
            found.append(f"after {fault}, a writer's next row took {seconds:.0f} s")
        for (name, what), values in self.samples.items():
            warm, end = _compared(values)
            if what in POOLS:
                if end > POOLS[what]:
                    found.append(
                        f"{what} of {name}: {end:.0f} at the end, {POOLS[what]} allowed"
                    )
            elif end > warm * (GROWTH if what == MEMORY else 1.0):
                found.append(
                    f"{what} of {name}: {warm:.1f} after the warm-up, {end:.1f} at the "
                    "end"
                )
        return found

    def latest(self) -> str:
        """Return the last samples of each survivor."""
        shown: dict[str, list[str]] = {}
        for (name, what), values in self.samples.items():
            text = f"{values[-1]:.1f} MiB" if what == MEMORY else f"{values[-1]:.0f}"
            shown.setdefault(name, []).append(text)
        return ", ".join(f"{name} {'/'.join(texts)}" for name, texts in shown.items())

    def lines(self) -> list[str]:
        """Return a summary."""
        seconds, fault = self.slowest
        lines = [
            f"{self.faults} faults, {self.lies} false or invalid messages",
            f"the next row after a fault: {seconds:.1f} s at most (after {fault})",
        ]
        for (name, what), values in self.samples.items():
            warm, end = _compared(values)
            allowed = f"; {POOLS[what]} allowed" if what in POOLS else ""
            lines.append(
                f"{what} of {name}: {warm:.1f} after the warm-up, {max(values):.1f} at "
                f"most, {end:.1f} at the end ({end / warm - 1:+.1%}{allowed})"
            )
        return lines


def _compared(values: Sequence[float]) -> tuple[float, float]:
    """Return the lower quartiles of those after the warm-up, and of the last ones.

    A link that a fault has just broken lowers a count at one moment. One that is being
    replaced, and a request in progress, raise it, which is more frequent.
    """
    begin = int(len(values) * WARM_UP)
    first, last = values[begin : begin + COMPARED], values[-COMPARED:]
    return _lower_quartile(first), _lower_quartile(last)


def _lower_quartile(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 4]


def run_soak(
    minutes: float, settings: Settings, print_line: Callable[[str], None]
) -> Result:
    """Run a soak for a number of minutes.

    :return: the result of a scenario; growth and late rows are errors.
    """
    findings = Findings()

    def cause(deployment: FaultDeployment, chance: random.Random) -> None:
        stopped = threading.Event()
        liar = threading.Thread(
            target=_lie, args=(deployment, chance.random(), stopped, findings)
        )
        liar.start()
        try:
            _cause_faults(deployment, chance, 60.0 * minutes, findings, print_line)
        finally:
            stopped.set()
            liar.join()

    scenario = Scenario("soak", cause, Needs(proxied="reader1"))
    try:
        result = run_scenario(scenario, settings, print_line)
    finally:
        # Show the measurements even if the run is interrupted.
        for line in findings.lines() if findings.faults else ():
            print_line(line)
    errors = [result.error] if result.error else []
    return attrs.evolve(result, error="; ".join(errors + findings.problems()))


def _cause_faults(
    deployment: FaultDeployment,
    chance: random.Random,
    seconds: float,
    findings: Findings,
    print_line: Callable[[str], None],
) -> None:
    started = time.monotonic()
    while (elapsed := time.monotonic() - started) < seconds:
        time.sleep(max(0.0, findings.faults * FAULT_INTERVAL - elapsed))
        name = FAULTS[findings.faults % len(FAULTS)]
        SCENARIOS[name].cause(deployment, chance)
        next_row = deployment.wait_for_next_rows(NEXT_ROW_TIMEOUT)
        findings.faults += 1
        findings.slowest = max(findings.slowest, (next_row, name))
        for survivor in SURVIVORS:
            findings.measure(survivor, MEMORY, deployment.memory_of(survivor))
            for what, count in deployment.counts_of(survivor).items():
                findings.measure(survivor, what, count)
        for process in deployment.processes.values():
            process.check()
        print_line(
            f"{time.monotonic() - started:.0f} s: {name}: {next_row:.1f} s; "
            f"{findings.latest()}"
        )


def _lie(
    deployment: FaultDeployment,
    seed: float,
    stopped: threading.Event,
    findings: Findings,
) -> None:
    """Publish false or invalid messages of each kind in turn until ``stopped``."""
    assert deployment.redis is not None
    port = deployment.redis.port
    kinds = list(false_messages())
    random.Random(seed).shuffle(kinds)
    for suffix, messages, count in cycle(kinds):
        if stopped.wait(LIE_INTERVAL):
            return
        with contextlib.suppress(OSError):
            findings.lies += hostile.publish(
                port, SERVER_NAME + suffix, islice(messages, count), LIE_INTERVAL
            )
