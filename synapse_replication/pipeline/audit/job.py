"""The audit job, which checks whether rows were lost.

Theory of operation: few rows are read in this process, many by tasks on Spark's
executors. In a healthy deployment, nearly all ids are in all sources. The tasks omit
these ids, so what reaches this process is small; it is loaded into a temporary DuckDB
database, in which the checks are queries (``checks.sql``).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

import attrs
import duckdb

from synapse_replication.data_files import read_queries
from synapse_replication.pipeline.archive.files import DamagedFile
from synapse_replication.pipeline.archive.snapshot import (
    Snapshot,
    bounds_of,
    open_snapshot,
)
from synapse_replication.pipeline.audit import findings, ids
from synapse_replication.pipeline.audit.facts import read_facts
from synapse_replication.pipeline.scan import Scan, Spark
from synapse_replication.pipeline.schemas import FINDINGS_SCHEMA
from synapse_replication.pipeline.settings import PipelineSettings
from synapse_replication.pipeline.source.connections import read_transaction
from synapse_replication.pipeline.source.planning import scan_rows
from synapse_replication.pipeline.spark.session import lazy_session
from synapse_replication.pipeline.workspace import (
    batches_as,
    load,
    load_lines,
    open_workspace,
    rows_of,
)

_QUERIES: Final = read_queries(Path(__file__).with_name("checks.sql"))

#: Fills the tables of the checks.
_TABLES: Final = read_queries(Path(__file__).with_name("tables.sql"))

#: Creates the views of recorded tokens.
TOKENS: Final = _QUERIES.pop("tokens")

#: Creates the other views, macros and tables that the checks use.
VIEWS: Final = _QUERIES.pop("views")

#: Finds lines of recordings that an archive contains more than once.
COMMANDS_TWICE: Final = _QUERIES.pop("commands_twice")

#: All other checks, by name.
CHECKS: Final = MappingProxyType(_QUERIES)

#: The number of steps of :func:`audited`.
AUDIT_STEPS: Final = 3

#: The columns of recorded lines that an audit needs.
LINE_COLUMNS: Final = (
    *("recording", "line_number", "t", "command", "stream", "instance_name", "token"),
    "prev_token",
)

#: The columns of rows by which ids are compared.
_KEYS: Final = ("instance_name", "stream_id", "row_index")


def run_audit(
    settings: PipelineSettings,
    *,
    recordings: Sequence[str] = (),
    archive: str | None = None,
    out: str | None = None,
    master: str | None = None,
    as_json: bool = False,
) -> Mapping[findings.Severity, int]:
    """Audit a deployment, and print the findings.

    :param out: the folder to write all findings to; created if it is missing.
    :param master: the URL of the Spark master; ``None`` for the default of
        :func:`.session.make_session`.
    :return: the number of findings of each severity.
    :raises PipelineError: if the database, a recording or the archive cannot be read,
        or ``out`` cannot be written.
    """
    with read_transaction(settings.conninfo):
        pass
    name = "synapse-replication audit"
    with lazy_session(name, AUDIT_STEPS, master=master) as (progress, spark):
        found = audited(
            settings,
            recordings=recordings,
            archive=None if archive is None else open_snapshot(archive),
            spark=spark,
            begin=progress.begin,
        )
    # Spark has stopped, so the process ends soon after the last line.
    if out is not None:
        findings.write_findings(found, out)
    show = findings.print_json if as_json else findings.print_findings
    return show(found, sys.stdout)


def audited(
    settings: PipelineSettings,
    *,
    recordings: Sequence[str | os.PathLike[str]] = (),
    archive: Snapshot | None = None,
    spark: Spark,
    begin: Callable[[str], object],
) -> list[findings.AuditFinding]:
    """Audit a deployment; return the findings, worst first.

    :param spark: called if there are many rows to read.
    :param begin: called at the beginning of each of :data:`AUDIT_STEPS` steps.
    :raises PipelineError: if the database, a recording or the archive cannot be read.
    """
    with open_workspace() as workspace:
        intact = None if archive is None else archive.verified(spark)
        audit = _Audit(workspace, settings, intact, spark)
        begin("read recordings and archive")
        found = audit.read_recordings(recordings)
        begin("compare ids")
        found += audit.compare_ids()
        begin("check the differences")
        found += audit.check()
    return findings.worst_first(found)


@attrs.define(slots=False)
class _Audit:
    """An audit in progress; the methods are called in their order."""

    _workspace: duckdb.DuckDBPyConnection
    _settings: PipelineSettings
    _archive: Snapshot | None
    _spark: Spark

    def read_recordings(
        self, recordings: Sequence[str | os.PathLike[str]]
    ) -> list[findings.AuditFinding]:
        """Load the lines of the recordings and of the archive, each line once."""
        archive = self._archive
        load_lines(self._workspace, LINE_COLUMNS, recordings, archive, self._spark)
        twice: list[findings.AuditFinding] = []
        # Each line of a file has its own number.
        if archive is not None:
            twice = list(run_check(self._workspace, COMMANDS_TWICE))
        if twice:
            self._workspace.execute(_TABLES["each_line_once"])
        self._workspace.execute(TOKENS)
        return twice

    def compare_ids(self) -> list[findings.AuditFinding]:
        """Load the facts, and the ids that have to be examined."""
        # Read the sequences after the recordings. Otherwise, an id that was allocated
        # in between would seem to be ahead of its sequence.
        self._streams, found = read_facts(self._settings)
        self._load_streams()
        streams = self._streams.values()
        nameless = [each.stream for each in streams if each.nameless]
        archive = self._archive
        stored = [ids.packed(self._in_tables(), ids.Source.TABLES, nameless)]
        if archive is not None:
            rows = archive.rows(*_KEYS)
            stored.append(ids.packed(rows, ids.Source.ARCHIVE, nameless))
        sent = self._workspace.sql(_TABLES["sent"]).to_arrow_table()
        chosen = ids.notable_ids(
            stored,
            ids.pack(sent.to_batches(), source=ids.Source.WIRE),
            self._spark,
            [each.stream for each in streams if each.persisted],
            received=self._received(),
            archived={} if archive is None else archive.id_bounds(),
        )
        load(self._workspace, "ids", ids.NOTABLE_SCHEMA, chosen)
        return found

    def check(self) -> list[findings.AuditFinding]:
        """Run the checks that need the ids."""
        workspace = self._workspace
        workspace.execute(VIEWS)
        self._load_texts()
        self._load_archived()
        damaged = () if self._archive is None else self._archive.damaged
        return [
            *map(_damaged_file, damaged),
            *(each for sql in CHECKS.values() for each in run_check(workspace, sql)),
        ]

    # -- tables of the checks ----------------------------------------------------------

    def _load_streams(self) -> None:
        received = self._workspace.execute(_TABLES["senders"]).fetchall()
        for stream in self._streams.values():
            # The first six fields are the first columns.
            values = [*attrs.astuple(stream)[:6], stream.sole_writer(received)]
            self._workspace.execute(_TABLES["add_stream"], values)

    def _in_tables(self) -> Scan:
        """Return the rows in the tables of the database.

        Rows above the writers' stored positions are included, because they may already
        be committed.
        """
        streams = self._streams.values()
        reach = {each.stream: each.reach for each in streams if each.persisted}
        return scan_rows(self._settings, *_KEYS, endingToken=json.dumps(reach))

    def _received(self) -> ids.Bounds:
        """Return the least and the greatest received token of each stream."""
        found = self._workspace.execute(_TABLES["received"]).fetchall()
        return {stream: (low, high) for stream, low, high in found}

    def _load_texts(self) -> None:
        """Load the rows of the ids in ``sampled``.

        Only the range of each stream that contains these ids is read.
        """
        workspace = self._workspace
        for each in rows_of(workspace, _TABLES["ranges"]):
            for source, scan in self._rows_between(**each):
                with batches_as(workspace, "found", scan.schema, scan.batches()):
                    workspace.execute(_TABLES["add_texts"], [source])

    def _rows_between(
        self, stream: str, first: int, last: int
    ) -> Iterator[tuple[str, Scan]]:
        # Ids of an archive or a recording may exceed those of the database. A read of
        # the database rejects such tokens.
        reach = self._streams[stream].reach
        yield (
            "tables",
            scan_rows(
                self._settings,
                *("stream_id", "row_index", "row"),
                streams=stream,
                startingToken=str(min(first - 1, reach)),
                endingToken=str(min(last, reach)),
            ),
        )
        if self._archive is not None:
            yield "archive", self._archive.json_rows([stream], first, last)

    def _load_archived(self) -> None:
        """Load the rows of repeated ids, and the ranges that may be missing."""
        workspace, archive = self._workspace, self._archive
        if archive is None:
            return
        ((repeated,),) = workspace.execute(_TABLES["repeated"]).fetchall()
        if repeated:
            scan = archive.rows(*_KEYS)
            with batches_as(workspace, "found", scan.schema, scan.batches()):
                workspace.execute(_TABLES["add_repeated"])
        ranges: list[tuple[str, int, int]] = [
            *((p.stream, p.first_token, p.last_token) for p in archive.purged),
            *((d.file.table_name, *bounds_of([d.file])) for d in archive.damaged),
        ]
        for each in ranges:
            workspace.execute(_TABLES["add_purged"], each)


def run_check(
    connection: duckdb.DuckDBPyConnection, sql: str
) -> Iterator[findings.AuditFinding]:
    """Yield the findings of a check."""
    for row in rows_of(connection, sql):
        shown = {n: "an unknown writer" if v is None else v for n, v in row.items()}
        found = {field: row[field] for field in FINDINGS_SCHEMA.names if field in row}
        found["message"] = row["message"].format_map(shown)
        found["evidence"] = findings.to_json(row["evidence"])
        yield findings.AuditFinding.from_row(found)


def _damaged_file(damaged: DamagedFile) -> findings.AuditFinding:
    file = damaged.file
    first, last = file.token_range or (None, None)
    return findings.AuditFinding(
        kind="archive_damaged",
        stream=None if file.token_range is None else file.table_name,
        first_token=first,
        last_token=last,
        count=file.row_count,
        message=str(damaged),
        evidence=findings.to_json({"file": f"{file.table_uri}/{file.path}"}),
    )
