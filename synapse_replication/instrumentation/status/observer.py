"""An observer that tracks the state of every writer, link and peer.

Theory of operation: :class:`StatusObserver` receives all observer events and records,
for each (stream, writer), the writer's announced position, the position that was
delivered here, and what delays the rows between them. The status is computed on
request, because most of it depends on the current time.

The lag in s is the age of the oldest write that was not delivered here. A heartbeat
states how long ago each position was reached. This is a duration, so a difference
between the clocks of the two machines does not matter; the lag is too small only by the
message's transit time. If a writer sends no heartbeats, a position is assumed to have
been written when it was first announced.

A writer is *stalled* once a problem with its rows has lasted for
:attr:`StatusLimits.stalled_after`, so that short interruptions are not reported. Memory
is bounded: an entry that the configuration does not name expires after a period without
events, except a link that is up and a writer that is catching up. Beyond
:data:`MAX_NAMES` entries of a kind, a new link replaces the link that has been down the
longest, and a new peer replaces the peer whose last heartbeat is the oldest; entries
that the configuration names are not replaced. Any other new entry is not stored.

docs/operators-guide.rst describes the status page.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager

import attrs
from typing_extensions import override

from synapse_replication import __version__
from synapse_replication.errors import excerpt
from synapse_replication.handlers.observer import (
    CatchUpEvent,
    ConnectionBuffers,
    PeerHeartbeat,
    ReplicationObserver,
)
from synapse_replication.instrumentation.status.model import (
    Condition,
    ProcessStatus,
    WriterStatus,
)
from synapse_replication.instrumentation.status.records import (
    MAX_NAMES,
    LinkRecord,
    PeerRecord,
    StatusLimits,
    StatusRecords,
    WriterRecord,
    store_if_room,
)
from synapse_replication.instrumentation.status.report import StatusReport
from synapse_replication.wire.connection import CloseReason


class StatusObserver(ReplicationObserver):
    """Tracks the replication status of this process.

    Call its methods in the reactor's thread. Only :meth:`snapshot` may also be called
    in another thread, in which a homeserver serves its metrics.

    :param server_name: the server name that the status shows.
    :param instance_name: the name of this process.
    :param expected: the (stream, writer) pairs from which rows are expected.
    :param needs_link: whether this process makes links; if so, it is not ready while no
        link is up.
    :param monotonic: returns a monotonic time in s.
    :param limits: the thresholds and limits of the status.
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
        self._writers: dict[tuple[str, str], WriterRecord] = {
            key: WriterRecord(now, now) for key in expected if key[1] != instance_name
        }
        self._expected = frozenset(self._writers)
        self._expected_names = frozenset(name for _, name in self._expected)
        #: The names of the links that this process makes itself.
        self._own_links = frozenset({instance_name, "redis", "redis_out"})
        #: Writers whose records expired; the writers may still be live.
        self._forgotten: dict[tuple[str, str], None] = {}
        self._records = StatusRecords(self._writers)
        self._links = self._records.links
        self._peers = self._records.peers
        self._duplicates = self._records.duplicates
        self._buffer_sources: list[Callable[[], Iterable[ConnectionBuffers]]] = []
        self._own: Callable[[], Mapping[str, int]] = dict

    def watch_buffers(self, source: Callable[[], Iterable[ConnectionBuffers]]) -> None:
        """Register a source of buffers, which is read for each snapshot.

        :param source: returns the buffers of the open connections that it knows.
        """
        self._buffer_sources.append(source)

    def watch_own_positions(self, source: Callable[[], Mapping[str, int]]) -> None:
        """Set the source of this process's own positions, read for each snapshot.

        :param source: returns, for each stream that this process writes, the token up
            to which its rows were sent or skipped, by the stream's name.
        """
        self._own = source

    def sample(self) -> None:
        """Append each writer's lag to its history, and remove expired entries.

        Call this every few seconds.
        """
        for writer in self._writers.values():
            writer.history.append(writer.lag())
            if len(writer.history) > self._limits.history:
                writer.history.popleft()
        self._remove_expired()

    def _remove_expired(self) -> None:
        """Remove entries that have expired and that the configuration does not name."""
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
                store_if_room(self._forgotten, key, None)
        for name, link in list(self._links.items()):
            if not link.up and link.since <= before and name not in self._own_links:
                del self._links[name]
        for name, peer in list(self._peers.items()):
            if peer.seen <= before and name not in self._expected_names:
                del self._peers[name]
        for name, (_, seen) in list(self._duplicates.items()):
            if seen <= before:
                del self._duplicates[name]

    # -- events -----------------------------------------------------------------------

    def _writer(self, stream_name: str, instance_name: str) -> WriterRecord | None:
        key = stream_name, instance_name
        writer = self._writers.get(key)
        if writer is None and instance_name != self._instance_name:
            now = self._monotonic()
            writer = store_if_room(self._writers, key, WriterRecord(now, now))
            if writer is not None and key in self._forgotten:
                del self._forgotten[key]
                # The writer sent its POSITION before the record expired, and may not
                # send another.
                up = (name for name, link in self._links.items() if link.up)
                writer.connection = next(up, None)
        return writer

    @override
    def position_announced(
        self, stream_name: str, instance_name: str, token: int
    ) -> None:
        writer = self._writers.get((stream_name, instance_name))
        # An announcement adds no record: other events add it, for instance when the
        # writer is connected.
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
            self._check_caught_up(writer)

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
            self._check_caught_up(writer)

    @staticmethod
    def _check_caught_up(writer: WriterRecord) -> None:
        if not writer.lag():
            writer.catch_up = None
            writer.was_live = writer.was_live or writer.connection is not None

    @override
    def stream_reset(
        self, stream_name: str, instance_name: str, from_token: int, to_token: int
    ) -> None:
        writer = self._writer(stream_name, instance_name)
        if writer is not None:
            writer.announced = to_token
            writer.undelivered.clear()
            writer.behind_us = None
            writer.move(to_token, self._monotonic())

    @override
    def position_refuted(
        self, stream_name: str, instance_name: str, token: int, last_token: int
    ) -> None:
        writer = self._writers.get((stream_name, instance_name))
        if writer is not None:
            writer.undelivered = deque(
                each for each in writer.undelivered if each[0] <= last_token
            )
            announced = (
                writer.undelivered[-1][0] if writer.undelivered else writer.position
            )
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
        # A drained writer sends no rows unless it returns; it then gets a new record.
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
                f"catch-up in ({event.from_token}, {event.upto_token}] failed, attempt "
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
        # The peers' heartbeats may have been lost while the link was down: count the
        # silence of each peer from now.
        for peer in self._peers.values():
            peer.silent_since = self._monotonic()

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

    def _link(self, name: str) -> LinkRecord | None:
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
        return link or store_if_room(self._links, name, LinkRecord(self._monotonic()))

    @override
    def heartbeat_received(self, heartbeat: PeerHeartbeat) -> None:
        now = self._monotonic()
        name = heartbeat.instance_name
        if name not in self._peers and len(self._peers) >= MAX_NAMES:
            removable = [
                (peer.seen, other)
                for other, peer in self._peers.items()
                if other not in self._expected_names
            ]
            if removable:
                del self._peers[min(removable)[1]]
        store_if_room(self._peers, name, PeerRecord(heartbeat, now))
        for stream_name, (token, age) in heartbeat.positions.items():
            writer = self._writers.get((stream_name, name))
            if writer is not None:
                writer.announce(token, now - max(age, 0.0))
        is_expected = any(writer == name for _, writer in self._expected)
        if heartbeat.is_leaving and not is_expected:
            # The configuration does not require this peer to return.
            self._peers.pop(name, None)
            for key in [key for key in self._writers if key[1] == name]:
                del self._writers[key]

    @override
    def duplicate_instance(self, instance_name: str, places: str) -> None:
        store_if_room(
            self._duplicates, instance_name, (excerpt(places), self._monotonic())
        )

    # -- the status --------------------------------------------------------------------

    def snapshot(self) -> ProcessStatus:
        """Return the current replication status."""
        now = self._monotonic()
        report = StatusReport(self._records.copy(), self._limits, now)
        writers = report.writers()
        writers += [
            WriterStatus(
                name, self._instance_name, Condition.WRITTEN_HERE, token, token
            )
            for name, token in self._own().items()
        ]
        writers.sort(key=lambda writer: (writer.stream_name, writer.instance_name))
        buffers = [each for source in self._buffer_sources for each in source()]
        return ProcessStatus(
            self._server_name,
            self._instance_name,
            __version__,
            now - self._started,
            tuple(report.not_ready(writers, needs_link=self._needs_link)),
            tuple(writers),
            tuple(report.links(buffers)),
            tuple(report.peers()),
            tuple(report.duplicates()),
        )
