"""``synapse-replication pipeline report``: what there is, as a page to look at."""

from __future__ import annotations

import click

from synapse_replication.cli.common import examples
from synapse_replication.cli.pipeline.options import (
    master_option,
    optional_source_options,
)
from synapse_replication.pipeline.settings import PipelineSettings

__all__ = ["report_command"]


@click.command(
    "report",
    epilog=examples(
        "pipeline report -c homeserver.yaml --out report",
    ),
)
@optional_source_options
@click.option(
    "--out",
    required=True,
    metavar="DIR",
    help="The folder to make, with report.html and a PNG of each plot. It must not "
    "exist.",
)
@click.option(
    "--archive",
    metavar="DIR",
    help="An archive: its rows, in place of the database's, and its recordings.",
)
@click.option(
    "--recording",
    "recordings",
    multiple=True,
    metavar="PATH",
    help="A recording of the wire, or a folder of them. May be given again.",
)
@click.option(
    "--findings",
    metavar="DIR",
    help="What 'pipeline audit --out' wrote, in place of an audit of the database.",
)
@click.option("--no-audit", is_flag=True, help="Audit nothing: that takes the longest.")
@click.option(
    "--window",
    type=click.IntRange(min=1),
    metavar="SECONDS",
    help="How long a window of a plot is; chosen by what there is if not given.",
)
@click.option(
    "--identify",
    is_flag=True,
    help="Show the names of rooms and users, not hashes with a discarded key.",
)
@master_option
def report_command(
    settings: PipelineSettings | None,
    out: str,
    archive: str | None,
    recordings: tuple[str, ...],
    findings: str | None,
    no_audit: bool,
    window: int | None,
    identify: bool,
    master: str | None,
) -> None:
    """Write a page about streams and writers: rows over time, lags, shares, findings.

    One file of HTML that needs no network, and PNGs. Of the database, or of an archive;
    and of recordings.
    """
    if settings is None and not archive and not recordings:
        raise click.UsageError(
            "of what? Give -c or --dsn, or --archive, or --recording"
        )
    from synapse_replication.pipeline.report.job import run_report

    page = run_report(
        settings,
        out,
        archive=archive,
        recordings=recordings,
        findings=findings,
        with_audit=not no_audit,
        window=window,
        identify=identify,
        master=master,
    )
    click.echo(f"written: {page}")
