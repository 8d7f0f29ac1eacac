"""Computes the contents of a report with Spark.

The results that reach the driver do not grow with the number of input rows: the numbers
of windows, events, findings, rooms and users are limited.
"""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
from pyspark.sql import functions as sf

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.audit.findings import Severity
from synapse_replication.pipeline.report import (
    row_counts as report_rows,
    wire_rows as report_wire,
)
from synapse_replication.pipeline.report.report_data import (
    BatchBucket,
    CommandCount,
    FindingLine,
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
from synapse_replication.pipeline.schemas import WIRE_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: The maximum number of rooms, and of users, that are shown.
MAX_HOT = 15

MAX_EVENTS = 50
MAX_FINDINGS = 200

#: The maximum number of windows that a requested window length may produce.
MAX_WINDOWS = 2000

_T = TypeVar("_T")


@attrs.frozen
class ReportInputs:
    """The input of a report.

    :ivar rows: rows with ROWS_SCHEMA, or with ``room_id`` and ``user_id`` instead of
        ``row``; ``None`` if only recordings are given.
    :ivar wire: the lines of recordings, with WIRE_SCHEMA; ``None`` if there are none.
    :ivar findings: an audit's findings, with FINDINGS_SCHEMA; ``None`` without an
        audit.
    :ivar sources: descriptions of the sources, for display.
    """

    rows: DataFrame | None
    wire: DataFrame | None
    findings: DataFrame | None
    sources: Sequence[str]


def collect_report(
    inputs: ReportInputs,
    *,
    window_s: int | None = None,
    identify: bool = False,
    now: datetime.datetime | None = None,
) -> ReportData:
    """Count rows and lines, and fetch the results.

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
    rows = inputs.rows
    if rows is not None and "row" in rows.columns:
        rows = report_rows.with_names(rows)
    wire = None
    if inputs.wire is not None:
        # Cache the lines, because several queries read them.
        wire = inputs.wire.select(*WIRE_SCHEMA.names).persist()
    try:
        if rows is not None:
            data = _add_rows(data, rows, window_s)
        if wire is not None:
            data = _add_wire(data, wire, rows, window_s)
        data = _add_hottest(data, rows, wire, identify=identify)
        if inputs.findings is not None:
            data = _add_findings(data, inputs.findings)
    finally:
        if wire is not None:
            wire.unpersist()
    return data


def _add_rows(data: ReportData, rows: DataFrame, window_s: int | None) -> ReportData:
    counts = report_rows.by_row_index(rows).persist()
    try:
        totals = _fetch(
            report_rows.totals(counts).orderBy("stream", "instance_name"), WriterTotal
        )
        batches = _fetch(
            report_rows.batch_sizes(counts).orderBy("stream", "bucket"), BatchBucket
        )
    finally:
        counts.unpersist()
    window = _window(
        window_s,
        (total.first_ts for total in totals),
        (total.last_ts for total in totals),
    )
    return attrs.evolve(
        data,
        totals=totals,
        batches=batches,
        rows_window=window,
        over_time=_fetch(report_rows.over_time(rows, window), WindowCount),
    )


def _add_wire(
    data: ReportData, wire: DataFrame, rows: DataFrame | None, window_s: int | None
) -> ReportData:
    first, last = _span(wire)
    relative = first is None
    if relative:
        wire = report_wire.since_beginning(wire)
        first, last = _span(wire)
    window = _window(window_s, [first], [last])
    arrived = report_wire.arrived_rows(wire).persist()
    late = report_wire.lags(arrived, rows)
    if relative:
        late = late.limit(0)
    late = late.persist()
    events = report_wire.stream_events(wire).persist()
    timed = arrived.withColumnRenamed("received_ts", "written_ts")
    latest = events.orderBy(
        sf.desc_nulls_last("received_ts"), sf.desc("line_number")
    ).limit(MAX_EVENTS)
    try:
        return attrs.evolve(
            data,
            has_wire=True,
            wire_window=window,
            wire_relative=relative,
            arrived=_fetch(report_rows.over_time(timed, window), WindowCount),
            lags=_fetch(
                report_wire.lag_percentiles(late, None).orderBy("stream"), LagLine
            ),
            lags_over_time=_fetch(report_wire.lag_percentiles(late, window), LagLine),
            events=_fetch(latest, StreamEvent),
            event_count=events.count(),
            commands=_fetch(
                report_wire.commands(wire).orderBy(sf.desc("lines")), CommandCount
            ),
        )
    finally:
        for frame in (arrived, late, events):
            frame.unpersist()


def _span(
    wire: DataFrame,
) -> tuple[datetime.datetime | None, datetime.datetime | None]:
    (span,) = wire.agg(
        sf.min("received_ts").alias("first"), sf.max("received_ts").alias("last")
    ).collect()
    return _utc(span["first"]), _utc(span["last"])


def _add_hottest(
    data: ReportData,
    rows: DataFrame | None,
    wire: DataFrame | None,
    *,
    identify: bool,
) -> ReportData:
    if rows is None:
        assert wire is not None
        rows = report_rows.with_names(report_wire.arrived_rows(wire))
    found = _fetch(report_rows.hottest(rows, MAX_HOT), Hot)
    found.sort(key=lambda hot: (hot.kind, -hot.rows, hot.name))
    if not identify:
        found = hide_names(found, secrets.token_bytes(32))
    return attrs.evolve(data, hottest=found)


def _add_findings(data: ReportData, findings: DataFrame) -> ReportData:
    is_note = sf.col("severity") == Severity.INFO.value
    notes = (
        findings.where(is_note)
        .groupBy("kind", "stream")
        .agg(
            sf.count(sf.lit(1)).alias("findings"),
            sf.sum("count").alias("count"),
            sf.min("message").alias("example"),
        )
        .orderBy("kind", "stream")
    )
    counted = findings.groupBy("severity").agg(sf.count(sf.lit(1)).alias("findings"))
    severities = [severity.value for severity in Severity]
    order = sf.array_position(sf.lit(severities), sf.col("severity"))
    worst = (
        findings.drop("evidence")
        .where(~is_note)
        .orderBy(order, "kind", "stream", "instance_name", "first_token")
        .limit(MAX_FINDINGS)
    )
    return attrs.evolve(
        data,
        findings=_fetch(worst, FindingLine),
        notes=_fetch(notes, Notes),
        finding_count={row["severity"]: row["findings"] for row in counted.collect()},
    )


def _fetch(frame: DataFrame, to: Callable[..., _T]) -> list[_T]:
    return [
        to(**{name: _utc(value) for name, value in row.asDict().items()})
        for row in frame.collect()
    ]


def _utc(value: Any) -> Any:
    """Convert a time to UTC; return any other value unchanged.

    PySpark returns naive times in this process's zone.
    """
    if isinstance(value, datetime.datetime):
        return value.astimezone(datetime.timezone.utc)
    return value


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
