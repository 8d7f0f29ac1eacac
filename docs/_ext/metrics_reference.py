"""The directive ``metrics-reference``: made from instrumentation/metrics.csv."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from sphinx.application import Sphinx

from synapse_replication.instrumentation.prometheus import METRICS, SERVER_NAME_LABEL


class MetricsReference(Directive):
    """A table with one row for each definition, in the order of the definitions."""

    def run(self) -> list[nodes.Node]:
        """Return the table. Called by docutils."""
        lines = [".. list-table::", "   :header-rows: 1", "   :widths: 50 15 35", ""]
        rows = [("Metric", "Labels", "Meaning")]
        rows += [
            (
                f"``{metric.name}`` ({metric.kind.value})",
                ", ".join(f"``{label}``" for label in metric.labels) or "--",
                metric.documentation,
            )
            for metric in METRICS
        ]
        for row in rows:
            lines += [f"   * - {row[0]}", *(f"     - {cell}" for cell in row[1:])]
        lines += ["", f"Every metric also has the label ``{SERVER_NAME_LABEL}``."]
        container = nodes.container()
        source = "instrumentation/metrics.csv"
        self.state.nested_parse(StringList(lines, source=source), 0, container)
        return container.children


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive with Sphinx."""
    app.add_directive("metrics-reference", MetricsReference)
    return {"parallel_read_safe": True}
