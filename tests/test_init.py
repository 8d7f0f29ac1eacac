"""Tests for importing the package."""

from __future__ import annotations

import subprocess
import sys

from twisted.trial.unittest import SynchronousTestCase

import synapse_replication

#: Imports the pure core, then prints the top-level modules that were loaded.
PROGRAM = """
import importlib, pkgutil, sys
import synapse_replication, synapse_replication.errors
import synapse_replication.streams, synapse_replication.wire
for package in (synapse_replication.streams, synapse_replication.wire):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


class ImportTests(SynchronousTestCase):
    """Tests for the modules that an import loads."""

    def test_core_without_twisted(self) -> None:
        """The streams and the wire format load neither a reactor nor a driver."""
        result = subprocess.run(
            [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
        )
        loaded = set(result.stdout.split())
        self.assertIn("msgspec", loaded)
        self.assertEqual(
            loaded
            & {
                "twisted",
                "zope",
                "treq",
                "txredisapi",
                "psycopg2",
                "prometheus_client",
                "opentelemetry",
                "pydantic",
                "pyspark",
            },
            set(),
        )

    def test_version(self) -> None:
        """The package has a version."""
        self.assertRegex(synapse_replication.__version__, r"^\d+\.\d+")
