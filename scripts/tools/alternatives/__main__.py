"""Compares this package with LISTEN/NOTIFY, Redis Streams and JetStream."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from scripts.tools.alternatives.peers import ALTERNATIVES
from scripts.tools.alternatives.run import OURS, PrivateNats, run

NAMES = (*ALTERNATIVES, OURS)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", nargs=-1, type=click.Choice(NAMES))
def alternatives(names: tuple[str, ...]) -> None:
    """Run the same service on each alternative, under the same faults.

    Two writers commit rows in transactions that overlap, and a consumer appends them to
    a file. Writers, consumer and server are killed, the consumer's connection is lost,
    and the consumer goes away and comes back.
    """
    lines = []
    for name in names or NAMES:
        if name == "jetstream" and PrivateNats.find() is None:
            click.echo("jetstream: skipped: nats-server is not installed", err=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            result = run(name, lambda text: click.echo(text, err=True), Path(folder))
        title = "this package" if name == OURS else ALTERNATIVES[name].title
        lines.append(
            f"{title:55} {result.written:8} {result.lost:6} {result.doubled:8} "
            f"{result.reordered:10} {result.quantile(50):7.1f} "
            f"{result.quantile(99):7.1f} {result.delayed:8.0f} {result.rate:7.0f}"
        )
        click.echo(lines[-1], err=True)
    click.echo(
        f"{'':55} {'written':>8} {'lost':>6} {'doubled':>8} {'reordered':>10} "
        f"{'p50 ms':>7} {'p99 ms':>7} {'held ms':>8} {'rows/s':>7}"
    )
    for line in lines:
        click.echo(line)


if __name__ == "__main__":
    alternatives()
