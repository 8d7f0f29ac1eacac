"""When a run is killed, and how."""

from __future__ import annotations

import os
import random
import select
import signal
from pathlib import Path

import attrs

from synapse_replication.pipeline.archive.table import Point

__all__ = ["PATIENCE_SECONDS", "WHOM", "Kill", "kill_process", "plan_kills"]

#: Who is killed.
WHOM = ("python", "both", "java")

#: Points that a run comes to once.
_ONCE = (Point.PLANNED, Point.COMPACTING, Point.COMPACTED, Point.VACUUMED)

#: How long a run, or a process that was killed, may take to end, s.
PATIENCE_SECONDS = 300.0


@attrs.frozen
class Kill:
    """When and whom to kill.

    :ivar point: a named point, and the how-manieth time it is reached; or else
    :ivar after: so many points of any name, and
    :ivar delay: so many s more.
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
    """Plan each named point once, and the rest at random."""
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
    """Kill a process of its own group, its Java, or both."""
    if whom == "both":
        os.killpg(python, signal.SIGKILL)
        return
    victim = python if whom == "python" else _java_of(python)
    if victim is None:
        return
    # Opened before: a number may be given out again.
    watched = os.pidfd_open(victim)
    try:
        os.kill(victim, signal.SIGKILL)
        if python == os.getpid():
            # What the point leads to must not happen any more.
            select.select([watched], [], [], PATIENCE_SECONDS)
    finally:
        os.close(watched)


def _java_of(python: int) -> int | None:
    children = Path(f"/proc/{python}/task").glob("*/children")
    for child in " ".join(path.read_text() for path in children).split():
        if b"java" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")[0]:
            return int(child)
    return None
