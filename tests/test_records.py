"""
How records are declared: as attrs classes.

A ``msgspec.Struct`` is for bytes that are decoded into it, or for a hot path that an
attrs class would make more than 3 % slower.
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
#: One is created for each chunk of rows, or for each command; those of the status, for
#: each writer and each page: attrs classes take 30 % longer for a large deployment.
HOT = {
    "handlers/receiving/receiver.py",
    "instrumentation/status/assessment.py",
    "instrumentation/status/records.py",
    "instrumentation/status/verdict.py",
    "streams/memory.py",
    "streams/pages.py",
    "streams/rows.py",
    "wire/commands.py",
    "wire/connection.py",
    "wire/rdata.py",
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
        allowed = DECODED | HOT
        self.assertEqual(modules - allowed, set(), "declare an attrs class")
        self.assertEqual(allowed - modules, set(), "remove the reason")
