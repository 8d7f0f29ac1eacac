"""Tests for :mod:`synapse_replication.pipeline.archive.store`."""

from __future__ import annotations

import pickle
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive.store import (
    ArchiveStore,
    open_archive,
    open_store,
)
from tests.pipeline.archives import make_archive


class StoreTests(SynchronousTestCase):
    """Tests for the locations of archives."""

    def setUp(self) -> None:
        self.folder = Path(self.mktemp()).absolute()

    def test_streams(self) -> None:
        """
        Stream names with special characters are stored in safe folder names, and listed
        unchanged.
        """
        store = open_store(self.folder)
        self.assertEqual(store.streams(), [])
        names = ["a/b", "events", "é~", ".hidden", "_x"]
        for name in names:
            Path(store.stream_uri(name)).mkdir(parents=True)
        self.assertEqual(store.streams(), sorted(names))
        for folder in Path(store.uri, "streams").iterdir():
            self.assertRegex(folder.name, r"^[A-Za-z0-9~][A-Za-z0-9~_.-]*$")

    def test_no_archive(self) -> None:
        """
        If a folder has no tables, the error names the command that creates an archive.
        """
        error = self.assertRaises(PipelineError, open_archive, self.folder)
        self.assertIn(
            "create an archive with: synapse-replication pipeline archive", str(error)
        )
        make_archive(self.folder)
        self.assertEqual(open_archive(self.folder).streams(), ["receipts", "to_device"])

    def test_invalid_paths(self) -> None:
        """A file, and a path that Spark interprets as a pattern, are errors."""
        self.folder.write_text("")
        for location in (self.folder, self.folder.with_name("a*b")):
            self.assertRaises(PipelineError, open_store, location)

    def test_credentials(self) -> None:
        """
        A pickled store contains the credentials of the environment; its ``repr`` does
        not.
        """
        self.patch(
            __import__("os"),
            "environ",
            {
                "AWS_ACCESS_KEY_ID": "key",
                "AWS_SECRET_ACCESS_KEY": "hush",
                "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
                "HOME": "/",
            },
        )
        store = open_store("s3://bucket/archive/")
        self.assertEqual(store.uri, "s3://bucket/archive")
        self.assertEqual(store.options["AWS_ALLOW_HTTP"], "true")
        self.assertNotIn("HOME", store.options)
        self.assertNotIn("hush", repr(store))
        copied = pickle.loads(pickle.dumps(store))
        self.assertEqual(copied.options["AWS_SECRET_ACCESS_KEY"], "hush")

    def test_unreachable(self) -> None:
        """The error names a store that cannot be reached, without its credentials."""
        options = {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "hush",
            "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
            "AWS_ALLOW_HTTP": "true",
        }
        store = ArchiveStore("s3://bucket/archive", options)
        self.patch(ArchiveStore, "filesystem", _NoRoute())
        error = self.assertRaises(PipelineError, store.streams)
        self.assertIn("the archive s3://bucket/archive cannot be read: ", str(error))
        self.assertNotIn("hush", str(error))


class _NoRoute:
    def get_file_info(self, selector: object) -> object:
        raise OSError("no route to host")
