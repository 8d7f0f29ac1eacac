"""The command line of the benchmark; see docs/performance.rst."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from synapse_replication.testing.bench.tasks import TASKS, Result, Task
from synapse_replication.testing.servers import PrivatePostgres

_OURS = [sys.executable, "-m", "synapse_replication.testing.bench.ours"]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--peer",
    required=True,
    type=click.Path(exists=True, dir_okay=False),
    help="The Python of an environment with a real Synapse.",
)
@click.option("--rounds", type=click.IntRange(min=1), help="Default 5, quick 3.")
@click.option("--quick", is_flag=True, help="Less work a round; under three minutes.")
@click.option("--only", multiple=True, help="A task's name, or the start of it.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, not a table.")
def bench(
    peer: str, rounds: int | None, quick: bool, only: tuple[str, ...], as_json: bool
) -> None:
    """Do the same work here and with a real Synapse, in turn, and compare."""
    tasks = [task for task in TASKS if not only or task.name.startswith(only)]
    if not tasks:
        names = ", ".join(task.name for task in TASKS)
        raise click.BadParameter(f"no such task; there are: {names}")
    rounds = rounds or (3 if quick else 5)
    stock = [peer, str(Path(__file__).with_name("stock.py"))]
    version = _version_of(peer)
    results = []
    with PrivatePostgres(durable=True) as postgres:
        for task in tasks:
            count = task.quick_count if quick else task.count
            ours_rates: list[float] = []
            stock_rates: list[float] = []
            for number in range(rounds):
                click.echo(f"{task.name}, round {number + 1} of {rounds}", err=True)
                for command, rates in ((_OURS, ours_rates), (stock, stock_rates)):
                    dsn = postgres.new_database() if task.needs_database else None
                    rates.append(count / _run(command, task, count, dsn))
            results.append(Result(task, ours_rates, stock_rates))
    if as_json:
        report = {
            "peer": f"matrix-synapse {version}",
            "python": platform.python_version(),
            "results": [result.to_json() for result in results],
        }
        click.echo(json.dumps(report, indent=1))
    else:
        _show(version, results)


def _version_of(peer: str) -> str:
    """Ask the peer's environment for Synapse's version: without it, there is no
    comparison."""
    asked = "import importlib.metadata as m; print(m.version('matrix-synapse'))"
    done = subprocess.run([peer, "-c", asked], capture_output=True, check=False)
    if done.returncode:
        raise click.ClickException(f"{peer} has no matrix-synapse; install it there")
    return done.stdout.decode().strip()


def _run(command: list[str], task: Task, count: int, dsn: str | None) -> float:
    """Run one side once, in a process of its own; give the s that it took."""
    parameters: dict[str, object] = {**task.parameters, task.count_name: count}
    if dsn is not None:
        parameters["dsn"] = dsn
    done = subprocess.run(
        [*command, task.measure, json.dumps(parameters)],
        capture_output=True,
        check=False,
        timeout=600,
    )
    lines = done.stdout.decode().splitlines()
    if done.returncode or not lines:
        tail = done.stderr.decode("utf-8", "replace")[-2000:]
        raise click.ClickException(f"{task.name} failed in {command[-1]}:\n{tail}")
    return float(lines[-1])


def _show(version: str, results: Iterable[Result]) -> None:
    table = Table(title=f"this package against matrix-synapse {version}")
    for heading in ("task", "unit", "ours", "spread", "stock", "spread", "ratio"):
        table.add_column(heading, justify="left" if heading == "task" else "right")
    for result in results:
        cells = []
        for rates in (result.ours, result.stock):
            median = sorted(rates)[len(rates) // 2]
            cells += [f"{median:,.0f}", f"{min(rates):,.0f}-{max(rates):,.0f}"]
        unit = f"{result.task.unit}/s"
        table.add_row(result.task.name, unit, *cells, f"{result.ratio:.1f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    bench()
