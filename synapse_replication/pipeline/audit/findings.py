"""The kinds of an audit's findings, their severities, and the columns of a finding.

docs/pipeline.rst says what each kind means, how certain it is, and what to do.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as sf

if TYPE_CHECKING:
    from pyspark.sql import Column

#: The maximum number of lines, rows or ids that the evidence of one finding lists.
SAMPLES: Final = 10


class Severity(enum.Enum):
    """The severity of a finding."""

    #: Certainly a fault.
    ERROR = "error"
    #: A fault that did no harm, or one that cannot be proved.
    WARNING = "warning"
    #: Occurs in healthy deployments, too; helps to interpret the other findings.
    INFO = "info"


class Kind(enum.Enum):
    """The kind of a finding."""

    ANNOUNCED_ABSENT = "announced_absent"
    ROW_OUT_OF_ORDER = "row_out_of_order"
    ROW_TWICE_ON_WIRE = "row_twice_on_wire"
    ID_OF_TWO_WRITERS = "id_of_two_writers"
    SEQUENCE_BEHIND = "sequence_behind"
    POSITION_AHEAD = "position_ahead"
    TOKEN_AHEAD = "token_ahead"
    POSITION_WRONG_SIGN = "position_wrong_sign"
    POSITIONS_MISSING = "positions_missing"
    POSITIONS_NOT_UNIQUE = "positions_not_unique"
    UNKNOWN_WRITER = "unknown_writer"
    ROW_TWICE_IN_ARCHIVE = "row_twice_in_archive"
    COMMAND_TWICE_IN_ARCHIVE = "command_twice_in_archive"
    ROW_NOT_ARCHIVED = "row_not_archived"
    ARCHIVE_DAMAGED = "archive_damaged"
    RECORDING_DAMAGED = "recording_damaged"
    RECORDING_CUT_OFF = "recording_cut_off"
    LATE_INVALIDATION = "late_invalidation"
    ROW_NOT_SEEN = "row_not_seen"
    ID_WITHOUT_ROW = "id_without_row"
    ROW_GONE = "row_gone"
    STREAM_RESET = "stream_reset"

    @property
    def severity(self) -> Severity:
        """The severity of findings of this kind."""
        return SEVERITIES[self]


_WARNINGS = (
    Kind.ROW_TWICE_ON_WIRE,
    Kind.POSITIONS_NOT_UNIQUE,
    Kind.UNKNOWN_WRITER,
    Kind.RECORDING_DAMAGED,
)
_INFOS = (
    Kind.RECORDING_CUT_OFF,
    Kind.LATE_INVALIDATION,
    Kind.ROW_NOT_SEEN,
    Kind.ID_WITHOUT_ROW,
    Kind.ROW_GONE,
    Kind.STREAM_RESET,
)

#: The severity of each kind.
SEVERITIES: Final[Mapping[Kind, Severity]] = MappingProxyType(
    {
        **dict.fromkeys(Kind, Severity.ERROR),
        **dict.fromkeys(_WARNINGS, Severity.WARNING),
        **dict.fromkeys(_INFOS, Severity.INFO),
    }
)


def finding(
    kind: Kind | Column,
    *,
    message: Sequence[Column | str],
    evidence: Mapping[str, Column],
    stream: Column | None = None,
    instance_name: Column | None = None,
    first: Column | None = None,
    last: Column | None = None,
    count: Column | None = None,
) -> list[Column]:
    """Return the columns of FINDINGS_SCHEMA, for a ``select``.

    For an omitted parameter, the column of the same name is used.

    :param kind: a kind, or a column with the values of kinds.
    :param message: texts and columns, concatenated to a sentence; a null value is shown
        as ``an unknown writer``.
    :param evidence: the fields of the JSON object ``evidence``, by name.
    """
    parts = [
        sf.lit(part)
        if isinstance(part, str)
        else sf.coalesce(part.cast("string"), sf.lit("an unknown writer"))
        for part in message
    ]
    fields = [column.alias(name) for name, column in evidence.items()]
    if isinstance(kind, Kind):
        severity = sf.lit(kind.severity.value)
        kind = sf.lit(kind.value)
    else:
        severity = _severity_of(kind)
    return [
        kind.alias("kind"),
        severity.alias("severity"),
        _given_or("stream", stream).cast("string").alias("stream"),
        _given_or("instance_name", instance_name).cast("string").alias("instance_name"),
        _given_or("first", first).cast("long").alias("first_token"),
        _given_or("last", last).cast("long").alias("last_token"),
        _given_or("count", count).cast("long").alias("count"),
        sf.concat(*parts).alias("message"),
        sf.to_json(sf.struct(*fields)).alias("evidence"),
    ]


def _given_or(name: str, column: Column | None) -> Column:
    return sf.col(name) if column is None else column


def _severity_of(kind: Column) -> Column:
    severity = sf.lit(Severity.ERROR.value)
    for each, its_severity in SEVERITIES.items():
        if its_severity is not Severity.ERROR:
            its = sf.lit(its_severity.value)
            severity = sf.when(kind == each.value, its).otherwise(severity)
    return severity


def sample(rank: Column, *fields: Column) -> Column:
    """Return the first :data:`SAMPLES` rows of a group as an array of objects.

    :param rank: the rank of a row within its group, from 1.
    :param fields: the fields of the objects, which are sorted by the first field.
    """
    first = sf.when(rank <= SAMPLES, sf.struct(*fields))
    return sf.array_sort(sf.collect_list(first))
