"""The command line of the kill tests."""

from __future__ import annotations

import os
import random
import sys
import tempfile
from pathlib import Path

import click

from scripts.tools.archive_kills.continuous import ContinuousTest
from scripts.tools.archive_kills.kills import VICTIMS, Kill, plan_kills
from scripts.tools.archive_kills.rounds import KillTest, TwoDriversTest
from scripts.tools.archive_kills.work import RETENTION_VARIABLE, work
from synapse_replication.testing.servers import PrivatePostgres
from tests.support.archive_points import Point


@click.command()
@click.option("--kills", default=40, show_default=True, help="The number of kills.")
@click.option(
    "--two-drivers",
    default=0,
    help="Instead, run this many rounds with two concurrent drivers.",
)
@click.option(
    "--skip",
    default=0,
    help="The number of kills to skip; the first kills are at named points.",
)
@click.option(
    "--seed", default=1, show_default=True, help="The seed of all random choices."
)
@click.option(
    "--minutes",
    type=click.FloatRange(min=1),
    help="Instead, archive continuously for this time, beside a running deployment.",
)
@click.option("--child", hidden=True)
@click.option("--point", type=click.Choice([p.value for p in Point]), hidden=True)
@click.option("--nth", default=1, hidden=True)
@click.option("--victims", type=click.Choice(VICTIMS), default="python", hidden=True)
def main(
    kills: int,
    two_drivers: int,
    skip: int,
    seed: int,
    minutes: float | None,
    child: str | None,
    point: str | None,
    nth: int,
    victims: str,
) -> None:
    """Kill the archive's driver repeatedly; exit with 1 if any row is wrong."""
    if child is not None:
        work(child, None if point is None else Kill(victims, Point(point), nth))
        return
    rng = random.Random(seed)
    if minutes is not None:
        with tempfile.TemporaryDirectory(prefix="archive-") as folder:
            problems = ContinuousTest(Path(folder), rng, click.echo).run(minutes)
        for problem in problems:
            click.echo(f"PROBLEM: {problem}", err=True)
        sys.exit(1 if problems else 0)
    with tempfile.TemporaryDirectory(prefix="archive-kills-") as folder:
        server = PrivatePostgres()
        server.start()
        try:
            archive = Path(folder, "archive")
            dsn = server.new_database()
            if two_drivers:
                test = TwoDriversTest(dsn, archive, click.echo)
                result = test.run_rounds(two_drivers, rng)
                click.echo(f"{test.refused} drivers were rejected")
            else:
                # With only one driver, uncommitted files may be removed immediately.
                os.environ[RETENTION_VARIABLE] = "0"
                planned = plan_kills(kills, rng)[skip:]
                result = KillTest(dsn, archive, click.echo).run(planned)
        finally:
            server.stop()
    click.echo(f"{result.kills} kills, {result.rows} rows")
    for problem in result.problems:
        click.echo(f"PROBLEM: {problem}", err=True)
    sys.exit(1 if result.problems else 0)


if __name__ == "__main__":
    main()
