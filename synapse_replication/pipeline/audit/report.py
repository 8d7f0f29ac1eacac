"""Prints and writes the findings of an audit, as text, JSON or Parquet."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

from pyarrow import parquet

from synapse_replication.durable import write_durably
from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.audit.findings import Severity
from synapse_replication.pipeline.schemas import FINDINGS_SCHEMA
from synapse_replication.text import printable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

#: The number of findings of each severity.
Counts = Counter[Severity]

#: The maximum number of errors, and of warnings, that are printed individually.
MAX_SHOWN: Final = 100

#: The maximum number of characters of a finding's evidence that are printed.
_MAX_EVIDENCE: Final = 600


def print_json(findings: DataFrame, out: TextIO) -> Counts:
    """Print all findings as one JSON object.

    :param findings: findings with FINDINGS_SCHEMA.
    """
    counts: Counts = Counter()
    out.write('{"findings": [')
    separator = "\n"
    for row in findings.toLocalIterator():
        counts[Severity(row.severity)] += 1
        value: dict[str, Any] = row.asDict()
        value["evidence"] = json.loads(row.evidence)
        out.write(separator + json.dumps(value))
        separator = ",\n"
    numbers = {f"{each.value}s": counts[each] for each in Severity}
    out.write(f"\n], {json.dumps(numbers)[1:-1]}}}\n")
    return counts


def write_findings(findings: DataFrame, folder: str) -> None:
    """Write findings as one Parquet file and as lines of JSON; replace older files.

    :param findings: findings with FINDINGS_SCHEMA; they must fit into memory.
    :param folder: the folder, which is created if it is missing.
    :raises PipelineError: if the folder cannot be written.
    """
    table = findings.select(*FINDINGS_SCHEMA.names).toArrow()
    parquet_file = io.BytesIO()
    parquet.write_table(table, parquet_file)
    lines = "".join(f"{json.dumps(row)}\n" for row in table.to_pylist())
    path = Path(folder).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_durably(path / "findings.parquet", parquet_file.getvalue())
        write_durably(path / "findings.json", lines.encode())
    except OSError as error:
        raise PipelineError(f"cannot write the findings: {error}") from error


def print_findings(findings: DataFrame, out: TextIO) -> Counts:
    """Print errors and warnings, and the totals of all other findings.

    At most MAX_SHOWN errors and as many warnings are printed; all are counted.

    :param findings: findings with FINDINGS_SCHEMA.
    """
    counts: Counts = Counter()
    notes: dict[tuple[str, str], list[int]] = {}
    for row in findings.select(*FINDINGS_SCHEMA.names).toLocalIterator():
        severity = Severity(row.severity)
        counts[severity] += 1
        if severity is Severity.INFO:
            note = notes.setdefault((row.kind, row.stream or "-"), [0, 0])
            note[0] += 1
            note[1] += row["count"]
        elif counts[severity] <= MAX_SHOWN:
            _print_finding(row, out)
        elif counts[severity] == MAX_SHOWN + 1:
            out.write(
                f"(more {severity.value}s are in the output of --out and --json)\n"
            )
    if notes:
        out.write("Normal in a healthy deployment:\n")
        width = max(len(kind) for kind, _ in notes)
        for (kind, stream), (number, affected) in sorted(notes.items()):
            out.write(
                f"  {kind:<{width}}  {printable(stream)}: findings: {number}; affected "
                f"rows, ids or lines: {affected}\n"
            )
    out.write(
        f"{counts[Severity.ERROR]} errors, {counts[Severity.WARNING]} warnings, "
        f"{counts[Severity.INFO]} notes\n"
    )
    return counts


def _print_finding(row: Row, out: TextIO) -> None:
    where = [row.stream, row.instance_name]
    if row.first_token is not None:
        same = row.first_token == row.last_token
        where.append(
            str(row.first_token) if same else f"{row.first_token}-{row.last_token}"
        )
    location = " ".join(str(part) for part in where if part is not None)
    evidence = row.evidence
    if len(evidence) > _MAX_EVIDENCE:
        evidence = evidence[:_MAX_EVIDENCE] + " ..."
    out.write(
        f"{row.severity.upper()} {row.kind} {printable(location)}\n"
        f"  {printable(row.message)}\n"
        f"  evidence: {printable(evidence)}\n"
    )
