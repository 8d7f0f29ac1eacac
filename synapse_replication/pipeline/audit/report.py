"""Prints, writes and reads the findings of an audit, as text, JSON or Parquet."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, TextIO

import pyarrow as pa
from pyarrow import parquet

from synapse_replication.durable import write_durably
from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.audit.findings import AuditFinding, Severity, notes_of
from synapse_replication.pipeline.schemas import FINDINGS_SCHEMA
from synapse_replication.text import printable

#: The number of findings of each severity.
Counts = Counter[Severity]

#: The maximum number of errors, and of warnings, that are printed individually.
MAX_SHOWN: Final = 100

#: The maximum number of characters of a finding's evidence that are printed.
_MAX_EVIDENCE: Final = 600

_PARQUET: Final = "findings.parquet"


def print_json(findings: Sequence[AuditFinding], out: TextIO) -> Counts:
    """Print all findings as one JSON object."""
    counts = Counter(finding.severity for finding in findings)
    values = (
        {**finding.to_row(), "evidence": json.loads(finding.evidence)}
        for finding in findings
    )
    lines = ",".join(f"\n{json.dumps(value)}" for value in values)
    out.write(f'{{"findings": [{lines}')
    numbers = {f"{each.value}s": counts[each] for each in Severity}
    out.write(f"\n], {json.dumps(numbers)[1:-1]}}}\n")
    return counts


def write_findings(findings: Iterable[AuditFinding], folder: str) -> None:
    """Write findings as one Parquet file and as lines of JSON; replace older files.

    :param folder: the folder, which is created if it is missing.
    :raises PipelineError: if the folder cannot be written.
    """
    rows = [finding.to_row() for finding in findings]
    parquet_file = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(rows, FINDINGS_SCHEMA), parquet_file)
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    path = Path(folder).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_durably(path / _PARQUET, parquet_file.getvalue())
        write_durably(path / "findings.json", lines.encode())
    except OSError as error:
        raise PipelineError(f"cannot write the findings: {error}") from error


def read_findings(folder: str) -> list[AuditFinding]:
    """Read the findings that :func:`write_findings` has written.

    :raises PipelineError: if the folder has none, or they cannot be read.
    """
    path = Path(folder).absolute() / _PARQUET
    if not path.exists():
        raise PipelineError(
            f"--findings {folder}: the folder has no {_PARQUET}, which 'pipeline audit "
            "--out' writes"
        )
    try:
        rows = parquet.read_table(path, schema=FINDINGS_SCHEMA).to_pylist()
        return [AuditFinding.from_row(row) for row in rows]
    except (pa.ArrowException, OSError, ValueError) as error:
        raise PipelineError(f"--findings {path}: {error}") from error


def print_findings(findings: Sequence[AuditFinding], out: TextIO) -> Counts:
    """Print errors and warnings, and the totals of all other findings.

    At most MAX_SHOWN errors and as many warnings are printed; all are counted.
    """
    counts = Counter(finding.severity for finding in findings)
    for severity in (Severity.ERROR, Severity.WARNING):
        for finding in [f for f in findings if f.severity is severity][:MAX_SHOWN]:
            _print_finding(finding, out)
        if counts[severity] > MAX_SHOWN:
            out.write(
                f"(more {severity.value}s are in the output of --out and --json)\n"
            )
    notes = {(k, s or "-"): found for (k, s), found in notes_of(findings).items()}
    if notes:
        out.write("Normal in a healthy deployment:\n")
        width = max(len(kind) for kind, _ in notes)
        for (kind, stream), found in sorted(notes.items()):
            affected = sum(finding.count for finding in found)
            out.write(
                f"  {kind:<{width}}  {printable(stream)}: findings: {len(found)}; "
                f"affected rows, ids or lines: {affected}\n"
            )
    out.write(
        f"{counts[Severity.ERROR]} errors, {counts[Severity.WARNING]} warnings, "
        f"{counts[Severity.INFO]} notes\n"
    )
    return counts


def _print_finding(finding: AuditFinding, out: TextIO) -> None:
    where = [finding.stream, finding.instance_name]
    first, last = finding.first_token, finding.last_token
    if first is not None:
        where.append(str(first) if first == last else f"{first}-{last}")
    location = " ".join(str(part) for part in where if part is not None)
    evidence = finding.evidence
    if len(evidence) > _MAX_EVIDENCE:
        evidence = evidence[:_MAX_EVIDENCE] + " ..."
    out.write(
        f"{finding.severity.value.upper()} {finding.kind.value} {printable(location)}\n"
        f"  {printable(finding.message)}\n"
        f"  evidence: {printable(evidence)}\n"
    )
