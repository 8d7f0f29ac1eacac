"""Tests for :mod:`synapse_replication.pipeline.audit.checks.ahead`."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline.audit.checks.ahead import ahead_findings
from tests.pipeline.audits import evidence, found, ids_of, make_rows, make_tokens


class AheadTests(SynchronousTestCase):
    """Tests for tokens beyond the last id that a stream's sequence has allocated."""

    def test_ahead(self) -> None:
        """A received or archived token beyond the last allocated id is an error."""
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
        ids = ids_of(make_rows(), archive)

        findings = ahead_findings(tokens, ids, {"events": 10, "backfill": 0})

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
