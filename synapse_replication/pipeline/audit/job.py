"""The audit job, which checks whether rows were lost.

The tasks that read tables, recordings and archive run on Spark's executors, and so do
the checks (see :mod:`.comparison`). Findings are all that reaches this process.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs
import pyarrow as pa
import pyarrow.compute as pc

from synapse_replication.pipeline.archive.files import DamagedFile
from synapse_replication.pipeline.archive.snapshot import (
    Snapshot,
    bounds_of,
    open_snapshot,
)
from synapse_replication.pipeline.audit import findings
from synapse_replication.pipeline.audit.comparison import (
    LINES_SCHEMA,
    MAX_SAMPLES,
    Inputs,
    compare,
)
from synapse_replication.pipeline.audit.facts import AuditedStream, read_facts
from synapse_replication.pipeline.audit.kinds import Severity
from synapse_replication.pipeline.progress import JobProgress
from synapse_replication.pipeline.recorded_lines import lines_frame
from synapse_replication.pipeline.scan import Batches, Scan, Spark
from synapse_replication.pipeline.schemas import ROWS_SCHEMA, with_texts
from synapse_replication.pipeline.settings import PipelineSettings
from synapse_replication.pipeline.source.planning import scan_ids, scan_rows
from synapse_replication.pipeline.spark.session import SparkJob, own_session
from synapse_replication.pipeline.wire_lines import scan_recordings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: The number of steps of :func:`audited`.
AUDIT_STEPS: Final = 2

#: The columns of rows by which ids are compared.
_KEYS: Final = ("instance_name", "stream_id", "row_index")

#: The kind of the findings that show rows, and the columns of these rows.
_LOST: Final = "announced_absent"
_TEXTS: Final = ("stream_id", "row_index", "row")


def run_audit(
    settings: PipelineSettings,
    *,
    recordings: Sequence[str] = (),
    archive: str | None = None,
    out: str | None = None,
    master: str | None = None,
    as_json: bool = False,
) -> Mapping[Severity, int]:
    """Audit a deployment, and print the findings.

    :param out: the folder to write all findings to; created if it is missing.
    :param master: the URL of the Spark master; ``None`` for the default of
        :func:`.session.make_session`.
    :return: the number of findings of each severity.
    :raises PipelineError: if the database, a recording or the archive cannot be read,
        or ``out`` cannot be written.
    """
    archived = None if archive is None else open_snapshot(archive)
    rows = count_rows(settings, archived, recordings)
    with (
        JobProgress(sys.stderr, AUDIT_STEPS) as progress,
        SparkJob("synapse-replication audit", master=master, progress=progress) as job,
    ):
        job.start(rows)
        found = audited(
            settings,
            recordings=recordings,
            archive=archived,
            spark=job,
            begin=progress.begin,
        )
    # Spark has stopped, so the process ends soon after the last line.
    if out is not None:
        findings.write_findings(found, out)
    show = findings.print_json if as_json else findings.print_findings
    return show(found, sys.stdout)


def count_rows(
    settings: PipelineSettings | None,
    archive: Snapshot | None,
    recordings: Sequence[str | os.PathLike[str]],
) -> int:
    """Return about how many rows and lines the job of an audit or report reads.

    :raises PipelineError: if the database or a recording cannot be read.
    """
    streams = {} if settings is None else read_facts(settings)[0]
    ids = sum(each.reach for each in streams.values() if each.persisted)
    archived = 0 if archive is None else sum(file.row_count for file in archive.files)
    lines = scan_recordings(recordings).ids
    return ids + archived + lines


def audited(
    settings: PipelineSettings,
    *,
    recordings: Sequence[str | os.PathLike[str]] = (),
    archive: Snapshot | None = None,
    spark: Spark,
    begin: Callable[[str], object],
) -> list[findings.AuditFinding]:
    """Audit a deployment; return the findings, worst first.

    :param spark: returns the session.
    :param begin: called at the beginning of each of :data:`AUDIT_STEPS` steps.
    :raises PipelineError: if the database, a recording or the archive cannot be read.
    """
    begin("verify the archive")
    session = own_session(spark())
    intact = None if archive is None else archive.verified(spark)
    wire = lines_frame(session, LINES_SCHEMA.names[:-1], recordings, intact)
    # Read the sequences after recordings and archive were listed. Otherwise, an id that
    # was allocated in between would seem to be ahead of its sequence.
    streams, found = read_facts(settings)
    begin("compare rows and lines")
    found += compare(session, _inputs(session, settings, streams, wire, intact))
    found = _with_rows(session, found, settings, streams, intact)
    if intact is not None:
        found += map(_damaged_file, intact.damaged)
    return findings.worst_first(found)


def _inputs(
    session: SparkSession,
    settings: PipelineSettings,
    streams: Mapping[str, AuditedStream],
    wire: DataFrame | None,
    archive: Snapshot | None,
) -> Inputs:
    # Rows above the writers' stored positions are included, because they may already be
    # committed.
    reach = {each.stream: each.reach for each in streams.values() if each.persisted}
    tables = scan_rows(settings, *_KEYS, endingToken=json.dumps(reach))
    inputs = Inputs(
        streams=list(streams.values()), tables=tables.frame(session), wire=wire
    )
    if archive is None:
        return inputs
    bounds = archive.id_bounds().items()
    return attrs.evolve(
        inputs,
        archive=archive.rows_frame(session, *_KEYS),
        archived_ranges=[(stream, *ends) for stream, ends in bounds],
        purged=[
            *((p.stream, p.first_token, p.last_token) for p in archive.purged),
            *((d.file.table_name, *bounds_of([d.file])) for d in archive.damaged),
        ],
    )


# -- the rows that were lost -------------------------------------------------------


def _with_rows(
    session: SparkSession,
    found: Sequence[findings.AuditFinding],
    settings: PipelineSettings,
    streams: Mapping[str, AuditedStream],
    archive: Snapshot | None,
) -> list[findings.AuditFinding]:
    """Replace ids in the evidence of findings by rows.

    Only the rows with these ids are read.
    """
    lost: dict[str, set[int]] = {}
    for each in found:
        if each.kind == _LOST:
            ids = json.loads(each.evidence).get("ids", ())
            lost.setdefault(each.stream or "", set()).update(ids)
    lost = {stream: ids for stream, ids in lost.items() if ids}
    if not lost:
        return list(found)
    reach = {stream: streams[stream].reach for stream in lost}
    reads = {"tables": scan_ids(settings, lost, *_TEXTS, endingToken=json.dumps(reach))}
    if archive is not None:
        reads["archive"] = archive.json_rows(lost, lost)
    rows: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for source, scan in sorted(reads.items()):
        for row in _first_rows(scan, lost).frame(session).toArrow().to_pylist():
            stream, *values = row.values()
            sample = dict(zip(("stream_id", "row_index", "row"), values, strict=True))
            rows.setdefault((stream, row["stream_id"]), []).append(
                {"stream_id": row["stream_id"], "source": source, **sample}
            )
    return [
        _with_samples(each, rows, streams[each.stream or ""].tables)
        if each.kind == _LOST and each.stream in lost
        else each
        for each in found
    ]


def _first_rows(scan: Scan, ids: Mapping[str, Collection[int]]) -> Scan:
    """Return the rows with some ids, those that a finding can show."""

    def choose(batches: Batches) -> Batches:
        for batch in batches:
            for stream, wanted in ids.items():
                chosen = pc.and_(
                    pc.equal(batch.column("stream"), stream),
                    pc.and_(
                        pc.is_in(batch.column("stream_id"), pa.array(sorted(wanted))),
                        pc.less(batch.column("row_index"), MAX_SAMPLES),
                    ),
                )
                rows = batch.select(schema.names).filter(chosen)
                if rows.num_rows:
                    yield pa.RecordBatch.from_arrays(rows.columns, schema=schema)

    schema = with_texts(ROWS_SCHEMA, *_TEXTS)
    return scan.then(choose, schema)


def _with_samples(
    found: findings.AuditFinding,
    rows: Mapping[tuple[str, int], Sequence[Mapping[str, Any]]],
    tables: Sequence[str],
) -> findings.AuditFinding:
    evidence = json.loads(found.evidence)
    samples: list[Mapping[str, Any]] = []
    for id_ in evidence.pop("ids"):
        of_id = rows.get((found.stream or "", id_), [{"stream_id": id_}])
        samples += sorted(of_id, key=lambda r: (r.get("source"), r.get("row_index")))
    evidence |= {"tables": list(tables), "rows": samples[:MAX_SAMPLES]}
    return attrs.evolve(found, evidence=findings.to_json(evidence))


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
