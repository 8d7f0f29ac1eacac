"""Tests for :mod:`synapse_replication.pipeline.audit.findings`."""

from __future__ import annotations

import re
from pathlib import Path

from pyspark.sql import functions as sf
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline.audit.findings import (
    SAMPLES,
    SEVERITIES,
    Kind,
    Severity,
    finding,
    sample,
)
from synapse_replication.pipeline.schemas import FINDINGS_SCHEMA
from tests.pipeline.audits import evidence, found, rows_of
from tests.pipeline.shared_session import shared_session

_DOCS = Path(__file__).parents[3] / "docs" / "pipeline.rst"


class KindTests(SynchronousTestCase):
    """Tests for the kinds of findings."""

    def test_each_is_explained(self) -> None:
        """The documentation explains each kind."""
        named = set(re.findall(r"``(\w+)``", _DOCS.read_text()))
        self.assertEqual({kind.value for kind in Kind} - named, set())

    def test_severities(self) -> None:
        """
        Each kind has a severity; a kind that occurs in healthy deployments is not an
        error.
        """
        self.assertEqual(set(SEVERITIES), set(Kind))
        self.assertIs(Kind.LATE_INVALIDATION.severity, Severity.INFO)
        self.assertIs(Kind.UNKNOWN_WRITER.severity, Severity.WARNING)
        self.assertIs(Kind.ANNOUNCED_ABSENT.severity, Severity.ERROR)


class FindingTests(SynchronousTestCase):
    """Tests for the rows of findings."""

    def setUp(self) -> None:
        self.frame = shared_session().createDataFrame(
            [
                ("row_gone", "events", None, 3, 9, 2),
                ("token_ahead", "caches", "w", 4, 4, 1),
            ],
            "kind string, stream string, instance_name string, first int, last int, "
            "count int",
        )

    def test_columns(self) -> None:
        """
        An omitted parameter is the column of its name; a null name is an unknown
        writer.
        """
        findings = self.frame.select(
            *finding(
                Kind.ROW_GONE,
                first=sf.lit(1),
                message=[sf.col("instance_name"), " has ", sf.col("count")],
                evidence={"n": sf.col("last")},
            )
        )
        self.assertEqual(
            [field.dataType for field in findings.schema.fields],
            [field.dataType for field in FINDINGS_SCHEMA.fields],
        )
        self.assertEqual(
            found(findings),
            [
                ("row_gone", "info", "caches", "w", 1, 4, 1),
                ("row_gone", "info", "events", None, 1, 9, 2),
            ],
        )
        self.assertEqual(
            {row.message for row in rows_of(findings)},
            {"an unknown writer has 2", "w has 1"},
        )
        self.assertCountEqual(evidence(findings), [{"n": 9}, {"n": 4}])

    def test_kind_of_each_row(self) -> None:
        """The kind may be a column; each kind has its own severity."""
        findings = self.frame.select(
            *finding(sf.col("kind"), message=["x"], evidence={"n": sf.lit(1)})
        )
        self.assertEqual(
            {row.kind: row.severity for row in rows_of(findings)},
            {"row_gone": "info", "token_ahead": "error"},
        )

    def test_sample(self) -> None:
        """A sample has the first few items in order, however many items there are."""
        ids = shared_session().range(30, 0, -1).withColumn("rank", sf.col("id"))
        (row,) = ids.agg(sample(sf.col("rank"), sf.col("id")).alias("s")).collect()
        self.assertEqual([each.id for each in row.s], list(range(1, SAMPLES + 1)))
