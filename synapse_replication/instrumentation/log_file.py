"""A log that never blocks its process, and counts the lines that are lost."""

from __future__ import annotations

import os
import select
from typing import Any, Final, TextIO

from synapse_replication.text import counted

#: The time in s that a reader has to make room, once until it has made room.
_PATIENCE: Final = 0.1


class LogFile:
    """Writes lines to a file, a terminal, or a pipe or socket that others may not read.

    If nobody reads the log, or its disk is full, lines are dropped; the next line that
    can be written is preceded by their number.

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

    def write(self, text: str) -> None:
        """Write the text of one or more lines, or drop it."""
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
