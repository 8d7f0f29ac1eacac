"""Tests for :mod:`synapse_replication.pipeline.transforms.audit_ids`, and of what
compares ids with an archive and with sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as sf
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline.transforms import audit_ids
from synapse_replication.pipeline.transforms.audit_ahead import ahead_findings
from synapse_replication.pipeline.transforms.audit_archive import (
    commands_twice_findings,
    not_archived_findings,
    rows_twice_findings,
)
from synapse_replication.pipeline.transforms.audit_ids import (
    gap_findings,
    gone_findings,
    known_ids,
    two_writers_findings,
)
from tests.pipeline.audits import evidence, found, make_rows, make_tokens
from tests.pipeline.spark import shared_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

KEPT = ("events", "account_data")


def ids_of(
    rows: DataFrame, archive: DataFrame | None = None, lines: tuple[str, ...] = ()
) -> DataFrame:
    return known_ids(
        rows,
        make_rows() if archive is None else archive,
        make_tokens(lines),
        KEPT,
        ["account_data"],
    )


class TwoWritersTests(SynchronousTestCase):
    """Tests for ids that were given out twice."""

    def test_of_two_writers(self) -> None:
        """An id that has rows of two writers is an error, in whichever place."""
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
        """Several rows of a token, tables without a writer, and rows that another
        process sent are none."""
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
    """Tests for ids without a row, and rows that are gone."""

    def test_gaps(self) -> None:
        """An id that nobody has is noted; those of other writers are no gap."""
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
        """Gaps are found wherever tasks share ids out; the many are summed up."""
        self.patch(audit_ids, "_BUCKET_BITS", 2)
        self.patch(audit_ids, "MAX_GAPS", 2)
        ids = ids_of(
            make_rows(*(("events", "w1", id_) for id_ in (3, 4, 5, 7, 9, 20, 24, 25)))
        )

        self.assertEqual(
            found(gap_findings(ids)),
            [
                ("id_without_row", "info", "events", None, 10, 19, 10),
                ("id_without_row", "info", "events", None, 21, 23, 3),
                ("id_without_row", "info", "events", None, 6, 8, 2),
            ],
        )


class ArchiveTests(SynchronousTestCase):
    """Tests for archives with rows too many or too few."""

    def test_rows_twice(self) -> None:
        """A row that an archive holds twice is an error; rows of one token are not."""
        once = make_rows(("events", "w1", 2), ("events", "w1", 3))
        more = once.withColumn("row_index", sf.lit(1))

        self.assertEqual(found(rows_twice_findings(once.unionByName(more))), [])
        self.assertEqual(
            found(rows_twice_findings(once.unionByName(once.where("stream_id = 3")))),
            [("row_twice_in_archive", "error", "events", "w1", 3, 3, 1)],
        )

    def test_commands_twice(self) -> None:
        """A line of a recording that an archive holds twice is an error."""
        wire = shared_session().createDataFrame(
            [("a", 1), ("a", 2), ("b", 2), ("a", 2)],
            "recording string, line_number long",
        )

        self.assertEqual(
            found(commands_twice_findings(wire)),
            [("command_twice_in_archive", "error", None, None, None, None, 1)],
        )

    def test_not_archived(self) -> None:
        """A row between archived ones of its writer ought to be archived."""
        ids = ids_of(
            make_rows(
                # Before the archive began, and after it was read.
                *(("events", "w1", id_) for id_ in (2, 5, 6, 7, 9)),
                # Of a writer that it has nothing of.
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


class AheadTests(SynchronousTestCase):
    """Tests for tokens that were never given out."""

    def test_ahead(self) -> None:
        """What was heard or archived beyond a sequence is an error (C34)."""
        tokens = make_tokens(
            [
                "POSITION events w1 9 9",
                "RDATA events w2 12 []",
                "POSITION events w2 12 13",
                "POSITION backfill w1 1 1",
                "POSITION typing w1 900 900",
            ]
        )
        archive = make_rows(("events", "w1", 11), ("events", "w2", 10))

        findings = ahead_findings(tokens, archive, {"events": 10, "backfill": 0})

        self.assertEqual(
            found(findings),
            [
                ("token_ahead", "error", "events", "w1", 11, 11, 1),
                ("token_ahead", "error", "events", "w2", 11, 13, 3),
            ],
        )
        self.assertIn(
            {
                "seen": {
                    "recording": "r.jsonl",
                    "line_number": 3,
                    "line": "POSITION events w2 12 13",
                },
                "sequence_value": 10,
            },
            evidence(findings),
        )
