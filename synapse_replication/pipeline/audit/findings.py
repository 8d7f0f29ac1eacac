"""The findings of an audit: their fields, order and output."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, TextIO
from zlib import crc32

import attrs
import pyarrow as pa
from jinja2 import Environment
from pyarrow import parquet

from synapse_replication.durable import write_durably
from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.audit.kinds import KINDS, Severity
from synapse_replication.pipeline.schemas import FINDINGS_SCHEMA
from synapse_replication.text import printable

#: The maximum number of errors, and of warnings, that are printed individually.
MAX_SHOWN: Final = 100

#: The maximum number of characters of a finding's evidence that are printed.
_MAX_EVIDENCE: Final = 600

_PARQUET: Final = "findings.parquet"
#: The key, in the metadata of the Parquet file, of the checksum of its rows. Parquet
#: itself has none for its footer.
_CHECKSUM: Final = b"synapse_replication.crc"


#: The number of findings of each severity.
Counts = Counter[Severity]

_BADNESS: Final = {severity: index for index, severity in enumerate(Severity)}


@attrs.frozen(kw_only=True)
class AuditFinding:
    """A finding; its fields are the columns of FINDINGS_SCHEMA.

    :ivar kind: the kind, one of :data:`.kinds.KINDS`.
    :ivar first_token: the first affected token.
    :ivar last_token: the last affected token.
    :ivar count: the number of affected rows, ids or lines.
    :ivar message: one sentence for display.
    :ivar evidence: files, lines, tables and values, as a JSON object.
    """

    kind: str = attrs.field(validator=attrs.validators.in_(KINDS))
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
        return KINDS[self.kind].severity

    def to_row(self) -> dict[str, Any]:
        """Return a row with FINDINGS_SCHEMA."""
        return {**attrs.asdict(self), "severity": self.severity.value}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> AuditFinding:
        """Convert a row with FINDINGS_SCHEMA."""
        return cls(**{name: row[name] for name in row if name != "severity"})


def worst_first(findings: Iterable[AuditFinding]) -> list[AuditFinding]:
    """Sort findings by severity, kind, stream, writer and token."""

    def key(finding: AuditFinding) -> tuple[Any, ...]:
        return (
            _BADNESS[finding.severity],
            finding.kind,
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
            notes.setdefault((finding.kind, finding.stream), []).append(finding)
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
    table = pa.Table.from_pylist(rows, FINDINGS_SCHEMA)
    lines = _to_lines(table.to_pylist())
    parquet_file = io.BytesIO()
    parquet.write_table(
        table.replace_schema_metadata({_CHECKSUM: b"%08x" % crc32(lines)}), parquet_file
    )
    path = Path(folder).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_durably(path / _PARQUET, parquet_file.getvalue())
        write_durably(path / "findings.json", lines)
    except OSError as error:
        raise PipelineError(f"cannot write the findings: {error}") from error


def _to_lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


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
        table = parquet.read_table(path)
        rows = table.cast(FINDINGS_SCHEMA).to_pylist()
        # Version 0.1.0 wrote no checksum.
        checksum = (table.schema.metadata or {}).get(_CHECKSUM)
        if checksum not in (None, b"%08x" % crc32(_to_lines(rows))):
            raise ValueError(
                "the checksum is wrong: the file is damaged; run the audit again"
            )
        return [AuditFinding.from_row(row) for row in rows]
    except (pa.ArrowException, OSError, ValueError) as error:
        raise PipelineError(f"--findings {path}: {error}") from error


def print_findings(findings: Sequence[AuditFinding], out: TextIO) -> Counts:
    """Print errors and warnings, and the totals of all other findings.

    At most MAX_SHOWN errors and as many warnings are printed; all are counted.
    """
    counts = Counter(finding.severity for finding in findings)
    notes = {(k, s or "-"): found for (k, s), found in notes_of(findings).items()}
    environment = Environment(trim_blocks=True, keep_trailing_newline=True)
    environment.filters["printable"] = printable
    template = Path(__file__).with_name("findings.txt").read_text("utf-8")
    text = environment.from_string(template).render(
        findings=findings,
        notes=sorted(notes.items(), key=itemgetter(0)),
        width=max((len(kind) for kind, _ in notes), default=0),
        counts={severity.value: counts[severity] for severity in Severity},
        max_shown=MAX_SHOWN,
        max_evidence=_MAX_EVIDENCE,
    )
    out.write(text)
    return counts
