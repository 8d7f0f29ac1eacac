"""Computes the contents of a report from the tables of its workspace.

The results do not grow with the number of input rows: the numbers of windows, events,
findings, rooms and users are limited.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, Final

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
from synapse_replication.pipeline.schemas import ROWS_SCHEMA, WIRE_SCHEMA, with_texts
from synapse_replication.pipeline.workspace import rows_of

#: The maximum number of rooms, and of users, that are shown.
MAX_HOT: Final = 15

MAX_EVENTS: Final = 50
MAX_FINDINGS: Final = 200

#: The maximum number of windows that a requested window length may produce.
MAX_REQUESTED: Final = 2000

#: The most windows into which :func:`choose_window` divides a span, unless the span is
#: too long for all lengths.
MAX_WINDOWS: Final = 120

_MINUTE, _HOUR, _DAY = 60, 3600, 86_400

#: The lengths of windows to choose from, in s.
_WINDOWS: Final = (
    *(1, 2, 5, 10, 15, 30),
    *(_MINUTE * n for n in (1, 2, 5, 10, 15, 30)),
    *(_HOUR * n for n in (1, 2, 3, 6, 12)),
    *(_DAY * n for n in (1, 2, 7, 14, 30, 90, 365)),
)

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

#: The rows of a query, with the query's columns as attributes.
Rows = Sequence[Any]


@attrs.frozen(kw_only=True)
class ReportData:
    """The contents of a report. The rows are those of the queries in :mod:`.queries`.

    :ivar made: the time at which the report was made, in UTC.
    :ivar sources: descriptions of the sources, for display.
    :ivar rows_window: the length of a window of ``over_time``, in s.
    :ivar wire_window: the length of a window of ``arrived`` and ``lags_over_time``, in
        s.
    :ivar wire_relative: whether the recordings have no date. If so, times are relative
        to the beginning of each recording, and are stored as times after 1970-01-01.
    :ivar event_count: the number of all events; ``events`` contains only the last ones.
    :ivar identified: whether the names of rooms and users are shown, not hashes.
    :ivar findings: the worst errors and warnings, worst first; ``None`` without an
        audit.
    :ivar notes: the findings that are neither errors nor warnings, by kind and stream:
        their number, the number of affected rows, ids or lines, and an example.
    :ivar finding_count: the number of all findings, by severity.
    """

    made: datetime.datetime
    sources: Sequence[str]
    totals: Rows = ()
    rows_window: int = _HOUR
    over_time: Rows = ()
    batches: Rows = ()
    hottest: Rows = ()
    identified: bool = False
    has_wire: bool = False
    wire_window: int = _MINUTE
    wire_relative: bool = False
    arrived: Rows = ()
    lags: Rows = ()
    lags_over_time: Rows = ()
    events: Rows = ()
    event_count: int = 0
    commands: Rows = ()
    findings: Sequence[AuditFinding] | None = None
    notes: Rows = ()
    finding_count: dict[str, int] = attrs.Factory(dict)


def collect_report(
    workspace: duckdb.DuckDBPyConnection,
    *,
    has_rows: bool = False,
    has_wire: bool = False,
    findings: Sequence[AuditFinding] | None = None,
    sources: Sequence[str] = (),
    window_s: int | None = None,
    identify: bool = False,
) -> ReportData:
    """Count rows and lines.

    :param workspace: has the tables ``rows`` and ``wire``, which may be empty.
    :param has_rows: whether rows were read; otherwise, only recordings are given.
    :param has_wire: whether recordings were read.
    :param findings: an audit's findings; ``None`` without an audit.
    :param sources: descriptions of the sources, for display.
    :param window_s: the length of a plot's window, in s; ``None`` to choose it by the
        period of the data.
    :param identify: whether to show the names of rooms and users.
    :raises PipelineError: if there would be too many windows.
    """
    found: dict[str, Any] = {}
    if has_rows:
        found |= _count_rows(workspace, window_s)
    if has_wire:
        found |= _count_lines(workspace, window_s)
    hottest = queries.hottest("rows" if has_rows else "arrived")
    hot = _fetch(workspace, hottest, limit=MAX_HOT)
    if findings is not None:
        found |= _count_findings(findings)
    return ReportData(
        made=datetime.datetime.now(datetime.timezone.utc),
        sources=sources,
        hottest=hot if identify else hide_names(hot, secrets.token_bytes(32)),
        identified=identify,
        has_wire=has_wire,
        **found,
    )


def _fetch(workspace: duckdb.DuckDBPyConnection, sql: str, **parameters: Any) -> Rows:
    return [SimpleNamespace(**row) for row in rows_of(workspace, sql, **parameters)]


def _count_rows(
    workspace: duckdb.DuckDBPyConnection, window_s: int | None
) -> dict[str, Any]:
    workspace.execute(queries.COUNTS)
    (span,) = _fetch(workspace, queries.WRITTEN)
    window = _window(window_s, span.first, span.last)
    by_time = queries.over_time("rows", "written_ts")
    return {
        "totals": _fetch(workspace, queries.TOTALS),
        "batches": _fetch(workspace, queries.BATCHES),
        "rows_window": window,
        "over_time": _fetch(workspace, by_time, window=window),
    }


def _count_lines(
    workspace: duckdb.DuckDBPyConnection, window_s: int | None
) -> dict[str, Any]:
    (span,) = _fetch(workspace, queries.SPAN)
    relative = span.first is None
    if relative:
        workspace.execute(queries.SINCE_BEGINNING)
        (span,) = _fetch(workspace, queries.SPAN)
    window = _window(window_s, span.first, span.last)
    workspace.execute(queries.ARRIVED)
    workspace.execute(queries.LATE)
    if relative:
        workspace.execute("DELETE FROM late")
    by_time = queries.over_time("arrived", "received_ts")
    (events,) = _fetch(workspace, f"SELECT count(*) AS count FROM ({queries.EVENTS})")
    return {
        "wire_window": window,
        "wire_relative": relative,
        "arrived": _fetch(workspace, by_time, window=window),
        "lags": _fetch(workspace, queries.LAGS),
        "lags_over_time": _fetch(workspace, queries.LAGS_OVER_TIME, window=window),
        "events": _fetch(workspace, f"{queries.EVENTS} LIMIT {MAX_EVENTS}"),
        "event_count": events.count,
        "commands": _fetch(workspace, queries.COMMANDS),
    }


def _count_findings(findings: Sequence[AuditFinding]) -> dict[str, Any]:
    findings = worst_first(findings)
    faults = [each for each in findings if each.severity is not Severity.INFO]
    return {
        "findings": faults[:MAX_FINDINGS],
        "notes": [
            SimpleNamespace(
                kind=kind,
                stream=stream,
                findings=len(found),
                count=sum(finding.count for finding in found),
                example=min(finding.message for finding in found),
            )
            for (kind, stream), found in notes_of(findings).items()
        ],
        "finding_count": dict(Counter(finding.severity.value for finding in findings)),
    }


def _window(
    requested: int | None,
    first: datetime.datetime | None,
    last: datetime.datetime | None,
) -> int:
    if requested is None:
        return choose_window(first, last)
    if first and last and (last - first).total_seconds() / requested > MAX_REQUESTED:
        raise PipelineError(
            f"--window {requested}: there would be more than {MAX_REQUESTED} windows "
            f"from {first:%Y-%m-%d} to {last:%Y-%m-%d}; choose a longer window"
        )
    return requested


def choose_window(
    first: datetime.datetime | None, last: datetime.datetime | None
) -> int:
    """Return the shortest window length, in s, with at most MAX_WINDOWS windows.

    If the span of the times is too long for all lengths, return the longest one.
    """
    span = (last - first).total_seconds() if first and last else 0
    for window in _WINDOWS:
        if span / window <= MAX_WINDOWS:
            return window
    return _WINDOWS[-1]


def hide_names(found: Iterable[Any], key: bytes) -> Rows:
    """Replace each name by a keyed hash; without the key, the name cannot be found.

    :param found: the rows of :func:`.queries.hottest`.
    """
    hidden = []
    for hot in found:
        digest = hmac.new(key, hot.name.encode(), hashlib.sha256).hexdigest()
        name = f"{hot.kind} {digest[:10]}"
        hidden.append(SimpleNamespace(kind=hot.kind, name=name, rows=hot.rows))
    return hidden
