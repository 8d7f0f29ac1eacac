"""The directive ``metrics-reference``: made from instrumentation/metrics.csv."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx
from tables import make_table

from synapse_replication.instrumentation.prometheus import METRICS, SERVER_NAME_LABEL


class MetricsReference(Directive):
    """A table with one row for each definition, in the order of the definitions."""

    def run(self) -> list[nodes.Node]:
        """Return the table. Called by docutils."""
        table = make_table(
            self,
            (
                (
                    f"``{metric.name}`` ({metric.kind.value})",
                    ", ".join(f"``{label}``" for label in metric.labels) or "--",
                    metric.documentation,
                )
                for metric in METRICS
            ),
            header=("Metric", "Labels", "Meaning"),
            widths=(50, 15, 35),
            source="instrumentation/metrics.csv",
        )
        others = nodes.paragraph(
            "",
            "",
            nodes.Text("Every metric also has the label "),
            nodes.literal("", SERVER_NAME_LABEL),
            nodes.Text("."),
        )
        return [*table, others]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive with Sphinx."""
    app.add_directive("metrics-reference", MetricsReference)
    return {"parallel_read_safe": True}
