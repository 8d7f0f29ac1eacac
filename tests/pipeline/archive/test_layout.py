"""Tests for synapse_replication.pipeline.archive.layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive.layout import (
    ARCHIVED_WIRE_SCHEMA,
    open_archive,
    read_archive,
    read_archived_wire,
)
from synapse_replication.pipeline.schemas import ARCHIVE_SCHEMA
from tests.pipeline.shared_session import shared_session


class OpenArchiveTests(SynchronousTestCase):
    """Tests for what is an archive, and of which version."""

    def setUp(self) -> None:
        self.folder = Path(self.mktemp())

    def refused(self, **options: Any) -> str:
        error = self.assertRaises(PipelineError, open_archive, self.folder, **options)
        return str(error)

    def change(self, change: Callable[[Any], object]) -> None:
        path = open_archive(self.folder, create=True).description
        description = json.loads(path.read_bytes())
        change(description)
        path.write_text(json.dumps(description))

    def test_made_once(self) -> None:
        """It is made where there is none, and opened where there is one."""
        self.assertIn("is no archive", self.refused())
        layout = open_archive(self.folder, create=True)
        self.assertTrue(layout.folder.is_absolute())
        self.assertEqual(open_archive(self.folder), layout)
        self.assertEqual(open_archive(self.folder, create=True), layout)
        self.assertTrue(layout.rows.is_dir())
        self.assertTrue(layout.wire.is_dir())

    def test_other_files(self) -> None:
        """A folder with other files is not made an archive."""
        self.folder.mkdir()
        (self.folder / "thesis.doc").write_text("")
        self.assertIn("holds other files (thesis.doc)", self.refused(create=True))

    def test_made_half(self) -> None:
        """What was cut off while it was made is made whole."""
        (self.folder / "_meta").mkdir(parents=True)
        open_archive(self.folder, create=True)

    def test_cannot_be_made(self) -> None:
        """A folder that cannot be made is named."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self.folder.write_text("")
        self.assertIn(str(self.folder), self.refused(create=True))

    def test_no_folder(self) -> None:
        """A URL, or a name that Spark reads as a pattern, is refused."""
        for text, reason in (
            ("s3a://bucket/x", "is no folder"),
            ("/tmp/a*[b]", "* [ ] for a pattern"),
        ):
            error = self.assertRaises(PipelineError, open_archive, text, create=True)
            self.assertIn(reason, str(error))

    def test_newer_format(self) -> None:
        """An archive of a later version is refused, with what to do."""
        self.change(lambda description: description.update(format=2))
        self.assertIn("has format 2, this version knows 1: update", self.refused())

    def test_newer_schema(self) -> None:
        """Rows of a later schema are refused, with what to do."""
        self.change(lambda d: d["schemas"]["rows"].update(version=2))
        self.assertIn("rows of", message := self.refused())
        self.assertIn("schema version 2, this version knows 1: update", message)

    def test_other_schema(self) -> None:
        """Rows of another schema are refused."""
        self.change(lambda d: d["schemas"]["wire"]["fields"].pop())
        self.assertIn("other columns than schema version 1 has", self.refused())

    def test_older_schema(self) -> None:
        """Rows of an earlier schema are refused, with what to do."""
        self.change(lambda d: d["schemas"]["wire"].update(version=0))
        self.assertIn("schema version 0, this version writes 1", self.refused())

    def test_damaged(self) -> None:
        """A description that cannot be read is named."""
        path = open_archive(self.folder, create=True).description
        for content, reason in (
            ("no JSON", "cannot read"),
            ("{}", "is damaged"),
            ('{"format": 1, "schemas": {}}', "says nothing of rows"),
        ):
            path.write_text(content)
            message = self.refused()
            self.assertIn(reason, message)
            self.assertIn(str(path), message)

    def test_empty(self) -> None:
        """An archive without rows reads as none, with all columns."""
        open_archive(self.folder, create=True)
        rows = read_archive(shared_session(), self.folder)
        wire = read_archived_wire(shared_session(), self.folder)
        self.assertEqual(rows.columns, ARCHIVE_SCHEMA.names)
        self.assertEqual(wire.columns, ARCHIVED_WIRE_SCHEMA.names)
        self.assertEqual((rows.count(), wire.count()), (0, 0))
