"""Helpers for tests of the audit: rows, lines of recordings, and findings."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import psycopg2
import pyarrow as pa
from click.testing import Result

from synapse_replication.pipeline.audit.comparison import (
    KEYS_SCHEMA,
    LINES_SCHEMA,
    Inputs,
    TokenRange,
    compare,
)
from synapse_replication.pipeline.audit.facts import AuditedStream
from synapse_replication.pipeline.audit.findings import AuditFinding
from synapse_replication.pipeline.scan import table_frame
from synapse_replication.pipeline.spark.session import own_session
from synapse_replication.storage.schema import DELTAS
from synapse_replication.streams.rows import encode_json
from synapse_replication.streams.standard.registry import STANDARD_STREAMS
from synapse_replication.testing.servers import shared_postgres
from synapse_replication.wire.commands import PositionCommand
from synapse_replication.wire.rdata import rdata_lines
from tests.pipeline.shared_session import shared_session
from tests.storage.synapse_extract import ON_THE_WIRE, ROWS, SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: Stream, writer and id.
Key = tuple[str, str, int]

#: Kind, severity, stream, writer, first and last token, count.
Found = tuple[str, str, str | None, str | None, int | None, int | None, int]

#: The tables of each artificial stream.
TABLES = ("events", "state")


@attrs.frozen(kw_only=True, eq=False)
class Deployment:
    """The input of an audit: rows, recorded lines, and the properties of streams.

    :ivar tables: the rows in tables.
    :ivar archive: the archived rows.
    :ivar lines: recorded lines; see :func:`lines_of`; ``None`` without recordings.
    :ivar nameless: the streams whose tables and archive do not record the writer.
    :ivar persisted: the streams that are stored in the database.
    :ivar writers: the known writers of a stream.
    :ivar purged: streams and the first and last token of a purged range.
    """

    tables: Sequence[Key] = ()
    archive: Sequence[Key | tuple[str, str, int, int]] = ()
    lines: Sequence[tuple[Any, ...]] | None = ()
    persisted: Collection[str] = ("events",)
    nameless: Collection[str] = ()
    idempotent: Collection[str] = ()
    in_memory: Collection[str] = ()
    allocated: Mapping[str, int] = attrs.field(factory=dict)
    writers: Mapping[str, Sequence[str]] = attrs.field(factory=dict)
    purged: Sequence[TokenRange] = ()

    def named(self, prefix: str) -> Deployment:
        """Return the deployment with a prefix to its streams and recordings."""

        def renamed(rows: Iterable[Any]) -> list[Any]:
            return [(prefix + stream, *row) for stream, *row in rows]

        def names(streams: Iterable[str]) -> list[str]:
            return [prefix + stream for stream in streams]

        return Deployment(
            tables=renamed(self.tables),
            archive=renamed(self.archive),
            lines=[
                (
                    *(prefix + line[0], *line[1:4]),
                    None if line[4] is None else prefix + line[4],
                    *line[5:],
                )
                for line in self.lines or ()
            ],
            persisted=names(self.persisted),
            nameless=names(self.nameless),
            idempotent=names(self.idempotent),
            in_memory=names(self.in_memory),
            allocated=dict(renamed(self.allocated.items())),
            writers=dict(renamed(self.writers.items())),
            purged=renamed(self.purged),
        )

    def _streams(self) -> list[AuditedStream]:
        return [
            AuditedStream(
                stream=stream,
                persisted=stream in self.persisted,
                in_memory=stream in self.in_memory,
                idempotent=stream in self.idempotent,
                tables=TABLES,
                last_allocated=self.allocated.get(stream),
                nameless=stream in self.nameless,
                writers=frozenset(self.writers.get(stream, ())),
            )
            for stream in sorted({*self.persisted, *self.idempotent, *self.in_memory})
        ]

    def audit(self) -> list[AuditFinding]:
        """Return the findings."""
        return audit_all([self])


def audit_all(deployments: Iterable[Deployment]) -> list[AuditFinding]:
    """Return the findings of several deployments, whose streams differ."""
    given = list(deployments)
    session = own_session(shared_session())

    def frame(rows: Iterable[Sequence[Any]], schema: pa.Schema) -> DataFrame:
        values = [dict(zip(schema.names, row, strict=False)) for row in rows]
        return table_frame(session, pa.Table.from_pylist(values, schema))

    lines = [each.lines for each in given if each.lines is not None]
    archive = [(*row, 0)[:4] for each in given for row in each.archive]
    ranges: dict[str, list[int]] = {}
    for stream, _, id_, _ in archive:
        ranges.setdefault(stream, []).append(id_)
    return compare(
        session,
        Inputs(
            streams=[stream for each in given for stream in each._streams()],
            tables=frame((row for each in given for row in each.tables), KEYS_SCHEMA),
            wire=frame(chain.from_iterable(lines), LINES_SCHEMA) if lines else None,
            archive=frame(archive, KEYS_SCHEMA),
            archived_ranges=[(s, min(ids), max(ids)) for s, ids in ranges.items()],
            purged=[purged for each in given for purged in each.purged],
        ),
    )


class Cases:
    """Deployments of a module's tests, which are audited together.

    A query costs Spark a second, whatever the number of rows.
    """

    def __init__(self) -> None:
        self._cases: list[Deployment] = []

    def add(self, **given: Any) -> Case:
        """Add a deployment."""
        self._cases.append(Deployment(**given))
        return Case(self, f"case{len(self._cases)}-")

    @functools.cached_property
    def findings(self) -> Mapping[str, Sequence[AuditFinding]]:
        """The findings of each deployment, by its prefix."""
        prefixes = [f"case{number}-" for number in range(1, len(self._cases) + 1)]
        found: dict[str, list[AuditFinding]] = {prefix: [] for prefix in prefixes}
        named = (
            case.named(prefix)
            for prefix, case in zip(prefixes, self._cases, strict=True)
        )
        for finding in audit_all(named):
            text = finding.message + finding.evidence + (finding.stream or "")
            (prefix,) = set(re.findall(r"case\d+-", text))
            found[prefix].append(
                attrs.evolve(
                    finding,
                    stream=finding.stream and finding.stream.removeprefix(prefix),
                    message=finding.message.replace(prefix, ""),
                    evidence=finding.evidence.replace(prefix, ""),
                )
            )
        return found


@attrs.frozen
class Case:
    """One deployment of a module's tests."""

    _cases: Cases
    _prefix: str

    def findings(self, *kinds: str) -> list[AuditFinding]:
        """Return its findings of some kinds; by default all."""
        return [
            finding
            for finding in self._cases.findings[self._prefix]
            if not kinds or finding.kind in kinds
        ]


def lines_of(lines: Iterable[str], recording: str = "r.jsonl") -> list[tuple[Any, ...]]:
    """Return rows with LINES_SCHEMA; line numbers and seconds start at 1."""
    found: list[tuple[Any, ...]] = []
    for number, line in enumerate(lines, 1):
        command, *rest = line.split(" ", 4)
        head = recording, number, float(number), command
        if command == "POSITION":
            found.append((*head, *rest[:2], int(rest[3]), int(rest[2]), False))
        elif command == "RDATA":
            token = None if rest[2] == "batch" else int(rest[2])
            found.append((*head, *rest[:2], token, None, False))
        else:
            found.append((*head, None, None, None, None, False))
    return found


def found(findings: Iterable[AuditFinding]) -> list[Found]:
    """Return the findings without message and evidence, in sorted order."""
    return sorted(
        (
            (
                each.kind,
                each.severity.value,
                each.stream,
                each.instance_name,
                each.first_token,
                each.last_token,
                each.count,
            )
            for each in findings
        ),
        key=lambda values: [str(value) for value in values],
    )


def evidence(findings: Iterable[AuditFinding]) -> list[Any]:
    """Return the evidence of each finding."""
    return [json.loads(each.evidence) for each in findings]


#: The value of each sequence in the artificial database.
LAST_ALLOCATED = 20


def new_database(*statements: str) -> str:
    """Create a database; return its connection string."""
    dsn = shared_postgres().new_database()
    with psycopg2.connect(dsn) as connection, connection.cursor() as cursor:
        for statement in (*DELTAS, SCHEMA, *statements):
            cursor.execute(statement)
    connection.close()
    return dsn


def artificial_database(*damage: str) -> str:
    """Create the database of a small deployment with one or two rows of each stream."""
    statements = [ROWS]
    for stream in STANDARD_STREAMS.values():
        if stream.sequence is not None:
            statements.append(f"CREATE SEQUENCE {stream.sequence}")
            statements.append(f"SELECT setval('{stream.sequence}', {LAST_ALLOCATED})")
    # One writer has a single row.
    writers = {*ON_THE_WIRE, ("receipts", "another")}
    for name, writer in sorted(writers):
        stream = STANDARD_STREAMS[name]
        if stream.positions_name is not None:
            token = -10 if stream.negative else 10
            statements.append(
                "INSERT INTO stream_positions VALUES "
                f"('{stream.positions_name}', '{writer}', {token})"
            )
    return new_database(*statements, *damage)


def healthy_lines() -> list[str]:
    """Return the lines that the writers of that database would send."""
    lines: list[bytes] = []
    for (stream, writer), rows in ON_THE_WIRE.items():
        by_token: dict[int, list[bytes]] = {}
        for token, row in rows:
            by_token.setdefault(token, []).append(encode_json(row))
        lines.append(PositionCommand(stream, writer, 1, 1).encode())
        last = 1
        for token, texts in sorted(by_token.items()):
            if token > last + 1:
                lines.append(PositionCommand(stream, writer, last, token - 1).encode())
            lines += rdata_lines(stream, writer, [(token, texts)])
            last = token
        lines.append(PositionCommand(stream, writer, last, 10).encode())
    return [line.decode() for line in lines]


def write_recording(path: Path, lines: list[str]) -> None:
    path.write_text(
        "".join(
            json.dumps({"t": number / 10, "channel": "hs", "line": line}) + "\n"
            for number, line in enumerate(lines)
        )
    )


def problems_of(result: Result) -> dict[tuple[str, str | None], dict[str, Any]]:
    """Return the printed errors and warnings, by kind and stream."""
    printed = json.loads(result.stdout)
    return {
        (each["kind"], each["stream"]): each
        for each in printed["findings"]
        if each["severity"] != "info"
    }
