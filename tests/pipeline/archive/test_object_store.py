"""An archive on S3, served by a moto process, without Hadoop."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive.snapshot import read_archive
from synapse_replication.pipeline.archive.store import ArchiveStore
from tests.pipeline.archives import (
    TODAY,
    add_rows_to,
    keys_of,
    open_table,
    purge,
    receipts,
)
from tests.pipeline.shared_session import shared_session
from tests.support.object_store import use_server

_ARCHIVE = "s3://bucket/deep/archive"


class ObjectStoreTests(SynchronousTestCase):
    """Tests with an S3 server that is configured only by environment variables."""

    def setUp(self) -> None:
        use_server(self)

    def test_archive(self) -> None:
        """
        Rows are committed, read, compacted, purged and vacuumed. A conditional write
        rejects the commit of a second driver.
        """
        error = self.assertRaises(PipelineError, ArchiveStore.existing, _ARCHIVE)
        self.assertIn("is not an archive", str(error))
        store = ArchiveStore.at(_ARCHIVE)
        first, second = open_table(store), open_table(store)
        add_rows_to(store, "receipts", receipts(1, 2, day=1), table=first)
        error = self.assertRaises(
            PipelineError,
            add_rows_to,
            *(store, "receipts", receipts(1, 2, day=1)),
            table=second,
        )
        self.assertIn("Only one driver may write", str(error))
        for token in (3, 4):
            add_rows_to(store, "receipts", receipts(token, token, day=1), table=first)
        add_rows_to(store, "receipts", receipts(5, 5), table=first)
        self.assertEqual(first.compact(3, shared_session)[0], 3)
        self.assertEqual(len(keys_of(store)), 5)
        archive = read_archive(shared_session(), _ARCHIVE)
        rows = archive.streams["receipts"].orderBy("stream_id").collect()
        self.assertEqual(
            [row["user_id"] for row in rows], [f"@user{n}" for n in range(1, 6)]
        )
        self.assertEqual(
            [str(row["day"]) for row in rows], ["2026-01-01"] * 4 + [str(TODAY)]
        )
        self.assertEqual(archive.rows("receipts").count(), 5)
        purge(_ARCHIVE, TODAY)
        self.assertEqual([token for _, _, token in keys_of(store)], [5])
        # The compacted file, the three files that it replaced, and the file of the
        # rejected driver.
        self.assertEqual(open_table(store).vacuum(0), 5)
        self.assertEqual([token for _, _, token in keys_of(store)], [5])
