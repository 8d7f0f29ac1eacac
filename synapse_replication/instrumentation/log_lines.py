"""The limits on the lines of a log, whatever a peer or a host has made part of them."""

from __future__ import annotations

from typing import Final

from synapse_replication.text import printable

#: The length of the longest log line, in bytes, including the line end.
MAX_LOG_LINE: Final = 8000


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
