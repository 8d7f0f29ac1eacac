"""The audit job, which checks whether rows were lost."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, Final

from pyspark import StorageLevel
from pyspark.sql import DataFrame, Window, functions as sf

from synapse_replication.pipeline.archive.frames import ArchivedTables, read_archive
from synapse_replication.pipeline.archive.store import open_archive
from synapse_replication.pipeline.audit.checks.ahead import ahead_findings
from synapse_replication.pipeline.audit.checks.announced import (
    announced_absent,
    announced_findings,
    not_seen_findings,
)
from synapse_replication.pipeline.audit.checks.archive import (
    commands_twice_findings,
    damaged_files_findings,
    not_archived_findings,
    rows_twice_findings,
)
from synapse_replication.pipeline.audit.checks.ids import (
    gap_findings,
    gone_findings,
    known_ids,
    two_writers_findings,
)
from synapse_replication.pipeline.audit.checks.sightings import (
    PACKED_SCHEMA,
    Source,
    pack,
)
from synapse_replication.pipeline.audit.checks.wire import (
    damage_findings,
    order_findings,
    reset_findings,
    wire_lines,
    wire_tokens,
)
from synapse_replication.pipeline.audit.facts import AuditFacts, read_facts
from synapse_replication.pipeline.audit.findings import SAMPLES, Severity
from synapse_replication.pipeline.audit.report import (
    print_findings,
    print_json,
    write_findings,
)
from synapse_replication.pipeline.local import local_frame
from synapse_replication.pipeline.progress import JobProgress
from synapse_replication.pipeline.schemas import (
    ARCHIVED_ROWS_SCHEMA,
    FINDINGS_SCHEMA,
    ROWS_SCHEMA,
    WIRE_SCHEMA,
)
from synapse_replication.pipeline.settings import PipelineSettings
from synapse_replication.pipeline.source.database import PLAN_TIMEOUT, reading
from synapse_replication.pipeline.source.frames import map_rows, read_rows
from synapse_replication.pipeline.spark.failures import short_failures
from synapse_replication.pipeline.spark.session import SCHEDULES_ONLY, job_session
from synapse_replication.pipeline.wire_lines import find_recordings, read_recordings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: The number of steps of :func:`audited`.
STEPS: Final = 3

_CODEGEN: Final = "spark.sql.codegen.wholeStage"

#: Below this number of ids and lines, compiling a query costs more than it saves.
_FEW: Final = 500_000

_MAX_ID: Final = 2**63 - 1

_PURGED_SCHEMA = "stream string, first_token long, last_token long"


def run_audit(
    settings: PipelineSettings,
    *,
    recordings: Sequence[str] = (),
    archive: str | None = None,
    out: str | None = None,
    master: str | None = None,
    as_json: bool = False,
) -> Mapping[Severity, int]:
    """Audit a deployment in a new Spark session, and print the findings.

    :param out: the folder to write all findings to; created if it is missing.
    :param master: the URL of the Spark master; ``None`` for the default of
        :func:`.session.make_session`.
    :return: the number of findings of each severity.
    :raises PipelineError: if the database, a recording or the archive cannot be read,
        or ``out`` cannot be written.
    """
    with short_failures():
        # Fail fast on invalid settings, because Spark takes seconds to start.
        with reading(settings.conninfo, PLAN_TIMEOUT):
            pass
        if archive is not None:
            open_archive(archive)
        with (
            JobProgress(sys.stderr, STEPS + 1) as progress,
            job_session(
                "synapse-replication audit",
                master=master,
                settings=SCHEDULES_ONLY,
                progress=progress,
            ) as session,
            audited(
                session,
                settings,
                recordings=recordings,
                archive=(
                    None
                    if archive is None
                    else read_archive(session, archive, verify=True)
                ),
                begin=progress.begin,
            ) as findings,
        ):
            if out is not None:
                write_findings(findings, out)
            progress.unwatch()
            show = print_json if as_json else print_findings
            return show(findings, sys.stdout)


def _show_nothing(step: str) -> None:
    """Ignore the step: no progress is shown."""


@contextlib.contextmanager
def audited(
    session: SparkSession,
    settings: PipelineSettings,
    *,
    recordings: Sequence[str | os.PathLike[str]] = (),
    archive: ArchivedTables | None = None,
    begin: Callable[[str], object] = _show_nothing,
) -> Iterator[DataFrame]:
    """Audit a deployment; yield a data frame of FINDINGS_SCHEMA, worst first.

    Cached data, in memory and on disk, is released at the end of the context.

    :param begin: called at the beginning of each of :data:`STEPS` steps.
    :raises PipelineError: if the database, a recording or the archive cannot be read.
    """
    with contextlib.ExitStack() as stack:
        begin("read recordings and archive")
        archived_wire = _archived_wire(session, archive)
        wire = _wire(session, recordings, archive, archived_wire)
        lines = wire_lines(wire)
        has_lines = bool(recordings) or (archive is not None and archive.has_wire)
        if has_lines:
            # Spark removes operations on an empty frame, unless it is cached.
            lines = _cached(lines, stack)
        tokens = wire_tokens(lines)
        on_wire = _reach(tokens) if has_lines else []
        begin("compare ids")
        # Read the sequences after the recordings. Otherwise, an id that was allocated
        # in between would seem to be ahead of its sequence.
        facts = read_facts(settings)
        ids = _cached(_ids(session, settings, archive, facts, tokens, on_wire), stack)
        few = ids.count() + lines.count() < _FEW
        if few:
            # So few rows do not need as many partitions as the scan produced.
            ids = ids.coalesce(session.sparkContext.defaultParallelism)
        begin("check the differences")
        found = [
            local_frame(session, FINDINGS_SCHEMA, facts.findings),
            two_writers_findings(ids),
            ahead_findings(tokens, ids, facts.last_allocated),
            gap_findings(ids),
            gone_findings(ids),
        ]
        if has_lines:
            found.append(damage_findings(lines))
        if on_wire:
            sole = facts.sole_writers(
                (stream, writer) for stream, writer, *_ in on_wire
            )
            lost = _cached(announced_absent(ids, tokens, facts.idempotent, sole), stack)
            texts = _texts(session, settings, lost, archive, facts.reach)
            found += [
                announced_findings(lost, texts, facts.tables),
                *_wire_findings(ids, tokens, facts, sole),
            ]
        if archive is not None:
            found += _archive_findings(session, ids, archive, archived_wire)
        findings = _cached(_worst_first(reduce(DataFrame.unionByName, found)), stack)
        with _interpreted(session, few=few):
            findings.count()
        yield findings


def _cached(frame: DataFrame, stack: contextlib.ExitStack) -> DataFrame:
    """Cache a frame in memory and on disk until the stack is closed."""
    cached = frame.persist(StorageLevel.MEMORY_AND_DISK)
    stack.callback(cached.unpersist)
    return cached


def _wire_findings(
    ids: DataFrame, tokens: DataFrame, facts: AuditFacts, sole: Mapping[str, str]
) -> list[DataFrame]:
    """Return the findings of the checks of tokens that were received.

    :param sole: the only writer of each stream whose tables do not record the writer.
    """
    return [
        order_findings(tokens, facts.persisted, facts.idempotent),
        reset_findings(tokens, facts.in_memory),
        not_seen_findings(ids, tokens, facts.idempotent, sole),
    ]


def _archive_findings(
    session: SparkSession,
    ids: DataFrame,
    archive: ArchivedTables,
    archived_wire: DataFrame,
) -> list[DataFrame]:
    """Return the findings of the checks of an archive.

    :param archived_wire: the result of :func:`_archived_wire`.
    """
    return [
        local_frame(session, FINDINGS_SCHEMA, damaged_files_findings(archive.damaged)),
        rows_twice_findings(_repeated(session, ids, archive)),
        *([commands_twice_findings(archived_wire)] if archive.has_wire else []),
        not_archived_findings(ids, _purged(session, archive)),
    ]


@contextlib.contextmanager
def _interpreted(session: SparkSession, *, few: bool) -> Iterator[None]:
    """Disable code generation within the context, if there are few rows.

    A query over few rows takes longer to compile than to run.

    :param few: whether there are few rows; otherwise, nothing is changed.
    """
    before = session.conf.get(_CODEGEN)
    if few:
        session.conf.set(_CODEGEN, "false")
    try:
        yield
    finally:
        session.conf.set(_CODEGEN, before or "true")


def _wire(
    session: SparkSession,
    recordings: Sequence[str | os.PathLike[str]],
    archive: ArchivedTables | None,
    archived_wire: DataFrame,
) -> DataFrame:
    """Return the lines of the recordings and of the archive, each line once.

    :param archived_wire: the result of :func:`_archived_wire`.
    """
    # Recordings that are in the archive must not be counted twice.
    not_archived = [
        path
        for path in find_recordings(recordings)
        if archive is None or archive.lacks(path)
    ]
    wire = read_recordings(session, not_archived)
    # Lines that are in the archive twice are reported by a separate check.
    archived_once = archived_wire.dropDuplicates(["recording", "line_number"])
    return wire.unionByName(archived_once)


def _archived_wire(session: SparkSession, archive: ArchivedTables | None) -> DataFrame:
    """Return an archive's lines, with recording names that begin with archive/wire/."""
    if archive is None:
        return local_frame(session, WIRE_SCHEMA)
    name = sf.concat(sf.lit("archive/wire/"), sf.col("recording"))
    return archive.wire.withColumn("recording", name).select(*WIRE_SCHEMA.names)


#: A stream, one of its writers, and the writer's least and greatest received token.
_Reach = tuple[str, str, int, int]


def _reach(tokens: DataFrame) -> list[_Reach]:
    """Return the least and the greatest received token of each writer of a stream.

    :param tokens: the result of :func:`.wire.wire_tokens`.
    """
    by_writer = tokens.groupBy("stream", "instance_name").agg(
        sf.min(sf.least("prev_token", "token")).alias("low"),
        sf.max("token").alias("high"),
    )
    return [tuple(row) for row in by_writer.collect()]


def _bounds(reach: Iterable[_Reach]) -> dict[str, tuple[int, int]]:
    """Return the least and the greatest received token of each stream."""
    found: dict[str, tuple[int, int]] = {}
    for stream, _, low, high in reach:
        before = found.get(stream, (low, high))
        found[stream] = min(before[0], low), max(before[1], high)
    return found


def _ids(
    session: SparkSession,
    settings: PipelineSettings,
    archive: ArchivedTables | None,
    facts: AuditFacts,
    tokens: DataFrame,
    on_wire: Iterable[_Reach],
) -> DataFrame:
    """Return :func:`.ids.known_ids` of the database, the archive and the recordings."""
    return known_ids(
        _in_tables(session, settings, facts),
        _in_archive(session, archive, facts),
        tokens,
        facts.persisted,
        received=_bounds(on_wire),
        archived={} if archive is None else archive.id_bounds(),
        last_ids=sum(facts.reach.values()),
    )


def _in_tables(
    session: SparkSession, settings: PipelineSettings, facts: AuditFacts
) -> DataFrame:
    """Return the packed sightings of ids in the tables of the database.

    Rows above the writers' stored positions are included, because they may already be
    committed. For sightings, see :mod:`.checks.sightings`.
    """
    work = functools.partial(pack, source=Source.TABLES, nameless=facts.nameless)
    reach = json.dumps(facts.reach)
    return map_rows(session, settings, work, PACKED_SCHEMA, endingToken=reach)


def _in_archive(
    session: SparkSession, archive: ArchivedTables | None, facts: AuditFacts
) -> DataFrame:
    """Return the packed sightings of ids in the archive."""
    if archive is None:
        return local_frame(session, PACKED_SCHEMA)
    work = functools.partial(pack, source=Source.ARCHIVE, nameless=facts.nameless)
    columns = ("instance_name", "stream_id", "row_index")
    return archive.map_rows(work, PACKED_SCHEMA, *columns)


def _repeated(
    session: SparkSession, ids: DataFrame, archive: ArchivedTables
) -> DataFrame:
    """Return the archived rows of the ids that have ``repeated`` set.

    Only the range of each stream that contains these ids is read.
    """
    columns = ("stream", "instance_name", "stream_id", "row_index")
    repeated = ids.where("repeated").select("stream", "stream_id")
    parts = [local_frame(session, ARCHIVED_ROWS_SCHEMA).select(*columns)]
    bounds = repeated.groupBy("stream").agg(
        sf.min("stream_id").alias("first"), sf.max("stream_id").alias("last")
    )
    for stream, first, last in bounds.collect():
        rows = archive.streams[stream].where(sf.col("stream_id").between(first, last))
        parts.append(rows.select(sf.lit(stream).alias("stream"), *columns[1:]))
    return reduce(DataFrame.unionByName, parts).join(
        sf.broadcast(repeated), on=["stream", "stream_id"], how="left_semi"
    )


def _texts(
    session: SparkSession,
    settings: PipelineSettings,
    lost: DataFrame,
    archive: ArchivedTables | None,
    reach: Mapping[str, int],
) -> DataFrame:
    """Return the rows of the first few ids that each POSITION in ``lost`` skipped.

    Only the range of each stream that contains these ids is read.

    :param reach: for each stream, the greatest token that a read may name.
    """
    columns = ("stream", "stream_id", "row_index", "row")
    of_line = Window.partitionBy("recording", "line_number").orderBy("stream_id")
    wanted = (
        lost.withColumn("rank", sf.row_number().over(of_line))
        .where(sf.col("rank") <= SAMPLES)
        .select("stream", "stream_id")
        .distinct()
    )
    bounds = (
        wanted.groupBy("stream")
        .agg(sf.min("stream_id").alias("first"), sf.max("stream_id").alias("last"))
        .collect()
    )
    parts = [(local_frame(session, ROWS_SCHEMA), "tables")]
    for stream, first, last in bounds:
        of_tables = _read_range(session, settings, stream, first, last, reach[stream])
        parts.append((of_tables, "tables"))
        within = sf.col("stream_id").between(first, last)
        if archive is not None:
            parts.append((archive.rows(stream).where(within), "archive"))
    return reduce(
        DataFrame.unionByName,
        (
            frame.select(*columns)
            .join(sf.broadcast(wanted), on=["stream", "stream_id"], how="left_semi")
            .withColumn("source", sf.lit(source))
            for frame, source in parts
        ),
    )


def _read_range(
    session: SparkSession,
    settings: PipelineSettings,
    stream: str,
    first: int,
    last: int,
    reach: int,
) -> DataFrame:
    # Ids of an archive or a recording may exceed those of the database. A read of the
    # database rejects such tokens.
    return read_rows(
        session,
        settings,
        streams=stream,
        startingToken=str(min(first - 1, reach)),
        endingToken=str(min(last, reach)),
    )


def _purged(session: SparkSession, archive: ArchivedTables) -> DataFrame:
    """Return the ranges of tokens that were purged, or are in damaged files."""
    ranges: list[Any] = [
        *((each.stream, each.first_token, each.last_token) for each in archive.purged),
        *(
            (each.file.table, *(each.file.tokens or (-_MAX_ID, _MAX_ID)))
            for each in archive.damaged
        ),
    ]
    return local_frame(session, _PURGED_SCHEMA, ranges)


def _worst_first(findings: DataFrame) -> DataFrame:
    severities = [severity.value for severity in Severity]
    badness = sf.array_position(sf.lit(severities), sf.col("severity"))
    chosen = findings.select(*FINDINGS_SCHEMA.names)
    # One partition suffices: most checks return one finding per writer or recording.
    return chosen.repartition(1).sortWithinPartitions(
        badness, "kind", "stream", "instance_name", "first_token", "evidence"
    )
