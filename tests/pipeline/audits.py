"""Helpers for tests of the audit: rows, lines of recordings, and findings."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import duckdb
import psycopg2
import pyarrow as pa
from click.testing import Result

from synapse_replication.pipeline.audit.findings import AuditFinding
from synapse_replication.pipeline.audit.ids import (
    NOTABLE_SCHEMA,
    Source,
    notable_ids,
    pack,
    packed,
)
from synapse_replication.pipeline.audit.job import (
    LINE_COLUMNS,
    TOKENS,
    VIEWS,
    run_check,
)
from synapse_replication.pipeline.scan import Scan
from synapse_replication.pipeline.workspace import lines_schema, load
from synapse_replication.storage.schema import DELTAS
from synapse_replication.streams.rows import encode_json
from synapse_replication.streams.standard.registry import STANDARD_STREAMS
from synapse_replication.testing.servers import shared_postgres
from synapse_replication.wire.commands import PositionCommand
from synapse_replication.wire.rdata import rdata_lines
from tests.pipeline.shared_session import shared_session
from tests.storage.synapse_extract import ON_THE_WIRE, ROWS, SCHEMA

LINES_SCHEMA = lines_schema(LINE_COLUMNS)
KEYS_SCHEMA = pa.schema(
    [
        ("stream", pa.string()),
        ("instance_name", pa.string()),
        ("stream_id", pa.int64()),
        ("row_index", pa.int32()),
    ]
)

#: Stream, writer and id.
Key = tuple[str, str, int]

#: Kind, severity, stream, writer, first and last token, count.
Found = tuple[str, str, str | None, str | None, int | None, int | None, int]


@attrs.frozen(kw_only=True)
class Deployment:
    """The input of an audit: rows, recorded lines, and the properties of streams.

    :ivar tables: the rows in tables.
    :ivar archive: the archived rows.
    :ivar lines: the rows of the table ``wire``; see :func:`lines_of`.
    :ivar nameless: the streams whose tables and archive do not record the writer.
    :ivar persisted: the streams that are stored in the database.
    """

    tables: Sequence[Key] = ()
    archive: Sequence[Key] = ()
    lines: Sequence[tuple[Any, ...]] = ()
    persisted: Collection[str] = ("events",)
    nameless: Collection[str] = ()
    idempotent: Collection[str] = ()
    in_memory: Collection[str] = ()
    allocated: Mapping[str, int] = attrs.field(factory=dict)
    sole_writers: Mapping[str, str] = attrs.field(factory=dict)

    def workspace(self) -> duckdb.DuckDBPyConnection:
        """Return a database with the tables of the checks."""
        database = duckdb.connect()
        load_rows(database, "wire", LINES_SCHEMA, self.lines)
        database.execute(TOKENS)
        streams = {*self.persisted, *self.idempotent, *self.in_memory}
        rows = [
            (
                stream,
                stream in self.persisted,
                stream in self.in_memory,
                stream in self.idempotent,
                ["events", "state"],
                self.allocated.get(stream),
                self.sole_writers.get(stream),
            )
            for stream in sorted(streams)
        ]
        for row in rows:
            database.execute("INSERT INTO streams VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        load(database, "ids", NOTABLE_SCHEMA, self._ids())
        database.execute(VIEWS)
        return database

    def _ids(self) -> Iterator[pa.RecordBatch]:
        stored = [
            self._packed(self.tables, Source.TABLES),
            self._packed(self.archive, Source.ARCHIVE),
        ]
        sightings = keys_table(
            (stream, writer, token)
            for *_, command, stream, writer, token, _, _ in self.lines
            if command == "RDATA" and token is not None
        )
        everywhere = dict.fromkeys(self.persisted, (0, 2**62))
        return notable_ids(
            stored,
            pack(sightings.to_batches(), source=Source.WIRE),
            shared_session,
            self.persisted,
            received=everywhere,
            archived=everywhere,
        )

    def _packed(self, keys: Sequence[Key], source: Source) -> Scan:
        table = keys_table(keys)
        scan = Scan(KEYS_SCHEMA, [table], lambda rows: rows.to_batches(), len(keys))
        return packed(scan, source, self.nameless)

    def run(self, check: str) -> list[AuditFinding]:
        """Run a check."""
        with self.workspace() as database:
            return list(run_check(database, check))


def load_rows(
    database: duckdb.DuckDBPyConnection,
    table: str,
    schema: pa.Schema,
    rows: Iterable[Sequence[Any]],
) -> None:
    """Create a table of rows."""
    values = [dict(zip(schema.names, row, strict=True)) for row in rows]
    load(database, table, schema, pa.Table.from_pylist(values, schema).to_batches())


def keys_table(keys: Iterable[Key]) -> pa.Table:
    """Return one row for each key."""
    rows = [dict(zip(KEYS_SCHEMA.names, (*key, 0), strict=True)) for key in keys]
    return pa.Table.from_pylist(rows, KEYS_SCHEMA)


def lines_of(lines: Iterable[str], recording: str = "r.jsonl") -> list[tuple[Any, ...]]:
    """Return rows of the table ``wire``; line numbers and seconds start at 1."""
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
