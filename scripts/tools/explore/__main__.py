"""Explore reader and writer in every interleaving of small worlds.

See docs/reader.rst and docs/storage.rst.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection
from itertools import islice

import click

from scripts.tools.explore import writer_worlds
from scripts.tools.explore.comparison import compare, compare_delayed
from scripts.tools.explore.driver_bugs import BUGS, find
from scripts.tools.explore.search import (
    UNIT_TESTED,
    Call,
    Search,
    agrees_unreduced,
    entries,
    explain,
    names,
)
from scripts.tools.explore.worlds import COMPARED, DEEP, DELAYED, DRIVEN, SHALLOW
from scripts.tools.explore.writer_search import search


@click.command()
@click.option("--shallow", is_flag=True, help="Explore only what scripts/test does.")
@click.option("--world", "only", multiple=True, help="Explore only this world.")
@click.option(
    "--seconds",
    default=3600.0,
    show_default=True,
    help="The limit of processor time for all worlds.",
)
def main(shallow: bool, only: tuple[str, ...], seconds: float) -> None:
    """Explore reader and writer in every interleaving of small worlds.

    The exit status is 0 if all is well, 1 if a promise was broken or if nothing took an
    entry of the table, and 2 if the time was too short.
    """
    sys.exit(_explore(shallow, only, seconds))


def _explore(shallow: bool, only: Collection[str], seconds: float) -> int:
    taken: set[Call] = set()
    status = _explore_readers(shallow, only, seconds, taken)
    if status != 1:
        status = max(status, _explore_writers(shallow, only, seconds))
    if status == 1:
        return 1
    if not only and not (
        compare_driver(40 if shallow else 300)
        and compare_reduced(2 if shallow else len(COMPARED))
    ):
        return 1
    untaken = names(entries() - taken)
    click.echo(f"{len(taken)} entries of the table taken")
    for entry in sorted(untaken):
        test = UNIT_TESTED.get(entry, "NO TEST")
        click.echo(f"not taken: {entry}: {test}")
    if not (shallow or only) and untaken - UNIT_TESTED.keys():
        return 1
    return status


def _explore_readers(
    shallow: bool, only: Collection[str], seconds: float, taken: set[Call]
) -> int:
    """Explore the worlds of a reader; return the status.

    :param taken: the entries of the table that were taken are added to it.
    """
    # Some worlds have the name of a smaller one.
    worlds = [*SHALLOW.items(), *(() if shallow else DEEP.items())]
    status = 0
    for name, (kind, bounds) in worlds:
        if only and name not in only:
            continue
        result = Search(kind, bounds).run(seconds - time.process_time(), every=30.0)
        end = "complete" if result.is_complete else "not complete"
        click.echo(
            f"{name}: {result.states} states, {result.transitions} transitions, depth "
            f"{result.depth}, at most {result.steps} steps to rest, "
            f"{result.seconds:.0f} s, {end}"
        )
        taken |= result.calls
        if result.broken is not None:
            click.echo(explain(result.broken))
            return 1
        if not result.is_complete:
            status = 2
    return status


def _explore_writers(shallow: bool, only: Collection[str], seconds: float) -> int:
    """Explore the worlds of a writer; return the status."""
    worlds = writer_worlds.SHALLOW | ({} if shallow else writer_worlds.DEEP)
    status = 0
    for name, bounds in worlds.items():
        if only and f"writer: {name}" not in only:
            continue
        result = search(bounds, seconds - time.process_time())
        end = "complete" if result.is_complete else "not complete"
        click.echo(
            f"writer: {name}: {result.states} states, {result.transitions} "
            f"transitions, depth {result.depth}, {result.rest} at rest, "
            f"{result.seconds:.0f} s, {end}"
        )
        if result.broken:
            click.echo(result.explain())
            return 1
        if not result.is_complete:
            status = 2
    return status


def compare_driver(states: int) -> bool:
    """Compare the driver of the package with small worlds; return whether all is well.

    :param states: how many states of each world to begin with.
    """
    runs = [
        ("driver", compare, DRIVEN, states),
        # These sequences are long.
        ("driver, with delays", compare_delayed, DELAYED, states // 2),
    ]
    for title, run, worlds, count in runs:
        for name, (kind, bounds) in worlds.items():
            found = run(kind, bounds, count)
            click.echo(
                f"{title}, {name}: {found.sequences} sequences of at most "
                f"{found.depth} events: {found.reason or 'agrees'}"
            )
            if found.reason is not None:
                click.echo("\n".join(map(str, found.events)))
                return False
    missed = [name for name, bug in BUGS.items() if find(bug).reason is None]
    click.echo(
        f"{len(BUGS) - len(missed)} of {len(BUGS)} deliberate bugs of the driver found"
    )
    for name in missed:
        click.echo(f"not found: {name}")
    return not missed


def compare_reduced(worlds: int) -> bool:
    """Compare searches with those that are not reduced; return whether all agree.

    :param worlds: how many of the worlds.
    """
    for name, (kind, bounds) in islice(COMPARED.items(), worlds):
        agrees = agrees_unreduced(kind, bounds, 3600.0)
        end = "the same states" if agrees else "OTHER STATES, or not complete"
        click.echo(f"without reductions, {name}: {end}")
        if not agrees:
            return False
    return True


if __name__ == "__main__":
    main()
