"""Safe log lines, whatever a peer or a host has made part of them: text, or JSON.

With JSON, each line is one object. ``time`` (ISO 8601, UTC), ``level``, ``logger`` and
``message`` are always present, followed by the event's own fields that are strings,
finite numbers or booleans (``stream``, ``writer``, ``token`` and so on), and by
``error`` with the traceback if there is one. Values of other fields appear only in the
message, if it quotes them. A line that would be too long has shortened strings.
"""

from __future__ import annotations

import json
import math
from datetime import datetime, timezone
from typing import Any, Final

from twisted.logger import LogEvent, formatEvent

from synapse_replication.text import printable

#: The length of the longest log line, in bytes, including the line end.
MAX_LOG_LINE: Final = 8000

#: Fields that this module sets: the event's fields cannot overwrite them.
_RESERVED = frozenset({"time", "level", "logger", "message", "error"})
#: Fields that Twisted's legacy logging adds to each event.
_LEGACY = frozenset({"format", "isError", "system", "printed", "why"})


def clean_lines(text: str | None) -> str | None:
    """Escape unprintable characters, and shorten each line that is too long."""
    if text is None:
        return None
    return "\n".join(map(_clean, text.split("\n")))


def _clean(line: str) -> str:
    # Twisted begins continuation lines with tabs.
    body = line.lstrip("\t")
    tabs = line[: len(line) - len(body)]
    return tabs + _cut(printable(body))


def _cut(line: str) -> str:
    # A character has up to 4 bytes.
    if len(line) < MAX_LOG_LINE // 4 or len(line.encode()) < MAX_LOG_LINE:
        return line
    length = MAX_LOG_LINE // (1 if line.isascii() else 4) - 50
    return f"{line[:length]}... ({len(line) - length} more characters)"


def json_line(event: LogEvent) -> str:
    """Return a log event as one line of JSON."""
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
        and name not in _RESERVED
        and name not in _LEGACY
    )
    failure = event.get("log_failure")
    if failure is not None:
        record["error"] = failure.getTraceback()
    # dumps() escapes all non-ASCII characters. This is required for lone surrogates,
    # which a peer may have sent, and which cannot be encoded in UTF-8.
    line = json.dumps(record)
    limit = MAX_LOG_LINE
    while len(line) >= MAX_LOG_LINE and limit > 8:
        limit //= 2
        line = json.dumps(
            {name: _shorten(value, limit) for name, value in record.items()}
        )
    return line + "\n"


def _shorten(value: Any, limit: int) -> Any:
    """Cut a long string in the middle, since a traceback's end names the error."""
    if not isinstance(value, str) or len(value) <= limit:
        return value
    return f"{value[: limit // 2]} ... {value[-limit // 2 :]}"
