"""``synapse-replication pipeline``: the jobs of the pipeline.

The jobs that read rows start Spark; ``bootstrap`` and ``purge`` do not. The commands
import their jobs, and thereby modules of the extra ``spark``, only when they run: help
and usage errors are fast and work without the extra. Exit status: 0 for success; 1 if a
job failed or an audit found errors in the data; 2 if the command or the configuration
is invalid, or if an audit could not be completed.
"""

from __future__ import annotations

import atexit
import gc
from typing import Any

import click

from synapse_replication.cli.pipeline import archives, deployment


class _JobGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order in which the commands were added."""
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        # At its end, Python would search all objects of the large libraries for
        # cycles, which takes longer than everything else after the last line.
        atexit.register(gc.freeze)
        return super().invoke(ctx)


@click.group(
    "pipeline",
    cls=_JobGroup,
    commands=[
        archives.archive_command,
        deployment.audit_command,
        deployment.bootstrap_command,
        deployment.report_command,
        archives.export_command,
        archives.purge_command,
    ],
)
def pipeline_command() -> None:
    """Archive, audit and report on the streams with Spark."""
