"""What is recorded of writers, links and peers between two looks at the status."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import TypeVar

import attrs

from synapse_replication.handlers.observer import CatchUpEvent, PeerHeartbeat

__all__ = [
    "MAX_NAMES",
    "LinkRecord",
    "PeerRecord",
    "StatusLimits",
    "StatusRecords",
    "WriterRecord",
    "keep",
]

#: The most writers that are tracked; likewise links, and peers.
MAX_NAMES = 1000
#: The most undelivered announcements of a writer that are stored; beyond this number,
#: every second one is removed.
MAX_TOLD = 256
#: The least time in s between two stored announcements of a writer.
_TOLD_EVERY = 0.5

_Name = TypeVar("_Name", bound=Hashable)
_Value = TypeVar("_Value")


@attrs.frozen
class StatusLimits:
    """The durations after which a state is reported, in s, and limits.

    :ivar late_after: the age of undelivered rows from which a live writer is shown as
        catching up.
    :ivar stalled_after: how long a problem must last before the writer is stalled.
    :ivar silent_after: how long after its last heartbeat a peer is considered gone.
    :ivar duplicate_for: how long after its last detection a duplicate is reported.
    :ivar history: the number of samples of the lag that are stored.
    :ivar forget_after: how long after its last event an entry that the configuration
        does not name is removed, for instance a peer that has left.
    """

    late_after: float = 2.0
    stalled_after: float = 10.0
    silent_after: float = 15.0
    duplicate_for: float = 60.0
    history: int = 60
    forget_after: float = 600.0


@attrs.define
class WriterRecord:
    """One writer of one stream.

    :ivar waiting_since: since when its position is waited for; all times are monotonic,
        in s.
    :ivar progress_at: when rows were delivered last.
    """

    waiting_since: float
    progress_at: float
    position: int | None = None
    announced: int | None = None
    connection: str | None = None
    was_level: bool = False
    catch_up: CatchUpEvent | None = None
    is_removed: bool = False
    failing_since: float | None = None
    failure: str = ""
    #: The undelivered announcements: ``(token, monotonic time of the write)``.
    told: deque[tuple[int, float]] = attrs.Factory(deque)
    history: deque[int] = attrs.Factory(deque)
    #: Position, announced position and connection at the last sample that differed
    #: from the one before, and the time of that sample.
    sampled: tuple[int | None, int | None, str | None] | None = None
    sampled_at: float = 0.0

    #: The writer's reported position if it is below ours, and since when it is.
    behind_us: int | None = None
    behind_us_since: float = 0.0

    def lag(self) -> int:
        """Return how many tokens were announced and not delivered."""
        if self.announced is None or self.position is None:
            return 0
        return max(self.announced - self.position, 0)

    def announce(self, token: int, written: float) -> None:
        """Record that the writer reached ``token`` at or before ``written``."""
        if self.position is None or token >= self.position:
            self.behind_us = None
        if self.announced is None or token > self.announced:
            self.announced = token
        if self.position is not None and token <= self.position:
            return
        if self.told and self.told[-1][1] > written:
            # Lower tokens were written no later than this one: correct their times.
            self.told = deque(
                (upto, min(told, written) if upto <= token else told)
                for upto, told in self.told
            )
        if not self.told or token > self.told[-1][0]:
            if self.told and written < self.told[-1][1] + _TOLD_EVERY:
                self.told[-1] = (token, self.told[-1][1])
                return
            self.told.append((token, written))
            if len(self.told) > MAX_TOLD:
                first, *rest = self.told
                self.told = deque([first, *rest[1::2]])

    def move(self, position: int, now: float) -> None:
        """Record that the rows up to ``position`` were delivered."""
        if position != self.position:
            self.progress_at = now
            self.failing_since = None
        self.position = position
        while self.told and self.told[0][0] <= position:
            self.told.popleft()
        if self.announced is None or position > self.announced:
            self.announced = position
        if not self.told:
            self.progress_at = now

    def oldest(self) -> float | None:
        """Return the time of the oldest undelivered write, if there is one."""
        return self.told[0][1] if self.told and self.lag() else None


@attrs.define
class LinkRecord:
    """The connections of one name.

    :ivar since: when the first of them was made, or the last was lost.
    :ivar up: how many there are.
    :ivar why: why there is none.
    """

    since: float
    up: int = 0
    why: str = "not connected yet"


@attrs.define
class PeerRecord:
    """One peer that speaks the extension.

    :ivar news: its last heartbeat.
    :ivar heard: when that arrived.
    """

    news: PeerHeartbeat
    heard: float
    #: Since when a heartbeat could have arrived and none has.
    silent_since: float = attrs.field(
        default=attrs.Factory(lambda self: self.heard, takes_self=True)
    )


@attrs.define
class StatusRecords:
    """All that is recorded.

    :ivar writers: by (stream, writer).
    :ivar links: by the name of the connection.
    :ivar peers: by their names.
    :ivar duplicates: by name: where the processes run, and when that was detected.
    """

    writers: dict[tuple[str, str], WriterRecord] = attrs.Factory(dict)
    links: dict[str, LinkRecord] = attrs.Factory(dict)
    peers: dict[str, PeerRecord] = attrs.Factory(dict)
    duplicates: dict[str, tuple[str, float]] = attrs.Factory(dict)


def keep(table: dict[_Name, _Value], key: _Name, value: _Value) -> _Value | None:
    """Store a value, unless the table is full; return it, or ``None`` if it is."""
    if key not in table and len(table) >= MAX_NAMES:
        return None
    table[key] = value
    return value
