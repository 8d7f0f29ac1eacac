"""What Java and Python workers write to standard error, without what nobody needs.

Java inherits the standard error of the process that starts it. While it starts, that
is a pipe here; a thread reads its lines and writes those on that say something.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Final

__all__ = ["quiet_start", "without_noise"]

#: Lines that say nothing about the job.
_NOISE: Final = re.compile(
    r"Using incubator modules"
    r"|Failed to cancel job group"
    r"|Using Spark's (?:default|repl) log4j profile"
    r"|Setting default log level to|To adjust logging level use"
)

_TRACEBACK: Final = "Traceback (most recent call last):"

#: Bytes of a line, at most; the rest is a line of its own.
_LONGEST: Final = 65_536


def without_noise(lines: Iterable[str]) -> Iterator[str]:
    """Return lines without noise; of a traceback, the line that says what it was.

    What failed for good is raised in the driver, with all of it.
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
def quiet_start() -> Iterator[None]:
    """Have processes that start within the context write to a filter.

    It lasts as long as they do.
    """
    try:
        before = os.dup(2)
    except OSError:
        # There is no standard error.
        yield
        return
    reader, writer = os.pipe()
    threading.Thread(target=_copy, args=(reader,), daemon=True).start()
    sys.stderr.flush()
    os.dup2(writer, 2)
    os.close(writer)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(before, 2)
        os.close(before)


def _copy(reader: int) -> None:
    with os.fdopen(reader, "rb") as pipe:
        read = (line.decode(errors="replace") for line in _lines(pipe.readline))
        for line in without_noise(read):
            # A stream that was closed must not stop what drains the pipe: Java would
            # wait for it for good.
            with contextlib.suppress(OSError, ValueError):
                # Looked up each time: what shows a bar puts itself in its place.
                sys.stderr.write(line)
                sys.stderr.flush()


def _lines(readline: Callable[[int], bytes]) -> Iterator[bytes]:
    while line := readline(_LONGEST):
        yield line
