"""Filters the standard error of Java and of Python workers.

Java is started with a pipe as its standard error, which its Python workers inherit. A
thread copies the relevant lines from the pipe to ``sys.stderr``.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Final

#: Lines that are irrelevant to the job.
_NOISE: Final = re.compile(
    r"Using incubator modules"
    r"|Failed to cancel job group"
    r"|Using Spark's (?:default|repl) log4j profile"
    r"|Setting default log level to|To adjust logging level use"
)

_TRACEBACK: Final = "Traceback (most recent call last):"

#: The beginning of the line that says why Java did not start.
_CAUSE: Final = re.compile(r"Exception in thread|Error|Invalid|Unrecognized|Could not")

#: The maximum number of lines that are held back.
_MOST_HELD: Final = 1000

#: The maximum length of a line, in bytes; longer lines are split.
_LONGEST: Final = 65_536


def without_noise(lines: Iterable[str]) -> Iterator[str]:
    """Yield the relevant lines; of a traceback, only the line with the exception.

    If a failure is permanent, the driver raises it with the complete traceback.
    """
    within = False
    for line in lines:
        if line.startswith(_TRACEBACK):
            within = True
        elif within and (not line.strip() or line[0].isspace()):
            continue
        elif within:
            within = False
            yield f"a worker failed: {line}"
        elif not _NOISE.search(line):
            yield line


class JavaErrors:
    """The standard error of Java, which is held back until Java has started.

    If Java does not start, the lines are the reason for it.
    """

    def __init__(self) -> None:
        self._held: list[str] | None = []
        self._lock = threading.Lock()
        #: Set when Java and all processes that it started have ended.
        self.ended = threading.Event()

    def release(self) -> None:
        """Print the lines that were held back, and all further ones at once."""
        with self._lock:
            held, self._held = self._held, None
        for line in held or ():
            _print(line)

    @property
    def cause(self) -> str:
        """The line that says why Java did not start, or the last line.

        Waits for up to 10 s until Java has ended.
        """
        self.ended.wait(10)
        with self._lock:
            lines = [line.strip() for line in self._held or () if line.strip()]
        found = [line for line in lines if _CAUSE.match(line)]
        return (found or lines[-1:] or ["Java printed nothing"])[0]

    def add(self, line: str) -> None:
        """Hold back or print a line. Thread-safe."""
        with self._lock:
            if self._held is not None:
                if len(self._held) < _MOST_HELD:
                    self._held.append(line)
                return
        _print(line)


@contextlib.contextmanager
def filtered_stderr(errors: JavaErrors) -> Iterator[int]:
    """Yield a descriptor for the standard error of processes started in the context.

    The filter runs until these processes have ended.
    """
    reader, writer = os.pipe()
    threading.Thread(target=_copy, args=(reader, errors), daemon=True).start()
    try:
        yield writer
    finally:
        os.close(writer)


def _copy(reader: int, errors: JavaErrors) -> None:
    with os.fdopen(reader, "rb") as pipe:
        lines = iter(lambda: pipe.readline(_LONGEST), b"")
        for line in without_noise(each.decode(errors="replace") for each in lines):
            errors.add(line)
    errors.ended.set()


def _print(line: str) -> None:
    # Look up sys.stderr for each line: a progress bar replaces it while the bar is
    # shown.
    out = sys.stderr
    # Continue even if it is closed or None: Java would block on a full pipe.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        out.write(line)
        out.flush()
