"""The comparison of recordings, tables and archive: Spark SQL on executors.

Theory of operation: the statements of ``checks.sql`` build on each other. The results
that several statements read are materialised: first the recorded lines in their order,
and the words, of which there are at least 64 times fewer than rows in a healthy
deployment; then the ids that have to be examined, and what is derived from them, which
grow with the differences between tables, archive and recordings. To plan a statement
takes longer than to run it on few rows, so those that can have no result, because a
view that they need is empty, are left out.

Nothing that grows with the number of rows, lines or differences reaches this process:
the number of findings of each kind and stream is bounded, and so is the evidence of
each finding.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import pyarrow as pa

from synapse_replication.data_files import read_queries
from synapse_replication.pipeline.audit.facts import AuditedStream
from synapse_replication.pipeline.audit.findings import AuditFinding, to_json
from synapse_replication.pipeline.scan import add_materialised_view, table_frame
from synapse_replication.pipeline.schemas import (
    FINDINGS_SCHEMA,
    WIRE_SCHEMA,
    read_schema,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_QUERIES: Final = read_queries(Path(__file__).with_name("checks.sql"))

#: The number of a stream's newest gaps that are findings of their own.
MAX_GAPS: Final = 1000

#: The number of findings of a kind and stream that are listed.
MAX_FINDINGS: Final = MAX_GAPS + 1

#: The maximum number of rows in the evidence of a finding.
MAX_SAMPLES: Final = 10

#: The columns of recorded lines that are compared.
LINES_SCHEMA: Final = pa.schema(
    [
        *(
            WIRE_SCHEMA.field(name)
            for name in (
                *("recording", "line_number", "t", "command", "stream"),
                *("instance_name", "token", "prev_token"),
            )
        ),
        pa.field("is_damaged", pa.bool_()),
    ]
)

#: The columns of rows that are compared.
KEYS_SCHEMA: Final = read_schema("keys")

_STREAMS: Final = read_schema("streams")

_RANGES: Final = pa.schema(
    [("stream", pa.string()), ("first_token", pa.int64()), ("last_token", pa.int64())]
)

#: A stream and the first and the last token of a range.
TokenRange = tuple[str, int, int]

#: The results that are computed after ``ids``, in their order, and the view or input
#: without whose rows they are empty.
_DERIVED: Final[Mapping[str, str]] = {
    "never_sent": "wire",
    "covered": "never_sent",
    "late": "wire",
    "judged": "late",
    "ahead": "farthest",
}

#: The statements with the findings, and what each of them needs.
_FINDINGS: Final[Mapping[str, str]] = {
    "two_writers": "ids",
    "rows_gone": "ids",
    "gaps": "ids",
    "tokens_ahead": "ahead",
    "damaged_records": "wire",
    "late_rows": "judged",
    "resets": "wire",
    "rows_not_sent": "covered",
    "rows_again": "archive_again",
    "rows_not_archived": "archive",
    "lines_again": "wire",
}

#: Spark's settings for the comparison. Spark takes the output of Python tasks to be
#: tiny, and would send it to every task; it may do so once it knows the size.
_SETTINGS: Final[Mapping[str, str]] = {
    "spark.sql.autoBroadcastJoinThreshold": "-1",
    "spark.sql.adaptive.autoBroadcastJoinThreshold": "10MB",
}


@attrs.frozen(kw_only=True)
class Inputs:
    """What is compared.

    :ivar streams: the facts about the streams.
    :ivar tables: the rows in the database, with KEYS_SCHEMA.
    :ivar wire: recorded lines with LINES_SCHEMA; ``None`` without recordings.
    :ivar archive: the archived rows, with KEYS_SCHEMA; ``None`` without an archive.
    :ivar archived_ranges: the range of the archived tokens of each stream.
    :ivar purged: ranges that the archive need not contain.
    """

    streams: Sequence[AuditedStream]
    tables: DataFrame
    wire: DataFrame | None = None
    archive: DataFrame | None = None
    archived_ranges: Sequence[TokenRange] = ()
    purged: Sequence[TokenRange] = ()


def compare(session: SparkSession, inputs: Inputs) -> list[AuditFinding]:
    """Return the findings.

    The evidence of ``announced_absent`` has the ids of the rows, not the rows.

    :param session: a session whose settings and temporary views may be changed.
    """
    for name, value in _SETTINGS.items():
        session.conf.set(name, value)
    _add_inputs(session, inputs)
    empty = _compute_results(session, inputs)
    chosen = [name for name, needed in _FINDINGS.items() if needed not in empty]
    union = "\nUNION ALL\n".join(_QUERIES[name] for name in chosen)
    session.sql(union, {"gaps": MAX_GAPS}).createOrReplaceTempView("all_findings")
    found = session.sql(_QUERIES["findings"], {"findings": MAX_FINDINGS})
    return [_to_finding(row) for row in found.toArrow().to_pylist()]


def _add_inputs(session: SparkSession, inputs: Inputs) -> None:
    """Add views of what is compared; those of missing inputs are empty."""
    streams = [
        {**attrs.asdict(each), "writers": sorted(each.writers)}
        for each in inputs.streams
    ]
    _add_table(session, "streams", pa.Table.from_pylist(streams, _STREAMS))
    _add_ranges(session, "archived_ranges", inputs.archived_ranges)
    _add_ranges(session, "purged", inputs.purged)
    archive = inputs.archive
    if archive is None:
        archive = table_frame(session, KEYS_SCHEMA.empty_table())
    inputs.tables.createOrReplaceTempView("tables")
    archive.createOrReplaceTempView("archive")
    if inputs.wire is None:
        _add_table(session, "wire", LINES_SCHEMA.empty_table())
        _add_view(session, "lines")
    else:
        inputs.wire.createOrReplaceTempView("wire")
        _materialise(session, "lines")


def _compute_results(session: SparkSession, inputs: Inputs) -> set[str]:
    """Add views of the results on which findings depend.

    :return: the views and inputs that have no rows.
    """
    for name in ("tokens", "claims", "spans"):
        _add_view(session, name)
    _materialise(session, "words")
    _materialise(session, "ids")
    empty = set()
    if inputs.wire is None:
        empty.add("wire")
    if inputs.archive is None:
        empty |= {"archive", "archive_again"}
    else:
        repeated = session.sql(_QUERIES["repeated"])
        if repeated.isEmpty():
            empty.add("archive_again")
        else:
            repeated.createOrReplaceTempView("repeated")
            _add_view(session, "archive_again")
    _add_view(session, "farthest")
    for name, needed in _DERIVED.items():
        if needed in empty or _materialise(session, name).isEmpty():
            empty.add(name)
    return empty


def _to_finding(row: Mapping[str, Any]) -> AuditFinding:
    evidence = json.loads(row["evidence"])
    shown = {n: "an unknown writer" if v is None else v for n, v in row.items()}
    found = {name: row[name] for name in FINDINGS_SCHEMA.names if name in row}
    found["message"] = row["message"].format_map({**evidence, **shown})
    found["evidence"] = to_json(evidence)
    return AuditFinding.from_row(found)


def _add_table(session: SparkSession, name: str, table: pa.Table) -> None:
    table_frame(session, table).createOrReplaceTempView(name)


def _add_ranges(session: SparkSession, name: str, ranges: Iterable[TokenRange]) -> None:
    rows = [dict(zip(_RANGES.names, each, strict=True)) for each in ranges]
    _add_table(session, name, pa.Table.from_pylist(rows, _RANGES))


def _add_view(session: SparkSession, name: str) -> None:
    session.sql(_QUERIES[name]).createOrReplaceTempView(name)


def _materialise(session: SparkSession, name: str) -> DataFrame:
    return add_materialised_view(session, name, _QUERIES[name])
