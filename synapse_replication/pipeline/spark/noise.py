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
from collections.abc import Callable, Iterable, Iterator
from typing import Final

#: Lines that are irrelevant to the job.
_NOISE: Final = re.compile(
    r"Using incubator modules"
    r"|Failed to cancel job group"
    r"|Using Spark's (?:default|repl) log4j profile"
    r"|Setting default log level to|To adjust logging level use"
)

_TRACEBACK: Final = "Traceback (most recent call last):"

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


@contextlib.contextmanager
def filtered_stderr() -> Iterator[int]:
    """Yield a descriptor for the standard error of processes started in the context.

    The filter runs until these processes have ended.
    """
    reader, writer = os.pipe()
    threading.Thread(target=_copy, args=(reader,), daemon=True).start()
    try:
        yield writer
    finally:
        os.close(writer)


def _copy(reader: int) -> None:
    with os.fdopen(reader, "rb") as pipe:
        read = (line.decode(errors="replace") for line in _lines(pipe.readline))
        for line in without_noise(read):
            # Look up sys.stderr for each line: a progress bar replaces it while the bar
            # is shown.
            out = sys.stderr
            # Continue even if it is closed or None: Java would block on a full pipe.
            with contextlib.suppress(OSError, ValueError, AttributeError):
                out.write(line)
                out.flush()


def _lines(readline: Callable[[int], bytes]) -> Iterator[bytes]:
    while line := readline(_LONGEST):
        yield line
