"""Tests for importing the package."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable

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

#: Imports what a process of a homeserver loads, then prints this package's modules.
HOST_PROGRAM = """
import sys
import synapse_replication.dropin.__main__
import synapse_replication.dropin.replaced_names
print(*(name for name in sys.modules if name.startswith("synapse_replication.")))
"""

#: The modules, and the packages, that a process of a homeserver does without as long as
#: no event or option requires them: each module takes memory in every process.
NOT_IN_HOST = (
    "synapse_replication.cli",
    "synapse_replication.config.models",
    "synapse_replication.config.process",
    "synapse_replication.config.replication_options",
    "synapse_replication.config.structuring",
    "synapse_replication.config.yaml_files",
    "synapse_replication.http.agent",
    "synapse_replication.http.client",
    "synapse_replication.instrumentation.status.assessment",
    "synapse_replication.storage.row_queries",
    "synapse_replication.storage.writer_lock",
    "synapse_replication.streams.table",
    "synapse_replication.transport.tls",
    "treq",
)

#: Imports what a stand-alone process loads, whatever its configuration, then prints all
#: modules.
STANDALONE_PROGRAM = """
import sys
import twisted.internet.reactor
import synapse_replication.app.service
import synapse_replication.app.supervision
import synapse_replication.cli.main
import synapse_replication.config.process
print(*sys.modules)
"""

#: The modules, and the packages, that a stand-alone process loads only if its
#: configuration requires them.
NOT_IN_STANDALONE = (
    "hyperlink",
    "jinja2",
    "opentelemetry",
    "synapse_replication.http.agent",
    "synapse_replication.http.resource",
    "synapse_replication.storage.id_generators",
    "synapse_replication.tcp",
    "synapse_replication.wire.connection",
    "treq",
    "twisted.internet.endpoints",
    "twisted.web",
)


class ImportTests(SynchronousTestCase):
    """Tests for the modules that an import loads."""

    def loaded(self, program: str) -> set[str]:
        """Return the modules that a program prints."""
        result = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        )
        return set(result.stdout.split())

    def test_core_without_twisted(self) -> None:
        """The streams and the wire format load neither a reactor nor a driver."""
        loaded = self.loaded(PROGRAM)
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
                "pyspark",
            },
            set(),
        )

    def test_small_in_host(self) -> None:
        """A process of a homeserver loads no module only for types or rare events."""
        loaded = self.loaded(HOST_PROGRAM)
        self.assertIn("synapse_replication.dropin.command_handler", loaded)
        self.assertEqual(_of_packages(NOT_IN_HOST, loaded), [])

    def test_small_alone(self) -> None:
        """A stand-alone process loads what its configuration may not need later."""
        loaded = self.loaded(STANDALONE_PROGRAM)
        self.assertIn("synapse_replication.handlers.command_handler", loaded)
        self.assertEqual(_of_packages(NOT_IN_STANDALONE, loaded), [])

    def test_version(self) -> None:
        """The package has a version."""
        self.assertRegex(synapse_replication.__version__, r"^\d+\.\d+")


def _of_packages(packages: Iterable[str], loaded: Iterable[str]) -> list[str]:
    """Return the loaded modules that are, or are in, one of these packages."""
    return [
        name
        for name in sorted(loaded)
        if any(f"{name}.".startswith(f"{each}.") for each in packages)
    ]
