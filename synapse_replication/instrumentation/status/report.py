"""Computes the status of a process from its records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import attrs

from synapse_replication.handlers.observer import ConnectionBuffers
from synapse_replication.instrumentation.status.model import (
    Condition,
    DuplicateStatus,
    LinkStatus,
    PeerStatus,
    StallReason,
    WriterStatus,
    describe_writer,
)
from synapse_replication.instrumentation.status.records import (
    PeerRecord,
    StatusLimits,
    StatusRecords,
    WriterRecord,
)

#: The reasons for which a writer counts as absent. An absent writer does not delay
#: readiness, because it sends no rows.
_ABSENT = frozenset({StallReason.NO_POSITION, StallReason.WRITER_GONE})

#: ``(reason, monotonic time of its beginning, detail)``.
_Problem: TypeAlias = tuple[StallReason, float, str]


@attrs.frozen
class StatusReport:
    """The status at one moment.

    :ivar records: the records of the process.
    :ivar limits: the thresholds and limits of the status.
    :ivar now: the monotonic time of the status, in s.
    """

    records: StatusRecords
    limits: StatusLimits
    now: float

    def writers(self) -> list[WriterStatus]:
        """Return the status of each writer."""
        return [self._writer(key) for key in self.records.writers]

    def peers(self) -> Iterator[PeerStatus]:
        """Yield the status of each peer, ordered by name."""
        for name, peer in sorted(self.records.peers.items()):
            yield PeerStatus(
                name,
                peer.heartbeat.epoch,
                peer.heartbeat.version,
                peer.heartbeat.where,
                self.now - peer.seen,
                self._is_gone(peer),
            )

    def duplicates(self) -> Iterator[DuplicateStatus]:
        """Yield the instance names that two processes have used recently."""
        for name, (places, seen) in sorted(self.records.duplicates.items()):
            if self.now - seen < self.limits.duplicate_for:
                yield DuplicateStatus(name, places, self.now - seen)

    def links(self, buffers: Iterable[ConnectionBuffers]) -> Iterator[LinkStatus]:
        """Yield the status of each link, ordered by name.

        :param buffers: the buffers of all connections.
        """
        queued: dict[str, tuple[int, int]] = {}
        for each in buffers:
            commands, size = queued.get(each.connection, (0, 0))
            queued[each.connection] = (
                commands + each.pending_commands,
                size + each.send_buffer + each.kernel_send_buffer,
            )
        for name, link in sorted(self.records.links.items()):
            commands, size = queued.get(name, (0, 0))
            since = self.now - link.since
            yield LinkStatus(name, link.up, since, link.why, commands, size)

    def not_ready(
        self, writers: Iterable[WriterStatus], *, needs_link: bool
    ) -> Iterator[str]:
        """Yield the reasons for which the process is not ready.

        A process that makes links, or has a record of a link, is not ready while no
        link is up. A writer that is not absent delays readiness until, for the first
        time, it is connected and all its rows have been delivered.
        """
        has_links = needs_link or bool(self.records.links)
        if has_links and not self._is_linked():
            yield "no link is up"
        for status in writers:
            key = status.stream_name, status.instance_name
            writer = self.records.writers.get(key)
            if writer is None or writer.was_live or status.reason in _ABSENT:
                continue
            yield describe_writer(status)

    def _writer(self, key: tuple[str, str]) -> WriterStatus:
        writer = self.records.writers[key]
        now = self.now
        oldest = writer.oldest()
        lag = writer.lag()
        is_late = oldest is not None and now - oldest >= self.limits.late_after
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
        for reason, since, detail in self._problems(key[1], writer):
            if now - since >= self.limits.stalled_after:
                return attrs.evolve(
                    status,
                    condition=Condition.STALLED,
                    reason=reason,
                    stalled_for=now - since,
                    detail=detail,
                )
        return status

    def _problems(self, name: str, writer: WriterRecord) -> Iterator[_Problem]:
        """Yield the problems for which a writer is stalled if they last.

        A cause is yielded before its consequences.
        """
        if writer.connection is None and not self._is_linked():
            links = self.records.links.items()
            downs = [f"{link_name}: {link.why}" for link_name, link in links]
            detail = "; ".join(downs) or "no peer is connected"
            yield StallReason.NO_LINK, writer.waiting_since, detail
        yield from self._problems_of_peer(name, writer)
        if writer.failing_since is not None:
            yield StallReason.CATCH_UP_FAILS, writer.failing_since, writer.failure
        is_fetching = writer.catch_up is not None
        if writer.lag() and (writer.connection is not None or is_fetching):
            since = max(writer.progress_at, writer.first_undelivered() or 0.0)
            detail = "rows were announced, but none was delivered"
            yield StallReason.NO_PROGRESS, since, detail
        if writer.connection is None and not (is_fetching or writer.is_removed):
            detail = f"{name} has not announced its position; is it running?"
            yield StallReason.NO_POSITION, writer.waiting_since, detail

    def _problems_of_peer(self, name: str, writer: WriterRecord) -> Iterator[_Problem]:
        """Yield problems of the writer's process."""
        peer = None if writer.is_removed else self.records.peers.get(name)
        if peer is not None and self._is_gone(peer):
            detail = (
                f"{name} announced its exit"
                if peer.heartbeat.is_leaving
                else f"{name} no longer sends heartbeats"
            )
            yield StallReason.WRITER_GONE, peer.seen, detail
        if writer.behind_us is not None:
            detail = (
                f"ahead of its writer: this process is at {writer.position}, but "
                f"{name} reports that it is at {writer.behind_us}"
            )
            yield StallReason.AHEAD_OF_WRITER, writer.behind_us_since, detail

    def _is_gone(self, peer: PeerRecord) -> bool:
        silent_for = self.now - peer.silent_since
        return peer.heartbeat.is_leaving or silent_for > self.limits.silent_after

    def _is_linked(self) -> bool:
        return any(link.up for link in self.records.links.values())
