"""An observer that tracks the state of every writer, link and peer.

Theory of operation: :class:`StatusObserver` receives all observer events and records,
for each (stream, writer), the writer's announced position, the position that was
delivered here, and what delays the rows between them. The status is computed on
request, because most of it depends on the current time.

The lag in s is the age of the oldest write that was not delivered here. A heartbeat
states how long before it a position was reached; that duration does not depend on the
clocks of the two machines, so only the message's transit time is added. A writer
without heartbeats is assumed to have written at the time of the first announcement.

A problem is called *stalled* once it has lasted :attr:`StatusLimits.stalled_after`, so
that short interruptions are not reported. Memory is bounded: beyond :data:`MAX_NAMES`
entries of a kind, the one without events for the longest time is evicted; an entry that
the configuration does not name expires after a period without events.

docs/operators-guide.rst.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TypeVar

import attrs
from typing_extensions import override

from synapse_replication import __version__
from synapse_replication.errors import excerpt
from synapse_replication.handlers.observer import (
    CatchUpEvent,
    CloseReason,
    ConnectionBuffers,
    PeerHeartbeat,
    ReplicationObserver,
)
from synapse_replication.instrumentation.status.model import (
    Condition,
    DuplicateStatus,
    LinkStatus,
    PeerStatus,
    ProcessStatus,
    StallReason,
    WriterStatus,
    describe_writer,
)

__all__ = ["StatusLimits", "StatusObserver"]

#: The most writers that are tracked; likewise links, and peers.
MAX_NAMES = 1000
#: The most undelivered announcements of a writer that are stored; beyond this number,
#: every second one is removed.
MAX_TOLD = 256
#: The least time in s between two stored announcements of a writer.
_TOLD_EVERY = 0.5

#: An absent writer does not delay readiness: no rows are to be expected from it.
_NOT_THERE = frozenset({StallReason.NO_POSITION, StallReason.WRITER_GONE})

_Key = tuple[str, str]
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
class _Writer:
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
class _Link:
    since: float
    up: int = 0
    why: str = "not connected yet"


@attrs.define
class _Member:
    news: PeerHeartbeat
    heard: float
    #: Since when a heartbeat could have arrived and none has.
    silent_since: float = attrs.field(
        default=attrs.Factory(lambda self: self.heard, takes_self=True)
    )


class StatusObserver(ReplicationObserver):
    """Tracks the replication status of this process.

    Call its methods in the reactor's thread.

    :param server_name: the server name that the status shows.
    :param instance_name: the name of this process.
    :param expected: the (stream, writer) pairs from which rows are expected.
    :param needs_link: whether this process makes links; if so, it is not ready without
        one.
    :param monotonic: returns a monotonic time in s.
    :param limits: the durations after which a state is reported.
    """

    def __init__(
        self,
        server_name: str,
        instance_name: str,
        expected: Iterable[tuple[str, str]] = (),
        *,
        needs_link: bool = False,
        monotonic: Callable[[], float] = time.monotonic,
        limits: StatusLimits | None = None,
    ) -> None:
        self._server_name = server_name
        self._instance_name = instance_name
        self._monotonic = monotonic
        self._needs_link = needs_link
        self._limits = limits or StatusLimits()
        self._started = now = monotonic()
        self._writers: dict[_Key, _Writer] = {
            key: _Writer(now, now) for key in expected if key[1] != instance_name
        }
        self._expected = frozenset(self._writers)
        self._expected_names = frozenset(name for _, name in self._expected)
        #: The names of the links that this process makes itself.
        self._own_links = frozenset({instance_name, "redis", "redis_out"})
        #: Writers that were removed without events and may still be live.
        self._forgotten: dict[_Key, None] = {}
        self._links: dict[str, _Link] = {}
        self._members: dict[str, _Member] = {}
        self._duplicates: dict[str, tuple[str, float]] = {}
        self._buffer_sources: list[Callable[[], Iterable[ConnectionBuffers]]] = []
        self._own: Callable[[], Mapping[str, int]] = dict

    def watch_buffers(self, source: Callable[[], Iterable[ConnectionBuffers]]) -> None:
        """Read the buffers of some connections for each snapshot."""
        self._buffer_sources.append(source)

    def watch_own_positions(self, source: Callable[[], Mapping[str, int]]) -> None:
        """Read the positions of the streams that this process writes for each snapshot.

        :param source: returns the last announced position of each stream, by its name.
        """
        self._own = source

    def sample(self) -> None:
        """Append the current lag to the history. To be called every few seconds."""
        for writer in self._writers.values():
            writer.history.append(writer.lag())
            if len(writer.history) > self._limits.history:
                writer.history.popleft()
        self._forget_strangers()

    def _forget_strangers(self) -> None:
        """Remove expired entries that the configuration does not name."""
        now = self._monotonic()
        before = now - self._limits.forget_after
        for key, writer in list(self._writers.items()):
            if key in self._expected:
                continue
            known = (writer.position, writer.announced, writer.connection)
            if known != writer.sampled:
                writer.sampled, writer.sampled_at = known, now
            elif writer.sampled_at <= before and writer.catch_up is None:
                del self._writers[key]
                _keep(self._forgotten, key, None)
        for name, link in list(self._links.items()):
            if not link.up and link.since <= before and name not in self._own_links:
                del self._links[name]
        for name, member in list(self._members.items()):
            if member.heard <= before and name not in self._expected_names:
                del self._members[name]
        for name, (_, heard) in list(self._duplicates.items()):
            if heard <= before:
                del self._duplicates[name]

    # -- events -----------------------------------------------------------------------

    def _writer(self, stream_name: str, instance_name: str) -> _Writer | None:
        key = stream_name, instance_name
        writer = self._writers.get(key)
        if writer is None and instance_name != self._instance_name:
            now = self._monotonic()
            writer = _keep(self._writers, key, _Writer(now, now))
            if writer is not None and key in self._forgotten:
                del self._forgotten[key]
                # Its POSITION came before it was removed; there may be no further one.
                up = (name for name, link in self._links.items() if link.up)
                writer.connection = next(up, None)
        return writer

    @override
    def position_announced(
        self, stream_name: str, instance_name: str, token: int
    ) -> None:
        writer = self._writers.get((stream_name, instance_name))
        # A writer that is not known yet is added when it is connected.
        if writer is not None and (
            token != writer.announced or writer.behind_us is not None
        ):
            writer.announce(token, self._monotonic())

    @override
    def position_changed(
        self, stream_name: str, instance_name: str, token: int
    ) -> None:
        writer = self._writer(stream_name, instance_name)
        if writer is not None:
            writer.move(token, self._monotonic())
            self._is_level(writer)

    @override
    def stream_connected(
        self, connection: str, stream_name: str, instance_name: str
    ) -> None:
        writer = self._writer(stream_name, instance_name)
        if writer is not None:
            writer.connection = connection
            writer.catch_up = None
            writer.is_removed = False
            writer.failing_since = None
            self._is_level(writer)

    @staticmethod
    def _is_level(writer: _Writer) -> None:
        if not writer.lag():
            writer.catch_up = None
            writer.was_level = writer.was_level or writer.connection is not None

    @override
    def stream_reset(
        self, stream_name: str, instance_name: str, from_token: int, to_token: int
    ) -> None:
        writer = self._writer(stream_name, instance_name)
        if writer is not None:
            writer.announced = to_token
            writer.told.clear()
            writer.behind_us = None
            writer.move(to_token, self._monotonic())

    @override
    def position_refuted(
        self, stream_name: str, instance_name: str, token: int, last_token: int
    ) -> None:
        writer = self._writers.get((stream_name, instance_name))
        if writer is not None:
            writer.told = deque(told for told in writer.told if told[0] <= last_token)
            announced = writer.told[-1][0] if writer.told else writer.position
            writer.announced = announced

    @override
    def ahead_of_writer(
        self, stream_name: str, instance_name: str, position: int, announced: int
    ) -> None:
        writer = self._writer(stream_name, instance_name)
        if writer is not None:
            if writer.behind_us is None:
                writer.behind_us_since = self._monotonic()
            writer.behind_us = announced

    @override
    def catch_up(self, event: CatchUpEvent) -> AbstractContextManager[object]:
        writer = self._writer(event.stream_name, event.instance_name)
        if writer is not None:
            now = self._monotonic()
            if writer.position is None or event.from_token < writer.position:
                writer.move(event.from_token, now)
            writer.announce(event.upto_token, now)
            first = event if writer.catch_up is None else writer.catch_up
            writer.catch_up = attrs.evolve(first, upto_token=event.upto_token)
        return contextlib.nullcontext()

    @override
    def removed_writer_found(
        self, stream_name: str, instance_name: str, from_token: int, upto_token: int
    ) -> None:
        writer = self._writer(stream_name, instance_name)
        if writer is not None:
            now = self._monotonic()
            writer.is_removed = True
            writer.move(from_token, now)
            writer.announce(upto_token, now)

    @override
    def removed_writer_drained(
        self, stream_name: str, instance_name: str, token: int
    ) -> None:
        # No further rows can come from it.
        self._writers.pop((stream_name, instance_name), None)

    @override
    def catch_up_page(self, event: CatchUpEvent, rows: int, upto_token: int) -> None:
        self.position_changed(event.stream_name, event.instance_name, upto_token)

    @override
    def catch_up_failed(
        self, event: CatchUpEvent, error: BaseException, attempt: int, retry_in: float
    ) -> None:
        writer = self._writer(event.stream_name, event.instance_name)
        if writer is not None:
            if writer.failing_since is None:
                writer.failing_since = self._monotonic()
            writer.failure = (
                f"fetching ({event.from_token}, {event.upto_token}] failed, attempt "
                f"{attempt}: {excerpt(str(error) or type(error).__name__)}"
            )

    @override
    def connection_made(self, connection: str) -> None:
        link = self._link(connection)
        if link is not None:
            if not link.up:
                link.since = self._monotonic()
                self._restart_grace_period()
            link.up += 1
            link.why = ""

    def _restart_grace_period(self) -> None:
        # No heartbeat could arrive while the link was down: count the silence from now.
        for member in self._members.values():
            member.silent_since = self._monotonic()

    @override
    def connection_lost(self, connection: str, reason: CloseReason, why: str) -> None:
        link = self._link(connection)
        if link is None or not link.up:
            return
        link.up -= 1
        if link.up:
            return
        now = link.since = self._monotonic()
        link.why = excerpt(why)
        for writer in self._writers.values():
            if writer.connection == connection:
                writer.connection = None
                writer.catch_up = None
                writer.waiting_since = now

    @override
    def connection_failed(self, connection: str, why: str, retry_in: float) -> None:
        link = self._link(connection)
        if link is not None and not link.up:
            link.why = excerpt(why)

    def _link(self, name: str) -> _Link | None:
        link = self._links.get(name)
        if link is None and len(self._links) >= MAX_NAMES:
            # Names that peers invent must not displace the links that are up.
            downs = [
                (known.since, other)
                for other, known in self._links.items()
                if not known.up and other not in self._own_links
            ]
            if downs:
                del self._links[min(downs)[1]]
        return link or _keep(self._links, name, _Link(self._monotonic()))

    @override
    def peer_heard(self, heartbeat: PeerHeartbeat) -> None:
        now = self._monotonic()
        name = heartbeat.instance_name
        if name not in self._members and len(self._members) >= MAX_NAMES:
            strangers = [
                (member.heard, other)
                for other, member in self._members.items()
                if other not in self._expected_names
            ]
            if strangers:
                del self._members[min(strangers)[1]]
        _keep(self._members, name, _Member(heartbeat, now))
        for stream_name, (token, age) in heartbeat.positions.items():
            writer = self._writers.get((stream_name, name))
            if writer is not None:
                writer.announce(token, now - max(age, 0.0))
        is_expected = any(writer == name for _, writer in self._expected)
        if heartbeat.is_leaving and not is_expected:
            # It need not come back.
            self._members.pop(name, None)
            for key in [key for key in self._writers if key[1] == name]:
                del self._writers[key]

    @override
    def duplicate_instance(self, instance_name: str, places: str) -> None:
        _keep(self._duplicates, instance_name, (excerpt(places), self._monotonic()))

    # -- the status --------------------------------------------------------------------

    def snapshot(self) -> ProcessStatus:
        """Return the current replication status."""
        now = self._monotonic()
        writers = [self._look(key, now) for key in self._writers]
        writers += [
            WriterStatus(
                name, self._instance_name, Condition.WRITTEN_HERE, token, token
            )
            for name, token in self._own().items()
        ]
        writers.sort(key=lambda writer: (writer.stream_name, writer.instance_name))
        return ProcessStatus(
            self._server_name,
            self._instance_name,
            __version__,
            now - self._started,
            tuple(self._not_ready(writers)),
            tuple(writers),
            tuple(self._look_at_links(now)),
            tuple(
                PeerStatus(
                    name,
                    member.news.epoch,
                    member.news.version,
                    member.news.where,
                    now - member.heard,
                    self._is_gone(member, now),
                )
                for name, member in sorted(self._members.items())
            ),
            tuple(
                DuplicateStatus(name, places, now - heard)
                for name, (places, heard) in sorted(self._duplicates.items())
                if now - heard < self._limits.duplicate_for
            ),
        )

    def _look(self, key: _Key, now: float) -> WriterStatus:
        writer = self._writers[key]
        oldest = writer.oldest()
        lag = writer.lag()
        is_late = oldest is not None and now - oldest >= self._limits.late_after
        if writer.is_removed:
            condition = Condition.DRAINING
        elif writer.catch_up is not None or (is_late and writer.connection is not None):
            condition = Condition.CATCHING_UP
        elif writer.connection is None:
            condition = Condition.WAITING
        else:
            condition = Condition.LIVE
        status = WriterStatus(
            *key,
            condition,
            writer.position,
            writer.announced,
            lag,
            0.0 if oldest is None else now - oldest,
            None if writer.catch_up is None else writer.catch_up.from_token,
            history=tuple(writer.history),
        )
        for reason, since, detail in self._problems(key[1], writer, now):
            if now - since >= self._limits.stalled_after:
                return attrs.evolve(
                    status,
                    condition=Condition.STALLED,
                    reason=reason,
                    stalled_for=now - since,
                    detail=detail,
                )
        return status

    def _problems(
        self, name: str, writer: _Writer, now: float
    ) -> Iterator[tuple[StallReason, float, str]]:
        """Yield why a writer's rows do not arrive: reason, start, detail.

        A problem comes before those that it causes.
        """
        if writer.connection is None and not any(
            link.up for link in self._links.values()
        ):
            downs = [
                f"{link_name}: {link.why}" for link_name, link in self._links.items()
            ]
            detail = "; ".join(downs) or "no peer is connected"
            yield StallReason.NO_LINK, writer.waiting_since, detail
        member = None if writer.is_removed else self._members.get(name)
        if member is not None and self._is_gone(member, now):
            detail = (
                f"{name} announced its exit"
                if member.news.is_leaving
                else f"{name} no longer sends heartbeats"
            )
            yield StallReason.WRITER_GONE, member.heard, detail
        if writer.behind_us is not None:
            detail = (
                f"ahead of its writer: this process is at {writer.position}, but "
                f"{name} reports to be at {writer.behind_us}"
            )
            yield StallReason.AHEAD_OF_WRITER, writer.behind_us_since, detail
        if writer.failing_since is not None:
            yield StallReason.CATCH_UP_FAILS, writer.failing_since, writer.failure
        if writer.lag():
            since = max(writer.progress_at, writer.told[0][1] if writer.told else 0.0)
            detail = "rows were announced and none was delivered"
            if writer.connection is not None or writer.catch_up is not None:
                yield StallReason.NO_PROGRESS, since, detail
        if writer.connection is None and not (writer.catch_up or writer.is_removed):
            detail = f"{name} has not announced its position; is it running?"
            yield StallReason.NO_POSITION, writer.waiting_since, detail

    def _is_gone(self, member: _Member, now: float) -> bool:
        silent_for = now - member.silent_since
        return member.news.is_leaving or silent_for > self._limits.silent_after

    def _not_ready(self, writers: Iterable[WriterStatus]) -> Iterator[str]:
        """Yield what delays readiness: no link, and writers that were never level.

        Absent writers are left out.
        """
        has_links = self._needs_link or bool(self._links)
        if has_links and not any(link.up for link in self._links.values()):
            yield "no link is up"
        for status in writers:
            writer = self._writers.get((status.stream_name, status.instance_name))
            if writer is None or writer.was_level or status.reason in _NOT_THERE:
                continue
            yield describe_writer(status)

    def _look_at_links(self, now: float) -> Iterator[LinkStatus]:
        queued: dict[str, tuple[int, int]] = {}
        for source in self._buffer_sources:
            for buffers in source():
                commands, size = queued.get(buffers.connection, (0, 0))
                queued[buffers.connection] = (
                    commands + buffers.pending_commands,
                    size + buffers.send_buffer + buffers.kernel_send_buffer,
                )
        for name, link in sorted(self._links.items()):
            commands, size = queued.get(name, (0, 0))
            yield LinkStatus(name, link.up, now - link.since, link.why, commands, size)


def _keep(table: dict[_Name, _Value], key: _Name, value: _Value) -> _Value | None:
    """Store a value, unless the table is full; return it, or ``None`` if it is."""
    if key not in table and len(table) >= MAX_NAMES:
        return None
    table[key] = value
    return value
