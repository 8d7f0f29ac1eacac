"""Tests for finding and unpacking a source distribution."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.synapse_suite.source import (
    SourceError,
    SourceFile,
    find_file,
    find_modules,
    unpack,
)

_PAGE = "https://index.test/simple/matrix-synapse/"


class FindFileTests(SynchronousTestCase):
    """Tests for find_file."""

    def test_json(self) -> None:
        """The URL and the hash are found on a JSON page."""
        files = [
            {"filename": "matrix_synapse-1.2.tar.gz", "url": "/a", "hashes": {}},
            {
                "filename": "matrix_synapse-1.2.3.tar.gz",
                "url": "https://files.test/b",
                "hashes": {"sha256": "ab12"},
            },
        ]
        text = json.dumps({"files": files})
        kind = "application/vnd.pypi.simple.v1+json"
        self.assertEqual(
            find_file(_PAGE, kind, text, "1.2.3"),
            SourceFile("https://files.test/b", "ab12"),
        )
        self.assertEqual(
            find_file(_PAGE, kind, text, "1.2"),
            SourceFile("https://index.test/a", None),
        )

    def test_html(self) -> None:
        """The URL and the hash are found on an HTML page."""
        text = (
            '<a href="../../f/matrix_synapse-1.2-py3-none-any.whl#sha256=00">w</a>\n'
            '<a href="../../f/x.tar.gz#sha256=ab12" rel="x">matrix-synapse-1.2.tar.gz'
            "</a>"
        )
        self.assertEqual(
            find_file(_PAGE, "text/html", text, "1.2"),
            SourceFile("https://index.test/f/x.tar.gz", "ab12"),
        )

    def test_missing(self) -> None:
        """The error names the version that is missing."""
        error = self.assertRaises(SourceError, find_file, _PAGE, "text/html", "", "9.9")
        self.assertIn("9.9", str(error))


class UnpackTests(SynchronousTestCase):
    """Tests for unpack."""

    def _archive(self, *names: str) -> Path:
        folder = Path(self.mktemp())
        for name in names:
            path = folder / "matrix_synapse-1.2" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
        archive = folder / "source.tar.gz"
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(folder / "matrix_synapse-1.2", "matrix_synapse-1.2")
        return archive

    def test_without_the_package(self) -> None:
        """
        The tests are unpacked without the package, so that the installed one is tested.
        """
        target = Path(self.mktemp())
        source = unpack(self._archive("tests/a.py", "synapse/b.py", "demo/c"), target)
        self.assertTrue((source / "tests" / "a.py").exists())
        self.assertTrue((source / "demo" / "c").exists())
        self.assertFalse((source / "synapse").exists())

    def test_no_tests(self) -> None:
        """An archive without tests is rejected."""
        archive = self._archive("synapse/b.py")
        self.assertRaises(SourceError, unpack, archive, Path(self.mktemp()))


class FindModulesTests(SynchronousTestCase):
    """Tests for find_modules."""

    def test_package(self) -> None:
        """A package becomes its test modules; a module or a class stays itself."""
        source = Path(self.mktemp())
        for name in ("tests/a/test_b.py", "tests/a/c/test_d.py", "tests/a/base.py"):
            path = source / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
        self.assertEqual(
            find_modules(source, "tests.a"), ["tests.a.c.test_d", "tests.a.test_b"]
        )
        for name in ("tests.a.test_b", "tests.a.test_b.SomeTestCase"):
            self.assertEqual(find_modules(source, name), [name])
