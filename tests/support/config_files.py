"""Configuration files in a folder of a test."""

from __future__ import annotations

from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.config.yaml_files import (
    MergedFiles,
    read_files,
)
from synapse_replication.errors import ConfigProblem


class FilesMixin(SynchronousTestCase):
    """Base class: files in a folder of the test."""

    def setUp(self) -> None:
        self.folder = Path(self.mktemp())
        self.folder.mkdir()
        self.problems: list[ConfigProblem] = []

    def write(self, name: str, text: str) -> str:
        path = self.folder / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    def read(self, *paths: str) -> MergedFiles:
        merged = read_files(paths)
        self.problems = merged.problems
        return merged
