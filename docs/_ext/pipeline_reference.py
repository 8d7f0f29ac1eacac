"""Directives for tables about the pipeline.

``finding-kinds`` shows the kinds of findings, and ``spark-settings`` the settings of
Spark.
"""

from __future__ import annotations

from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx
from tables import make_table

from synapse_replication.pipeline.audit.kinds import KINDS
from synapse_replication.pipeline.spark.settings import LOG_SETTINGS, own_settings


class FindingKinds(Directive):
    """A table with one row for each kind of findings."""

    def run(self) -> list[nodes.Node]:
        """Return the table. Called by docutils."""
        return make_table(
            self,
            (
                (name, kind.severity.value, kind.meaning, kind.remedy)
                for name, kind in KINDS.items()
            ),
            header=("Kind", "Level", "Meaning", "What to do"),
            widths=(22, 8, 42, 28),
            source="pipeline/audit/kinds.py",
        )


class SparkSettings(Directive):
    """A table with one row for each setting of Spark."""

    def run(self) -> list[nodes.Node]:
        """Return the table. Called by docutils."""
        # The folder in which the manual is made is left out.
        here = f"{LOG_SETTINGS.parent}/"
        return make_table(
            self,
            (
                (
                    f"``{setting.name}``",
                    f"``{setting.value.replace(here, '')}``",
                    setting.reason,
                )
                for setting in own_settings()
            ),
            header=("Setting", "Value", "Reason"),
            widths=(34, 32, 34),
            source="pipeline/spark/settings.py",
        )


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives with Sphinx."""
    app.add_directive("finding-kinds", FindingKinds)
    app.add_directive("spark-settings", SparkSettings)
    return {"parallel_read_safe": True}
