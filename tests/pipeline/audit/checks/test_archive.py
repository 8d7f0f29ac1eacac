"""Tests for :mod:`synapse_replication.pipeline.audit.checks.archive`."""

from __future__ import annotations

from pyspark.sql import functions as sf
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline.audit.checks.archive import (
    commands_twice_findings,
    not_archived_findings,
    rows_twice_findings,
)
from tests.pipeline.audits import found, ids_of, make_rows
from tests.pipeline.shared_session import shared_session


class ArchiveTests(SynchronousTestCase):
    """Tests for archives with repeated or missing rows."""

    def test_rows_twice(self) -> None:
        """
        A row that is archived twice is an error; two rows of the same token are not.
        """
        once = make_rows(("events", "w1", 2), ("events", "w1", 3))
        more = once.withColumn("row_index", sf.lit(1))

        self.assertEqual(found(rows_twice_findings(once.unionByName(more))), [])
        self.assertEqual(
            found(rows_twice_findings(once.unionByName(once.where("stream_id = 3")))),
            [("row_twice_in_archive", "error", "events", "w1", 3, 3, 1)],
        )

    def test_commands_twice(self) -> None:
        """A recorded line that is archived twice is an error."""
        wire = shared_session().createDataFrame(
            [("a", 1), ("a", 2), ("b", 2), ("a", 2)],
            "recording string, line_number long",
        )

        self.assertEqual(
            found(commands_twice_findings(wire)),
            [("command_twice_in_archive", "error", None, None, None, None, 1)],
        )

    def test_not_archived(self) -> None:
        """
        A row that is missing between archived rows of its writer is an error, unless it
        was purged.
        """
        ids = ids_of(
            make_rows(
                # These rows are before the first archived id and after the last one.
                *(("events", "w1", id_) for id_ in (2, 5, 6, 7, 9)),
                # This row's writer has no archived rows.
                ("events", "w2", 8),
                ("account_data", "", 6),
            ),
            make_rows(
                ("events", "w1", 5),
                ("events", "w1", 7),
                ("account_data", "", 5),
                ("account_data", "", 8),
            ),
        )
        schema = "stream string, first_token long, last_token long"
        nothing = shared_session().createDataFrame([], schema)
        purged = shared_session().createDataFrame([("events", 4, 6)], schema)
        account_data = ("row_not_archived", "error", "account_data", None, 6, 6, 1)

        self.assertEqual(
            found(not_archived_findings(ids, nothing)),
            [account_data, ("row_not_archived", "error", "events", "w1", 6, 6, 1)],
        )
        self.assertEqual(found(not_archived_findings(ids, purged)), [account_data])
