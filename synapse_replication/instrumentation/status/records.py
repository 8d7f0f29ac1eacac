"""The recorded state of writers, links and peers, from which the status is computed."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Mapping
from typing import Final, TypeVar

from msgspec import Struct, field

from synapse_replication.handlers.events import AnnouncedBy, PeerHeartbeat
from synapse_replication.instrumentation.status.model import StallReason

#: The maximum number of entries of each kind: writers, links, peers, duplicates.
MAX_NAMES = 1000
#: The maximum number of stored undelivered announcements of a writer; beyond this
#: number, every second one is removed.
MAX_UNDELIVERED = 256
#: The age in s of undelivered rows above which a live writer is shown as catching up.
LATE_AFTER = 2.0
#: How long a problem must last before the writer is stalled, in s.
STALLED_AFTER = 10.0
#: How long a peer must send no heartbeat, although a link is up, before the peer is
#: considered gone, in s.
PEER_SILENT_AFTER = 15.0
#: The number of intervals of its heartbeats after which a silent process is gone.
_MISSED = 3
#: How long after its last detection a duplicate is reported, in s.
DUPLICATE_FOR = 60.0
#: How long a partial resync is shown after its end, in s.
RESYNC_SHOWN_FOR = 60.0
#: The number of samples of the lag that are stored.
MAX_HISTORY = 60
#: The time in s without events after which an entry is removed if the configuration
#: does not name it, for instance a peer that was killed.
FORGET_AFTER = 600.0
#: The minimum time between two stored announcements of a writer, in s.
_ANNOUNCEMENT_INTERVAL = 0.5

_Name = TypeVar("_Name", bound=Hashable)
_Value = TypeVar("_Value")


class WriterRecord(Struct):
    """Everything that was heard of one writer of one stream.

    All times are monotonic, in s. The state of the writer's rows is that of its reader.

    :ivar since: when this record was created.
    :ivar progress_at: the time of the last :meth:`move` that changed ``position`` or
        left ``undelivered`` empty.
    :ivar position: the position up to which the writer's rows were delivered; ``None``
        if it is not known.
    :ivar announced: the greatest position that the writer is known to have reached;
        ``None`` if there is none.
    :ivar heard_at: when the writer was last heard; ``None`` if it never was.
    :ivar heard_by: what was heard.
    :ivar spoke_at: when its last row or POSITION arrived.
    :ivar announced_at: when its last POSITION or heartbeat arrived.
    :ivar link: the name of the link on which its last row or POSITION arrived.
    :ivar has_written: whether a row arrived, or was fetched. An announced position says
        nothing: in some streams, that of an idle writer advances with the others'.
    :ivar is_drained: whether this is a removed writer whose rows were delivered.
    :ivar was_live: whether, at some time, the writer was live and all its rows were
        delivered.
    :ivar catch_up_from: the position at which the current catch-up began.
    :ivar missing_since: when it began.
    :ivar fetching_since: when its last fetch began.
    :ivar resynced_at: when its last catch-up ended, if that fetched rows only from the
        writer's backlog or memory; otherwise ``None``.
    :ivar behind_us: the writer's reported position if it is below the position of this
        process.
    :ivar behind_since: the time of the first such report.
    :ivar lost_since: when a row that cannot be parsed arrived, if nothing was heard of
        the writer's position since.
    :ivar problems: by reason: when the problem was first found, and an explanation of
        it, for display. That a catch-up fails is a problem until the position changes.
    :ivar set_back: the lowest stored position that was found when the database was set
        back, and the highest position of this process.
    :ivar lost_tokens: the number of tokens whose rows are lost.
    :ivar skipped: the number of skipped rows.
    """

    since: float
    progress_at: float
    position: int | None = None
    announced: int | None = None
    heard_at: float | None = None
    heard_by: AnnouncedBy | None = None
    spoke_at: float | None = None
    announced_at: float | None = None
    link: str = ""
    has_written: bool = False
    is_drained: bool = False
    was_live: bool = False
    catch_up_from: int | None = None
    missing_since: float = 0.0
    fetching_since: float = 0.0
    resynced_at: float | None = None
    behind_us: int | None = None
    behind_since: float = 0.0
    lost_since: float | None = None
    problems: dict[StallReason, tuple[float, str]] = field(default_factory=dict)
    set_back: tuple[int, int] | None = None
    lost_tokens: int = 0
    skipped: int = 0
    #: The undelivered announcements: ``(token, latest possible time of the write)``.
    undelivered: list[tuple[int, float]] = field(default_factory=list)
    #: Samples of the lag, in ids, oldest first.
    history: list[int] = field(default_factory=list)

    def hear(self, link: str, by: AnnouncedBy, now: float) -> None:
        """Record a row or a POSITION of the writer, and where it arrived."""
        self.link, self.heard_by = link, by
        self.heard_at = self.spoke_at = now
        self.lost_since = None
        self.problems.pop(StallReason.UNDECLARED_WRITER, None)
        self.is_drained = False
        if by is AnnouncedBy.POSITION:
            self.announced_at = now
        elif by is AnnouncedBy.ROW:
            self.has_written = True

    def add_problem(self, reason: StallReason, now: float, detail: str) -> None:
        """Record a problem, or another explanation of one that was found before."""
        since, _ = self.problems.get(reason, (now, ""))
        self.problems[reason] = since, detail

    def is_quiet(self) -> bool:
        """Return whether nothing in this record can be a reason for a stall."""
        return (
            self.announced == self.position
            and self.behind_us is None
            and self.lost_since is None
            and not self.problems
        )

    def is_idle(self, before: float) -> bool:
        """Return whether nothing was heard or delivered since ``before``."""
        return max(self.since, self.heard_at or 0.0, self.progress_at) <= before

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
            self.undelivered = [
                (upto, min(at, written) if upto <= token else at)
                for upto, at in self.undelivered
            ]
        never = float("-inf")
        last, at = self.undelivered[-1] if self.undelivered else (never, never)
        if token <= last:
            return
        if written < at + _ANNOUNCEMENT_INTERVAL:
            self.undelivered[-1] = token, at
            return
        self.undelivered.append((token, written))
        if len(self.undelivered) > MAX_UNDELIVERED:
            del self.undelivered[1::2]

    def end_catch_up_problems(self) -> None:
        """Record that the catch-up has made progress, or lacks less than it seemed."""
        self.problems.pop(StallReason.CATCH_UP_FAILS, None)
        self.problems.pop(StallReason.DATABASE_BEHIND, None)

    def move(self, position: int, now: float) -> None:
        """Record that the rows up to ``position`` were delivered."""
        if position != self.position:
            self.progress_at = now
            self.end_catch_up_problems()
            if self.behind_us is not None and position <= self.behind_us:
                self.behind_us = None
        self.position = position
        while self.undelivered and self.undelivered[0][0] <= position:
            del self.undelivered[0]
        if self.announced is None or position > self.announced:
            self.announced = position
        if not self.undelivered:
            self.progress_at = now

    def move_back(self, position: int, now: float) -> None:
        """Record that the position moved back, as the writer did, or seemed to do."""
        self.announced = position
        self.undelivered.clear()
        self.behind_us = None
        self.move(position, now)

    def oldest(self) -> float | None:
        """Return the time of the oldest undelivered write, or ``None``.

        Thread-safe: another thread may remove the entry at the same time.
        """
        if self.lag():
            with contextlib.suppress(IndexError):
                return self.undelivered[0][1]
        return None


class LinkRecord(Struct):
    """The state of the connections with one name.

    :ivar since: the monotonic time in s at which ``up`` last changed from or to 0;
        before the first such change, the time at which this record was created.
    :ivar up: the number of open connections.
    :ivar why: the reason for which no connection is open; empty if one is.
    :ivar address: the address of the last client; empty if the peer is a server.
    :ivar peer: the instance at the other end, if it has stated its name.
    """

    since: float
    up: int = 0
    why: str = "not connected yet"
    address: str = ""
    peer: str = ""


class PeerRecord(Struct, frozen=True):
    """The state of one peer that uses the extension.

    All times are monotonic, in s. A status report adds the last two.

    :ivar heartbeat: the last heartbeat or goodbye.
    :ivar seen: when it arrived.
    :ivar heard_at: when its last row or POSITION arrived, in any stream.
    :ivar asked_at: when this process last asked it to answer; ``None`` if it was not
        asked, or does not answer.
    """

    heartbeat: PeerHeartbeat
    seen: float
    heard_at: float = float("-inf")
    asked_at: float | None = None

    def is_silent(self, since: float, now: float) -> bool:
        """Return whether heartbeats have been missed.

        :param since: since when they could be heard.
        """
        if self.asked_at is not None and self.seen < self.asked_at:
            return now - max(self.asked_at, since) > PEER_SILENT_AFTER
        limit = max(PEER_SILENT_AFTER, _MISSED * self.heartbeat.every)
        return now - max(self.seen, since) > limit


#: The names of the links over Redis: the subscription, and the one that publishes.
REDIS_LINKS: Final = ("redis", "redis_out")


class HearingRecord(Struct, frozen=True):
    """Whether this process can hear others: whether its handler has a link.

    :ivar since: since when it has or has not had one, in s. After a pause of the
        process itself, it counts from the end of the pause.
    """

    is_up: bool = False
    since: float = 0.0


def last_asked(links: Mapping[str, LinkRecord]) -> float | None:
    """Return when peers were last asked to answer over Redis, in s.

    :param links: all links of the process, by name.
    :return: ``None`` if the process has no link over Redis, or cannot publish.
    """
    over_redis = [links[name] for name in REDIS_LINKS if name in links]
    if not over_redis or not all(link.up for link in over_redis):
        return None
    return max(link.since for link in over_redis)


def store_if_room(table: dict[_Name, _Value], key: _Name, value: _Value) -> None:
    """Store a value, unless its key is new and the table is full."""
    if key in table or len(table) < MAX_NAMES:
        table[key] = value
