"""The directive ``finding-kinds``: made from pipeline/audit/kinds.py."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from sphinx.application import Sphinx

from synapse_replication.pipeline.audit.kinds import KINDS


class FindingKinds(Directive):
    """A table with one row for each kind of findings."""

    def run(self) -> list[nodes.Node]:
        """Return the table. Called by docutils."""
        lines = [".. list-table::", "   :header-rows: 1", "   :widths: 22 8 42 28", ""]
        rows = [("Kind", "Level", "Meaning", "What to do")]
        rows += [
            (name, kind.severity.value, kind.meaning, kind.remedy)
            for name, kind in KINDS.items()
        ]
        for row in rows:
            lines += [f"   * - {row[0]}", *(f"     - {cell}" for cell in row[1:])]
        container = nodes.container()
        self.state.nested_parse(
            StringList(lines, source="pipeline/audit/kinds.py"), 0, container
        )
        return container.children


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive with Sphinx."""
    app.add_directive("finding-kinds", FindingKinds)
    return {"parallel_read_safe": True}
