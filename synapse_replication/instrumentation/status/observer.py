"""The one place that remembers how each writer's rows arrive.

Theory of operation: :class:`StatusObserver` hears what all observers hear, and keeps
for each (stream, writer) how far it is, how far we are, and what stands between. What
is shown is computed when it is asked for, since most of it is the passing of time.

The lag in s is the age of the oldest write that is not handled here. A heartbeat tells
how long before it a position was reached; that difference is the same on every
machine's clock, so only the way of the message is added. Writers without heartbeats
are taken to have written when it was first heard of.

Something wrong is called *stalled* once it has lasted
:attr:`StatusLimits.stalled_after`: a short blip is none. Bounded: beyond
:data:`MAX_NAMES`, what was heard longest ago makes room; what the configuration does
not name is forgotten after a while without news.

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

#: How many writers, links and members are kept, of each.
MAX_NAMES = 1000
#: Unhandled announcements that are kept of a writer; beyond, each second one.
MAX_TOLD = 256
#: s between two that are kept.
_TOLD_EVERY = 0.5

#: Writers that are not there hold nobody up: nothing can come of them.
_NOT_THERE = frozenset({StallReason.NO_POSITION, StallReason.WRITER_GONE})

_Key = tuple[str, str]
_Name = TypeVar("_Name", bound=Hashable)
_Value = TypeVar("_Value")


@attrs.frozen
class StatusLimits:
    """When something is called wrong, in s.

    :ivar late_after: rows on their way for less are no lag worth a word.
    :ivar stalled_after: how long it must last.
    :ivar silent_after: without a heartbeat, a process is gone.
    :ivar duplicate_for: after its last sign, a duplicate name is forgotten.
    :ivar history: samples of the lag that are kept.
    :ivar forget_after: what the configuration does not name is forgotten after so long
        without news: a peer that is gone, a writer that nobody waits for.
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
    #: ``(token, when it was written)``, of what is not handled; times monotonic.
    told: deque[tuple[int, float]] = attrs.Factory(deque)
    history: deque[int] = attrs.Factory(deque)
    #: What was known of it at a sample, and since which one.
    sampled: tuple[int | None, int | None, str | None] | None = None
    sampled_at: float = 0.0

    #: What the writer said, and since when that is below what we have.
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
            # Known better now: what is below was written no later.
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
        """Record that the rows up to ``position`` were handled."""
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
        """Return when the oldest write was made that is not handled."""
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
    #: Since when a heartbeat could have arrived and none did.
    silent_since: float = attrs.field(
        default=attrs.Factory(lambda self: self.heard, takes_self=True)
    )


class StatusObserver(ReplicationObserver):
    """Knows how replication stands.

    :param server_name: for those who look.
    :param instance_name: this process.
    :param expected: the (stream, writer) pairs that are to be heard.
    :param needs_link: this process makes links: without one it is not ready.
    :param monotonic: gives a time in s that never goes back.
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
        #: Of the links that this process makes itself.
        self._own_links = frozenset({instance_name, "redis", "redis_out"})
        #: Writers that may be live all the same.
        self._forgotten: dict[_Key, None] = {}
        self._links: dict[str, _Link] = {}
        self._members: dict[str, _Member] = {}
        self._duplicates: dict[str, tuple[str, float]] = {}
        self._buffer_sources: list[Callable[[], Iterable[ConnectionBuffers]]] = []
        self._own: Callable[[], Mapping[str, int]] = dict

    def watch_buffers(self, source: Callable[[], Iterable[ConnectionBuffers]]) -> None:
        """Have the buffers of some connections read when the status is asked for."""
        self._buffer_sources.append(source)

    def watch_own_positions(self, source: Callable[[], Mapping[str, int]]) -> None:
        """Have the positions of the streams that this process writes read.

        :param source: gives how far they were told to others, by stream.
        """
        self._own = source

    def sample(self) -> None:
        """Keep the lag of now in the history. Called every few seconds."""
        for writer in self._writers.values():
            writer.history.append(writer.lag())
            if len(writer.history) > self._limits.history:
                writer.history.popleft()
        self._forget_strangers()

    def _forget_strangers(self) -> None:
        """Forget what the configuration does not name and has had no news for long."""
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

    # -- what is heard ----------------------------------------------------------------

    def _writer(self, stream_name: str, instance_name: str) -> _Writer | None:
        key = stream_name, instance_name
        writer = self._writers.get(key)
        if writer is None and instance_name != self._instance_name:
            now = self._monotonic()
            writer = _keep(self._writers, key, _Writer(now, now))
            if writer is not None and key in self._forgotten:
                del self._forgotten[key]
                # It was announced before it was forgotten, and need not be again.
                up = (name for name, link in self._links.items() if link.up)
                writer.connection = next(up, None)
        return writer

    @override
    def position_announced(
        self, stream_name: str, instance_name: str, token: int
    ) -> None:
        writer = self._writers.get((stream_name, instance_name))
        # One that is not known yet is told of when it is connected.
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
        # There is nothing to wait for any more.
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
        # No heartbeat could arrive while the link was down: silence means something
        # only from now on.
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
            # Names that peers made up must not hide the links that are there.
            downs = [
                (known.since, other)
                for other, known in self._links.items()
                if not known.up and other not in self._own_links
            ]
            if downs:
                del self._links[min(downs)[1]]
        return link or _keep(self._links, name, _Link(self._monotonic()))

    @override
    def peer_heard(self, news: PeerHeartbeat) -> None:
        now = self._monotonic()
        name = news.instance_name
        if name not in self._members and len(self._members) >= MAX_NAMES:
            strangers = [
                (member.heard, other)
                for other, member in self._members.items()
                if other not in self._expected_names
            ]
            if strangers:
                del self._members[min(strangers)[1]]
        _keep(self._members, name, _Member(news, now))
        for stream_name, (token, age) in news.positions.items():
            writer = self._writers.get((stream_name, name))
            if writer is not None:
                writer.announce(token, now - max(age, 0.0))
        if news.is_leaving and not any(writer == name for _, writer in self._expected):
            # Nobody waits for it to come back.
            self._members.pop(name, None)
            for key in [key for key in self._writers if key[1] == name]:
                del self._writers[key]

    @override
    def duplicate_instance(self, instance_name: str, places: str) -> None:
        _keep(self._duplicates, instance_name, (excerpt(places), self._monotonic()))

    # -- what is shown -----------------------------------------------------------------

    def snapshot(self) -> ProcessStatus:
        """Say how replication stands now."""
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
        """Say what keeps a writer's rows from us, since when, the root of it first."""
        if writer.connection is None and not any(
            link.up for link in self._links.values()
        ):
            downs = [
                f"{link_name}: {link.why}" for link_name, link in self._links.items()
            ]
            detail = "; ".join(downs) or "nobody is connected"
            yield StallReason.NO_LINK, writer.waiting_since, detail
        member = None if writer.is_removed else self._members.get(name)
        if member is not None and self._is_gone(member, now):
            detail = (
                f"{name} said goodbye"
                if member.news.is_leaving
                else f"{name} sends no heartbeats any more"
            )
            yield StallReason.WRITER_GONE, member.heard, detail
        if writer.behind_us is not None:
            detail = (
                f"ahead of its writer: this process is at {writer.position}, and "
                f"{name} says to be at {writer.behind_us}"
            )
            yield StallReason.AHEAD_OF_WRITER, writer.behind_us_since, detail
        if writer.failing_since is not None:
            yield StallReason.CATCH_UP_FAILS, writer.failing_since, writer.failure
        if writer.lag():
            since = max(writer.progress_at, writer.told[0][1] if writer.told else 0.0)
            detail = "rows are known of and none was handled"
            if writer.connection is not None or writer.catch_up is not None:
                yield StallReason.NO_PROGRESS, since, detail
        if writer.connection is None and not (writer.catch_up or writer.is_removed):
            detail = f"{name} has not told where it stands; does it run?"
            yield StallReason.NO_POSITION, writer.waiting_since, detail

    def _is_gone(self, member: _Member, now: float) -> bool:
        silent_for = now - member.silent_since
        return member.news.is_leaving or silent_for > self._limits.silent_after

    def _not_ready(self, writers: Iterable[WriterStatus]) -> Iterator[str]:
        """Say what was never level, as far as that can come by waiting."""
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
    """Put something in a table, if that has room for it."""
    if key not in table and len(table) >= MAX_NAMES:
        return None
    table[key] = value
    return value
