"""``synapse-replication pipeline audit``: finds lost, duplicate and misplaced rows."""

from __future__ import annotations

import sys
from typing import Any

import click

from synapse_replication.cli.common import command, fail
from synapse_replication.cli.pipeline.options import (
    json_option,
    master_option,
    needs_spark,
    recordings_option,
    source_options,
)
from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.settings import PipelineSettings


@command("audit", "pipeline audit -c homeserver.yaml --archive /srv/archive")
@source_options
@recordings_option
@click.option(
    "--archive",
    metavar="DIR",
    help="An archive whose rows are compared with the tables. Its recordings are also "
    "audited.",
)
@click.option(
    "--out",
    metavar="DIR",
    help="Write all findings to findings.parquet and findings.json in this folder.",
)
@master_option
@json_option
def audit_command(settings: PipelineSettings, **options: Any) -> None:
    """Check for lost, duplicate and misplaced rows.

    The audit compares tables, sequences, positions, recordings and archive. It changes
    none of them, and can be run while the deployment is running. Exit status: 1 if it
    finds an error in the data, 2 if the audit itself fails.
    """
    try:
        with needs_spark():
            from synapse_replication.pipeline.audit.findings import Severity
            from synapse_replication.pipeline.audit.job import run_audit

            counts = run_audit(settings, **options)
    except PipelineError as error:
        fail(f"Error: {error}")
    if counts[Severity.ERROR]:
        sys.exit(1)
