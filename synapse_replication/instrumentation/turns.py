"""Measurement of the reactor's turns, and of what made it stall.

Theory of operation: a turn is what the reactor does between two calls of ``poll()``: it
runs the delayed calls that are due, and handles what has arrived. While it lasts,
nothing else is handled in the process. :class:`ReactorTurns` wraps the reactor's poller
to time each turn, which takes less than 1 µs. A thread looks at the current turn ten
times a second; while it finds the reactor waiting, it looks more and more rarely, up to
every 3.2 s, because its wake-ups are a large part of what an idle process costs. If the
current turn has lasted too long, it records what the reactor's thread is executing,
once for each turn. A reactor without a poller is not measured.
"""

from __future__ import annotations

import faulthandler
import re
import tempfile
import threading
import time
from bisect import bisect_left
from itertools import accumulate
from typing import Any

import attrs

#: A turn of this duration or longer is a stall, in s.
STALL = 0.25
#: The upper bounds of the histogram's buckets, in s.
BUCKETS = (0.001, 0.01, 0.05, 0.1, STALL, 1.0, 5.0)
#: The interval at which the thread looks at the current turn, in s. While it finds the
#: reactor waiting, it doubles the interval, up to the second value.
_WATCH_INTERVAL, _REST = 0.1, 3.2
#: The number of functions that are recorded of a stall, and of the last parts of the
#: paths of their files.
_DEPTH, _PARTS = 5, 3
#: A function, as ``faulthandler`` writes it.
_FUNCTION = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


@attrs.frozen
class Stall:
    """The stalls in some period.

    :ivar count: their number.
    :ivar longest: the duration of the longest one, in s.
    :ivar what: what the longest one was executing, innermost function first; empty if
        it ended before it was seen, which it may if it is shorter than :data:`_REST`,
        or if no temporary file could be written.
    """

    count: int
    longest: float
    what: str


class ReactorTurns:
    """The durations of a reactor's turns.

    Use it in the reactor's thread.

    :ivar counts: the number of turns in each bucket, and of those above all buckets.
    :ivar total: the duration of all turns, in s.
    """

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.total = 0.0
        # The code that the current turn was executing at the last look, or empty.
        self._what = ""
        self._stall = Stall(0, 0.0, "")
        self._stopped = threading.Event()

    def start(self, reactor: Any) -> bool:
        """Measure the turns of a reactor; return whether it can be measured."""
        poller = getattr(reactor, "_poller", None)
        if poller is None:
            return False
        timed = _TimedPoller(poller, self)
        reactor._poller = timed  # noqa: SLF001 -- Twisted's own
        thread = threading.Thread(
            target=self._watch,
            args=(timed, threading.get_ident()),
            name="synapse_replication.turns",
            daemon=True,
        )
        thread.start()
        return True

    def stop(self) -> None:
        """Stop the thread. The turns are still measured."""
        self._stopped.set()

    def add(self, seconds: float) -> None:
        """Record the duration of a turn."""
        self.total += seconds
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        if seconds >= STALL:
            what, self._what = self._what, ""
            before = self._stall
            if seconds <= before.longest:
                seconds, what = before.longest, before.what
            self._stall = Stall(before.count + 1, seconds, what)

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Return the histogram: pairs of an upper bound and a count, and the sum."""
        bounds = [*map(str, BUCKETS), "+Inf"]
        return list(zip(bounds, accumulate(self.counts), strict=True)), self.total

    def take_stall(self) -> Stall | None:
        """Return the stalls since the last call; ``None`` if there were none."""
        stall, self._stall = self._stall, Stall(0, 0.0, "")
        return stall if stall.count else None

    def _watch(self, poller: _TimedPoller, thread: int) -> None:
        seen: float | None = None
        pause = _WATCH_INTERVAL
        while not self._stopped.wait(pause):
            began = poller.began
            is_idle = began is None or began == seen
            pause = min(2 * pause, _REST) if is_idle else _WATCH_INTERVAL
            if began is None or is_idle:
                continue
            if time.perf_counter() - began >= STALL:
                seen = began
                what = _describe(thread)
                if poller.began == began:
                    self._what = what


class _TimedPoller:
    """A poller that times what is done between its calls.

    :ivar began: when the current turn began; ``None`` while it waits for events.
    """

    def __init__(self, inner: Any, turns: ReactorTurns) -> None:
        self.began: float | None = None
        self._inner = inner
        self._turns = turns

    def poll(self, *args: Any) -> Any:
        """Wait for events."""
        if self.began is not None:
            self._turns.add(time.perf_counter() - self.began)
            self.began = None
        found = self._inner.poll(*args)
        self.began = time.perf_counter()
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _describe(thread: int) -> str:
    """Return the innermost functions of a thread.

    Python code that walks the frames of another thread lets it run in between, and
    CPython 3.11 was seen to crash then. One call of ``faulthandler`` does not.
    """
    try:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            dump = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    stack = dump.partition(f"Thread {thread:#018x} ")[2].partition("\n\n")[0]
    return ", called by ".join(
        f"{function} at {'/'.join(path.split('/')[-_PARTS:])}:{line}"
        for path, line, function in _FUNCTION.findall(stack)[:_DEPTH]
    )
