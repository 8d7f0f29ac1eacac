"""``synapse-replication demo``: a replicating deployment on one machine."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import click

from synapse_replication.cli.common import command, fail
from synapse_replication.errors import ReplicationError

_GOOD = "No row is missing, duplicated or out of order; all positions agree."
_BAD = "Rows were lost, duplicated or out of order, or positions differ."


@command("demo", "demo", "demo --rows 2000 --transport tcp --no-faults")
@click.option(
    "--rows",
    type=click.IntRange(min=1),
    default=8000,
    show_default=True,
    help="The minimum number of rows to write; a shorter recording is repeated.",
)
@click.option(
    "--rate",
    type=click.FloatRange(min=1),
    default=400.0,
    show_default=True,
    help="Rows per second, of all writers together.",
)
@click.option(
    "--transport",
    type=click.Choice(["redis", "tcp"]),
    default="redis",
    show_default=True,
    help="How rows reach the readers.",
)
@click.option(
    "--faults/--no-faults",
    default=True,
    help="Kill a reader, and restart Redis if it is used, while rows are written.",
)
@click.option(
    "--recording",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A recording to use instead of the one that ships with the package.",
)
def demo_command(
    rows: int, rate: float, transport: str, faults: bool, recording: Path | None
) -> None:
    """Replicate rows between real processes and check that all rows arrive.

    Starts a private PostgreSQL, a private Redis (unless the transport is tcp), a main
    process, three more writers and two readers. Unless --no-faults is given, a reader
    is killed and restarted while rows are written, and then Redis, if it is used, is
    restarted. The exit status is 0 only if no row is missing, duplicated or out of
    order, and all positions agree.
    """
    import psycopg2  # noqa: F401 -- the processes of the demonstration need it
    from rich.console import Console

    from synapse_replication.demo import display
    from synapse_replication.demo.course import run_demo
    from synapse_replication.demo.deployment import (
        DemoPlan,
        Deployment,
        interrupt_on_termination,
    )
    from synapse_replication.demo.script import read_script
    from synapse_replication.recordings.reader import shipped_recording

    console = Console()
    recording = recording or shipped_recording()
    plan = DemoPlan(recording, rows, rate, transport == "redis")
    try:
        total = sum(len(write.rows) for write in read_script(recording, rows))
    except ValueError as error:
        raise click.BadParameter(f"{recording}: {error}") from error
    interrupt_on_termination()
    deployment = Deployment(plan)
    try:
        with display.TextScreen(console) as screen:
            tallies = run_demo(deployment, screen, total, with_faults=faults)
    except ReplicationError as error:
        fail(f"The demonstration failed: {error}", 1)
    except KeyboardInterrupt:
        fail("Interrupted; stopping everything ...", 130)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        deployment.close()
    display.show_table(console, tallies)
    agree = display.positions_agree(tallies)
    is_good = agree and all(tally.is_good for tally in tallies)
    click.echo(_GOOD if is_good else _BAD)
    sys.exit(0 if is_good else 1)
