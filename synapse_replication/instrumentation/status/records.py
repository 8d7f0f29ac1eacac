"""The recorded state of writers, links and peers, from which the status is computed."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Hashable
from typing import TypeVar

import attrs

from synapse_replication.handlers.observer import CatchUpEvent, PeerHeartbeat

#: The maximum number of entries of each kind: writers, links, peers, duplicates.
MAX_NAMES = 1000
#: The maximum number of stored undelivered announcements of a writer; beyond this
#: number, every second one is removed.
MAX_UNDELIVERED = 256
#: The minimum time between two stored announcements of a writer, in s.
_ANNOUNCEMENT_INTERVAL = 0.5

_Name = TypeVar("_Name", bound=Hashable)
_Value = TypeVar("_Value")


@attrs.frozen
class StatusLimits:
    """The thresholds and limits of the status. All durations are in s.

    :ivar late_after: the age of undelivered rows above which a live writer is shown as
        catching up.
    :ivar stalled_after: how long a problem must last before the writer is stalled.
    :ivar silent_after: how long a peer must send no heartbeat, although a link is up,
        before the peer is considered gone.
    :ivar duplicate_for: how long after its last detection a duplicate is reported.
    :ivar history: the number of samples of the lag that are stored.
    :ivar forget_after: the time without events after which an entry is removed if the
        configuration does not name it, for instance a peer that was killed.
    """

    late_after: float = 2.0
    stalled_after: float = 10.0
    silent_after: float = 15.0
    duplicate_for: float = 60.0
    history: int = 60
    forget_after: float = 600.0


@attrs.define
class WriterRecord:
    """The state of one writer of one stream. All times are monotonic, in s.

    :ivar waiting_since: the last time at which this process began to wait for the
        writer's POSITION.
    :ivar progress_at: the time of the last :meth:`move` that changed ``position`` or
        left ``undelivered`` empty.
    :ivar position: the position up to which the writer's rows were delivered; ``None``
        if it is not known.
    :ivar announced: the greatest position that the writer is known to have reached;
        ``None`` if there is none.
    :ivar connection: the name of the link on which the writer sent its POSITION;
        ``None`` while this process waits for it.
    :ivar was_live: whether, at some time, the writer was connected and all its rows
        were delivered.
    :ivar catch_up: the current catch-up, which is running or waiting for a retry; its
        ``from_token`` is that of its first step. ``None`` if there is none.
    :ivar is_removed: whether this is a removed writer that is being drained.
    :ivar failing_since: the time of the first failure of a catch-up since the position
        last changed or the writer last connected; ``None`` if there is none.
    :ivar failure: a description of the last failure of a catch-up.
    """

    waiting_since: float
    progress_at: float
    position: int | None = None
    announced: int | None = None
    connection: str | None = None
    was_live: bool = False
    catch_up: CatchUpEvent | None = None
    is_removed: bool = False
    failing_since: float | None = None
    failure: str = ""
    #: The undelivered announcements: ``(token, latest possible time of the write)``.
    undelivered: deque[tuple[int, float]] = attrs.Factory(deque)
    #: Samples of the lag, in ids, oldest first.
    history: deque[int] = attrs.Factory(deque)
    #: Position, announced position and connection at the last sample that differed
    #: from its predecessor, and the time of that sample.
    sampled: tuple[int | None, int | None, str | None] | None = None
    sampled_at: float = 0.0

    #: The writer's reported position if it is below the position of this process, and
    #: the monotonic time of the first such report.
    behind_us: int | None = None
    behind_us_since: float = 0.0

    def lag(self) -> int:
        """Return by how many ids the delivered position is below the announced one.

        Return 0 if the delivered position is not below the announced one, or if either
        of them is unknown.
        """
        if self.announced is None or self.position is None:
            return 0
        return max(self.announced - self.position, 0)

    def announce(self, token: int, written: float) -> None:
        """Record that the writer reached ``token`` no later than at ``written``."""
        if self.position is None or token >= self.position:
            self.behind_us = None
        if self.announced is None or token > self.announced:
            self.announced = token
        if self.position is not None and token <= self.position:
            return
        if self.undelivered and self.undelivered[-1][1] > written:
            # Lower tokens were written no later than this one: correct their times.
            self.undelivered = deque(
                (upto, min(at, written) if upto <= token else at)
                for upto, at in self.undelivered
            )
        if not self.undelivered or token > self.undelivered[-1][0]:
            if (
                self.undelivered
                and written < self.undelivered[-1][1] + _ANNOUNCEMENT_INTERVAL
            ):
                self.undelivered[-1] = (token, self.undelivered[-1][1])
                return
            self.undelivered.append((token, written))
            if len(self.undelivered) > MAX_UNDELIVERED:
                first, *rest = self.undelivered
                self.undelivered = deque([first, *rest[1::2]])

    def move(self, position: int, now: float) -> None:
        """Record that the rows up to ``position`` were delivered."""
        if position != self.position:
            self.progress_at = now
            self.failing_since = None
        self.position = position
        while self.undelivered and self.undelivered[0][0] <= position:
            self.undelivered.popleft()
        if self.announced is None or position > self.announced:
            self.announced = position
        if not self.undelivered:
            self.progress_at = now

    def oldest(self) -> float | None:
        """Return the time of the oldest undelivered write, or ``None``."""
        return self.first_undelivered() if self.lag() else None

    def first_undelivered(self) -> float | None:
        """Return the time of the first entry of ``undelivered``, or ``None``.

        Thread-safe: another thread may remove the entry at the same time.
        """
        with contextlib.suppress(IndexError):
            return self.undelivered[0][1]
        return None


@attrs.define
class LinkRecord:
    """The state of the connections with one name.

    :ivar since: the monotonic time in s at which ``up`` last changed from or to 0;
        before the first such change, the time at which this record was created.
    :ivar up: the number of open connections.
    :ivar why: the reason for which no connection is open; empty if one is.
    """

    since: float
    up: int = 0
    why: str = "not connected yet"


@attrs.define
class PeerRecord:
    """The state of one peer that uses the extension.

    :ivar heartbeat: the last heartbeat.
    :ivar seen: the monotonic time in s at which the last heartbeat arrived.
    """

    heartbeat: PeerHeartbeat
    seen: float
    #: The time since which a heartbeat could have arrived, but none has.
    silent_since: float = attrs.field(
        default=attrs.Factory(lambda self: self.seen, takes_self=True)
    )


@attrs.define
class StatusRecords:
    """All records of one process.

    :ivar writers: the writers, by (stream, writer).
    :ivar links: the links, by the name of the connection.
    :ivar peers: the peers, by instance name.
    :ivar duplicates: by instance name: the locations of two processes with that name,
        and the monotonic time in s of the last detection.
    """

    writers: dict[tuple[str, str], WriterRecord] = attrs.Factory(dict)
    links: dict[str, LinkRecord] = attrs.Factory(dict)
    peers: dict[str, PeerRecord] = attrs.Factory(dict)
    duplicates: dict[str, tuple[str, float]] = attrs.Factory(dict)

    def copy(self) -> StatusRecords:
        """Return a copy to iterate over. Thread-safe: dict.copy() is atomic."""
        return StatusRecords(
            self.writers.copy(),
            self.links.copy(),
            self.peers.copy(),
            self.duplicates.copy(),
        )


def store_if_room(
    table: dict[_Name, _Value], key: _Name, value: _Value
) -> _Value | None:
    """Store and return a value; return ``None`` for a new key in a full table."""
    if key not in table and len(table) >= MAX_NAMES:
        return None
    table[key] = value
    return value
