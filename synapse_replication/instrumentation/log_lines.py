"""The limit on the length of a log line, whatever its content."""

from __future__ import annotations

from typing import Final

#: The length of the longest log line, in bytes, including the line end.
MAX_LOG_LINE: Final = 8000


def cut_lines(text: str | None) -> str | None:
    """Shorten each line that is too long, and state how much was omitted."""
    # A character has up to 4 bytes.
    if text is None or len(text) < MAX_LOG_LINE // 4:
        return text
    return "\n".join(map(_cut, text.split("\n")))


def _cut(line: str) -> str:
    if len(line.encode("utf-8", "replace")) < MAX_LOG_LINE:
        return line
    length = MAX_LOG_LINE // (1 if line.isascii() else 4) - 50
    return f"{line[:length]}... ({len(line) - length} more characters)"
