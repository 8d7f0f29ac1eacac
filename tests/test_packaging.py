"""Tests that a wheel contains the package and the public test kit, and nothing else."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

from setuptools import find_packages
from twisted.trial.unittest import SynchronousTestCase

ROOT = Path(__file__).parents[1]

#: Bytes.
MAX_SIZE = 1_000_000

_BUILD = """
import sys
from setuptools import build_meta
print(build_meta.build_wheel(sys.argv[1]))
"""


class WheelTests(SynchronousTestCase):
    """Builds a wheel from a copy of the checkout, without a network."""

    def setUp(self) -> None:
        folder = Path(self.mktemp()).absolute()
        source, built = folder / "source", folder / "built"
        built.mkdir(parents=True)
        shutil.copytree(
            ROOT / "synapse_replication",
            source / "synapse_replication",
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        for name in ("setup.cfg", "pyproject.toml", "MANIFEST.in", "README.rst"):
            shutil.copy(ROOT / name, source)
        shutil.copy(ROOT / "LICENSE", source)
        done = subprocess.run(
            [sys.executable, "-c", _BUILD, str(built)],
            cwd=source,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        (self.wheel,) = built.glob("*.whl")

    def test_contents(self) -> None:
        """The wheel contains the package with its data, is small, and has metadata."""
        self.assertLess(self.wheel.stat().st_size, MAX_SIZE)
        with zipfile.ZipFile(self.wheel) as wheel:
            names = set(wheel.namelist())
            (metadata,) = (
                message_from_bytes(wheel.read(name))
                for name in names
                if name.endswith("/METADATA")
            )
        top_levels = {name.split("/")[0] for name in names}
        self.assertEqual(
            {top for top in top_levels if not top.endswith(".dist-info")},
            {"synapse_replication"},
        )
        packaged = {
            str(path.relative_to(ROOT))
            for path in (ROOT / "synapse_replication").rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        self.assertEqual(packaged - names, set())
        for text in ("bench", "flood", "faults/", "tests/", "support/", "fuzz"):
            found = [name for name in names if text in name]
            self.assertEqual(found, [], text)
        for key in ("Author", "Keywords"):
            self.assertTrue(metadata[key], key)

    def test_packages(self) -> None:
        """Each folder with modules is a package, so that the wheel contains it."""
        config = configparser.ConfigParser(interpolation=None)
        config.read(ROOT / "setup.cfg")
        include = config["options.packages.find"]["include"].split()
        found = {
            name.replace(".", "/") for name in find_packages(str(ROOT), (), include)
        }
        folders = {
            str(path.parent.relative_to(ROOT))
            for path in (ROOT / "synapse_replication").rglob("*.py")
        }
        self.assertEqual(folders - found, set())
