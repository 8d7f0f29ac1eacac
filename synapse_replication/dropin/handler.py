"""The replacement for ``synapse.replication.tcp.handler``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import attrs
from twisted.internet.defer import Deferred, DeferredList, TimeoutError

from synapse_replication.app.position_check import (
    StoredPositionCheck,
    start_position_check,
)
from synapse_replication.dropin.backlogs import make_backlog, make_partial_resync
from synapse_replication.dropin.foreign import ForeignConnection
from synapse_replication.dropin.homeserver import Homeserver
from synapse_replication.dropin.host_code import make_yieldable
from synapse_replication.dropin.host_streams import declared_writers, instances_of
from synapse_replication.dropin.id_generators import HostDatabase
from synapse_replication.dropin.observer import monitoring_of, observer_of
from synapse_replication.dropin.redis_factories import close, connect_subscriber
from synapse_replication.dropin.settings import own_settings
from synapse_replication.dropin.streamer import combine_notifications, favour_streamer
from synapse_replication.dropin.synapse_host import SynapseHost
from synapse_replication.handlers import handler
from synapse_replication.handlers.epochs import PeerEpochs
from synapse_replication.handlers.extension.extension import (
    FEW_PEERS,
    ReplicationExtension,
)
from synapse_replication.handlers.sending.streamer import ReplicationStreamer
from synapse_replication.redis.subscriber import RedisSubscriber
from synapse_replication.streams.reader_table import State
from synapse_replication.streams.standard.registry import STANDARD_STREAMS
from synapse_replication.text import process_label
from synapse_replication.wire import commands

#: The time after which positions are requested once more, in s: soon enough that no
#: writer that answers is regarded as stalled.
ASK_AGAIN = 7.0
#: The timeout of each step of the shutdown, in s.
_DRAIN_TIMEOUT = 5.0


class DropInCommandHandler(handler.ReplicationCommandHandler):
    """Receives commands from all connections, and sends to all of them.

    It accepts this package's connections, and any other object with ``send_command``
    that calls ``on_<COMMAND>(connection, command)`` for each received command.

    If the subscription to Redis is replaced, too, it uses the extension, whose epoch is
    the host's instance id: a random id that differs at each start. Stock processes do
    not subscribe to the extension's channel.

    :ivar host: the adapter of ``hs``; the streamer uses the same adapter.
    :ivar backlog: the recently sent rows; ``None`` if peers cannot request them.
    :ivar extension: the extension, which the subscription to Redis uses; ``None`` if it
        is disabled.
    """

    host: SynapseHost

    def __init__(self, hs: Homeserver) -> None:
        self.hs = hs
        self.server_name = hs.hostname
        observer = observer_of(hs)
        self.host = SynapseHost(hs, monitoring_of(hs).hooks)
        self._epochs = epochs = PeerEpochs()
        partial_resync = make_partial_resync(hs, self.host.clock, observer, epochs)
        self.backlog = make_backlog(hs)
        settings = own_settings()
        has_links = bool(hs.config.redis.redis_enabled)
        super().__init__(
            self.host,
            observer,
            options=handler.HandlerOptions(
                # Without Redis, Synapse is a single process.
                expects_links=has_links,
                partial=partial_resync,
                receiver=settings.receiving
                if has_links
                else attrs.evolve(settings.receiving, position_check_seconds=0),
            ),
        )
        self.extension: ReplicationExtension | None = None
        if settings.backlog is not None:
            self.extension = ReplicationExtension(
                self, epochs, self.backlog, where=process_label()
            )
        self._is_stopping = False
        self._position_check: StoredPositionCheck | None = None
        self._foreign: dict[Any, ForeignConnection] = {}
        hs.get_notifier().add_lock_released_callback(self.on_lock_released)
        combine_notifications(hs)

    # -- start --------------------------------------------------------------------

    def start_replication(self, hs: Homeserver) -> None:  # type: ignore[override]
        """Connect to Redis, and start the monitoring and the extension.

        Without Redis, only create the streamer.
        """
        channels = super().start_replication()
        hs.get_replication_streamer()
        if not hs.config.redis.redis_enabled:
            return
        favour_streamer(hs)
        outbound = hs.get_outbound_redis_connection()
        factory = connect_subscriber(hs, outbound, channels)
        monitoring_of(hs).begin(self, self.host)
        self._position_check = self._start_position_check()
        if self.extension is not None:
            self.extension.start()
        factories = [outbound._factory, factory]  # noqa: SLF001 -- txredisapi's own
        trigger = hs.get_reactor().addSystemEventTrigger(
            "before",
            "shutdown",
            lambda: Deferred.fromCoroutine(self._stop(factories)),
        )
        # If the host shuts down while its reactor keeps running, it calls
        # shutdown_func, which must not wait. If the reactor stops, _stop() has run
        # before the phase "during", and shutdown_func has nothing left to do.
        hs.register_sync_shutdown_handler(
            phase="during",
            eventType="shutdown",
            shutdown_func=partial(self._stop_without_waiting, factories, trigger),
        )

    def _start_position_check(self) -> StoredPositionCheck | None:
        """Start to compare the stored positions of the declared writers.

        :return: ``None`` if it is disabled, or if the database is not PostgreSQL.
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
        return start_position_check(
            database,
            self,
            self._epochs,
            streams,
            {name: declared_writers(worker, name) for name in streams},
            instances_of(worker.instance_map),
            interval=own_settings().receiving.position_check_seconds,
        )

    def _stop_without_waiting(self, factories: Sequence[Any], trigger: Any) -> None:
        """Flush and close the connections to Redis, without waiting."""
        if self._is_stopping:
            return
        self._is_stopping = True
        self.hs.get_reactor().removeSystemEventTrigger(trigger)
        self._end_checks()
        self._stop_sending()
        for factory in factories:
            close(factory)

    def _end_checks(self) -> Deferred[None] | None:
        """End the periodic checks, and return :meth:`.Monitoring.end`'s result."""
        if self._position_check is not None:
            self._position_check.stop()
        return monitoring_of(self.hs).end()

    async def _stop(self, factories: Sequence[Any]) -> None:
        """Send pending rows and commands, then close the connections to Redis."""
        if self._is_stopping:
            return
        self._is_stopping = True
        spans_sent = self._end_checks()
        streamer = self.hs.get_replication_streamer()
        if isinstance(streamer, ReplicationStreamer):
            await self._wait_for(Deferred.fromCoroutine(streamer.stop()))
        # Yield, so that other parts of the host can send during their shutdown.
        await self.host.clock.sleep(0)
        self._stop_sending()
        closed = []
        for factory in factories:
            if factory.pool and factory.connector is not None:
                closed.append(factory.waitForEmptyPool())
            close(factory)
        if spans_sent is not None:
            closed.append(spans_sent)
        await self._wait_for(DeferredList(closed))

    def _stop_sending(self) -> None:
        if self.extension is not None:
            self.extension.stop()
        self.sender.drop_unsent()
        self.host.processes.stop()

    async def _wait_for(self, deferred: Deferred[Any]) -> None:
        deferred.addTimeout(_DRAIN_TIMEOUT, self.hs.get_reactor())
        try:
            await make_yieldable(deferred)
        except TimeoutError as error:
            self.observer.failure("a clean shutdown", error)

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
            and len(self._epochs) <= FEW_PEERS
            and any(
                reader.state is State.WAITING and self._epochs.epoch_of(name) is None
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
