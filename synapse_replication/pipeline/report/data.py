"""What a report shows, as values: small, whatever was read."""

from __future__ import annotations

import datetime
import hashlib
import hmac
from collections.abc import Iterable, Sequence

import attrs

__all__ = [
    "BatchBucket",
    "CommandCount",
    "FindingLine",
    "Hot",
    "LagLine",
    "Notes",
    "ReportData",
    "StreamEvent",
    "WindowCount",
    "WriterTotal",
    "choose_window",
    "hide_names",
]

#: Windows in a plot at most.
MAX_WINDOWS = 120

_MINUTE, _HOUR, _DAY = 60, 3600, 86_400

#: Lengths of windows to choose from, s.
_WINDOWS = (
    *(1, 2, 5, 10, 15, 30),
    *(_MINUTE * n for n in (1, 2, 5, 10, 15, 30)),
    *(_HOUR * n for n in (1, 2, 3, 6, 12)),
    *(_DAY * n for n in (1, 2, 7, 14, 30, 90, 365)),
)


@attrs.frozen(kw_only=True)
class WriterTotal:
    """The rows of one writer of a stream.

    :ivar timed: rows of which it is known when they were written.
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
    """Rows of a writer in a window.

    :ivar start: of the window, s since 1970.
    """

    stream: str
    instance_name: str
    start: int
    rows: int


@attrs.frozen(kw_only=True)
class LagLine:
    """Percentiles of lags, in ms.

    :ivar start: of the window, s since 1970; ``None`` for all of a stream.
    :ivar tokens: that were measured.
    :ivar least: below zero where the clocks of writer and recorder differ.
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
    """How many tokens of a stream have about so many rows.

    :ivar bucket: from so many rows to less than twice as many.
    :ivar largest: of the stream, in rows; ``p50`` and ``p99`` likewise.
    """

    stream: str
    bucket: int
    tokens: int
    p50: int
    p99: int
    largest: int


@attrs.frozen(kw_only=True)
class StreamEvent:
    """A POSITION after which readers catch up, or begin again.

    :ivar kind: ``catch-up`` or ``reset``.
    :ivar known: the writer's token that was seen before.
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
    """Lines of a command; of ``None`` those that nobody can read."""

    command: str | None
    lines: int


@attrs.frozen(kw_only=True)
class Hot:
    """A room or a user that many rows are about.

    :ivar kind: ``room`` or ``user``.
    """

    kind: str
    name: str
    rows: int


@attrs.frozen(kw_only=True)
class FindingLine:
    """A finding of an audit, without its evidence, which may hold names."""

    kind: str
    severity: str
    stream: str | None
    instance_name: str | None
    first_token: int | None
    last_token: int | None
    count: int
    message: str


@attrs.frozen(kw_only=True)
class Notes:
    """What happens without a fault: the findings of one kind in one stream.

    :ivar findings: how many there are.
    :ivar count: rows or ids concerned.
    :ivar example: the sentence of one of them.
    """

    kind: str
    stream: str | None
    findings: int
    count: int
    example: str


@attrs.frozen(kw_only=True)
class ReportData:
    """All that is shown.

    :ivar sources: what was read, for people.
    :ivar rows_window: s, of ``over_time``; ``wire_window`` of the recordings.
    :ivar wire_relative: recordings do not say when they were made: their times are
        since the beginning of each, as if that were 1970.
    :ivar event_count: of ``events``, which are the last ones.
    :ivar identified: names of rooms and users are real.
    :ivar findings: errors and warnings, worst first; ``None`` if nobody looked for any.
    :ivar notes: all other findings, in groups.
    :ivar finding_count: by severity, of all there are.
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
    findings: Sequence[FindingLine] | None = None
    notes: Sequence[Notes] = ()
    finding_count: dict[str, int] = attrs.Factory(dict)


def choose_window(
    first: datetime.datetime | None, last: datetime.datetime | None
) -> int:
    """Choose how long windows are, in s, so that there are not too many."""
    span = (last - first).total_seconds() if first and last else 0
    for window in _WINDOWS:
        if span / window <= MAX_WINDOWS:
            return window
    return _WINDOWS[-1]


def hide_names(found: Iterable[Hot], key: bytes) -> list[Hot]:
    """Put a keyed hash in place of each name; without the key nobody can guess it."""
    return [
        attrs.evolve(
            hot,
            name=f"{hot.kind} "
            + hmac.new(key, hot.name.encode(), hashlib.sha256).hexdigest()[:10],
        )
        for hot in found
    ]
