"""Prints the results as tables or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import attrs
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from scripts.tools.faults.run import Result
from scripts.tools.faults.synapse.course import DeploymentResult, StreamResult
from scripts.tools.faults.synapse.deployments import DEPLOYMENTS


def show_json(results: Sequence[Result], seed: int) -> str:
    """Return the results as JSON text."""
    values: list[dict[str, Any]] = [
        attrs.asdict(result) | {"good": result.is_good} for result in results
    ]
    return json.dumps({"seed": seed, "scenarios": values}, indent=2)


def show_table(console: Console, results: Sequence[Result]) -> None:
    """Show a line for each scenario, then the reasons for skipped and failed ones."""
    table = Table(title="Faults under load", title_justify="left")
    table.add_column("scenario", no_wrap=True)
    for heading in (
        "rows written",
        "received (2 readers)",
        "refused writes",
        "lost",
        "duplicated",
        "reordered",
        "catch-ups",
        "caught up after (s)",
        "all agree",
        "stalls",
        "false",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        if result.skipped or (result.error and not result.written):
            table.add_row(result.scenario, "skipped" if result.skipped else "failed")
            continue
        table.add_row(
            result.scenario,
            str(result.written),
            str(result.received),
            str(result.refused),
            *(
                f"[bold red]{number}[/]" if number else "0"
                for number in (result.lost, result.duplicated, result.reordered)
            ),
            str(result.catch_ups),
            "[bold red]never[/]" if result.seconds is None else f"{result.seconds:.1f}",
            "yes" if result.agreed else "[bold red]no[/]",
            str(result.stalls),
            f"[bold red]{len(result.false_stalls)}[/]" if result.false_stalls else "0",
        )
    _print_whole(console, table)
    for result in results:
        for what, text in (
            ("skipped", result.skipped),
            ("failed", result.error),
            ("false alarms", "; ".join(result.false_stalls)),
        ):
            if text:
                console.print(
                    f"{result.scenario} {what}: {text}", markup=False, highlight=False
                )


def show_deployments_json(results: Sequence[DeploymentResult], seed: int) -> str:
    """Return the results for a real Synapse as JSON text."""
    values = [attrs.asdict(result) | {"good": result.is_good} for result in results]
    return json.dumps({"seed": seed, "deployments": values}, indent=2)


def show_deployments(console: Console, results: Sequence[DeploymentResult]) -> None:
    """Show a line for each stream of each deployment, followed by the lost rows."""
    table = Table(title="Faults on a real Synapse", title_justify="left")
    for heading in ("deployment", "processes", "stream"):
        table.add_column(heading, no_wrap=True)
    for heading in (
        "committed",
        "due",
        "delivered",
        "lost",
        "duplicated",
        "never shown",
        "failed reads",
        "caught up after (s)",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        for stream in result.streams:
            table.add_row(DEPLOYMENTS[result.name].title, *_cells(stream))
        table.add_section()
    _print_whole(console, table)
    for result in results:
        if result.error:
            console.print(
                f"{result.name} failed: {result.error}", markup=False, highlight=False
            )
        if result.late:
            console.print(
                f"{result.name} delivered late on ours: {', '.join(result.late)}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
        if result.alarms or result.false_alarms:
            console.print(
                f"{result.name}: {result.alarms} stalls and resets were reported, "
                f"{len(result.false_alarms)} of them falsely"
                f"{': ' if result.false_alarms else ''}"
                f"{'; '.join(result.false_alarms)}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
        if result.unannounced is not None:
            for what, found in (
                ("received by no process", result.unannounced),
                ("received by no process, and removed since", result.consumed),
                ("found by the meter", result.metered),
            ):
                console.print(
                    f"{result.name} {what}: {len(found)}: {', '.join(found)}",
                    markup=False,
                    highlight=False,
                    soft_wrap=True,
                )
        for text in result.lost:
            console.print(f"{result.name} lost: {text}", markup=False, highlight=False)


def _cells(result: StreamResult) -> list[str]:
    tally = result.tally
    never_shown = "-" if result.never_shown is None else str(result.never_shown)
    return [
        "ours" if tally.is_ours else "stock",
        tally.stream,
        *map(str, (tally.committed, tally.due, tally.delivered)),
        *(
            f"[bold red]{number}[/]" if number else "0"
            for number in (tally.lost, tally.duplicated)
        ),
        f"[bold red]{never_shown}[/]" if result.never_shown else never_shown,
        "-" if result.never_shown is None else str(result.failed_reads),
        "[bold red]never[/]" if result.seconds is None else f"{result.seconds:.1f}",
    ]


def _print_whole(console: Console, table: Table) -> None:
    # Widen the console if needed: a truncated table is useless in a log.
    needed = Measurement.get(console, console.options.update(width=1000), table)
    console.width = max(console.width, needed.maximum)
    console.print(table)
