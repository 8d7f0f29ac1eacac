"""Computes the contents of a report from frames of rows and of recorded lines.

The queries are in ``queries.sql``, and run on Spark's executors.

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
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import attrs

from synapse_replication.data_files import read_queries
from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.audit.findings import AuditFinding, notes_of
from synapse_replication.pipeline.audit.kinds import Severity
from synapse_replication.pipeline.report.windows import HOUR, MINUTE, choose_window
from synapse_replication.pipeline.scan import (
    add_materialised_view,
    materialise,
    table_frame,
)
from synapse_replication.pipeline.schemas import ROWS_SCHEMA, WIRE_SCHEMA, with_texts
from synapse_replication.pipeline.spark.session import few_rows
from synapse_replication.streams.standard.registry import STANDARD_STREAMS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

QUERIES: Final = read_queries(Path(__file__).with_name("queries.sql"))

#: The maximum number of rooms, and of users, that are shown.
MAX_HOT: Final = 15

MAX_EVENTS: Final = 50
MAX_FINDINGS: Final = 200

#: The maximum number of windows that a requested window length may produce.
MAX_REQUESTED: Final = 2000

#: The columns of the rows whose times of arrival are compared with their times of
#: writing, in addition to ``stream``.
WRITTEN_COLUMNS: Final = ("instance_name", "stream_id", "written_ts")

#: The columns of these rows.
WRITTEN: Final = with_texts(ROWS_SCHEMA, *WRITTEN_COLUMNS)

#: The columns of recorded lines.
LINE_COLUMNS: Final = tuple(
    name for name in WIRE_SCHEMA.names if name not in ("channel", "line")
)

#: The rows of a query, with the query's columns as attributes.
Rows = Sequence[Any]


@attrs.define(kw_only=True)
class ReportData:
    """The contents of a report. The rows are those of the queries.

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
    rows_window: int = HOUR
    over_time: Rows = ()
    batches: Rows = ()
    hottest: Rows = ()
    identified: bool = False
    has_wire: bool = False
    wire_window: int = MINUTE
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
    session: SparkSession,
    *,
    tallies: DataFrame | None = None,
    written: DataFrame | None = None,
    wire: DataFrame | None = None,
    findings: Sequence[AuditFinding] | None = None,
    sources: Sequence[str] = (),
    window_s: int | None = None,
    identify: bool = False,
) -> ReportData:
    """Count rows and lines.

    :param session: a session whose temporary views may be changed.
    :param tallies: counts of rows, which are read once; ``None`` if only recordings are
        given. See :mod:`.tallies`.
    :param written: rows with WRITTEN, which are read if there are recordings. Times are
        null if a row's table does not store them.
    :param wire: recorded lines with ``LINE_COLUMNS`` and ``is_damaged``.
    :param findings: an audit's findings, worst first; ``None`` without an audit.
    :param sources: descriptions of the sources, for display.
    :param window_s: the length of a plot's window, in s; ``None`` to choose it by the
        period of the data.
    :param identify: whether to show the names of rooms and users.
    :raises PipelineError: if there would be too many windows.
    """
    data = ReportData(
        made=datetime.datetime.now(datetime.timezone.utc),
        sources=sources,
        identified=identify,
        has_wire=wire is not None,
    )
    if tallies is not None:
        tallies.createOrReplaceTempView("tallies")
        _count_rows(session, data, window_s)
    if wire is not None:
        wire.createOrReplaceTempView("wire")
        if written is None:
            written = table_frame(session, WRITTEN.empty_table())
        written.createOrReplaceTempView("rows")
        _count_lines(session, data, window_s)
    if tallies is not None or wire is not None:
        source = "arrived_names" if tallies is None else "counted_names"
        session.sql(QUERIES[source]).createOrReplaceTempView("names")
        with few_rows(session):
            hot = _fetch(session, "hottest", limit=MAX_HOT)
        data.hottest = hot if identify else hide_names(hot, secrets.token_bytes(32))
    if findings is not None:
        _count_findings(findings, data)
    return data


def _fetch(session: SparkSession, name: str, **parameters: int) -> Rows:
    found = session.sql(QUERIES[name], parameters or None).toArrow()
    return [SimpleNamespace(**row) for row in found.to_pylist()]


def _count_rows(session: SparkSession, data: ReportData, window_s: int | None) -> None:
    # Reading all rows takes the time: read them once, for the sums.
    sums = materialise(session.sql(QUERIES["sums"]))
    with few_rows(session):
        # They are few: combine the results of the tasks.
        sums.coalesce(1).createOrReplaceTempView("sums")
        session.sql(QUERIES["counts"]).createOrReplaceTempView("counts")
        (span,) = _fetch(session, "written")
        data.rows_window = _window(window_s, span.first, span.last)
        data.totals = _fetch(session, "totals")
        data.batches = _fetch(session, "batches")
        data.over_time = _fetch(session, "over_time", window=data.rows_window)


def _count_lines(session: SparkSession, data: ReportData, window_s: int | None) -> None:
    names = {"rooms": _path_cases("room_id"), "users": _path_cases("user_id")}
    add_materialised_view(session, "lines", QUERIES["lines"].format_map(names))
    (span,) = _fetch(session, "span")
    data.wire_relative = span.first is None
    if data.wire_relative:
        since = session.sql(QUERIES["since_beginning"])
        since.createOrReplaceTempView("lines")
        (span,) = _fetch(session, "span")
    window = data.wire_window = _window(window_s, span.first, span.last)
    add_materialised_view(session, "arrived", QUERIES["arrived"])
    data.arrived = _fetch(session, "arrived_over_time", window=window)
    if not data.wire_relative:
        session.sql(QUERIES["late"]).createOrReplaceTempView("late")
        lags = _fetch(session, "lags", window=window)
        data.lags = [lag for lag in lags if lag.start is None]
        data.lags_over_time = [lag for lag in lags if lag.start is not None]
    session.sql(QUERIES["all_events"]).createOrReplaceTempView("all_events")
    data.events = _fetch(session, "events", limit=MAX_EVENTS)
    data.event_count = len(data.events)
    if data.event_count == MAX_EVENTS:
        (found,) = _fetch(session, "event_count")
        data.event_count = found.events
    data.commands = _fetch(session, "commands")


def _path_cases(field: str) -> str:
    """Return the cases of an expression for a field of the JSON rows of streams."""
    cases = []
    for stream in STANDARD_STREAMS.values():
        # Rows of events have several types.
        row_type: Any = getattr(stream.description.codec, "row_type", None)
        fields = list(attrs.fields_dict(row_type)) if row_type else []
        if field in fields:
            path = f"$[{fields.index(field)}]"
            cases.append(f"WHEN '{stream.name}' THEN get_json_object(row, '{path}')")
    return " ".join(cases)


def _count_findings(findings: Sequence[AuditFinding], data: ReportData) -> None:
    faults = [each for each in findings if each.severity is not Severity.INFO]
    data.findings = faults[:MAX_FINDINGS]
    data.notes = [
        SimpleNamespace(
            kind=kind,
            stream=stream,
            findings=len(found),
            count=sum(finding.count for finding in found),
            example=min(finding.message for finding in found),
        )
        for (kind, stream), found in notes_of(findings).items()
    ]
    data.finding_count = dict(Counter(finding.severity.value for finding in findings))


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


def hide_names(found: Iterable[Any], key: bytes) -> Rows:
    """Replace each name by a keyed hash; without the key, the name cannot be found.

    :param found: the rows of the query ``hottest``.
    """
    hidden = []
    for hot in found:
        digest = hmac.new(key, hot.name.encode(), hashlib.sha256).hexdigest()
        name = f"{hot.kind} {digest[:10]}"
        hidden.append(SimpleNamespace(kind=hot.kind, name=name, rows=hot.rows))
    return hidden
