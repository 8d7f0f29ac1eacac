"""Tests for synapse_replication.config.own_section."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.config.own_section import OwnSection
from synapse_replication.config.sections import read_value
from synapse_replication.config.yaml_files import MergedFiles
from synapse_replication.streams.table import TableStream


def read(values: dict[str, Any]) -> OwnSection:
    """Read the section from values that are valid."""
    merged = MergedFiles(["f.yaml"], {}, {})
    section: OwnSection = read_value(OwnSection, values, (), merged)
    assert not merged.problems, merged.problems
    return section


class StreamsTests(SynchronousTestCase):
    def test_streams(self) -> None:
        """A declaration in the configuration becomes a TableStream."""
        declaration = {
            "name": "a",
            "table": "a",
            "id_column": "i",
            "columns": ["c"],
            "sequence": "s",
            "writers": "w",
        }
        own = read({"streams": ["typing", declaration]})
        self.assertEqual(own.streams, ["typing", own.streams and own.streams[1]])
        assert own.streams is not None
        self.assertIsInstance(own.streams[1], TableStream)


class EmptySectionsTests(SynchronousTestCase):
    def test_empty_sections(self) -> None:
        """A section without keys, which YAML reads as null, has its defaults."""
        for section in ("direct_tcp", "http", "receiving", "tls", "extension"):
            own = read({section: None})
            self.assertEqual(own, OwnSection(), section)
