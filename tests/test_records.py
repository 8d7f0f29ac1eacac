"""
How records are declared: as attrs classes.

A ``msgspec.Struct`` is for bytes that are decoded into it, or for a hot path where
``scripts/bench`` shows more than 3 %.
"""

from __future__ import annotations

import ast
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

import synapse_replication

_PACKAGE = Path(synapse_replication.__file__).parent

#: Bytes are decoded into a Struct of these modules.
DECODED = {
    "demo/check.py",
    "http/client.py",
    "instrumentation/status/model.py",
    "pipeline/source/offsets.py",
    "pipeline/source/options.py",
    "recordings/reader.py",
    "wire/extension.py",
}
#: One is created for each chunk of rows, or for each command.
HOT = {
    "handlers/receiving/receiver.py",
    "streams/pages.py",
    "streams/rows.py",
    "wire/commands.py",
    "wire/rdata.py",
}
#: These were written before the rule. Remove a module when its records are attrs
#: classes; add none.
BEFORE_THE_RULE = {
    "app/status_page.py",
    "errors.py",
    "handlers/events.py",
    "handlers/interfaces.py",
    "handlers/sending/streamer.py",
    "instrumentation/prometheus.py",
    "instrumentation/status/assessment.py",
    "instrumentation/status/records.py",
    "instrumentation/status/verdict.py",
    "pipeline/archive/purges.py",
    "storage/id_streams.py",
    "storage/name_lock.py",
    "storage/open_transactions.py",
    "storage/removed_writer_search.py",
    "storage/row_queries.py",
    "storage/standby.py",
    "storage/stuck_id_watch.py",
    "streams/id_column.py",
    "streams/memory.py",
    "streams/standard/registry.py",
    "streams/stream.py",
    "streams/stuck_ids.py",
    "wire/connection.py",
}


def _has_struct(path: Path) -> bool:
    tree = ast.parse(path.read_text("utf-8"))
    bases = (
        ast.unparse(base).partition("[")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for base in node.bases
    )
    return any(base in ("Struct", "msgspec.Struct") for base in bases)


class RecordTests(SynchronousTestCase):
    """The modules that declare a Struct."""

    def test_structs(self) -> None:
        """Each has a reason, and no reason is without a Struct."""
        modules = {
            path.relative_to(_PACKAGE).as_posix()
            for path in _PACKAGE.rglob("*.py")
            if _has_struct(path)
        }
        allowed = DECODED | HOT | BEFORE_THE_RULE
        self.assertEqual(modules - allowed, set(), "declare an attrs class")
        self.assertEqual((DECODED | HOT) - modules, set(), "remove the reason")
