"""Tests for :mod:`synapse_replication.pipeline.audit.report`."""

from __future__ import annotations

import io
import json
from typing import Any

from pyspark.sql import DataFrame
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline.audit import report as audit_report
from synapse_replication.pipeline.audit.findings import Severity
from synapse_replication.pipeline.audit.report import print_findings, print_json
from synapse_replication.pipeline.schemas import FINDINGS_SCHEMA
from tests.pipeline.shared_session import shared_session

LOST = ("k", "error", "events", "w1", 7, 9, 3, "3 rows are gone", '{"rows": [1]}')
ODD = ("k2", "warning", "a\x1bb", None, 5, 5, 1, "an\nodd name", '{"x": "\u202e"}')


def note(stream: str | None, count: int) -> tuple[Any, ...]:
    """Return a finding with severity ``info``."""
    return ("late", "info", stream, None, None, None, count, "late", "{}")


def frame(*findings: tuple[Any, ...]) -> DataFrame:
    """Return a frame of findings."""
    return shared_session().createDataFrame(list(findings), FINDINGS_SCHEMA)


class PrintTests(SynchronousTestCase):
    """Tests for printing findings."""

    def setUp(self) -> None:
        self.out = io.StringIO()

    def test_nothing(self) -> None:
        """If there are no findings, the counts are still printed."""
        print_findings(frame(), self.out)
        self.assertEqual(self.out.getvalue(), "0 errors, 0 warnings, 0 notes\n")

    def test_one_by_one(self) -> None:
        """
        Errors and warnings are printed with tokens and evidence; notes only as totals.
        """
        counts = print_findings(
            frame(LOST, note("caches", 4), note("caches", 2), note(None, 1)), self.out
        )
        self.assertEqual(counts, {Severity.ERROR: 1, Severity.INFO: 3})
        self.assertEqual(
            self.out.getvalue().splitlines(),
            [
                "ERROR k events w1 7-9",
                "  3 rows are gone",
                '  evidence: {"rows": [1]}',
                "Normal in a healthy deployment:",
                "  late  -: findings: 1; affected rows, ids or lines: 1",
                "  late  caches: findings: 2; affected rows, ids or lines: 6",
                "1 errors, 0 warnings, 3 notes",
            ],
        )

    def test_names_command_no_terminal(self) -> None:
        """Control characters in names, messages and evidence are escaped."""
        print_findings(frame(ODD, note("c\x1bd", 1)), self.out)
        text = self.out.getvalue()
        self.assertNotIn("\x1b", text)
        self.assertIn("WARNING k2 a\\x1bb 5\n  an\\nodd name\n", text)
        self.assertIn('  evidence: {"x": "\\u202e"}\n', text)
        self.assertIn(
            "  late  c\\x1bd: findings: 1; affected rows, ids or lines: 1\n", text
        )

    def test_long_evidence(self) -> None:
        """Long evidence is truncated."""
        self.patch(audit_report, "_MAX_EVIDENCE", 4)
        print_findings(frame((*LOST[:-1], "12345"), (*LOST[:-1], "1234")), self.out)
        lines = self.out.getvalue().splitlines()
        self.assertIn("  evidence: 1234 ...", lines)
        self.assertIn("  evidence: 1234", lines)

    def test_so_many(self) -> None:
        """Errors beyond the maximum are not printed; one line says where they are."""
        self.patch(audit_report, "MAX_SHOWN", 2)
        counts = print_findings(frame(*[LOST] * 5), self.out)
        self.assertEqual(counts[Severity.ERROR], 5)
        self.assertEqual(self.out.getvalue().count("ERROR k"), 2)
        self.assertEqual(self.out.getvalue().count("(more errors are in"), 1)

    def test_json(self) -> None:
        """
        The JSON output has all findings with all fields, and the count of each
        severity.
        """
        counts = print_json(frame(LOST, ODD, note("caches", 4)), self.out)
        printed = json.loads(self.out.getvalue())
        self.assertEqual(counts.total(), 3)
        self.assertEqual(
            {name: printed[name] for name in ("errors", "warnings", "infos")},
            {"errors": 1, "warnings": 1, "infos": 1},
        )
        self.assertEqual([f["kind"] for f in printed["findings"]], ["k", "k2", "late"])
        self.assertEqual(printed["findings"][0]["evidence"], {"rows": [1]})

    def test_no_json(self) -> None:
        """Without findings, the output is still valid JSON."""
        print_json(frame(), self.out)
        self.assertEqual(json.loads(self.out.getvalue())["findings"], [])
