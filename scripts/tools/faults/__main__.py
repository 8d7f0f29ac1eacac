"""The command line of the real faults."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import NoReturn

import click
from rich.console import Console

from scripts.tools.faults.report import show_json, show_table
from scripts.tools.faults.run import Settings, run_scenario
from scripts.tools.faults.scenarios import SCENARIOS
from synapse_replication.recordings.reader import shipped_recording


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--scenario",
    "names",
    type=click.Choice(list(SCENARIOS)),
    multiple=True,
    help="Only this one; may be given more than once.",
)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option(
    "--rate",
    type=click.FloatRange(min=1),
    default=200.0,
    show_default=True,
    help="Rows a second, of all writers together.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, not a table.")
@click.option(
    "--recording",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Another recording than the one that ships with the package.",
)
def faults(
    names: tuple[str, ...],
    seed: int,
    rate: float,
    as_json: bool,
    recording: Path | None,
) -> None:
    """Cause real faults on real processes under load, and check every row.

    For each scenario a private PostgreSQL and Redis, a main process, three more
    writers and two readers are started. Exit status 0 only if nothing was lost,
    doubled or reordered, and all positions agreed in the end.
    """
    settings = Settings(recording or shipped_recording(), rate, seed)
    progress = Console(stderr=True)
    # Whoever ends us lets us clean up.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    results = []
    try:
        for name in names or SCENARIOS:
            _say(progress, f"{name} ...")
            results.append(
                run_scenario(
                    SCENARIOS[name], settings, lambda text: _say(progress, text)
                )
            )
    except KeyboardInterrupt:
        click.echo("Interrupted; everything was stopped.", err=True)
        sys.exit(130)
    if as_json:
        click.echo(show_json(results, seed))
    else:
        show_table(Console(), results)
    sys.exit(0 if all(result.is_good for result in results) else 1)


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    faults()
