"""The facts about a deployment that an audit needs: its streams and their progress.

The Spark driver reads them in one read-only transaction.
"""

from __future__ import annotations

from typing import Any

import attrs

from synapse_replication.pipeline.audit.findings import AuditFinding, to_json
from synapse_replication.pipeline.settings import PipelineSettings, Stream
from synapse_replication.pipeline.source.connections import read_transaction
from synapse_replication.storage.consistency import Problem, ProblemKind, StreamState


@attrs.frozen(kw_only=True)
class AuditedStream:
    """The facts about a stream; ``streams.csv`` has those that the checks use.

    :ivar stream: the name on the wire.
    :ivar persisted: whether a sequence of the database allocates its ids.
    :ivar in_memory: whether it is held in memory: its tokens start again when its
        writer restarts.
    :ivar idempotent: whether late rows are delivered.
    :ivar tables: its existing tables, if it is persisted.
    :ivar last_allocated: the last id that its sequence has allocated.
    :ivar nameless: whether one of its tables does not record the writer.
    :ivar reach: the greatest token in its sequence or its positions.
    :ivar writers: its writers, from configuration and positions.
    """

    stream: str
    persisted: bool
    in_memory: bool
    idempotent: bool
    tables: tuple[str, ...] = ()
    last_allocated: int | None = None
    nameless: bool = False
    reach: int = 0
    writers: frozenset[str] = frozenset()


def read_facts(
    settings: PipelineSettings,
) -> tuple[dict[str, AuditedStream], list[AuditFinding]]:
    """Read the facts from the database, and check them against each other.

    :return: the streams by name, and the findings from comparing sequences, tables and
        positions.
    :raises PipelineError: if the database cannot be read.
    """
    with read_transaction(settings.conninfo, walk_indexes=False) as txn:
        report = settings.read_states(txn)
    states = {
        state.name: state
        for state in report.streams
        if state.sequence_value is not None
    }
    found = {s.name: _audited(s, states.get(s.name)) for s in settings.streams}
    problems = [_finding(p, states.get(p.stream_name or "")) for p in report.problems]
    return found, problems


def _audited(stream: Stream, state: StreamState | None) -> AuditedStream:
    audited = AuditedStream(
        stream=stream.name,
        persisted=state is not None,
        in_memory=stream.description.held_in_memory,
        idempotent=stream.description.idempotent,
    )
    if state is None:
        return audited
    stored = (state.stream.sign * (each.stored or 0) for each in state.writers)
    return attrs.evolve(
        audited,
        tables=tuple(state.farthest),
        last_allocated=state.sequence_value,
        nameless=any(column.writer_column is None for column in state.stream.tables),
        reach=max(state.sequence_value or 0, *stored, 0),
        writers=frozenset(writer.instance_name for writer in state.writers),
    )


def _finding(problem: Problem, state: StreamState | None) -> AuditFinding:
    kind = problem.kind.value
    first: int | None = None
    last: int | None = None
    evidence: dict[str, Any] = {"hint": list(problem.statements)}
    if state is not None:
        sequence_value = state.sequence_value or 0
        stored = {w.instance_name: w.stored for w in state.writers}
        evidence |= {
            "sequence": state.stream.sequence,
            "sequence_value": sequence_value,
            "tables": dict(state.farthest),
            "stored": stored,
        }
        if problem.kind is ProblemKind.SEQUENCE_BEHIND:
            first, last = sequence_value + 1, max(state.farthest.values())
        elif problem.instance_name is not None:
            position = abs(stored[problem.instance_name] or 0)
            first, last = min(sequence_value + 1, position), position
    count = 1 if first is None or last is None else last - first + 1
    where = "" if problem.stream_name is None else f"{problem.stream_name}: "
    return AuditFinding(
        kind=kind,
        stream=problem.stream_name,
        instance_name=problem.instance_name,
        first_token=first,
        last_token=last,
        count=count,
        message=where + problem.text,
        evidence=to_json(evidence),
    )
