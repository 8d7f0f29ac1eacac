"""Tests for :mod:`synapse_replication.pipeline.audit.checks.ids`."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline.audit.checks import ids as audit_ids
from synapse_replication.pipeline.audit.checks.ids import (
    gap_findings,
    gone_findings,
    two_writers_findings,
)
from tests.pipeline.audits import (
    evidence,
    found,
    ids_of,
    ids_of_rows,
    make_rows,
    make_tokens,
)


class TwoWritersTests(SynchronousTestCase):
    """Tests for ids that two writers have used."""

    def test_of_two_writers(self) -> None:
        """
        An id with rows of two writers is an error, in the tables or across sources.
        """
        ids = ids_of(
            make_rows(
                ("events", "w1", 2),
                ("events", "w2", 3),
                ("events", "w1", 4),
                ("events", "w2", 4),
            ),
            make_rows(("events", "w1", 2), ("events", "w1", 3)),
        )

        self.assertEqual(
            found(two_writers_findings(ids)),
            [("id_of_two_writers", "error", "events", "w1", 3, 4, 2)],
        )

    def test_healthy(self) -> None:
        """
        An id with several rows, with a table that does not record the writer, or with a
        row that another instance sent is not reported.
        """
        ids = ids_of(
            make_rows(
                ("events", "w1", 2),
                ("events", "w1", 2),
                ("events", "", 3),
                ("account_data", "w1", 2),
            ),
            make_rows(("account_data", "w2", 2), ("events", "w2", 3)),
            ("RDATA events w2 2 []", "RDATA account_data w3 2 []"),
        )

        self.assertEqual(found(two_writers_findings(ids)), [])


class GapTests(SynchronousTestCase):
    """Tests for ids without a row, and for rows that were deleted."""

    def test_gaps(self) -> None:
        """
        An id without a row of any writer is reported; an id of another writer is not a
        gap.
        """
        ids = ids_of(
            make_rows(("events", "w1", 2), ("events", "w2", 3), ("events", "w1", 9)),
            make_rows(("events", "w1", 5)),
            ("RDATA events w2 6 []",),
        )

        gaps = gap_findings(ids)

        self.assertEqual(
            found(gaps),
            [
                ("id_without_row", "info", "events", None, 4, 4, 1),
                ("id_without_row", "info", "events", None, 7, 8, 2),
            ],
        )
        self.assertIn(
            {
                "before": {"stream_id": 6, "writer": "w2"},
                "after": {"stream_id": 9, "writer": "w1"},
                "gaps": 1,
            },
            evidence(gaps),
        )
        self.assertEqual(
            found(gone_findings(ids)),
            [
                ("row_gone", "info", "events", "w1", 5, 5, 1),
                ("row_gone", "info", "events", "w2", 6, 6, 1),
            ],
        )

    def test_across_buckets(self) -> None:
        """
        Gaps are found across the buckets of tasks. Beyond the maximum, gaps are
        reported together.
        """
        self.patch(audit_ids, "MAX_GAPS", 2)
        stored = (("events", "w1", id_) for id_ in (3, 4, 5, 7, 9, 20, 24, 25))
        ids = ids_of_rows(
            make_rows(*stored), make_rows(), make_tokens(()), ["events"], bucket_bits=2
        )

        self.assertEqual(
            found(gap_findings(ids)),
            [
                ("id_without_row", "info", "events", None, 10, 19, 10),
                ("id_without_row", "info", "events", None, 21, 23, 3),
                ("id_without_row", "info", "events", None, 6, 8, 2),
            ],
        )
