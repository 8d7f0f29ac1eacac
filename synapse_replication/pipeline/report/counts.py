"""Computes the contents of a report from the tables of its workspace.

The results do not grow with the number of input rows: the numbers of windows, events,
findings, rooms and users are limited.
"""

from __future__ import annotations

import datetime
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

import attrs
import duckdb

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.audit.findings import (
    AuditFinding,
    Severity,
    notes_of,
    worst_first,
)
from synapse_replication.pipeline.report import queries
from synapse_replication.pipeline.report.report_data import (
    BatchBucket,
    CommandCount,
    Hot,
    LagLine,
    Notes,
    ReportData,
    StreamEvent,
    WindowCount,
    WriterTotal,
    choose_window,
    hide_names,
)
from synapse_replication.pipeline.schemas import ROWS_SCHEMA, WIRE_SCHEMA, with_texts
from synapse_replication.pipeline.workspace import rows_of

#: The maximum number of rooms, and of users, that are shown.
MAX_HOT = 15

MAX_EVENTS = 50
MAX_FINDINGS = 200

#: The maximum number of windows that a requested window length may produce.
MAX_WINDOWS = 2000

#: The columns of rows in addition to ``stream``.
ROW_COLUMNS: Final = (
    *("instance_name", "stream_id", "row_index", "written_ts", "room_id", "user_id"),
)

#: The table ``rows`` of :mod:`.queries`.
ROWS: Final = with_texts(ROWS_SCHEMA, *ROW_COLUMNS)

#: The columns of recorded lines.
LINE_COLUMNS: Final = tuple(
    name for name in WIRE_SCHEMA.names if name not in ("channel", "line")
)

_T = TypeVar("_T")


@attrs.frozen
class ReportInputs:
    """The input of a report.

    :ivar workspace: has the tables ``rows`` and ``wire``, which may be empty.
    :ivar has_rows: whether rows were read; otherwise, only recordings are given.
    :ivar has_wire: whether recordings were read.
    :ivar findings: an audit's findings; ``None`` without an audit.
    :ivar sources: descriptions of the sources, for display.
    """

    workspace: duckdb.DuckDBPyConnection
    has_rows: bool
    has_wire: bool
    findings: Sequence[AuditFinding] | None
    sources: Sequence[str]

    def fetch(self, to: Callable[..., _T], sql: str, **parameters: Any) -> list[_T]:
        """Run a query, and convert its rows."""
        return [to(**row) for row in rows_of(self.workspace, sql, **parameters)]


def collect_report(
    inputs: ReportInputs,
    *,
    window_s: int | None = None,
    identify: bool = False,
    now: datetime.datetime | None = None,
) -> ReportData:
    """Count rows and lines.

    :param window_s: the length of a plot's window, in s; ``None`` to choose it by the
        period of the data.
    :param identify: whether to show the names of rooms and users.
    :param now: the time of the report, in UTC; by default the current time.
    :raises PipelineError: if there would be too many windows.
    """
    data = ReportData(
        made=now or datetime.datetime.now(datetime.timezone.utc),
        sources=inputs.sources,
        identified=identify,
    )
    if inputs.has_rows:
        data = _add_rows(data, inputs, window_s)
    if inputs.has_wire:
        data = _add_wire(data, inputs, window_s)
    table = "rows" if inputs.has_rows else "arrived"
    hottest = inputs.fetch(Hot, queries.hottest(table), limit=MAX_HOT)
    if not identify:
        hottest = hide_names(hottest, secrets.token_bytes(32))
    data = attrs.evolve(data, hottest=hottest)
    if inputs.findings is not None:
        data = _add_findings(data, inputs.findings)
    return data


def _add_rows(
    data: ReportData, inputs: ReportInputs, window_s: int | None
) -> ReportData:
    inputs.workspace.execute(queries.COUNTS)
    totals = inputs.fetch(WriterTotal, queries.TOTALS)
    window = _window(
        window_s,
        (total.first_ts for total in totals),
        (total.last_ts for total in totals),
    )
    by_time = queries.over_time("rows", "written_ts")
    return attrs.evolve(
        data,
        totals=totals,
        batches=inputs.fetch(BatchBucket, queries.BATCHES),
        rows_window=window,
        over_time=inputs.fetch(WindowCount, by_time, window=window),
    )


def _add_wire(
    data: ReportData, inputs: ReportInputs, window_s: int | None
) -> ReportData:
    first, last = _span(inputs)
    relative = first is None
    if relative:
        inputs.workspace.execute(queries.SINCE_BEGINNING)
        first, last = _span(inputs)
    window = _window(window_s, [first], [last])
    inputs.workspace.execute(queries.ARRIVED)
    inputs.workspace.execute(queries.LATE)
    if relative:
        inputs.workspace.execute("DELETE FROM late")
    by_time = queries.over_time("arrived", "received_ts")
    (events,) = rows_of(
        inputs.workspace, f"SELECT count(*) AS count FROM ({queries.EVENTS})"
    )
    return attrs.evolve(
        data,
        has_wire=True,
        wire_window=window,
        wire_relative=relative,
        arrived=inputs.fetch(WindowCount, by_time, window=window),
        lags=inputs.fetch(LagLine, queries.LAGS),
        lags_over_time=inputs.fetch(LagLine, queries.LAGS_OVER_TIME, window=window),
        events=inputs.fetch(StreamEvent, f"{queries.EVENTS} LIMIT {MAX_EVENTS}"),
        event_count=events["count"],
        commands=inputs.fetch(CommandCount, queries.COMMANDS),
    )


def _span(
    inputs: ReportInputs,
) -> tuple[datetime.datetime | None, datetime.datetime | None]:
    (span,) = rows_of(inputs.workspace, queries.SPAN)
    return span["first"], span["last"]


def _add_findings(data: ReportData, findings: Iterable[AuditFinding]) -> ReportData:
    findings = worst_first(findings)
    faults = [each for each in findings if each.severity is not Severity.INFO]
    return attrs.evolve(
        data,
        findings=faults[:MAX_FINDINGS],
        notes=[
            Notes(
                kind=kind,
                stream=stream,
                findings=len(found),
                count=sum(finding.count for finding in found),
                example=min(finding.message for finding in found),
            )
            for (kind, stream), found in notes_of(findings).items()
        ],
        finding_count=dict(Counter(finding.severity.value for finding in findings)),
    )


def _window(
    requested: int | None,
    first: Iterable[datetime.datetime | None],
    last: Iterable[datetime.datetime | None],
) -> int:
    begin = min((time for time in first if time), default=None)
    end = max((time for time in last if time), default=None)
    if requested is None:
        return choose_window(begin, end)
    if begin and end and (end - begin).total_seconds() / requested > MAX_WINDOWS:
        raise PipelineError(
            f"--window {requested}: there would be more than {MAX_WINDOWS} windows "
            f"from {begin:%Y-%m-%d} to {end:%Y-%m-%d}; choose a longer window"
        )
    return requested
