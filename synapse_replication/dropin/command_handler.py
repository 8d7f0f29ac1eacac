"""The replacement for ``synapse.replication.tcp.handler``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from twisted.internet.defer import Deferred
from txredisapi import RedisFactory

from synapse_replication.app.stop_steps import StopSteps
from synapse_replication.app.wiring import ResyncParts, StoredStreams, Wiring
from synapse_replication.dropin.backlogs import row_requests, serves_backlog
from synapse_replication.dropin.foreign import ForeignConnection
from synapse_replication.dropin.homeserver import Homeserver
from synapse_replication.dropin.host_code import make_yieldable
from synapse_replication.dropin.host_database import HostDatabase
from synapse_replication.dropin.host_streams import declared_writers, instances_of
from synapse_replication.dropin.observer import observer_of, observers_of
from synapse_replication.dropin.redis_factories import close, connect_subscriber
from synapse_replication.dropin.settings import own_settings
from synapse_replication.dropin.streamer import combine_notifications, favour_streamer
from synapse_replication.dropin.synapse_host import SynapseHost
from synapse_replication.handlers.command_handler import ReplicationCommandHandler
from synapse_replication.handlers.extension.extension import ReplicationExtension
from synapse_replication.handlers.extension.watches import FEW_PEERS
from synapse_replication.handlers.waiters import wait_for_all
from synapse_replication.redis.subscriber import RedisSubscriber
from synapse_replication.streams.backlog import Backlog
from synapse_replication.streams.reader_table import State
from synapse_replication.streams.standard.registry import STANDARD_STREAMS
from synapse_replication.wire import commands

#: The time after which positions are requested once more, in s: soon enough that no
#: writer that answers is regarded as stalled.
ASK_AGAIN = 7.0
#: The timeout of each step of the shutdown, in s.
_DRAIN_TIMEOUT = 5.0


class DropInCommandHandler(ReplicationCommandHandler):
    """Receives commands from all connections, and sends to all of them.

    It accepts this package's connections, and any other object with ``send_command``
    that calls ``on_<COMMAND>(connection, command)`` for each received command.

    If the subscription to Redis is replaced, too, it uses the extension, whose epoch is
    the host's instance id: a random id that differs at each start. Stock processes do
    not subscribe to the extension's channel.

    :ivar host: the adapter of ``hs``; the streamer uses the same adapter.
    """

    host: SynapseHost

    def __init__(self, hs: Homeserver) -> None:
        self.hs = hs
        self.server_name = hs.hostname
        host, settings = SynapseHost(hs, observers_of(hs).hooks), own_settings()
        self._parts = ResyncParts(
            host.clock, observers_of(hs), settings, serves_backlog=serves_backlog(hs)
        )
        super().__init__(
            host,
            observer_of(hs),
            options=self._parts.handler_options(
                row_requests(hs),
                # Without Redis, Synapse is a single process.
                expects_links=bool(hs.config.redis.redis_enabled),
            ),
        )
        self._stops = StopSteps(hs.get_reactor(), _DRAIN_TIMEOUT)
        self._wiring = Wiring(
            self, self._parts, observers_of(hs), settings, self._stops
        )
        self._is_stopping = False
        self._foreign: dict[object, ForeignConnection] = {}
        hs.get_notifier().add_lock_released_callback(self.on_lock_released)
        combine_notifications(hs)

    @property
    def backlog(self) -> Backlog | None:
        """The recently sent rows; ``None`` if peers cannot request them."""
        return self._parts.backlog

    @property
    def extension(self) -> ReplicationExtension | None:
        """The extension; ``None`` if it is disabled."""
        return self._wiring.extension

    # -- start --------------------------------------------------------------------

    def start_replication(self, hs: Homeserver) -> None:  # type: ignore[override]
        """Connect to Redis, and start the observers and the extension.

        Without Redis, only create the streamer.
        """
        channels = super().start_replication()
        streamer = hs.get_replication_streamer()
        if not hs.config.redis.redis_enabled:
            return
        favour_streamer(hs)
        self._wiring.start_observers(
            hs.get_reactor(), self.host.streams.get_generators, damage=""
        )
        self._connect_redis(hs, channels)
        self._stops.add("ending background processes", self.host.processes.stop)
        self._wiring.start_extension()
        # Other parts of the host can send during their shutdown.
        self._stops.add("waiting for the host", self._let_host_send)
        self._wiring.start_sending(streamer, self._stored_streams())
        trigger = hs.get_reactor().addSystemEventTrigger(
            "before", "shutdown", lambda: Deferred.fromCoroutine(self._stop())
        )
        # If the host shuts down while its reactor keeps running, it calls
        # shutdown_func, which must not wait. If the reactor stops, _stop() has run
        # before the phase "during", and shutdown_func has nothing left to do.
        hs.register_sync_shutdown_handler(
            phase="during",
            eventType="shutdown",
            shutdown_func=partial(self._stop_without_waiting, trigger),
        )

    def _connect_redis(self, hs: Homeserver, channels: Sequence[str]) -> None:
        outbound = hs.get_outbound_redis_connection()
        factories = [
            outbound._factory,  # noqa: SLF001 -- txredisapi's own
            connect_subscriber(hs, outbound, channels),
        ]
        self._stops.add("closing the Redis connections", partial(_close_all, factories))

    def _stored_streams(self) -> StoredStreams | None:
        """Return the streams whose stored positions are checked.

        :return: ``None`` if the database is not PostgreSQL.
        """
        hs = self.hs
        database = HostDatabase(hs.get_datastores().main.db_pool, hs.hostname)
        if not database.is_postgres:
            return None
        worker = hs.config.worker
        streams = {
            name: known
            for name, known in STANDARD_STREAMS.items()
            if known.positions_name is not None or known.any_instance_writes
        }
        writers = {name: declared_writers(worker, name) for name in streams}
        instances = instances_of(worker.instance_map)
        return StoredStreams(database, streams, writers, instances)

    # -- stop ---------------------------------------------------------------------

    def _begin_stop(self) -> bool:
        """Report that the process stops; return whether that is new."""
        is_new, self._is_stopping = not self._is_stopping, True
        if is_new:
            observers_of(self.hs).stopping()
        return is_new

    def _stop_without_waiting(self, trigger: object) -> None:
        """Flush and close the connections to Redis, without waiting."""
        if self._begin_stop():
            self.hs.get_reactor().removeSystemEventTrigger(trigger)
            self._stops.run_without_waiting()

    async def _stop(self) -> None:
        """Send pending rows and commands, then close the connections to Redis."""
        if self._begin_stop():
            await self._stops.run()

    async def _let_host_send(self) -> None:
        await self.host.clock.sleep(0)

    # -- for the host -------------------------------------------------------------

    def get_streams(self) -> Mapping[str, Any]:
        """Return the host's own stream objects, by name."""
        return {
            name: stream.original
            for name, stream in self.host.streams.get_streams().items()
        }

    def get_streams_to_replicate(self) -> Sequence[Any]:
        """Return the host's own objects of the streams that this process writes."""
        return [
            stream.original for stream in self.host.streams.get_streams_to_replicate()
        ]

    # The host's tests use this attribute.
    _streams = property(get_streams)

    @property
    def _channels_to_subscribe_to(self) -> list[str]:
        # The host's tests use this attribute, too.
        return list(self._channels)

    # -- connections of the host --------------------------------------------------

    def new_connection(self, connection: Any) -> None:  # type: ignore[override]
        """Add a connection of this package, or any object with ``send_command``."""
        if isinstance(connection, RedisSubscriber):
            super().new_connection(connection)
            self.host.clock.call_later(ASK_AGAIN, self._ask_again, connection)
            return
        # Imported here, because a host that uses Redis has no other connections.
        from synapse_replication.tcp.protocol import BaseReplicationStreamProtocol

        if isinstance(connection, BaseReplicationStreamProtocol):
            super().new_connection(connection)
            return
        foreign = self._foreign[connection] = ForeignConnection(connection)
        super().new_connection(foreign, asks=False)

    def _ask_again(self, connection: RedisSubscriber) -> None:
        """Request positions once more if a stock process has not announced its own.

        A stock process that is not subscribed yet misses the first request, and what it
        announces while it cannot publish is discarded.
        """
        if (
            connection in self.sender.links
            and len(self._parts.epochs) <= FEW_PEERS
            and any(
                reader.state is State.WAITING
                and self._parts.epochs.epoch_of(name) is None
                for (_, name), reader in self.readers().items()
            )
        ):
            self.sender.send_to(connection, commands.ReplicateCommand())

    def lost_connection(self, connection: Any) -> None:
        """Remove a connection."""
        super().lost_connection(self._foreign.pop(connection, connection))

    def receive_command(self, connection: Any, command: Any) -> None:
        """Handle a command that a connection has received.

        :param connection: a connection of this package or of the host.
        :param command: a command, of this package's class or the host's own.
        """
        if not isinstance(command, commands.Command):
            # It is of the host's own class: the part "commands" is not replaced.
            command = commands.parse_command_from_line(
                f"{command.NAME} {command.to_line()}"
            )
        self.received(self._foreign.get(connection, connection), [command])

    def is_stream_connected(self, conn: Any, stream_name: str) -> bool:
        """Return whether rows of a stream can be received now."""
        return super().is_stream_connected(self._foreign.get(conn, conn), stream_name)


def _close_all(factories: Sequence[RedisFactory]) -> Deferred[None]:
    """Close the connections of factories; return a Deferred that waits for that."""
    closed = []
    for factory in factories:
        if factory.pool and factory.connector is not None:
            closed.append(factory.waitForEmptyPool())
        close(factory)
    return make_yieldable(wait_for_all(closed))
