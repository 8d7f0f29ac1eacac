"""``scripts/scale``: what one more process costs the others, and what restarts cost.

Theory of operation: the processes are real. They run until each has subscribed and
received all rows; then one phase follows another. Of each phase, the CPU time of all
processes, the time until all are subscribed and have all rows, and the messages through
Redis are printed. A message to all counts once; each process receives it.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable

import click

from scripts.tools.scale.deployment import Deployment
from scripts.tools.scale.simulated import count_messages
from scripts.tools.scale.traffic import Traffic

#: How long a phase may take until all processes agree, in s.
LIMIT = 180.0
#: How many processes are started at the same time.
BATCH = 4


class _Run:
    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._traffic = Traffic(deployment.redis.host, deployment.redis.port)
        self.is_good = True

    def phase(self, name: str, act: Callable[[], object], *, settle: float) -> None:
        """Do something, wait until all processes agree, and print what it cost."""
        deployment = self._deployment
        self._traffic.take()
        before = deployment.processor_seconds()
        began = time.monotonic()
        act()
        acted = time.monotonic()
        count = len(deployment.processes)
        subscribed = deployment.wait(lambda: deployment.subscribed() >= count, LIMIT)
        agreed = deployment.wait(lambda: deployment.missing()[0] == 0, LIMIT)
        agreed += subscribed
        time.sleep(max(0.0, settle - (time.monotonic() - acted)))
        spent = []
        for each, seconds in deployment.processor_seconds().items():
            earlier = before.get(each, 0.0)
            # A process that was restarted counts from 0.
            spent.append(seconds - earlier if earlier <= seconds else seconds)
        messages, size = self._traffic.take()
        lasted = time.monotonic() - began
        kinds = ", ".join(
            f"{number} {kind} ({size[kind] // 1024} KiB)"
            for kind, number in messages.most_common()
        )
        self.is_good &= math.isfinite(agreed)
        click.echo(
            f"{name}: subscribed after {subscribed:.1f} s, all rows after {agreed:.1f} "
            f"s; CPU in {lasted:.0f} s: {sum(spent):.1f} s in all, {max(spent):.2f} s "
            f"at most; {kinds or 'no messages'}"
        )

    def start(self, names: list[str]) -> None:
        """Start processes, a few at a time; stop those that run."""
        for number in range(0, len(names), BATCH):
            batch = [self._deployment.processes[n] for n in names[number:][:BATCH]]
            for process in batch:
                process.request_stop()
            for process in batch:
                process.wait()
                process.start()
            for process in batch:
                self._deployment.wait(process.is_ready, LIMIT)

    def kill(self, names: list[str]) -> None:
        """Kill processes, and start them at the same time."""
        for name in names:
            self._deployment.processes[name].kill()
        for name in names:
            self._deployment.processes[name].start()


def _perform(deployment: Deployment, seconds: float) -> bool:
    run = _Run(deployment)
    names = list(deployment.processes)
    phases: list[tuple[str, Callable[[], object], float]] = [
        ("start of all", lambda: run.start(names), 5.0),
        ("idle", lambda: time.sleep(seconds), 0.0),
        ("one more process", lambda: deployment.add("extra").start(), 5.0),
        ("rows", lambda: _write_for(deployment, seconds), 0.0),
        ("restart of Redis", lambda: _restart(deployment.redis), 5.0),
        ("restart of PostgreSQL", lambda: _restart(deployment.postgres), 5.0),
        ("main killed", lambda: run.kill(["master"]), 5.0),
        ("a fifth killed", lambda: run.kill(names[1::5]), 5.0),
        ("rolling restart", lambda: run.start(names), 5.0),
    ]
    for name, act, settle in phases:
        run.phase(name, act, settle=settle)
    memory = sorted(deployment.mebibytes())
    lost, doubled = deployment.missing()
    click.echo(
        f"memory of each: {memory[0]:.0f} to {memory[-1]:.0f} MiB; rows lost {lost}, "
        f"doubled {doubled}; load {os.getloadavg()[0]:.1f}"
    )
    return run.is_good and lost == doubled == 0


def _write_for(deployment: Deployment, seconds: float) -> None:
    deployment.write_rows(True)
    time.sleep(seconds)
    deployment.write_rows(False)


def _restart(server: object) -> None:
    server.kill()  # type: ignore[attr-defined]
    server.start()  # type: ignore[attr-defined]


@click.command()
@click.option("--processes", default=50, show_default=True, help="The number of them.")
@click.option("--rate", default=40.0, show_default=True, help="Rows written in 1 s.")
@click.option("--seconds", default=20.0, show_default=True, help="Of idling and rows.")
@click.option("--simulated", is_flag=True, help="Count messages of a simulation.")
def main(processes: int, rate: float, seconds: float, simulated: bool) -> None:
    """Measure a deployment of many processes, a fifth of which write three streams."""
    if simulated:
        started, received = count_messages(processes)
        click.echo(f"one more process causes: {dict(started)}")
        rates = {kind: round(rate, 2) for kind, rate in received.items()}
        click.echo(f"idle, each of {processes} receives in 1 s: {rates}")
        return
    deployment = Deployment(processes, rate)
    try:
        deployment.start_servers()
        good = _perform(deployment, seconds)
    finally:
        deployment.close()
    if not good:
        raise click.ClickException("rows are missing or doubled, or a phase took long")


if __name__ == "__main__":
    main()
