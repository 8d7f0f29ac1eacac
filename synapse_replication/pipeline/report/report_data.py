"""The contents of a report; their size does not depend on the number of input rows."""

from __future__ import annotations

import datetime
import hashlib
import hmac
from collections.abc import Iterable, Sequence

import attrs

from synapse_replication.pipeline.audit.findings import AuditFinding

#: The most windows into which :func:`choose_window` divides a span, unless the span is
#: too long for all lengths.
MAX_WINDOWS = 120

_MINUTE, _HOUR, _DAY = 60, 3600, 86_400

#: The lengths of windows to choose from, in s.
_WINDOWS = (
    *(1, 2, 5, 10, 15, 30),
    *(_MINUTE * n for n in (1, 2, 5, 10, 15, 30)),
    *(_HOUR * n for n in (1, 2, 3, 6, 12)),
    *(_DAY * n for n in (1, 2, 7, 14, 30, 90, 365)),
)


@attrs.frozen(kw_only=True)
class WriterTotal:
    """The rows of one writer of a stream.

    :ivar timed: the number of rows whose time of writing is known.
    """

    stream: str
    instance_name: str
    rows: int
    tokens: int
    first_token: int
    last_token: int
    timed: int
    first_ts: datetime.datetime | None
    last_ts: datetime.datetime | None


@attrs.frozen(kw_only=True)
class WindowCount:
    """The number of rows of a writer in a window.

    :ivar start: the start of the window, in s since 1970.
    """

    stream: str
    instance_name: str
    start: int
    rows: int


@attrs.frozen(kw_only=True)
class LagLine:
    """Percentiles of the times from writing to arrival (lags), in ms.

    :ivar start: the start of the window, in s since 1970; ``None`` for the whole
        stream.
    :ivar tokens: the number of tokens that were measured.
    :ivar least: the smallest lag; negative only if the clocks of writer and recorder
        differ.
    """

    stream: str
    start: int | None
    tokens: int
    p50: float
    p95: float
    p99: float
    least: float


@attrs.frozen(kw_only=True)
class BatchBucket:
    """The number of a stream's tokens whose number of rows is in a range.

    :ivar bucket: the lower bound of the range, in rows. The upper bound, which is
        excluded, is twice as large.
    :ivar p50: the median number of rows of the stream's tokens.
    :ivar p99: the 99th percentile of that number.
    :ivar largest: the greatest number of rows of a token of the stream.
    """

    stream: str
    bucket: int
    tokens: int
    p50: int
    p99: int
    largest: int


@attrs.frozen(kw_only=True)
class StreamEvent:
    """A POSITION that makes readers catch up, or that resets the stream.

    :ivar kind: ``catch-up`` or ``reset``.
    :ivar known: the greatest token of the writer's previous POSITION, and of its rows
        between that POSITION and this one.
    """

    kind: str
    stream: str
    instance_name: str
    received_ts: datetime.datetime | None
    recording: str
    line_number: int
    known: int
    prev_token: int
    token: int


@attrs.frozen(kw_only=True)
class CommandCount:
    """The number of lines of a command.

    :ivar command: the name; ``None`` for the lines that cannot be read.
    """

    command: str | None
    lines: int


@attrs.frozen(kw_only=True)
class Hot:
    """A room or a user to which many rows refer.

    :ivar kind: ``room`` or ``user``.
    """

    kind: str
    name: str
    rows: int


@attrs.frozen(kw_only=True)
class Notes:
    """The findings of one kind in one stream that do not indicate a fault.

    :ivar findings: the number of findings.
    :ivar count: the number of affected rows, ids or lines.
    :ivar example: the text of one of the findings.
    """

    kind: str
    stream: str | None
    findings: int
    count: int
    example: str


@attrs.frozen(kw_only=True)
class ReportData:
    """The contents of a report.

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
    :ivar notes: the findings that are neither errors nor warnings, by kind and stream.
    :ivar finding_count: the number of all findings, by severity.
    """

    made: datetime.datetime
    sources: Sequence[str]
    totals: Sequence[WriterTotal] = ()
    rows_window: int = _HOUR
    over_time: Sequence[WindowCount] = ()
    batches: Sequence[BatchBucket] = ()
    hottest: Sequence[Hot] = ()
    identified: bool = False
    has_wire: bool = False
    wire_window: int = _MINUTE
    wire_relative: bool = False
    arrived: Sequence[WindowCount] = ()
    lags: Sequence[LagLine] = ()
    lags_over_time: Sequence[LagLine] = ()
    events: Sequence[StreamEvent] = ()
    event_count: int = 0
    commands: Sequence[CommandCount] = ()
    findings: Sequence[AuditFinding] | None = None
    notes: Sequence[Notes] = ()
    finding_count: dict[str, int] = attrs.Factory(dict)


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


def hide_names(found: Iterable[Hot], key: bytes) -> list[Hot]:
    """Replace each name by a keyed hash; without the key, the name cannot be found."""
    return [
        attrs.evolve(
            hot,
            name=f"{hot.kind} "
            + hmac.new(key, hot.name.encode(), hashlib.sha256).hexdigest()[:10],
        )
        for hot in found
    ]
