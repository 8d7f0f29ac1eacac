"""Tests for :mod:`synapse_replication.pipeline.archive.store`."""

from __future__ import annotations

import pickle
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive.store import ArchiveStore, storage_error_text
from tests.pipeline.archives import make_archive

_CHAIN = (
    "Kernel error -> Generic S3 error\n \x1b[31m\u21b3\x1b[0m Error performing GET "
    "http://127.0.0.1:9/bucket in 2 s\n  \x1b[31m\u21b3\x1b[0m {}\n"
)


class StoreTests(SynchronousTestCase):
    """Tests for the locations of archives."""

    def setUp(self) -> None:
        self.folder = Path(self.mktemp()).absolute()

    def test_streams(self) -> None:
        """
        Stream names with special characters are stored in safe folder names, and listed
        unchanged.
        """
        store = ArchiveStore.at(self.folder)
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
        error = self.assertRaises(PipelineError, ArchiveStore.existing, self.folder)
        self.assertIn(
            "create an archive with: synapse-replication pipeline archive", str(error)
        )
        make_archive(self.folder)
        self.assertEqual(
            ArchiveStore.existing(self.folder).streams(), ["receipts", "to_device"]
        )

    def test_invalid_paths(self) -> None:
        """A file, and a path that Spark interprets as a pattern, are errors."""
        self.folder.write_text("")
        for location in (self.folder, self.folder.with_name("a*b")):
            self.assertRaises(PipelineError, ArchiveStore.at, location)

    def test_other_schemes(self) -> None:
        """An unknown scheme is an error at once, which says what to give instead."""
        for scheme in ("gs", "az", "abfss", "http", "hdfs", "s3a", "file"):
            with self.assertRaises(PipelineError) as caught:
                ArchiveStore.at(f"{scheme}://bucket/archive")
            self.assertIn(f"{scheme}://bucket/archive", str(caught.exception))
            self.assertIn("s3://BUCKET/PATH", str(caught.exception))

    def test_without_a_bucket(self) -> None:
        """An object store without a bucket is an error, not a folder ``s3:``."""
        for location in ("s3://", "s3:///", "s3:///archive"):
            with self.assertRaises(PipelineError) as caught:
                ArchiveStore.at(location)
            self.assertIn("s3://BUCKET/PATH", str(caught.exception))

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
        store = ArchiveStore.at("s3://bucket/archive/")
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


class ReasonTests(SynchronousTestCase):
    """Tests for the cause and the hint of an error."""

    def test_answer(self) -> None:
        """The answer of an S3 server is the cause."""
        answer = (
            '404 Not Found <?xml version="1.0"?>\n<Error><Code>NoSuchBucket</Code>'
            "<Message>The specified bucket does not exist</Message></Error>"
        )
        self.assertEqual(
            storage_error_text(_CHAIN.format(answer)),
            "NoSuchBucket: The specified bucket does not exist; create the bucket, or "
            "correct --archive",
        )

    def test_end_of_chain(self) -> None:
        """The last elements of a chain are the cause, in one line."""
        reason = storage_error_text(
            _CHAIN.format("error sending request\n \u21b3 refused")
        )
        self.assertEqual(
            reason,
            "Error performing GET http://127.0.0.1:9/bucket in 2 s: error sending "
            "request: refused; check AWS_ENDPOINT_URL, or Amazon's default, and the "
            "network",
        )

    def test_hints(self) -> None:
        """Typical causes have a hint."""
        for text, hint in {
            "SignatureDoesNotMatch": "AWS_SECRET_ACCESS_KEY",
            "AccessDenied": "rights of these credentials",
            "PUT http://169.254.169.254/latest/api/token": "no credentials",
            "ACCESS_DENIED: anonymous users may not read": "no credentials",
            "PermanentRedirect": "AWS_REGION",
            "[Errno 13] Permission denied: '/srv'": "rights of this user",
            "[Errno 28] No space left on device": "free some space",
        }.items():
            self.assertIn(hint, storage_error_text(text))

    def test_long(self) -> None:
        """The end of a long cause is shown."""
        reason = storage_error_text("a" * 5000 + " the cause")
        self.assertTrue(reason.endswith(" the cause"))
        self.assertLess(len(reason), 400)
