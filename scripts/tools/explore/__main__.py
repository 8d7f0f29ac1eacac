"""Explore reader and writer in every interleaving of small worlds.

See docs/reader.rst and docs/storage.rst.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import islice

from scripts.tools.explore import writer_worlds
from scripts.tools.explore.driven import compare
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
from scripts.tools.explore.worlds import COMPARED, DEEP, DRIVEN, SHALLOW
from scripts.tools.explore.writer_search import search


def main(arguments: list[str]) -> int:
    """Explore worlds; return 0 if all is well, 2 if the time was too short.

    :return: 1 if a promise was broken, or if nothing took an entry of the table.
    """
    parser = argparse.ArgumentParser(prog="scripts/explore", description=__doc__)
    parser.add_argument(
        "--shallow", action="store_true", help="explore only what scripts/test does"
    )
    parser.add_argument("--world", action="append", help="only this world")
    parser.add_argument(
        "--seconds",
        type=float,
        default=3600.0,
        help="the limit of processor time for all worlds",
    )
    options = parser.parse_args(arguments)
    worlds = [*SHALLOW.items(), *(() if options.shallow else DEEP.items())]
    status = 0
    taken: set[Call] = set()
    for name, (kind, bounds) in worlds:
        if options.world and name not in options.world:
            continue
        left = options.seconds - time.process_time()
        result = Search(kind, bounds).run(left, every=30.0)
        end = "complete" if result.is_complete else "not complete"
        print(  # noqa: T201 -- the result
            f"{name}: {result.states} states, {result.transitions} transitions, depth "
            f"{result.depth}, at most {result.steps} steps to rest, "
            f"{result.seconds:.0f} s, {end}",
            flush=True,
        )
        taken |= result.calls
        if result.broken is not None:
            print(explain(result.broken), flush=True)  # noqa: T201
            return 1
        if not result.is_complete:
            status = 2
    status = max(status, _explore_writers(options))
    if status == 1:
        return 1
    if not options.world and not (
        compare_driver(40 if options.shallow else 300)
        and compare_reduced(2 if options.shallow else len(COMPARED))
    ):
        return 1
    untaken = names(entries() - taken)
    print(f"{len(taken)} entries of the table taken")  # noqa: T201 -- the result
    for entry in sorted(untaken):
        test = UNIT_TESTED.get(entry, "NO TEST")
        print(f"not taken: {entry}: {test}")  # noqa: T201 -- the result
    if not (options.shallow or options.world) and untaken - UNIT_TESTED.keys():
        return 1
    return status


def _explore_writers(options: argparse.Namespace) -> int:
    worlds = writer_worlds.SHALLOW | ({} if options.shallow else writer_worlds.DEEP)
    status = 0
    for name, bounds in worlds.items():
        if options.world and f"writer: {name}" not in options.world:
            continue
        result = search(bounds, options.seconds - time.process_time())
        end = "complete" if result.is_complete else "not complete"
        print(  # noqa: T201 -- the result
            f"writer: {name}: {result.states} states, {result.transitions} "
            f"transitions, depth {result.depth}, {result.rest} at rest, "
            f"{result.seconds:.0f} s, {end}",
            flush=True,
        )
        if result.broken:
            print(result.explain(), flush=True)  # noqa: T201 -- the result
            return 1
        if not result.is_complete:
            status = 2
    return status


def compare_driver(states: int) -> bool:
    """Compare the driver of the package with small worlds; return whether all is well.

    :param states: how many states of each world to begin with.
    """
    for name, (kind, bounds) in DRIVEN.items():
        found = compare(kind, bounds, states)
        print(  # noqa: T201 -- the result
            f"driver, {name}: {found.sequences} sequences of at most {found.depth} "
            f"events: {found.reason or 'agrees'}",
            flush=True,
        )
        if found.reason is not None:
            print(*found.events, sep="\n")  # noqa: T201 -- the result
            return False
    missed = [name for name, bug in BUGS.items() if find(bug).reason is None]
    print(  # noqa: T201 -- the result
        f"{len(BUGS) - len(missed)} of {len(BUGS)} deliberate bugs of the driver found",
        *missed,
        sep="\nnot found: ",
        flush=True,
    )
    return not missed


def compare_reduced(worlds: int) -> bool:
    """Compare searches with those that are not reduced; return whether all agree.

    :param worlds: how many of the worlds.
    """
    for name, (kind, bounds) in islice(COMPARED.items(), worlds):
        agrees = agrees_unreduced(kind, bounds, 3600.0)
        end = "the same states" if agrees else "OTHER STATES, or not complete"
        print(f"without reductions, {name}: {end}", flush=True)  # noqa: T201
        if not agrees:
            return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
