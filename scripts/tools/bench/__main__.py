"""The command line of the benchmark; see docs/performance.rst."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from scripts.tools.bench import process
from scripts.tools.bench.deployment import (
    IDLE_NAME,
    NAME,
    measure_deployment,
    measure_idle,
)
from scripts.tools.bench.growth import measure_growth
from scripts.tools.bench.runner import BenchError, Runner
from scripts.tools.bench.tasks import TASKS, Result
from tests.support.synapse_process import PEER_PYTHON

_ASK_VERSION = "import importlib.metadata as m; print(m.version('matrix-synapse'))"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--peer",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The Python interpreter of an environment with a real Synapse.",
)
@click.option(
    "--against",
    type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path),
    help="A checkout of another version of this package, to compare with that instead.",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    help="The number of rounds of each task; by default 5, or 2 with --quick.",
)
@click.option("--quick", is_flag=True, help="Do less work, in less than 3 minutes.")
@click.option(
    "--only",
    multiple=True,
    help="Run only the tasks whose names begin with this; may be repeated.",
)
@click.option(
    "--growth",
    is_flag=True,
    help="Measure only this package's cost per row, as rows, streams and writers grow.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, not a table.")
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a plot to this file (PNG); requires the extra 'bench'.",
)
def bench(
    peer: Path | None,
    against: Path | None,
    rounds: int | None,
    quick: bool,
    only: tuple[str, ...],
    growth: bool,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Do the same work with this package and with a real Synapse, and compare."""
    if plot is not None:
        # Import it before the work, because matplotlib may not be installed.
        from scripts.tools.bench import plots

    def print_line(text: str) -> None:
        click.echo(text, err=True)

    rounds = rounds or (2 if quick else 5)
    load = [os.getloadavg()[0]]
    try:
        if growth:
            series = measure_growth(quick, rounds, print_line)
            if plot is not None:
                plots.plot_growth(series, plot)
            report: object = [each.to_json() for each in series]
            if as_json:
                click.echo(json.dumps(report, indent=1))
            else:
                for each in series:
                    click.echo(each.to_text())
            return
        other = against or peer
        if other is None:
            raise click.UsageError("requires --peer or --against")
        name = _name_of(other)
        results = _run_tasks(other, rounds, quick, only, print_line)
    except BenchError as error:
        raise click.ClickException(str(error)) from None
    load.append(os.getloadavg()[0])
    if plot is not None:
        plots.plot_ratios(results, name, plot)
    if as_json:
        report = {
            "other": name,
            "python": platform.python_version(),
            "machine": f"{platform.machine()}, {platform.system()}",
            "processors": os.cpu_count(),
            "rounds": rounds,
            "load_at_start_and_end": [round(value, 1) for value in load],
            "results": [result.to_json() for result in results],
        }
        click.echo(json.dumps(report, indent=1))
    else:
        _show(name, results)


def _run_tasks(
    other: Path,
    rounds: int,
    quick: bool,
    only: tuple[str, ...],
    print_line: Callable[[str], None],
) -> list[Result]:
    tasks = [
        task
        for task in TASKS
        if (not only or task.name.startswith(only))
        and (other.is_dir() or not task.is_of_package)
    ]
    is_idle = any(IDLE_NAME.startswith(each) for each in only)
    is_process = process.NAME in only
    if not (tasks or NAME in only or is_idle or is_process):
        others = (NAME, IDLE_NAME, process.NAME)
        names = ", ".join((*(task.name for task in TASKS), *others))
        raise click.BadParameter(f"no such task; the tasks are: {names}")
    results: list[Result] = []
    if tasks:
        results += Runner(other, rounds, quick, print_line).run(tasks)
    if NAME in only:
        os.environ.setdefault(PEER_PYTHON, str(other))
        results += measure_deployment(rounds, quick, print_line)
    if is_idle:
        os.environ.setdefault(PEER_PYTHON, str(other))
        results += measure_idle(rounds, quick, print_line)
    if is_process:
        if not other.is_dir():
            raise click.UsageError(f"{process.NAME} requires --against")
        results += process.measure_process(other, rounds, print_line)
    return results


def _name_of(other: Path) -> str:
    """Return the name and version of what this package is compared with.

    :raises click.ClickException: if Synapse is not installed there.
    """
    if other.is_dir():
        return str(other)
    done = subprocess.run([other, "-c", _ASK_VERSION], capture_output=True, check=False)
    if done.returncode:
        raise click.ClickException(f"{other} has no matrix-synapse; install it there")
    return f"matrix-synapse {done.stdout.decode().strip()}"


def _show(other: str, results: Sequence[Result]) -> None:
    table = Table(title=f"this package against {other}")
    for heading in ("task", "unit", "ours", "spread", "other", "spread", "ratio"):
        table.add_column(heading, justify="left" if heading == "task" else "right")
    for result in results:
        cells = []
        for values in (result.ours, result.other):
            median = statistics.median(values)
            digits = 0 if median >= 100 else 2
            cells += [
                f"{median:,.{digits}f}",
                f"{min(values):,.{digits}f}-{max(values):,.{digits}f}",
            ]
        table.add_row(result.name, result.unit.shown, *cells, f"{result.ratio:.3f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    bench()
