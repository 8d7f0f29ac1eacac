"""The command line of the homeserver's own tests."""

from __future__ import annotations

import importlib.metadata
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
from rich.console import Console

from scripts.tools.synapse_suite.modules import FULL, SHORT
from scripts.tools.synapse_suite.report import show
from scripts.tools.synapse_suite.run import Comparison, Suite
from scripts.tools.synapse_suite.source import (
    DISTRIBUTION,
    SourceError,
    fetch,
    unpack,
)
from synapse_replication.testing.servers import shared_postgres


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--short", is_flag=True, help="Only what takes less than two minutes.")
@click.option(
    "--source",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    envvar="SYNAPSE_REPLICATION_SDIST",
    help="A source distribution, instead of fetching it from the package index.",
)
@click.option(
    "--except",
    "excepted",
    metavar="PARTS",
    help="Leave these parts of the homeserver as they are.",
)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where to keep logs and results; else they are removed.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Modules that run at the same time.",
)
@click.argument("names", nargs=-1, metavar="[MODULE]...")
def suite(
    short: bool,
    source: Path | None,
    excepted: str | None,
    folder: Path | None,
    jobs: int,
    names: tuple[str, ...],
) -> None:
    """Run the homeserver's own tests on stock replication, then on ours.

    Exit status 0 only if every test that succeeds on stock succeeds on ours; 2 if the
    tests cannot be had.
    """
    console = Console(stderr=True)
    version = importlib.metadata.version(DISTRIBUTION)
    with tempfile.TemporaryDirectory(prefix="synapse-suite-") as private:
        try:
            unpacked = (
                fetch(version, Path(private))
                if source is None
                else unpack(source, Path(private))
            )
        except SourceError as error:
            console.print(f"the tests of {DISTRIBUTION} {version}: {error}")
            sys.exit(2)
        results = folder or Path(private) / "results"
        results.mkdir(parents=True, exist_ok=True)
        options = ("--except", excepted) if excepted else ()
        # Absolute: the tests run in a folder of their own.
        it = Suite(unpacked, results.resolve(), shared_postgres().dsn(), options)
        comparisons: list[Comparison] = []
        with ThreadPoolExecutor(jobs) as pool:
            for done in pool.map(it.compare, names or (SHORT if short else FULL)):
                comparisons.append(done)
                console.print(
                    f"{done.name}: stock {len(done.stock.successes)}, "
                    f"ours {len(done.ours.successes)}"
                )
        show(Console(), version, comparisons)
    sys.exit(0 if all(done.is_good for done in comparisons) else 1)


if __name__ == "__main__":
    suite()
