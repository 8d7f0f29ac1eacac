"""``scripts/scale``: what one more process costs the others, and what restarts cost.

Theory of operation: the processes are real. They run until each has subscribed and
received all rows; then one phase follows another. Of each phase, the CPU time of all
processes, the time until all are subscribed and have all rows, the requests at main and
the longest turn of its reactor, the stalls that were logged, and the messages through
Redis are printed. A message to all counts once; each process receives it.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable

import attrs
import click

from scripts.tools.scale.deployment import Deployment
from scripts.tools.scale.simulated import count_messages
from scripts.tools.scale.traffic import Traffic
from synapse_replication.testing.private_process import PrivateServer

#: How long a phase may take until all processes agree, in s.
LIMIT = 180.0
#: How many processes are started at the same time.
BATCH = 4
#: How long after the last start the deployment is at rest, in s: an instance that
#: writes nothing sends the first heartbeat 30 s after its hello.
REST = 45.0
#: The number of processes that are started one after another, to measure one start.
EXTRA = 20


@attrs.frozen
class _Cost:
    """The cost of a phase.

    :ivar lasted: the duration, in s.
    :ivar spent: the CPU time of each process, in s.
    """

    lasted: float
    spent: dict[str, float]


class _Run:
    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._traffic = Traffic(deployment.redis.host, deployment.redis.port)
        self.is_good = True

    def phase(
        self, name: str, act: Callable[[], object], *, settle: float = 5.0
    ) -> _Cost:
        """Do something, wait until all processes agree, and print what it cost."""
        deployment = self._deployment
        for take in (self._traffic.take, deployment.take_main, deployment.take_stalls):
            take()
        before = deployment.processor_seconds()
        began = time.monotonic()
        act()
        acted = time.monotonic()
        count = len(deployment.processes)
        subscribed = deployment.wait(lambda: deployment.subscribed() >= count, LIMIT)
        agreed = deployment.wait(lambda: deployment.missing()[0] == 0, LIMIT)
        agreed += subscribed
        time.sleep(max(0.0, settle - (time.monotonic() - acted)))
        spent = {}
        for each, seconds in deployment.processor_seconds().items():
            earlier = before.get(each, 0.0)
            # A process that was restarted counts from 0.
            spent[each] = seconds - earlier if earlier <= seconds else seconds
        lasted = time.monotonic() - began
        messages, size = self._traffic.take()
        kinds = ", ".join(
            f"{number} {kind} ({size[kind] // 1024} KiB)"
            for kind, number in messages.most_common()
        )
        requests, turn = deployment.take_main()
        stalls = ", ".join(
            f"{number} {reason}" for reason, number in deployment.take_stalls().items()
        )
        self.is_good &= math.isfinite(agreed)
        click.echo(
            f"{name}: subscribed after {subscribed:.1f} s, all rows after {agreed:.1f} "
            f"s; CPU in {lasted:.0f} s: {sum(spent.values()):.1f} s in all, "
            f"{max(spent.values()):.2f} s at most; main: {requests} requests, longest "
            f"turn {turn * 1000:.0f} ms; stalls: {stalls or 'none'}; "
            f"{kinds or 'no messages'}"
        )
        return _Cost(lasted, spent)

    def start(self, names: list[str], at_once: int = BATCH) -> None:
        """Start processes, a few at a time; stop those that run."""
        for number in range(0, len(names), at_once):
            batch = [self._deployment.processes[n] for n in names[number:][:at_once]]
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
    run.phase("start of all", lambda: run.start(names))
    run.phase("until all are at rest", lambda: time.sleep(REST), settle=0.0)
    idle = run.phase("idle", lambda: time.sleep(seconds), settle=0.0)
    _start_extra(run, deployment, idle)
    rows = run.phase("rows", lambda: _write_for(deployment, seconds), settle=0.0)
    count = deployment.count_rows()
    click.echo(f"each received {count:,} rows in {rows.lasted:.1f} s")
    run.phase("restart of Redis", lambda: _restart(deployment.redis))
    run.phase("restart of PostgreSQL", lambda: _restart(deployment.postgres))
    run.phase("main killed", lambda: run.kill(["master"]))
    run.phase("a fifth killed", lambda: run.kill(names[1::5]))
    run.phase("rolling restart", lambda: run.start(names))
    memory = sorted(deployment.mebibytes())
    lost, doubled = deployment.missing()
    click.echo(
        f"memory of each: {memory[0]:.0f} to {memory[-1]:.0f} MiB; rows lost {lost}, "
        f"doubled {doubled}; load {os.getloadavg()[0]:.1f}"
    )
    return run.is_good and lost == doubled == 0


def _start_extra(run: _Run, deployment: Deployment, idle: _Cost) -> None:
    """Start further processes, and print what a start costs the others."""
    extra = [f"extra{number}" for number in range(EXTRA)]
    for name in extra:
        deployment.add(name)
    cost = run.phase(
        f"{EXTRA} more processes", lambda: run.start(extra, 1), settle=REST
    )
    own = sum(cost.spent.pop(name) for name in extra)
    resting = sum(idle.spent.values()) / idle.lasted * cost.lasted
    others = sum(cost.spent.values()) - resting
    click.echo(
        f"one start: {own / EXTRA:.2f} s of its own; of all others together "
        f"{others / EXTRA:.2f} s more than while idle: {others / own:.2f} times as much"
    )


def _write_for(deployment: Deployment, seconds: float) -> None:
    deployment.write_rows(True)
    time.sleep(seconds)
    deployment.write_rows(False)


def _restart(server: PrivateServer) -> None:
    server.kill()
    server.start()


@click.command()
@click.option("--processes", default=50, show_default=True, help="The number of them.")
@click.option("--rate", default=40.0, show_default=True, help="Rows written in 1 s.")
@click.option("--batch", default=1, show_default=True, help="Rows of one write.")
@click.option("--seconds", default=20.0, show_default=True, help="Of idling and rows.")
@click.option("--simulated", is_flag=True, help="Count messages of a simulation.")
def main(
    processes: int, rate: float, batch: int, seconds: float, simulated: bool
) -> None:
    """Measure a deployment of many processes, a fifth of which write three streams."""
    if simulated:
        started, received = count_messages(processes)
        click.echo(f"one more process causes: {dict(started)}")
        for (since, until), rates in received.items():
            text = ", ".join(f"{rate:.2f} {kind}" for kind, rate in rates.items())
            click.echo(
                f"{since} to {until} s after the last start, each of {processes} "
                f"receives in 1 s: {text}"
            )
        return
    deployment = Deployment(processes, rate, batch)
    try:
        deployment.start_servers()
        good = _perform(deployment, seconds)
    finally:
        deployment.close()
    if not good:
        raise click.ClickException("rows are missing or doubled, or a phase took long")


if __name__ == "__main__":
    main()
