"""Names of the package: no class has the name of another one."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

import synapse_replication

_PACKAGE = Path(synapse_replication.__file__).parent


class NameTests(SynchronousTestCase):
    def test_classes(self) -> None:
        """Each class of a module has a name of its own, private ones too."""
        modules: defaultdict[str, list[str]] = defaultdict(list)
        for path in _PACKAGE.rglob("*.py"):
            for node in ast.parse(path.read_text("utf-8")).body:
                if isinstance(node, ast.ClassDef):
                    modules[node.name].append(path.relative_to(_PACKAGE).as_posix())
        self.assertGreater(len(modules), 100)
        shared = {name: found for name, found in modules.items() if len(found) > 1}
        self.assertEqual(shared, {}, "rename all but one of them")
