"""Tests for :mod:`synapse_replication.pipeline.audit.findings`."""

from __future__ import annotations

import re
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline.audit.findings import (
    AuditFinding,
    Kind,
    Severity,
    to_json,
    worst_first,
)
from synapse_replication.pipeline.schemas import FINDINGS_SCHEMA

_DOCS = Path(__file__).parents[3] / "docs" / "pipeline.rst"


class KindTests(SynchronousTestCase):
    """Tests for the kinds of findings."""

    def test_each_is_explained(self) -> None:
        """The documentation explains each kind."""
        named = set(re.findall(r"``(\w+)``", _DOCS.read_text()))
        self.assertEqual({kind.value for kind in Kind} - named, set())

    def test_severities(self) -> None:
        """
        A kind that occurs in healthy deployments is a note, and a harmless fault is a
        warning.
        """
        self.assertIs(Kind.LATE_INVALIDATION.severity, Severity.INFO)
        self.assertIs(Kind.UNKNOWN_WRITER.severity, Severity.WARNING)
        self.assertIs(Kind.ANNOUNCED_ABSENT.severity, Severity.ERROR)


class FindingTests(SynchronousTestCase):
    """Tests for the fields and the order of findings."""

    def test_row(self) -> None:
        """A finding is converted to a row with the published columns, and back."""
        finding = AuditFinding(
            kind=Kind.ROW_GONE, stream="events", message="x", evidence=""
        )
        self.assertEqual(set(finding.to_row()), set(FINDINGS_SCHEMA.names))
        self.assertEqual(finding.to_row()["severity"], "info")
        self.assertEqual(AuditFinding.from_row(finding.to_row()), finding)

    def test_worst_first(self) -> None:
        """Errors come first, then warnings; the token decides last."""
        kinds = (Kind.ROW_GONE, Kind.UNKNOWN_WRITER, Kind.TOKEN_AHEAD)
        findings = [
            AuditFinding(kind=kind, first_token=token, message="x", evidence="")
            for kind in kinds
            for token in (9, None, 3)
        ]
        self.assertEqual(
            [(each.kind, each.first_token) for each in worst_first(findings)],
            [(kind, token) for kind in reversed(kinds) for token in (None, 3, 9)],
        )

    def test_nulls(self) -> None:
        """Evidence omits fields whose values are null, at any depth."""
        self.assertEqual(
            to_json({"a": None, "rows": [{"b": 1, "c": None}]}), '{"rows": [{"b": 1}]}'
        )
