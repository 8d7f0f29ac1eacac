"""Log lines for programs: one JSON object a line.

``time`` (ISO 8601, UTC), ``level``, ``logger`` and ``message`` are always there, then
the fields of the event that are texts, numbers or truth values (``stream``, ``writer``,
``token`` and so on), and ``error`` with the traceback if there is one. Other values are
in the message alone.
"""

from __future__ import annotations

import json
import math
from datetime import datetime, timezone
from typing import Any, TextIO

from twisted.logger import ILogObserver, LogEvent, formatEvent
from zope.interface import implementer

from synapse_replication.instrumentation.log_lines import MAX_LOG_LINE

__all__ = ["JsonLogObserver", "to_json"]

#: Fields of ours come before those of the event: they cannot be written over.
_OURS = frozenset({"time", "level", "logger", "message", "error"})
#: What old ways of logging put into each event.
_NOISE = frozenset({"format", "isError", "system", "printed", "why"})


def to_json(event: LogEvent) -> str:
    """Write a log event as one line, without its end."""
    moment = datetime.fromtimestamp(event["log_time"], timezone.utc)
    level = event.get("log_level")
    record: dict[str, Any] = {
        "time": moment.isoformat(timespec="milliseconds"),
        "level": "info" if level is None else level.name,
        "logger": event.get("log_namespace", ""),
        "message": formatEvent(event),
    }
    record.update(
        (name, value)
        for name, value in event.items()
        if isinstance(value, str | int | float)
        and not (isinstance(value, float) and not math.isfinite(value))
        and not name.startswith("log_")
        and name not in _OURS
        and name not in _NOISE
    )
    failure = event.get("log_failure")
    if failure is not None:
        record["error"] = failure.getTraceback()
    # ASCII: half characters, which a peer may have sent, have no other form.
    line = json.dumps(record)
    most = MAX_LOG_LINE
    while len(line) >= MAX_LOG_LINE and most > 8:
        most //= 2
        line = json.dumps(
            {name: _shorten(value, most) for name, value in record.items()}
        )
    return line


def _shorten(value: Any, most: int) -> Any:
    """Return a text cut in the middle: a traceback's end says what failed."""
    if not isinstance(value, str) or len(value) <= most:
        return value
    return f"{value[: most // 2]} ... {value[-most // 2 :]}"


@implementer(ILogObserver)
class JsonLogObserver:
    """Writes each event as a line of JSON.

    :param stream: where to.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __call__(self, event: LogEvent) -> None:
        """Write an event."""
        self._stream.write(to_json(event) + "\n")
        self._stream.flush()
