"""The findings of an audit: their kinds, severities and fields, and their output.

docs/pipeline.rst says what each kind means, how certain it is, and what to do.
"""

from __future__ import annotations

import enum
import io
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TextIO

import attrs
import pyarrow as pa
from pyarrow import parquet
from typing_extensions import Self

from synapse_replication.durable import write_durably
from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.schemas import FINDINGS_SCHEMA
from synapse_replication.text import printable

#: The maximum number of errors, and of warnings, that are printed individually.
MAX_SHOWN: Final = 100

#: The maximum number of characters of a finding's evidence that are printed.
_MAX_EVIDENCE: Final = 600

_PARQUET: Final = "findings.parquet"


class Severity(enum.Enum):
    """The severity of a finding, from the worst to the least."""

    #: Certainly a fault.
    ERROR = "error"
    #: A fault that did no harm, or one that cannot be proved.
    WARNING = "warning"
    #: Occurs in healthy deployments, too; helps to interpret the other findings.
    INFO = "info"


class Kind(enum.Enum):
    """The kind of a finding.

    :ivar severity: the severity of findings of this kind.
    """

    severity: Severity

    def __new__(cls, value: str, severity: Severity = Severity.ERROR) -> Self:
        """Take the name of the kind as its value."""
        kind = object.__new__(cls)
        kind._value_ = value
        kind.severity = severity
        return kind

    ANNOUNCED_ABSENT = "announced_absent"
    ROW_OUT_OF_ORDER = "row_out_of_order"
    ROW_TWICE_ON_WIRE = "row_twice_on_wire", Severity.WARNING
    ID_OF_TWO_WRITERS = "id_of_two_writers"
    SEQUENCE_BEHIND = "sequence_behind"
    POSITION_AHEAD = "position_ahead"
    TOKEN_AHEAD = "token_ahead"
    POSITION_WRONG_SIGN = "position_wrong_sign"
    POSITIONS_MISSING = "positions_missing"
    POSITIONS_NOT_UNIQUE = "positions_not_unique", Severity.WARNING
    UNKNOWN_WRITER = "unknown_writer", Severity.WARNING
    ROW_TWICE_IN_ARCHIVE = "row_twice_in_archive"
    COMMAND_TWICE_IN_ARCHIVE = "command_twice_in_archive"
    ROW_NOT_ARCHIVED = "row_not_archived"
    ARCHIVE_DAMAGED = "archive_damaged"
    RECORDING_DAMAGED = "recording_damaged", Severity.WARNING
    RECORDING_CUT_OFF = "recording_cut_off", Severity.INFO
    LATE_INVALIDATION = "late_invalidation", Severity.INFO
    ROW_NOT_SEEN = "row_not_seen", Severity.INFO
    ID_WITHOUT_ROW = "id_without_row", Severity.INFO
    ROW_GONE = "row_gone", Severity.INFO
    STREAM_RESET = "stream_reset", Severity.INFO


#: The number of findings of each severity.
Counts = Counter[Severity]

_BADNESS: Final = {severity: index for index, severity in enumerate(Severity)}


@attrs.frozen(kw_only=True)
class AuditFinding:
    """A finding; its fields are the columns of FINDINGS_SCHEMA.

    :ivar first_token: the first affected token.
    :ivar last_token: the last affected token.
    :ivar count: the number of affected rows, ids or lines.
    :ivar message: one sentence for display.
    :ivar evidence: files, lines, tables and values, as a JSON object.
    """

    kind: Kind
    stream: str | None = None
    instance_name: str | None = None
    first_token: int | None = None
    last_token: int | None = None
    count: int = 1
    message: str
    evidence: str

    @property
    def severity(self) -> Severity:
        """The severity, which depends on the kind."""
        return self.kind.severity

    def to_row(self) -> dict[str, Any]:
        """Return a row with FINDINGS_SCHEMA."""
        head = {"kind": self.kind.value, "severity": self.severity.value}
        return {**attrs.asdict(self), **head}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> AuditFinding:
        """Convert a row with FINDINGS_SCHEMA."""
        fields = {name: value for name, value in row.items() if name != "severity"}
        return cls(**{**fields, "kind": Kind(row["kind"])})


def worst_first(findings: Iterable[AuditFinding]) -> list[AuditFinding]:
    """Sort findings by severity, kind, stream, writer and token."""

    def key(finding: AuditFinding) -> tuple[Any, ...]:
        return (
            _BADNESS[finding.severity],
            finding.kind.value,
            finding.stream or "",
            finding.instance_name or "",
            -1 if finding.first_token is None else finding.first_token,
            finding.evidence,
        )

    return sorted(findings, key=key)


def notes_of(
    findings: Iterable[AuditFinding],
) -> dict[tuple[str, str | None], list[AuditFinding]]:
    """Return the findings that are not faults, by kind and stream."""
    notes: dict[tuple[str, str | None], list[AuditFinding]] = {}
    for finding in findings:
        if finding.severity is Severity.INFO:
            notes.setdefault((finding.kind.value, finding.stream), []).append(finding)
    return notes


def to_json(evidence: Mapping[str, Any]) -> str:
    """Convert evidence to a JSON object, without the fields whose values are null."""
    return json.dumps(_known(evidence))


def _known(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _known(v) for name, v in value.items() if v is not None}
    return [_known(each) for each in value] if isinstance(value, list) else value


# -- output ------------------------------------------------------------------------


def print_json(findings: Sequence[AuditFinding], out: TextIO) -> Counts:
    """Print all findings as one JSON object."""
    counts = Counter(finding.severity for finding in findings)
    values = [
        {**finding.to_row(), "evidence": json.loads(finding.evidence)}
        for finding in findings
    ]
    numbers = {f"{each.value}s": counts[each] for each in Severity}
    out.write(json.dumps({"findings": values, **numbers}, indent=1) + "\n")
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
