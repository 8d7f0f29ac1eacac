"""The plan of kills, and their execution."""

from __future__ import annotations

import os
import random
import select
import signal
from pathlib import Path

import attrs

from synapse_replication.pipeline.archive.table import Point

__all__ = ["PATIENCE_SECONDS", "WHOM", "Kill", "kill_process", "plan_kills"]

#: The processes to kill.
WHOM = ("python", "both", "java")

#: Points that a run reaches only once.
_ONCE = (Point.PLANNED, Point.COMPACTING, Point.COMPACTED, Point.VACUUMED)

#: The most time that a run, or a killed process, may take to end, in s.
PATIENCE_SECONDS = 300.0


@attrs.frozen
class Kill:
    """One planned kill.

    :ivar whom: the processes to kill.
    :ivar point: a named point, together with ``nth``; ``None`` to use ``after`` and
        ``delay``.
    :ivar nth: the number of times that the point is reached.
    :ivar after: the number of points of any name.
    :ivar delay: the additional delay in s.
    """

    whom: str
    point: Point | None = None
    nth: int = 1
    after: int = 0
    delay: float = 0.0

    def __str__(self) -> str:
        if self.point is not None:
            return f"{self.whom} at {self.point.value} {self.nth}"
        return f"{self.whom} {self.delay:.2f} s after point {self.after}"


def plan_kills(count: int, rng: random.Random) -> list[Kill]:
    """Plan one kill at each named point, and the others at random times."""
    kills = [
        Kill(WHOM[index % len(WHOM)], point, 1 if point in _ONCE else rng.randint(1, 2))
        for index, point in enumerate(Point)
    ]
    while len(kills) < count:
        kills.append(
            Kill(
                rng.choice(WHOM), after=rng.randint(1, 12), delay=rng.uniform(0.0, 0.6)
            )
        )
    return kills[:count]


def kill_process(python: int, whom: str) -> None:
    """Kill a process, its Java, or both; the process leads its own group."""
    if whom == "both":
        os.killpg(python, signal.SIGKILL)
        return
    victim = python if whom == "python" else _java_of(python)
    if victim is None:
        return
    # Opened first, because a process id may be reused.
    watched = os.pidfd_open(victim)
    try:
        os.kill(victim, signal.SIGKILL)
        if python == os.getpid():
            # The step after the point must not be executed.
            select.select([watched], [], [], PATIENCE_SECONDS)
    finally:
        os.close(watched)


def _java_of(python: int) -> int | None:
    children = Path(f"/proc/{python}/task").glob("*/children")
    for child in " ".join(path.read_text() for path in children).split():
        if b"java" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")[0]:
            return int(child)
    return None
