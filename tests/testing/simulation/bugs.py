"""
Bugs of other implementations, reintroduced on purpose: the simulation must find each.

Each bug is a set of parts with one wrong part; all other parts are the real code.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any

from synapse_replication.dropin.streams import HostStream
from synapse_replication.handlers.receiving.announcements import AnnouncementHandler
from synapse_replication.handlers.receiving.receiver import StreamReceiver
from synapse_replication.handlers.receiving.rows import RowHandler
from synapse_replication.handlers.receiving.writer_state import Link, LinkedWriter
from synapse_replication.redis.subscriber import RedisSubscriber
from synapse_replication.storage.postgres_stream import PostgresStream
from synapse_replication.streams.positions import WriterPositions
from synapse_replication.streams.stream import RemovedWriter
from synapse_replication.testing.simulation.parts import Parts
from synapse_replication.wire.commands.standard import PositionCommand
from synapse_replication.wire.rdata import RdataRun

__all__ = ["BUGS", "FOUND_BY"]


class _ReplicatesBeforeSubscribed(RedisSubscriber):
    """Sends REPLICATE before the subscription is confirmed."""

    def authenticated(self) -> None:
        super().report_connection()
        # A slow subscription.
        self.factory.reactor_clock.callLater(0.1, super().authenticated)

    def report_connection(self) -> None:
        """Do nothing: the connection was reported already."""


class _RowsDuringCatchUp(RowHandler):
    def handle_slice(
        self, writer: LinkedWriter, tokens: list[Any], rows: list[bytes]
    ) -> Awaitable[None] | None:
        catch_up, writer.catch_up = writer.catch_up, None
        try:
            return super().handle_slice(writer, tokens, rows)
        finally:
            writer.catch_up = writer.catch_up or catch_up


class _DeliversDuringCatchUp(StreamReceiver):
    """Delivers rows that arrive during a catch-up immediately."""

    row_handler_type = _RowsDuringCatchUp


class _BatchesByStream(RowHandler):
    def handle_slice(
        self, writer: LinkedWriter, tokens: list[Any], rows: list[bytes]
    ) -> Awaitable[None] | None:
        others = [
            other
            for (name, _), other in writer.link.writers.items()
            if name == self.stream_name and other is not writer
        ]
        for other in others:
            writer.pending = other.pending + writer.pending
            other.pending = []
        return super().handle_slice(writer, tokens, rows)


class _OneBatchPerStream(StreamReceiver):
    """Collects the rows of a batch by stream instead of by writer."""

    row_handler_type = _BatchesByStream


class _DropsAllBatches(AnnouncementHandler):
    async def handle_position(self, link: Link, position: PositionCommand) -> None:
        for (name, _), writer in link.writers.items():
            if name == position.stream_name:
                writer.pending = []
        await super().handle_position(link, position)


class _PositionDropsAllBatches(StreamReceiver):
    """Drops the unfinished batches of all writers at the POSITION of one."""

    announcement_handler_type = _DropsAllBatches


class _ConnectAllWriters(RowHandler):
    def handle(self, link: Link, run: RdataRun) -> Awaitable[None] | None:
        key = self.stream_name, run.instance_name
        if key not in link.writers and any(
            name == self.stream_name and writer.is_connected
            for (name, _), writer in link.writers.items()
        ):
            link.writer(*key).is_connected = True
        return super().handle(link, run)


class _MakesAllWritersLive(StreamReceiver):
    """Accepts the rows of all writers after the POSITION of one."""

    row_handler_type = _ConnectAllWriters


class _SkipsUnreadableRows(StreamReceiver):
    """Skips an unreadable row of a batch, and delivers the others."""

    def enqueue_lost_row(self, link: Link, instance_name: str) -> None:
        """Do nothing."""


class _AnnouncesOnRemotePositions(WriterPositions):
    """
    Moves the announced position past a finished id of its own when another writer
    announces during a fetch, while ``local`` stays behind.
    """

    _moved_to = 0

    def advance(self, instance_name: str, id_: int) -> None:
        super().advance(instance_name, id_)
        if self.is_writer and self.lowest_in_flight() is None:
            # Ignores ids that are being fetched.
            self._moved_to = self.max_finished

    @property
    def announceable(self) -> int:
        return max(super().announceable, self._moved_to)

    def writer_position(self, instance_name: str) -> int:
        position = super().writer_position(instance_name)
        if instance_name == self.instance_name:
            return max(position, self._moved_to)
        return position


class _IgnoresFetches(WriterPositions):
    """Ignores an id between nextval and its registration."""

    def lowest_floor(self) -> int | None:
        return None

    def is_usable(self, fetch: int, id_: int) -> bool:
        return id_ > self.floor_of(fetch)


class _IgnoresEpochs(StreamReceiver):
    """Detects a restarted writer of a stream in memory only by a lower POSITION."""

    def enqueue_epoch(
        self, link: Link, instance_name: str, token: int, epoch: str
    ) -> None:
        pass


class _SavesNoEpochs(StreamReceiver):
    """Assumes that the first epoch received is the epoch of the saved positions."""

    _first: dict[str, str] | None = None

    def enqueue_epoch(
        self, link: Link, instance_name: str, token: int, epoch: str
    ) -> None:
        self._first = self._first or {}
        if self._first.setdefault(instance_name, epoch) != epoch:
            super().enqueue_epoch(link, instance_name, token, epoch)


class _TrustsPersistedUpto(HostStream):
    """Treats everything that all writers have persisted as delivered."""

    def current_token(self, instance_name: str) -> int:
        return int(self.original.current_token(instance_name))


class _LateBaseline(HostStream):
    """
    Starts an undeclared writer at the host's position at the time of the first query
    about the writer, instead of that at startup.
    """

    def current_token(self, instance_name: str) -> int:
        received = self._received
        if received is None or instance_name == self._instance_name:
            return super().current_token(instance_name)
        return received.setdefault(
            instance_name, int(self.original.current_token(instance_name))
        )

    def advance(self, instance_name: str, token: int, *, is_position: bool) -> bool:
        self.current_token(instance_name)
        return super().advance(instance_name, token, is_position=is_position)


class _RevealsRows(HostStream):
    """
    Accepts positions immediately, so that users are never shown a row of another writer
    that this process missed and is about to fetch.
    """

    def writers_behind(self, instance_name: str, token: int) -> list[str]:
        return []


class _IgnoresRemovedWriters(PostgresStream):
    """Does not search for the committed rows of removed writers."""

    async def find_removed_writers(self) -> Mapping[str, RemovedWriter]:
        return {}


class _FindsRemovedWritersOnce(PostgresStream):
    """Does not detect the removal of a writer while running."""

    _has_searched = False

    async def find_removed_writers(self) -> Mapping[str, RemovedWriter]:
        if self._has_searched:
            return {}
        found = await super().find_removed_writers()
        self._has_searched = True
        return found


BUGS: Mapping[str, Parts] = {
    "reconnect-order": Parts(subscriber=_ReplicatesBeforeSubscribed),
    "rows-during-catch-up": Parts(receiver=_DeliversDuringCatchUp),
    "interleaved-batches": Parts(receiver=_OneBatchPerStream),
    "position-during-batch": Parts(receiver=_PositionDropsAllBatches),
    "gap-per-writer": Parts(receiver=_MakesAllWritersLive),
    "unreadable-row": Parts(receiver=_SkipsUnreadableRows),
    "covered-rows": Parts(positions=_AnnouncesOnRemotePositions),
    "unregistered-id": Parts(positions=_IgnoresFetches),
    "typing-reset": Parts(receiver=_IgnoresEpochs),
    "typing-reset, saved": Parts(receiver=_SavesNoEpochs),
    "shared token": Parts(host_stream=_TrustsPersistedUpto),
    "late baseline": Parts(host_stream=_LateBaseline),
    "revealed rows": Parts(host_stream=_RevealsRows),
    "removed": Parts(stream=_IgnoresRemovedWriters),
    "removed, running": Parts(stream=_FindsRemovedWritersOnce),
}

#: For each bug, the seed at which its search starts: the first that found it.
FOUND_BY: Mapping[str, int] = {
    "reconnect-order": 203,
    "interleaved-batches": 14,
    "position-during-batch": 18,
    "gap-per-writer": 90,
    "unreadable-row": 21,
    "covered-rows": 72,
    "unregistered-id": 133,
    "typing-reset": 12,
    "typing-reset, saved": 12,
    "shared token": 6,
    "late baseline": 10,
    "revealed rows": 24,
    "removed": 4,
    "removed, running": 15,
}
