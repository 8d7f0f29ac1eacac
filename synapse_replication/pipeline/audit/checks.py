"""The checks of an audit: queries for DuckDB, in ``checks.sql``.

A row of a check is a finding. Its columns ``kind``, ``message`` (the sentence for
display, with the names of other columns in braces), ``evidence``, ``stream``,
``instance_name``, ``first_token``, ``last_token`` and ``count`` become the fields of
the finding; the last five are optional. The queries read these tables and views:

* ``streams``: ``stream``, ``persisted`` (in the database), ``idempotent`` (late rows
  are delivered), ``in_memory`` (tokens start again when the writer restarts),
  ``last_allocated`` (by the sequence), ``sole_writer`` (of a stream with a single
  writer, if a table does not record it) and ``tables``;
* ``ids``: see :data:`.ids.NOTABLE_SCHEMA`;
* ``wire``: recorded lines; ``tokens`` and ``claims``: those with tokens;
* ``lost``: ids that a POSITION has skipped; ``texts``: some rows with these ids;
* ``archived``: archived rows of ids that are ``repeated``; ``purged``: the ranges that
  the archive need not contain.

Theory of operation: the checks of tokens follow the behaviour of readers. In a stream
that is stored in the database, a row advances a reader to the row's token. A POSITION
whose previous token is lower than its new token is a *claim* that its writer has no
rows above the previous token, up to and including the new one; it advances a reader
that has reached the previous token to the new token. Readers discard rows at or below
their position, except those of idempotent streams. A POSITION whose two tokens are
equal is not a claim: readers that are behind the token query the database. A row with
that token may follow the POSITION, or the recorder may have missed the row; neither is
reported as a fault. Streams held in memory are reset when their writer restarts, so
their order is not checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Final

import duckdb

from synapse_replication.data_files import read_queries
from synapse_replication.pipeline.audit.findings import AuditFinding, to_json
from synapse_replication.pipeline.workspace import rows_of

_QUERIES: Final = read_queries(Path(__file__).with_name("checks.sql"))

#: Creates the views of recorded tokens.
TOKENS: Final = _QUERIES.pop("tokens")

#: Creates the other views, macros and tables that the checks use.
VIEWS: Final = _QUERIES.pop("views")

#: Finds lines of recordings that an archive contains more than once.
COMMANDS_TWICE: Final = _QUERIES.pop("commands_twice")

#: All other checks, by name.
CHECKS: Final = MappingProxyType(_QUERIES)


def run_check(
    connection: duckdb.DuckDBPyConnection, sql: str
) -> Iterator[AuditFinding]:
    """Yield the findings of a check."""
    for row in rows_of(connection, sql):
        shown = {n: "an unknown writer" if v is None else v for n, v in row.items()}
        yield AuditFinding(
            kind=row["kind"],
            stream=row.get("stream"),
            instance_name=row.get("instance_name"),
            first_token=row.get("first_token"),
            last_token=row.get("last_token"),
            count=row.get("count", 1),
            message=row["message"].format_map(shown),
            evidence=to_json(row["evidence"]),
        )
