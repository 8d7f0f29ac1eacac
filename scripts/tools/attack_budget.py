"""Measures the cost of hostile input to a process, in CPU time and memory.

``python -m scripts.tools.attack_budget`` starts a deployment of six real processes
under a light load, attacks one of them (or, over Redis, all) for some seconds with each
kind of input, and prints the rows of the table in ``docs/security.rst``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import attrs
import click

from scripts.tools import hostile
from scripts.tools.faults.deployment import FaultDeployment, Needs
from synapse_replication.demo.deployment import READERS, SERVER_NAME, DemoPlan
from synapse_replication.demo.processes import wait_until_ready
from synapse_replication.demo.run import Tail
from synapse_replication.errors import ServerStartError
from synapse_replication.recordings.reader import shipped_recording

#: The load during all measurements, in rows per second.
RATE = 50.0
#: The time in s that a process has to recover from an attack, and the duration in s of
#: the measurement after that.
QUIET_AFTER = 8.0
QUIET_FOR = 2.0
#: The time in s within which the first rows must arrive.
ROWS_TIMEOUT = 60.0
_TICKS = os.sysconf("SC_CLK_TCK")


@attrs.frozen
class Attack:
    """One kind of input.

    :ivar what: the description of the input in the table.
    :ivar victim: the process that is measured.
    :ivar run: sends the input for a number of s; returns the amount sent, and its unit.
    :ivar direct_tcp: whether the attack needs a deployment without Redis.
    """

    what: str
    victim: str
    run: Callable[[FaultDeployment, float], tuple[int, str]]
    direct_tcp: bool = False


@attrs.frozen
class Cost:
    """The cost of an attack to its victim.

    :ivar sent: the amount sent, and the duration in s, as text.
    :ivar cpu: the share of a core in percent, before, during and after the attack.
    :ivar memory: the resident memory in MiB before the attack, its peak, and the
        resident memory afterwards.
    :ivar log: the number of logged bytes.
    :ivar stalls: the number of the reactor's turns of 0.25 s or more.
    :ivar next_row: the time from the end of the attack until the next row of each
        writer of events had arrived at a reader, in s.
    """

    sent: str
    cpu: tuple[float, float, float]
    memory: tuple[float, float, float]
    log: int
    stalls: int
    next_row: float


def _tcp(deployment: FaultDeployment) -> int:
    return deployment.tcp_ports["event_writer1"]


def _redis(deployment: FaultDeployment) -> int:
    assert deployment.redis is not None
    return deployment.redis.port


def _publish(
    messages: Callable[[], hostile.Lines],
    unit: str,
    most: int = 10**9,
    suffix: str = "",
) -> Callable[[FaultDeployment, float], tuple[int, str]]:
    def run(deployment: FaultDeployment, seconds: float) -> tuple[int, str]:
        channel = SERVER_NAME + suffix
        sent = hostile.publish(_redis(deployment), channel, messages(), seconds, most)
        return sent, unit

    return run


def _send(
    lines: Callable[[], hostile.Lines], unit: str
) -> Callable[[FaultDeployment, float], tuple[int, str]]:
    return lambda deployment, seconds: (
        hostile.send_lines(_tcp(deployment), lines(), seconds),
        unit,
    )


ATTACKS = (
    Attack(
        "Well-formed commands over direct TCP",
        "event_writer1",
        _send(hostile.server_up_lines, "lines"),
        direct_tcp=True,
    ),
    Attack(
        "Names of 16 KB over direct TCP",
        "event_writer1",
        _send(lambda: hostile.long_names(16_000), "lines"),
        direct_tcp=True,
    ),
    Attack(
        "Undeclared writers over direct TCP",
        "event_writer1",
        _send(hostile.made_up_writers, "lines"),
        direct_tcp=True,
    ),
    Attack(
        "Connections with made-up NAMEs",
        "event_writer1",
        lambda deployment, seconds: (
            hostile.connect_with_names(_tcp(deployment), 10**9, seconds),
            "connections",
        ),
        direct_tcp=True,
    ),
    Attack(
        "Silent connections",
        "event_writer1",
        lambda deployment, seconds: (
            hostile.connect_silently(_tcp(deployment), 900, seconds),
            "connections",
        ),
        direct_tcp=True,
    ),
    Attack(
        "Well-formed commands over Redis",
        "reader1",
        _publish(hostile.server_up_lines, "messages"),
    ),
    Attack(
        "Names of 2 MB over Redis",
        "reader1",
        _publish(lambda: hostile.long_names(2_000_000), "messages", 20),
    ),
    Attack(
        "Undeclared writers over Redis",
        "reader1",
        _publish(hostile.made_up_writers, "messages"),
    ),
    Attack(
        "Forged epochs of a writer in memory",
        "reader1",
        _publish(hostile.forged_epochs, "messages", 300, "/replication_ext"),
    ),
    Attack(
        "Gaps of a declared writer",
        "reader1",
        _publish(lambda: hostile.gap_positions(5000), "messages", 10_000),
    ),
    Attack(
        "Rows of 15 MB",
        "reader1",
        _publish(lambda: hostile.large_rows(15_000_000), "messages", 6),
    ),
    Attack(
        "Rows just under the limit of 1 MiB",
        "reader1",
        _publish(lambda: hostile.large_rows(1_000_000), "messages", 60),
    ),
    Attack(
        "REPLICATE",
        "event_writer1",
        _publish(hostile.requests_for_positions, "messages", 10_000),
    ),
    Attack(
        "Made-up hellos",
        "reader1",
        _publish(hostile.made_up_hellos, "messages", 10_000, "/replication_ext"),
    ),
    Attack(
        "Incomplete HTTP requests",
        READERS[-1],
        lambda deployment, seconds: (
            hostile.send_incomplete_requests(
                int(deployment.status_page.split(":")[2].split("/")[0]), 1040, seconds
            ),
            "connections",
        ),
    ),
    Attack(
        "HTTP bodies of 5 MiB without a secret",
        "reader2",
        lambda deployment, seconds: (
            hostile.post_bodies(
                deployment.socket_of("reader2"), 5 << 20, 10**9, seconds
            ),
            "requests",
        ),
    ),
)


def _count_stalls(deployment: FaultDeployment, name: str) -> int:
    """Return the number of an instance's turns of 0.25 s or more."""
    metrics = deployment.get_metrics(name)
    found = {
        bound: float(count)
        for bound, count in re.findall(
            r'reactor_turn_seconds_bucket{le="([^"]+)"[^}]*} (\S+)', metrics
        )
    }
    return int(found["+Inf"] - found["0.25"])


def _wait_for_next_rows(deployment: FaultDeployment) -> float:
    """Return the time until a row of each writer of events arrives at a reader, in s.

    Wait for :data:`ROWS_TIMEOUT` at most.
    """
    started = time.monotonic()
    missing = {"event_writer1", "event_writer2"}
    with deployment.journal_of(READERS[0]).open("rb") as journal:
        journal.seek(0, os.SEEK_END)
        while missing and time.monotonic() - started < ROWS_TIMEOUT:
            for line in journal.readlines():
                with contextlib.suppress(ValueError):
                    entry = json.loads(line)
                    if entry["stream"] == "events" and entry["rows"]:
                        missing.discard(entry["writer"])
            time.sleep(0.02)
    return time.monotonic() - started


class _Meter:
    """Measures one process with the kernel's accounting."""

    def __init__(self, deployment: FaultDeployment, name: str) -> None:
        self._folder = Path(f"/proc/{deployment.processes[name].pid}")
        self._log = deployment.directory / f"{name}.log"

    def cpu_seconds(self) -> float:
        fields = (self._folder / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def memory(self, key: str = "VmRSS") -> float:
        status = (self._folder / "status").read_text()
        found = re.search(rf"{key}:\s+(\d+)", status)
        assert found is not None
        return int(found[1]) / 1024

    def forget_peak(self) -> None:
        (self._folder / "clear_refs").write_text("5")

    def log_size(self) -> int:
        return self._log.stat().st_size

    def share(self, seconds: float) -> float:
        """Return the share of a core used during the next ``seconds``, in percent."""
        before = self.cpu_seconds()
        time.sleep(seconds)
        return 100 * (self.cpu_seconds() - before) / seconds


def measure(deployment: FaultDeployment, attack: Attack, seconds: float) -> Cost:
    """Attack the victim, and measure it before, during and after the attack."""
    meter = _Meter(deployment, attack.victim)
    cpu_before, memory_before = meter.share(QUIET_FOR), meter.memory()
    logged = meter.log_size()
    meter.forget_peak()
    stalls = _count_stalls(deployment, attack.victim)
    started, used = time.monotonic(), meter.cpu_seconds()
    sent, unit = attack.run(deployment, seconds)
    lasted = time.monotonic() - started
    next_row = _wait_for_next_rows(deployment)
    # Input that was sent quickly may take longer to process.
    time.sleep(max(0.0, seconds - lasted))
    cpu = 100 * (meter.cpu_seconds() - used) / (time.monotonic() - started)
    time.sleep(QUIET_AFTER)
    cpu_after, memory_after = meter.share(QUIET_FOR), meter.memory()
    return Cost(
        f"{sent:,} {unit} in {lasted:.1f} s",
        (cpu_before, cpu, cpu_after),
        (memory_before, meter.memory("VmHWM"), memory_after),
        meter.log_size() - logged,
        _count_stalls(deployment, attack.victim) - stalls,
        next_row,
    )


def _wait_for_rows(deployment: FaultDeployment) -> None:
    """Wait until each reader has received a row.

    :raises ServerStartError: if a process ended, or no row arrived in time.
    """
    deadline = time.monotonic() + ROWS_TIMEOUT
    for name in READERS:
        tail = Tail(deployment.journal_of(name))
        while not tail.rows:
            deployment.processes[name].check()
            if time.monotonic() > deadline:
                raise ServerStartError(
                    f"{name} received no row within {ROWS_TIMEOUT:.0f} s"
                )
            time.sleep(0.05)
            tail.read_new_lines()


def _deploy(*, direct_tcp: bool) -> FaultDeployment:
    plan = DemoPlan(shipped_recording(), 0, RATE, use_redis=not direct_tcp)
    deployment = FaultDeployment(plan, Needs(direct_tcp=direct_tcp), 0)
    try:
        deployment.start_servers()
        deployment.start_processes()
        wait_until_ready(deployment.processes.values())
        deployment.let_writers_begin()
        _wait_for_rows(deployment)
    except BaseException:
        deployment.close()
        raise
    return deployment


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--seconds",
    type=click.FloatRange(min=1, max=60),
    default=5.0,
    show_default=True,
    help="How long each attack lasts.",
)
@click.option("--only", default="", help="Only attacks whose name contains this text.")
def attack_budget(seconds: float, only: str) -> None:
    """Measure the cost of each kind of hostile input; print the rows of a table."""
    wanted = [attack for attack in ATTACKS if only.lower() in attack.what.lower()]
    for direct_tcp in (True, False):
        attacks = [attack for attack in wanted if attack.direct_tcp == direct_tcp]
        if not attacks:
            continue
        deployment = _deploy(direct_tcp=direct_tcp)
        try:
            for attack in attacks:
                _show(attack, measure(deployment, attack, seconds))
        finally:
            deployment.close()


def _show(attack: Attack, cost: Cost) -> None:
    cpu = ", ".join(f"{share:.0f}" for share in cost.cpu)
    memory = ", ".join(f"{size:.0f}" for size in cost.memory)
    click.echo(f"   * - {attack.what}\n     - {cost.sent}\n     - {cpu}")
    click.echo(f"     - {memory}\n     - {cost.log / 1024:.0f}")
    click.echo(f"     - {cost.stalls}\n     - {cost.next_row:.1f}")


if __name__ == "__main__":
    attack_budget()
