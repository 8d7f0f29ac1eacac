"""``synapse-replication pipeline``: the jobs on Spark, from the command line.

What each job needs is imported when it runs: the rest of the command line works
without Spark. Exit status: 0 when all went well, 1 when something failed or an
audit found an error, 2 when the command or the configuration is wrong, or an audit
could not be made.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import click

from synapse_replication.errors import SparkMissingError

__all__ = ["pipeline"]

#: The jobs: each module has a click command of this name with ``_command`` behind.
_JOBS: Mapping[str, str] = MappingProxyType(
    {
        "archive": "synapse_replication.pipeline.archive.job",
        "audit": "synapse_replication.pipeline.audit.job",
        "bootstrap": "synapse_replication.pipeline.bootstrap.job",
        "report": "synapse_replication.pipeline.report.job",
        "export": "synapse_replication.pipeline.archive.export_job",
        "purge": "synapse_replication.pipeline.archive.purge_job",
    }
)


class _JobGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_JOBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _JOBS:
            return None
        try:
            module = importlib.import_module(_JOBS[cmd_name])
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] not in ("pyspark", "pyarrow", "pandas"):
                raise
            raise SparkMissingError(
                f"{error.name} is missing; install it with: "
                "pip install 'synapse_replication[spark]'"
            ) from error
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command

    def invoke(self, ctx: click.Context) -> Any:
        # The pipeline lies above us.
        failures = importlib.import_module(
            "synapse_replication.pipeline.spark.failures"
        )
        with failures.short_failures():
            return super().invoke(ctx)


@click.group("pipeline", cls=_JobGroup)
def pipeline() -> None:
    """Archive, audit, bootstrap, report, export, purge: jobs on Spark."""
