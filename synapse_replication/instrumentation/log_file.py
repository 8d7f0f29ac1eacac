"""A log that neither the origin of a line nor its reader can harm.

Lines are safe, whatever a peer or a host has made part of them, as text or as JSON.
With JSON, each line is one object. ``time`` (ISO 8601, UTC), ``level``, ``logger`` and
``message`` are always present, followed by the event's own fields that are strings,
finite numbers or booleans (``stream``, ``writer``, ``token`` and so on), and by
``error`` with the traceback if there is one. Values of other fields appear only in the
message, if it quotes them. A line that would be too long has shortened strings.

:class:`LogFile` never blocks its process, and counts the lines that are lost.
"""

from __future__ import annotations

import json
import math
import os
import select
import threading
from datetime import datetime, timezone
from typing import Any, Final, TextIO

from twisted.logger import LogEvent, formatEvent

from synapse_replication.text import counted, printable

#: The time in s that a reader has to make room, once until it has made room.
_PATIENCE: Final = 0.1
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


class LogFile:
    """Writes lines to a file, a terminal, or a pipe or socket that others may not read.

    If nobody reads the log, or its disk is full, lines are dropped; the next line that
    can be written is preceded by their number.

    Thread-safe: threads of the database log, too.

    :param stream: an open text stream with a descriptor.
    """

    def __init__(self, stream: TextIO) -> None:
        self._descriptor = stream.fileno()
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLOUT)
        self._lost = 0
        self._why = ""
        # Whether the last line that was written has no end.
        self._is_cut = False
        # An object of poll() may not be used by two threads at once.
        self._lock = threading.Lock()

    def write(self, text: str) -> None:
        """Write the text of one or more lines, or drop it."""
        with self._lock:
            self._write(text)

    def _write(self, text: str) -> None:
        data = text.encode("utf-8", "backslashreplace")
        if self._lost:
            lines = counted(self._lost, "log line")
            note = f"{lines} could not be written: {self._why}\n"
            data = b"\n" * self._is_cut + note.encode() + data
        lost = self._lost
        try:
            while data:
                self._wait()
                # Less than this does not block if there is room in a pipe.
                written = os.write(self._descriptor, data[: select.PIPE_BUF])
                self._is_cut = not data[:written].endswith(b"\n")
                data = data[written:]
        except OSError as error:
            self._why = error.strerror or str(error)
            self._lost = lost + text.count("\n")
        else:
            self._lost = 0

    def _wait(self) -> None:
        """Wait until there is room.

        :raises TimeoutError: if there is none in time.
        """
        found: Any = self._poll.poll(0 if self._lost else _PATIENCE * 1000)
        if not found:
            raise TimeoutError(0, "nobody reads the log")

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""
