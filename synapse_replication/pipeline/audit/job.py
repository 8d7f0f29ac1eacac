"""The job that proves or refutes that nothing was lost."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, Final

from pyspark import StorageLevel
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as sf

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
    not_archived_findings,
    rows_twice_findings,
)
from synapse_replication.pipeline.audit.checks.ids import (
    gap_findings,
    gone_findings,
    known_ids,
    two_writers_findings,
)
from synapse_replication.pipeline.audit.checks.wire import (
    damage_findings,
    order_findings,
    reset_findings,
    wire_lines,
    wire_tokens,
)
from synapse_replication.pipeline.audit.facts import read_facts
from synapse_replication.pipeline.audit.findings import SAMPLES, Severity
from synapse_replication.pipeline.audit.report import (
    print_findings,
    print_json,
    write_findings,
)
from synapse_replication.pipeline.progress import JobProgress
from synapse_replication.pipeline.schemas import (
    ARCHIVED_ROWS_SCHEMA,
    FINDINGS_SCHEMA,
    ROWS_SCHEMA,
    WIRE_SCHEMA,
)
from synapse_replication.pipeline.settings import PipelineSettings
from synapse_replication.pipeline.source.database import PLAN_TIMEOUT, reading
from synapse_replication.pipeline.source.frames import read_rows
from synapse_replication.pipeline.spark.failures import short_failures
from synapse_replication.pipeline.spark.local import local_frame
from synapse_replication.pipeline.spark.session import SCHEDULES_ONLY, job_session
from synapse_replication.pipeline.tables import RowForm
from synapse_replication.pipeline.wire_lines import find_recordings, read_recordings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["STEPS", "audited", "run_audit"]

#: Of :func:`audited`.
STEPS: Final = 3

_CODEGEN: Final = "spark.sql.codegen.wholeStage"

#: Rows that a query is not worth compiling for.
_FEW: Final = 500_000

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
    """Audit a deployment in a session of Spark's own, and print the findings.

    :param out: the folder to write all findings to; made if it is missing.
    :param master: where Spark runs; this machine if ``None``.
    :return: how many findings there are of each severity.
    :raises PipelineError: if something cannot be read.
    """
    with short_failures():
        # Mistakes are reported at once: Spark takes its time.
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
                archive=archive,
                begin=progress.begin,
            ) as findings,
        ):
            if out is not None:
                write_findings(findings, out)
            progress.unwatch()
            show = print_json if as_json else print_findings
            return show(findings, sys.stdout)


def _say_nothing(step: str) -> None:
    """Do nothing: nobody looks."""


@contextlib.contextmanager
def audited(
    session: SparkSession,
    settings: PipelineSettings,
    *,
    recordings: Sequence[str | os.PathLike[str]] = (),
    archive: str | os.PathLike[str] | None = None,
    begin: Callable[[str], object] = _say_nothing,
) -> Iterator[DataFrame]:
    """Audit a deployment: gives a data frame of FINDINGS_SCHEMA, worst first.

    What it holds in memory and on disks is given back at the end of the context.

    :param begin: called at the beginning of each of :data:`STEPS` steps.
    :raises PipelineError: if the database, a recording or the archive cannot be read.
    """
    with contextlib.ExitStack() as stack:

        def keep(frame: DataFrame) -> DataFrame:
            kept = frame.persist(StorageLevel.MEMORY_AND_DISK)
            stack.callback(kept.unpersist)
            return kept

        begin("read recordings and archive")
        archived = None if archive is None else read_archive(session, archive)
        # What the archive has is not counted twice.
        given = [
            path
            for path in find_recordings(recordings)
            if archived is None or archived.lacks(path)
        ]
        wire = read_recordings(session, given)
        archived_wire = _archived_wire(session, archived)
        rows_archived = (
            local_frame(session, ARCHIVED_ROWS_SCHEMA).drop("row")
            if archived is None
            else archived.keys()
        )
        # Lines that are in the archive twice are reported as such.
        archived_once = archived_wire.dropDuplicates(["recording", "line_number"])
        lines = keep(wire_lines(wire.unionByName(archived_once)))
        tokens = wire_tokens(lines)
        heard = _reach(
            tokens.select(
                "stream",
                "instance_name",
                sf.least("prev_token", "token").alias("low"),
                sf.col("token").alias("high"),
            )
        )
        reach = _reach(
            rows_archived.select(
                "stream",
                "instance_name",
                sf.col("stream_id").alias("low"),
                sf.col("stream_id").alias("high"),
            )
        )
        begin("compare ids")
        # Now: what was heard before, the sequences have given out.
        facts = read_facts(settings)
        # Whatever positions say: what is committed beyond them is a row, too.
        rows = read_rows(
            session, settings, RowForm.NONE, endingToken=json.dumps(facts.reach)
        )
        ids = keep(
            known_ids(
                rows,
                rows_archived,
                tokens,
                facts.kept,
                facts.nameless,
                heard=_bounds(heard),
                archived=_bounds(reach),
                last_ids=sum(facts.reach.values()),
            )
        )
        few = ids.count() + lines.count() < _FEW
        if few:
            # Many tasks have found little: what follows needs but a few of them.
            ids = ids.coalesce(session.sparkContext.defaultParallelism)
        begin("judge what differs")
        sole = facts.sole_writers((stream, writer) for stream, writer, *_ in heard)
        found = [
            local_frame(session, FINDINGS_SCHEMA, facts.findings),
            two_writers_findings(ids),
            ahead_findings(tokens, _farthest(session, reach), facts.given_out),
            gap_findings(ids),
            gone_findings(ids),
        ]
        if recordings or archived is not None:
            found.append(damage_findings(lines))
        if heard:
            lost = keep(announced_absent(ids, tokens, facts.idempotent, sole))
            texts = _texts(session, settings, lost, archived, facts.reach)
            found += [
                announced_findings(lost, texts, facts.tables),
                order_findings(tokens, facts.kept, facts.idempotent),
                reset_findings(tokens, facts.in_memory),
                not_seen_findings(ids, tokens, facts.idempotent, sole),
            ]
        if archived is not None:
            found += [
                rows_twice_findings(
                    rows_archived.join(
                        sf.broadcast(
                            ids.where("repeated").select("stream", "stream_id")
                        ),
                        on=["stream", "stream_id"],
                        how="left_semi",
                    )
                ),
                commands_twice_findings(archived_wire),
                not_archived_findings(ids, _purged(session, archived)),
            ]
        findings = keep(_worst_first(reduce(DataFrame.unionByName, found)))
        with _interpreted(session, few=few):
            findings.count()
        yield findings


@contextlib.contextmanager
def _interpreted(session: SparkSession, *, few: bool) -> Iterator[None]:
    """Have queries over few rows interpreted: to compile them costs far more."""
    before = session.conf.get(_CODEGEN)
    if few:
        session.conf.set(_CODEGEN, "false")
    try:
        yield
    finally:
        session.conf.set(_CODEGEN, before or "true")


def _archived_wire(session: SparkSession, archive: ArchivedTables | None) -> DataFrame:
    """Read the recordings of an archive, by names that no file has."""
    if archive is None:
        return local_frame(session, WIRE_SCHEMA)
    name = sf.concat(sf.lit("archive/wire/"), sf.col("recording"))
    return archive.wire.withColumn("recording", name).select(*WIRE_SCHEMA.names)


#: The least and the greatest token of a stream's writer.
_Reach = tuple[str, str, int, int]


def _reach(tokens: DataFrame) -> list[_Reach]:
    """Return between which tokens each writer of a stream was seen.

    :param tokens: ``stream``, ``instance_name``, ``low``, ``high``.
    """
    by_writer = tokens.groupBy("stream", "instance_name").agg(
        sf.min("low").alias("low"), sf.max("high").alias("high")
    )
    return [tuple(row) for row in by_writer.collect()]


def _bounds(reach: Iterable[_Reach]) -> dict[str, tuple[int, int]]:
    """Return between which tokens each stream was seen, of whichever writer."""
    found: dict[str, tuple[int, int]] = {}
    for stream, _, low, high in reach:
        before = found.get(stream, (low, high))
        found[stream] = min(before[0], low), max(before[1], high)
    return found


def _farthest(session: SparkSession, reach: Iterable[_Reach]) -> DataFrame:
    rows = [(stream, writer, high) for stream, writer, _, high in reach]
    return local_frame(
        session, "stream string, instance_name string, stream_id long", rows
    )


def _texts(
    session: SparkSession,
    settings: PipelineSettings,
    lost: DataFrame,
    archive: ArchivedTables | None,
    reach: Mapping[str, int],
) -> DataFrame:
    """Read rows of lost ids, the first few of each line.

    Of each stream, only the range that they lie in is read.

    :param reach: how far each stream is to be read in the database.
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
    # What the archive or a recording has may be ahead of the database.
    return read_rows(
        session,
        settings,
        streams=stream,
        startingToken=str(min(first - 1, reach)),
        endingToken=str(min(last, reach)),
    )


def _purged(session: SparkSession, archive: ArchivedTables) -> DataFrame:
    ranges: list[Any] = [
        (each.stream, each.first_token, each.last_token) for each in archive.purged
    ]
    return local_frame(session, _PURGED_SCHEMA, ranges)


def _worst_first(findings: DataFrame) -> DataFrame:
    severities = [severity.value for severity in Severity]
    badness = sf.array_position(sf.lit(severities), sf.col("severity"))
    chosen = findings.select(*FINDINGS_SCHEMA.names)
    # Few: each is of a group, or one of a limited number of gaps.
    return chosen.repartition(1).sortWithinPartitions(
        badness, "kind", "stream", "instance_name", "first_token", "evidence"
    )
