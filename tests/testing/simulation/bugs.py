"""
Bugs of other implementations, reintroduced on purpose: the simulation must find each.

Each bug is a set of parts with one wrong part; all other parts are the real code.
"""

from __future__ import annotations

from collections.abc import Mapping

from synapse_replication.dropin.streams import HostStream
from synapse_replication.redis.subscriber import RedisSubscriber
from synapse_replication.storage.postgres_stream import PostgresStream
from synapse_replication.streams.positions import WriterPositions
from synapse_replication.streams.stream import RemovedWriter
from synapse_replication.testing.simulation.parts import Parts


class _ReplicatesBeforeSubscribed(RedisSubscriber):
    """Sends REPLICATE before the subscription is confirmed."""

    def authenticated(self) -> None:
        super().report_connection()
        # A slow subscription.
        self.factory.reactor_clock.callLater(0.1, super().authenticated)

    def report_connection(self) -> None:
        """Do nothing: the connection was reported already."""


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

    def advance(self, instance_name: str, token: int, *, is_position: bool) -> None:
        self.current_token(instance_name)
        super().advance(instance_name, token, is_position=is_position)


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
    "covered-rows": Parts(positions=_AnnouncesOnRemotePositions),
    "unregistered-id": Parts(positions=_IgnoresFetches),
    "shared token": Parts(host_stream=_TrustsPersistedUpto),
    "late baseline": Parts(host_stream=_LateBaseline),
    "revealed rows": Parts(host_stream=_RevealsRows),
    "removed": Parts(stream=_IgnoresRemovedWriters),
    "removed, running": Parts(stream=_FindsRemovedWritersOnce),
}

#: For each bug, the seed at which its search starts: the first that found it.
FOUND_BY: Mapping[str, int] = {
    "reconnect-order": 203,
    "covered-rows": 72,
    "unregistered-id": 133,
    "shared token": 6,
    "late baseline": 10,
    "revealed rows": 24,
    "removed": 4,
    "removed, running": 15,
}
