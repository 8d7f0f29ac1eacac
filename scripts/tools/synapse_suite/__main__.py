"""The command line for running the homeserver's own tests."""

from __future__ import annotations

import importlib.metadata
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from scripts.tools.synapse_suite.databases import open_server
from scripts.tools.synapse_suite.modules import FULL, SHORT, WHOLE
from scripts.tools.synapse_suite.report import show
from scripts.tools.synapse_suite.run import Comparison, Suite
from scripts.tools.synapse_suite.source import (
    DISTRIBUTION,
    SourceError,
    fetch,
    find_modules,
    unpack,
)


class _Part(click.ParamType[tuple[int, int]]):
    """A part of the modules: ``N/M``."""

    name = "part"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        """Return the number of the part, from 0 on, and the number of parts."""
        number, _, count = str(value).partition("/")
        is_number = number.isdecimal() and count.isdecimal()
        if not is_number or not 1 <= int(number) <= int(count):
            self.fail(f"{value!r} is not N/M with 1 <= N <= M", param, ctx)
        return int(number) - 1, int(count)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--short", is_flag=True, help="Run a subset, in less than two minutes.")
@click.option("--all", "whole", is_flag=True, help="Run all tests, which takes hours.")
@click.option(
    "--part",
    type=_Part(),
    default="1/1",
    metavar="N/M",
    help="Run every Mth module from the Nth on, for instance 2/8.",
)
@click.option(
    "--source",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    envvar="SYNAPSE_REPLICATION_SDIST",
    help="A source distribution to use instead of fetching it from the package index.",
)
@click.option(
    "--except",
    "excepted",
    metavar="PARTS",
    help="Do not replace these parts of the homeserver.",
)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="The folder for logs and results; by default they are removed.",
)
@click.option(
    "--resume", is_flag=True, help="Run only modules without a result in that folder."
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="The number of modules that run at the same time.",
)
@click.argument("names", nargs=-1, metavar="[MODULE]...")
def suite(
    short: bool,
    whole: bool,
    part: tuple[int, int],
    source: Path | None,
    excepted: str | None,
    folder: Path | None,
    resume: bool,
    jobs: int,
    names: tuple[str, ...],
) -> None:
    """Run the homeserver's own tests with stock replication, then with this package.

    With --folder and --resume, an interrupted run continues where it stopped, and a
    last run with all parts prints the table of all.

    The exit status is 0 only if every test that succeeds with stock replication also
    succeeds with this package; it is 2 if the tests cannot be fetched.
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
        comparisons: list[Comparison] = []
        # Run one process per module, so that a run can be resumed.
        modules = dict.fromkeys(
            name
            for each in names or (SHORT if short else WHOLE if whole else FULL)
            for name in ([each] if short else find_modules(unpacked, each))
        )
        number, count = part
        with open_server() as server, ThreadPoolExecutor(jobs) as pool:
            # Use an absolute path, because the tests run in another folder.
            tests = Suite(unpacked, results.resolve(), server.dsn(), options, resume)
            for done in pool.map(tests.compare, [*modules][number::count]):
                comparisons.append(done)
                console.print(
                    f"{done.name}: stock {len(done.stock.successes)}, "
                    f"ours {len(done.ours.successes)}"
                )
        show(Console(), version, comparisons)
    sys.exit(0 if all(done.is_good for done in comparisons) else 1)


if __name__ == "__main__":
    suite()
