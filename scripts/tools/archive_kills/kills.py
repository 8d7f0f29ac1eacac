"""The plan of kills, and their execution."""

from __future__ import annotations

import os
import random
import select
import signal
from pathlib import Path

import attrs

from tests.support.archive_points import Point

#: The processes that one kill can end.
VICTIMS = ("python", "both", "java")

#: Points that a run reaches only once.
_ONCE = (
    Point.PLANNED,
    Point.STARTED,
    Point.COMPACTING,
    Point.COMPACTED,
    Point.VACUUMED,
)

#: The time within which a run, or a killed process, must end, in s.
PATIENCE_SECONDS = 300.0


@attrs.frozen
class Kill:
    """One planned kill.

    :ivar victims: the processes to kill.
    :ivar point: the named point at which to kill; ``None`` to use ``after`` and
        ``delay``.
    :ivar nth: kill when ``point`` is reached for the nth time.
    :ivar after: kill after this number of points of any name.
    :ivar delay: the delay after the last of these points, in s.
    """

    victims: str
    point: Point | None = None
    nth: int = 1
    after: int = 0
    delay: float = 0.0

    def __str__(self) -> str:
        if self.point is not None:
            return f"{self.victims} at {self.point.value} {self.nth}"
        return f"{self.victims} {self.delay:.2f} s after point {self.after}"


def plan_kills(count: int, rng: random.Random) -> list[Kill]:
    """Plan kills of all victims at each named point, then more at random times."""
    kills = [
        Kill(victims, point, 1 if point in _ONCE else rng.randint(1, 2))
        for point in Point
        for victims in VICTIMS
        # Java is started after the plan.
        if (victims, point) != ("java", Point.PLANNED)
    ]
    while len(kills) < count:
        kills.append(
            Kill(
                rng.choice(VICTIMS),
                after=rng.randint(1, 12),
                delay=rng.uniform(0.0, 0.6),
            )
        )
    return kills[:count]


def kill_process(python: int, victims: str) -> None:
    """Kill a Python process, its Java process, or both.

    :param python: the id of the Python process, which leads its own process group.
    :param victims: one of :data:`VICTIMS`.
    """
    java = java_of(python)
    if victims == "both" and java is not None:
        os.kill(java, signal.SIGKILL)
    victim = java if victims == "java" else python
    if victim is None:
        return
    # Open the process before killing it, because its id may be reused afterwards.
    watched = os.pidfd_open(victim)
    try:
        os.kill(victim, signal.SIGKILL)
        if python == os.getpid():
            # Wait, so that this process does not execute the step after the point.
            select.select([watched], [], [], PATIENCE_SECONDS)
    finally:
        os.close(watched)


def java_of(python: int) -> int | None:
    """Return the id of the Java process of a Python process, if there is one."""
    children = Path(f"/proc/{python}/task").glob("*/children")
    for child in " ".join(path.read_text() for path in children).split():
        if b"java" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")[0]:
            return int(child)
    return None
