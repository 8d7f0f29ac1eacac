"""The command line of the fault tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import click
from rich.console import Console

from scripts.tools.faults.costs import measure_costs
from scripts.tools.faults.fresh_starts import run_fresh_starts
from scripts.tools.faults.report import (
    show_deployments,
    show_deployments_json,
    show_json,
    show_table,
)
from scripts.tools.faults.run import Result, Settings, run_scenario
from scripts.tools.faults.scenarios import SCENARIOS
from scripts.tools.faults.skew import run_skew
from scripts.tools.faults.soak import run_soak
from scripts.tools.faults.synapse.course import (
    PATIENCE,
    DeploymentResult,
    run_deployment,
)
from scripts.tools.faults.synapse.deployments import DEPLOYMENTS
from scripts.tools.faults.synapse.monitored import run_monitored
from scripts.tools.faults.synapse.nemeses import FULL_RUN, MIXABLE, NAMES
from scripts.tools.faults.synapse.schedule import make_schedule
from synapse_replication.demo.deployment import interrupt_on_termination
from synapse_replication.recordings.reader import shipped_recording

T = TypeVar("T", Result, DeploymentResult)

#: The options that apply to one host only.
_OF_DEMO = ("names", "rate", "recording")
_OF_SYNAPSE = (
    "deployments",
    "nemeses",
    "rounds",
    "patience",
    "bug",
    "meter",
    "monitor",
)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--host",
    type=click.Choice(["demo", "synapse"]),
    default="demo",
    show_default=True,
    help="The host of the demonstration, or a real Synapse.",
)
@click.option(
    "--scenario",
    "names",
    type=click.Choice(list(SCENARIOS)),
    multiple=True,
    help="demo: run only this scenario; may be repeated.",
)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option(
    "--rate",
    type=click.FloatRange(min=1),
    default=200.0,
    show_default=True,
    help="demo: rows per second, of all writers together.",
)
@click.option(
    "--recording",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="demo: the recording to use; by default the one in the package.",
)
@click.option(
    "--deployment",
    "deployments",
    type=click.Choice(list(DEPLOYMENTS)),
    multiple=True,
    help="synapse: run only this deployment; may be repeated.",
)
@click.option(
    "--nemesis",
    "nemeses",
    type=click.Choice(NAMES),
    multiple=True,
    help="synapse: cause only this fault; may be repeated.",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="synapse: how often each fault is caused.",
)
@click.option(
    "--patience",
    type=click.FloatRange(min=0),
    default=PATIENCE,
    show_default=True,
    help="synapse: the time in s after each fault within which all rows must arrive.",
)
@click.option(
    "--bug",
    metavar="NAME",
    default="",
    help="synapse: call this function, which introduces a bug, in processes with this "
    "package; the checker must then find lost rows.",
)
@click.option(
    "--meter",
    is_flag=True,
    help="With --host synapse: run `follow --verify` beside the deployment; it must "
    "find exactly the rows that no process received; those that were removed since may "
    "be missing.",
)
@click.option(
    "--monitor",
    type=click.FloatRange(min=0, min_open=True),
    metavar="MINUTES",
    help="With --host synapse: run `monitor` beside stock processes for this time, "
    "with traffic and faults; each alarm must have a cause, each killed process must "
    "be named, and the rows that no process received must be counted.",
)
@click.option(
    "--costs",
    is_flag=True,
    help="Measure the cost of each kind of hostile input instead, and print the table.",
)
@click.option(
    "--only",
    default="",
    help="With --costs: only input whose description contains this text.",
)
@click.option(
    "--soak",
    type=click.FloatRange(min=0, min_open=True),
    metavar="MINUTES",
    help="Run one deployment of the demonstration for this time, with a fault every 20 "
    "s and false or invalid messages in every second, instead of the scenarios.",
)
@click.option(
    "--skew",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="WHEEL",
    help="Run deployments of which one half is installed from the wheel of an earlier "
    "release; upgrade it, and go back.",
)
@click.option(
    "--fresh-starts",
    type=click.IntRange(min=1),
    metavar="N",
    help="Cause no faults: start N deployments of two processes, four at a time, and "
    "check that no row of a stream held in memory is delivered twice.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, not a table.")
@click.pass_context
def faults(
    ctx: click.Context,
    host: str,
    names: tuple[str, ...],
    seed: int,
    rate: float,
    recording: Path | None,
    deployments: tuple[str, ...],
    nemeses: tuple[str, ...],
    rounds: int,
    patience: float,
    bug: str,
    meter: bool,
    monitor: float | None,
    costs: bool,
    only: str,
    soak: float | None,
    skew: Path | None,
    fresh_starts: int | None,
    as_json: bool,
) -> None:
    """Cause real faults on real processes under load, and check every row.

    With the host of the demonstration, each scenario starts a private PostgreSQL and
    Redis, a main process, three more writers and two readers. The exit status is 0 only
    if no row was lost, duplicated or reordered, and all positions agreed at the end.

    With a real Synapse, each deployment starts a private PostgreSQL and Redis and five
    processes, some with this package and some stock. The exit status is 0 only if no
    process with this package lost or duplicated a row.
    """
    if costs:
        sys.exit(0 if measure_costs(only, click.echo) else 1)
    _reject_options(ctx, _OF_SYNAPSE if host == "demo" else _OF_DEMO, host)
    progress = Console(stderr=True)

    def print_line(text: str) -> None:
        progress.print(text, markup=False, highlight=False, soft_wrap=True)

    if fresh_starts is not None:
        bad = run_fresh_starts(fresh_starts, print_line)
        click.echo(f"{fresh_starts} fresh starts, {bad} wrong")
        sys.exit(1 if bad else 0)
    if host == "demo":
        settings = Settings(recording or shipped_recording(), rate, seed)

        def run_one(name: str) -> Result:
            print_line(f"{name} ...")
            return run_scenario(SCENARIOS[name], settings, print_line)

        if soak is not None:
            results = _run_all([""], lambda _: run_soak(soak, settings, print_line))
        elif skew is not None:
            results = run_skew(skew, names, settings, print_line)
        else:
            results = _run_all(names or list(SCENARIOS), run_one)
        if as_json:
            click.echo(show_json(results, seed))
        else:
            show_table(Console(), results)
        sys.exit(0 if all(result.is_good for result in results) else 1)

    if monitor is not None:
        interrupt_on_termination()
        monitored = run_monitored(monitor, seed, print_line)
        for line in monitored.lines():
            click.echo(line)
        sys.exit(0 if monitored.is_good else 1)
    schedule = make_schedule(seed, nemeses or FULL_RUN, rounds, MIXABLE)
    found = _run_all(
        deployments
        or [name for name, each in DEPLOYMENTS.items() if not each.only_on_demand],
        lambda name: run_deployment(
            name, schedule, print_line, patience=patience, bug=bug, with_meter=meter
        ),
    )
    if as_json:
        click.echo(show_deployments_json(found, seed))
    else:
        show_deployments(Console(), found)
    sys.exit(0 if all(result.is_good for result in found) else 1)


def _reject_options(ctx: click.Context, names: Sequence[str], host: str) -> None:
    for parameter in ctx.command.params:
        source = ctx.get_parameter_source(parameter.name or "")
        if parameter.name in names and source is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(
                f"{parameter.opts[0]} does not apply to --host {host}"
            )


def _run_all(names: Sequence[str], run_one: Callable[[str], T]) -> list[T]:
    interrupt_on_termination()
    try:
        return [run_one(name) for name in names]
    except KeyboardInterrupt:
        click.echo("Interrupted; everything was stopped.", err=True)
        sys.exit(130)


if __name__ == "__main__":
    faults()
