"""Helpers for tests of the audit: rows, lines of recordings, and findings."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg2
from click.testing import Result

from synapse_replication.pipeline.audit.checks.ids import known_ids, packed
from synapse_replication.pipeline.audit.checks.sightings import BUCKET_BITS, Source
from synapse_replication.pipeline.local import FEW_IDS
from synapse_replication.pipeline.schemas import FINDINGS_SCHEMA, ROWS_SCHEMA
from synapse_replication.storage.schema.deltas import DELTAS
from synapse_replication.streams.rows import encode_json
from synapse_replication.streams.standard.registry import STANDARD_STREAMS
from synapse_replication.testing.servers import shared_postgres
from synapse_replication.wire.commands import PositionCommand, encode_command
from synapse_replication.wire.rdata import rdata_lines
from tests.pipeline.shared_session import shared_session
from tests.storage.synapse_extract import ON_THE_WIRE, ROWS, SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

TOKENS_SCHEMA = (
    "recording string, line_number long, t double, stream string, "
    "instance_name string, is_row boolean, prev_token long, token long"
)

#: Kind, severity, stream, writer, first and last token, count.
Found = tuple[str, str, str | None, str | None, int | None, int | None, int]


def make_rows(*rows: tuple[str, str, int]) -> DataFrame:
    """Make one row for each ``(stream, writer, id)``."""
    return shared_session().createDataFrame(
        [
            (stream, writer, id_, 0, f'["row {id_}"]', None)
            for stream, writer, id_ in rows
        ],
        ROWS_SCHEMA,
    )


def make_tokens(lines: Iterable[str], recording: str = "r.jsonl") -> DataFrame:
    """Make the token rows of a recording of these lines, with one line per second."""
    return shared_session().createDataFrame(
        list(tokens_of(lines, recording)), TOKENS_SCHEMA
    )


def ids_of(
    rows: DataFrame, archive: DataFrame | None = None, lines: tuple[str, ...] = ()
) -> DataFrame:
    """Call ``known_ids``; the tables of ``account_data`` do not record the writer."""
    return ids_of_rows(
        rows,
        make_rows() if archive is None else archive,
        make_tokens(lines),
        ("events", "account_data"),
        ["account_data"],
    )


def ids_of_rows(
    tables: DataFrame,
    archive: DataFrame,
    tokens: DataFrame,
    persisted: Collection[str],
    nameless: Collection[str] = (),
    *,
    bucket_bits: int = BUCKET_BITS,
) -> DataFrame:
    """Call ``known_ids`` with frames of rows.

    :param nameless: streams whose tables and archive do not record the writer.
    """
    return known_ids(
        packed(tables, Source.TABLES, nameless, bucket_bits=bucket_bits),
        packed(archive, Source.ARCHIVE, nameless, bucket_bits=bucket_bits),
        tokens,
        persisted,
        # With small buckets, compare the ids in several tasks.
        last_ids=0 if bucket_bits == BUCKET_BITS else FEW_IDS + 1,
    )


def tokens_of(lines: Iterable[str], recording: str) -> Iterable[tuple[Any, ...]]:
    """Parse lines into token rows; line numbers and seconds start at 1."""
    for number, line in enumerate(lines, 1):
        name, *rest = line.split(" ", 4)
        head = recording, number, float(number), *rest[:2]
        if name == "POSITION":
            yield *head, False, *map(int, rest[2:])
        elif name == "RDATA" and rest[2] != "batch":
            yield *head, True, None, int(rest[2])


def found(findings: DataFrame) -> list[Found]:
    """Return the findings without message and evidence, in sorted order."""
    return sorted(
        (tuple(row)[:7] for row in rows_of(findings)),
        key=lambda values: [str(value) for value in values],
    )


def evidence(findings: DataFrame) -> list[Any]:
    """Return the evidence of each finding."""
    return [json.loads(row.evidence) for row in rows_of(findings)]


def rows_of(findings: DataFrame) -> list[Row]:
    """Return the findings after checking their schema, messages and evidence."""
    assert findings.schema.names == FINDINGS_SCHEMA.names
    rows = findings.collect()
    for row in rows:
        assert row.message, row
        assert row.evidence, row
    return rows


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
        lines.append(encode_command(PositionCommand(stream, writer, 1, 1)))
        last = 1
        for token, texts in sorted(by_token.items()):
            if token > last + 1:
                lines.append(
                    encode_command(PositionCommand(stream, writer, last, token - 1))
                )
            lines += rdata_lines(stream, writer, [(token, texts)])
            last = token
        lines.append(encode_command(PositionCommand(stream, writer, last, 10)))
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
