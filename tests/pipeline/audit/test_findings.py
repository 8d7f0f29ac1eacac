"""Tests for :mod:`synapse_replication.pipeline.audit.findings`."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import attrs
from pyarrow import parquet
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.audit import findings
from synapse_replication.pipeline.audit.findings import (
    AuditFinding,
    print_findings,
    print_json,
    read_findings,
    to_json,
    worst_first,
    write_findings,
)
from synapse_replication.pipeline.audit.kinds import KINDS, Severity
from synapse_replication.pipeline.schemas import FINDINGS_SCHEMA
from tests.support.crashes import with_file_size

_ROOT = Path(__file__).parents[3]
_DOCS = _ROOT / "docs" / "pipeline.rst"
_CHECKS = _ROOT / "synapse_replication" / "pipeline" / "audit" / "checks.sql"

LOST = AuditFinding(
    kind="row_out_of_order",
    stream="events",
    instance_name="w1",
    first_token=7,
    last_token=9,
    count=3,
    message="3 rows are gone",
    evidence='{"rows": [1]}',
)
ODD = AuditFinding(
    kind="unknown_writer",
    stream="a\x1bb",
    first_token=5,
    last_token=5,
    message="an\nodd name",
    evidence='{"x": "\u202e"}',
)


def note(stream: str | None, count: int) -> AuditFinding:
    """Return a finding with severity ``info``."""
    return AuditFinding(
        kind="row_gone", stream=stream, count=count, message="gone", evidence="{}"
    )


class KindTests(SynchronousTestCase):
    """Tests for the kinds of findings."""

    def test_each_is_explained(self) -> None:
        """The manual has the kinds of all checks."""
        self.assertIn(".. finding-kinds::\n", _DOCS.read_text())
        sql = _CHECKS.read_text()
        checked = set(re.findall(r"'([a-z]+(?:_[a-z]+)+)'", sql))
        self.assertGreater(len(checked), 5)
        self.assertEqual(checked - KINDS.keys(), set())
        with self.assertRaises(ValueError):
            AuditFinding(kind="unheard_of", message="", evidence="")

    def test_severities(self) -> None:
        """
        A kind that occurs in healthy deployments is a note, and a harmless fault is a
        warning.
        """
        self.assertIs(KINDS["late_invalidation"].severity, Severity.INFO)
        self.assertIs(KINDS["unknown_writer"].severity, Severity.WARNING)
        self.assertIs(KINDS["announced_absent"].severity, Severity.ERROR)


class FindingTests(SynchronousTestCase):
    """Tests for the fields and the order of findings."""

    def test_row(self) -> None:
        """A finding is converted to a row with the published columns, and back."""
        finding = AuditFinding(
            kind="row_gone", stream="events", message="x", evidence=""
        )
        self.assertEqual(set(finding.to_row()), set(FINDINGS_SCHEMA.names))
        self.assertEqual(finding.to_row()["severity"], "info")
        self.assertEqual(AuditFinding.from_row(finding.to_row()), finding)

    def test_worst_first(self) -> None:
        """Errors come first, then warnings; the token decides last."""
        kinds = ("row_gone", "unknown_writer", "token_ahead")
        unsorted = [
            AuditFinding(kind=kind, first_token=token, message="x", evidence="")
            for kind in kinds
            for token in (9, None, 3)
        ]
        self.assertEqual(
            [(each.kind, each.first_token) for each in worst_first(unsorted)],
            [(kind, token) for kind in reversed(kinds) for token in (None, 3, 9)],
        )

    def test_nulls(self) -> None:
        """Evidence omits fields whose values are null, at any depth."""
        self.assertEqual(
            to_json({"a": None, "rows": [{"b": 1, "c": None}]}), '{"rows": [{"b": 1}]}'
        )


class PrintTests(SynchronousTestCase):
    """Tests for printing findings."""

    def setUp(self) -> None:
        self.out = io.StringIO()

    def test_nothing(self) -> None:
        """If there are no findings, the counts are still printed."""
        print_findings([], self.out)
        self.assertEqual(self.out.getvalue(), "0 errors, 0 warnings, 0 notes\n")

    def test_one_by_one(self) -> None:
        """
        Errors and warnings are printed with tokens and evidence; notes only as totals.
        """
        counts = print_findings(
            [LOST, note("caches", 4), note("caches", 2), note(None, 1)], self.out
        )
        self.assertEqual(counts, {Severity.ERROR: 1, Severity.INFO: 3})
        self.assertEqual(
            self.out.getvalue().splitlines(),
            [
                "ERROR row_out_of_order events w1 7-9",
                "  3 rows are gone",
                '  evidence: {"rows": [1]}',
                "Normal in a healthy deployment:",
                "  row_gone  -: findings: 1; affected rows, ids or lines: 1",
                "  row_gone  caches: findings: 2; affected rows, ids or lines: 6",
                "1 errors, 0 warnings, 3 notes",
            ],
        )

    def test_names_command_no_terminal(self) -> None:
        """Control characters in names, messages and evidence are escaped."""
        print_findings([ODD, note("c\x1bd", 1)], self.out)
        text = self.out.getvalue()
        self.assertNotIn("\x1b", text)
        self.assertIn("WARNING unknown_writer a\\x1bb 5\n  an\\nodd name\n", text)
        self.assertIn('  evidence: {"x": "\\u202e"}\n', text)
        self.assertIn(
            "  row_gone  c\\x1bd: findings: 1; affected rows, ids or lines: 1\n", text
        )

    def test_long_evidence(self) -> None:
        """Long evidence is truncated."""
        self.patch(findings, "_MAX_EVIDENCE", 4)
        print_findings(
            [attrs.evolve(LOST, evidence=text) for text in ("12345", "1234")], self.out
        )
        lines = self.out.getvalue().splitlines()
        self.assertIn("  evidence: 1234 ...", lines)
        self.assertIn("  evidence: 1234", lines)

    def test_so_many(self) -> None:
        """Errors beyond the maximum are not printed; one line says where they are."""
        self.patch(findings, "MAX_SHOWN", 2)
        counts = print_findings([LOST] * 5, self.out)
        self.assertEqual(counts[Severity.ERROR], 5)
        self.assertEqual(self.out.getvalue().count("ERROR row_out"), 2)
        self.assertEqual(self.out.getvalue().count("(more errors are in"), 1)

    def test_json(self) -> None:
        """
        The JSON output has all findings with all fields, and the count of each
        severity.
        """
        counts = print_json([LOST, ODD, note("caches", 4)], self.out)
        printed = json.loads(self.out.getvalue())
        self.assertEqual(counts.total(), 3)
        self.assertEqual(
            {name: printed[name] for name in ("errors", "warnings", "infos")},
            {"errors": 1, "warnings": 1, "infos": 1},
        )
        self.assertEqual(
            [f["kind"] for f in printed["findings"]],
            ["row_out_of_order", "unknown_writer", "row_gone"],
        )
        self.assertEqual(printed["findings"][0]["evidence"], {"rows": [1]})

    def test_no_json(self) -> None:
        """Without findings, the output is still valid JSON."""
        print_json([], self.out)
        self.assertEqual(json.loads(self.out.getvalue())["findings"], [])


class FilesTests(SynchronousTestCase):
    """Tests for files of findings."""

    def test_read_again(self) -> None:
        """Findings are read as they were written; a folder without any is an error."""
        folder = Path(self.mktemp())
        error = self.assertRaises(PipelineError, read_findings, str(folder))
        self.assertIn("the folder has no findings.parquet", str(error))
        write_findings([LOST, ODD], str(folder))
        self.assertEqual(read_findings(str(folder)), [LOST, ODD])
        # Version 0.1.0 wrote no checksum.
        path = folder / "findings.parquet"
        parquet.write_table(parquet.read_table(path).replace_schema_metadata(), path)
        self.assertEqual(read_findings(str(folder)), [LOST, ODD])
        path.write_text("x")
        error = self.assertRaises(PipelineError, read_findings, str(folder))
        self.assertIn("findings.parquet: ", str(error))

    def test_bits(self) -> None:
        """Findings whose file is damaged are right, or an error that names the file."""
        folder = Path(self.mktemp())
        write_findings([LOST, ODD], str(folder))
        path = folder / "findings.parquet"
        whole = path.read_bytes()
        for number, byte in enumerate(range(0, len(whole), 23)):
            damaged = bytearray(whole)
            damaged[byte] ^= 1 << number % 8
            for text in (damaged, whole[:byte]):
                path.write_bytes(text)
                try:
                    self.assertEqual(read_findings(str(folder)), [LOST, ODD], byte)
                except PipelineError as error:
                    self.assertIn("findings.parquet: ", str(error))

    def test_full_at_each_byte(self) -> None:
        """If the disk becomes full, it is an error, and the older findings remain."""
        folder = Path(self.mktemp())
        write_findings([LOST], str(folder))

        def work() -> None:
            try:
                write_findings([LOST, ODD], str(folder))
            except PipelineError as error:
                self.assertIn("File too large", str(error))

        for limit in range(0, (folder / "findings.parquet").stat().st_size, 500):
            with_file_size(limit, work)
            self.assertEqual(read_findings(str(folder)), [LOST])
