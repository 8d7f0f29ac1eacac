"""The command line of the simulation."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

import click

from tests.simulation.long import Sample, simulate_days, why_growing
from tests.simulation.runner import Result, simulate


def _read_range(context: object, parameter: object, value: str | None) -> range | None:
    if value is None:
        return None
    first, colon, end = value.partition(":")
    try:
        seeds = range(int(first), int(end)) if colon else range(int(first))
    except ValueError:
        seeds = range(0)
    if not seeds:
        raise click.BadParameter(f"'{value}' is not a range; write for instance 0:200")
    return seeds


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--seeds",
    callback=_read_range,
    metavar="FIRST:END",
    help="Run the seeds from FIRST to END - 1.  [default: 0:200]",
)
@click.option("--seed", type=int, help="Run one seed.")
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Print all events; no effect if seeds run in parallel.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=os.cpu_count() or 1,
    show_default=True,
    help="How many seeds to run in parallel.",
)
@click.option(
    "--discards",
    is_flag=True,
    help="Let writers discard rows, as stock ones do that cannot publish.",
)
@click.option(
    "--replaces",
    is_flag=True,
    help="Let writers hold their names, and suspend and replace some of them.",
)
@click.option(
    "--days",
    type=click.FloatRange(min=0, min_open=True),
    help="Run one cluster for this simulated time, with faults every four minutes.",
)
def main(
    seeds: range | None,
    seed: int | None,
    verbose: bool,
    jobs: int,
    discards: bool,
    replaces: bool,
    days: float | None,
) -> None:
    """Run a cluster with simulated time, network, Redis and PostgreSQL.

    The cluster has a main process, two workers that write and two that read. The
    faults include crashes, broken links, outages of the broker and the database, and
    unreadable rows. The seed determines a run, so a failure can be reproduced. The
    exit status is 0 only if every invariant held for every seed.
    """
    if days is not None:
        sys.exit(_run_days(seed or 0, days))
    if seed is not None:
        seeds, jobs = range(seed, seed + 1), 1
    if seeds is None:
        seeds = range(200)
    # As simulate() does for each seed: exclude existing objects from the garbage
    # collection.
    gc.freeze()
    run = partial(simulate, discards=discards, replaces=replaces)
    started = time.monotonic()
    if jobs == 1 or len(seeds) == 1:
        failed = _report(
            (_run(run, each, verbose) for each in seeds), len(seeds), started
        )
    else:
        with multiprocessing.Pool(jobs) as pool:
            results = pool.imap(run, seeds, chunksize=5)
            failed = _report(results, len(seeds), started)
    sys.exit(1 if failed else 0)


def _run_days(seed: int, days: float) -> int:
    samples: list[Sample] = []

    def report(sample: Sample) -> None:
        samples.append(sample)
        click.echo(
            f"day {sample.day}: {sample.memory:.0f} MiB, {sample.objects:,} objects, "
            f"{sample.delayed_calls} delayed calls; {sample.rows:,} rows, "
            f"{sample.faults:,} faults and {sample.starts:,} starts so far"
        )

    gc.freeze()
    failure = simulate_days(seed, days, report) or why_growing(samples)
    click.echo(
        f"{days:g} days of seed {seed}: "
        + (failure or "every invariant held, and all positions are equal")
    )
    return 1 if failure else 0


def _run(run: Callable[..., Result], seed: int, verbose: bool) -> Result:
    if not verbose:
        return run(seed)
    return run(seed, trace_to=lambda now, text: click.echo(f"{now:10.4f}  {text}"))


def _report(results: Iterable[Result], total: int, started: float) -> int:
    """Print failures as they occur, then the totals; return the number of failures."""
    failed = 0
    faults: Counter[str] = Counter()
    sums: Counter[str] = Counter()
    moves: Counter[str] = Counter()
    slowest = 0.0
    for result in results:
        if result.failure is not None:
            failed += 1
            click.echo(f"seed {result.seed} FAILED: {result.failure}")
            click.echo(f"    repeat with: scripts/simulate --seed {result.seed} -v")
        counts = result.counts
        faults += counts.faults
        moves += counts.moves
        slowest = max(slowest, result.agreed_after)
        sums["rows committed"] += result.committed_rows
        sums["rows delivered"] += result.applied_rows
        sums["messages"] += result.messages
        sums["catch-ups"] += counts.catch_ups.total()
        sums["subscriptions"] += counts.subscriptions.total()
        sums["drains of removed writers"] += counts.drains.total()
        sums["rows of removed writers"] += counts.drained_rows
        sums["crashes"] += counts.starts.total() - 5
        sums["unreadable rows"] += counts.garbled
        sums["pages of partial resyncs"] += counts.partial_resyncs
        sums["refuted positions"] += counts.refuted
        sums["fallbacks"] += counts.fallbacks
        sums["repairs of sequences"] += counts.repairs
        sums["excused rows"] += result.excused_rows
        sums["excused resets"] += result.excused_resets
        sums["hidden resets"] += len(counts.hidden_resets)
        sums["simulated s"] += round(result.simulated_seconds)
    click.echo("faults: " + _format(faults))
    click.echo("moves: " + _format(moves))
    click.echo("in total: " + _format(sums))
    click.echo(
        f"{total} seeds, {failed} failed, in {time.monotonic() - started:.1f} s; "
        f"longest wait for all positions to agree: {slowest:.1f} s after the last fault"
    )
    return failed


def _format(numbers: Counter[str]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in numbers.most_common())


if __name__ == "__main__":
    main()
