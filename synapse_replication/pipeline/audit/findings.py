"""The findings of an audit: their kinds, severities and fields.

docs/pipeline.rst says what each kind means, how certain it is, and what to do.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

import attrs
from typing_extensions import Self

#: The maximum number of lines, rows or ids that the evidence of one finding lists.
SAMPLES: Final = 10


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
