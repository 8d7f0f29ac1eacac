"""Tests for how the tests in :mod:`tests.external` are enabled."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tests.external import PEERS, VARIABLE, Peer, skip_reason

FOLDER = Path(__file__).parent

# Imports every test module while the peers cannot be imported.
_SCRIPT = """
import importlib, sys
peers, modules = (argument.split(",") for argument in sys.argv[1:])
sys.modules.update(dict.fromkeys(peers))
for module in modules:
    importlib.import_module(module)
"""


def modules_of(name: str) -> list[str]:
    """Return the full names of a package's test modules."""
    found = [path.stem for path in (FOLDER / name).glob("test_*.py")]
    return [f"tests.external.{name}.{stem}" for stem in sorted(found)]


class OptInTests(SynchronousTestCase):
    """Tests for ``skip_reason``."""

    def test_not_opted_in(self) -> None:
        """Without the variable the reason names it and the tox environment."""
        self.assertEqual(
            skip_reason("cluster", {}),
            f"runs only with {VARIABLE}=cluster, as 'tox -e spark' does",
        )

    def test_another(self) -> None:
        """Enabling one package does not enable another."""
        self.assertIsNotNone(skip_reason("cluster", {VARIABLE: "browser,synapse"}))

    def test_peer_missing(self) -> None:
        """The reason names the modules and programs that are missing."""
        peer = Peer("browser", ("sys", "no_such_module"), ("sh", "no-such-program"))
        self.patch(sys.modules["tests.external"], "PEERS", {"browser": peer})
        self.assertEqual(
            skip_reason("browser", {VARIABLE: "browser"}),
            "not installed: no_such_module, no-such-program; see 'tox -e browser'",
        )

    def test_runs(self) -> None:
        """With the variable and the peer there is no reason to skip."""
        self.patch(sys.modules["tests.external"], "PEERS", {"x": Peer("x", ("sys",))})
        self.assertIsNone(skip_reason("x", {VARIABLE: "synapse,x"}))

    def test_every_package(self) -> None:
        """Each package has a peer, and each peer a package with tests."""
        packages = {path.parent.name for path in FOLDER.glob("*/__init__.py")}
        self.assertEqual(packages, set(PEERS))
        for name in PEERS:
            self.assertNotEqual(modules_of(name), [])

    def test_every_module(self) -> None:
        """Each test module has the skip reason of its package."""
        for name in PEERS:
            for module in modules_of(name):
                skip = importlib.import_module(module).skip
                self.assertEqual(skip, skip_reason(name), module)

    def test_imports_without_peers(self) -> None:
        """Each test module can be imported without any peer installed."""
        peers = ",".join(module for peer in PEERS.values() for module in peer.modules)
        modules = ",".join(module for name in PEERS for module in modules_of(name))
        done = subprocess.run(
            [sys.executable, "-c", _SCRIPT, peers, modules],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        self.assertEqual((done.returncode, done.stderr), (0, ""))
