"""Explore the reader in every interleaving of small worlds. See docs/reader.rst."""

from __future__ import annotations

import argparse
import sys

from scripts.tools.explore.search import Call, Search, entries, explain
from scripts.tools.explore.worlds import DEEP, SHALLOW


def main(arguments: list[str]) -> int:
    """Explore worlds; return 1 if a promise was broken, 2 if the time was too short."""
    parser = argparse.ArgumentParser(prog="scripts/explore", description=__doc__)
    parser.add_argument(
        "--shallow", action="store_true", help="explore only what scripts/test does"
    )
    parser.add_argument("--world", action="append", help="only this world")
    parser.add_argument(
        "--seconds",
        type=float,
        default=3600.0,
        help="the limit of processor time for each world",
    )
    options = parser.parse_args(arguments)
    worlds = [*SHALLOW.items(), *(() if options.shallow else DEEP.items())]
    status = 0
    taken: set[Call] = set()
    for name, (kind, bounds) in worlds:
        if options.world and name not in options.world:
            continue
        result = Search(kind, bounds).run(options.seconds, every=30.0)
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
    left = sorted(
        f"{event.name} {before.name} -> {after.name}"
        for event, before, after in entries() - taken
    )
    print(  # noqa: T201 -- the result
        f"{len(taken)} entries of the table taken; not taken: {', '.join(left) or '-'}"
    )
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
