"""The wiring between the host and the links of a process: :class:`Wiring`.

Theory of operation: a stand-alone process and a process of a homeserver differ in their
host, their links, and in what they serve. Between these, each process has the same
parts: the epochs of its peers, the backlog and the client of other backlogs, the
command handler, the extension, the streamer, and the check of stored positions. They
are created, started and stopped here. In this order, a process

#. creates its :class:`ResyncParts`, with these the command handler, and with both a
   :class:`Wiring`;
#. starts the observers;
#. opens its links, to which it passes the handler and the extension;
#. starts the extension, and finally starts to send.

Each start adds a step of the stop, so a stop runs in the reverse order: the last rows
are sent, then the extension's goodbye, and the links are closed before the observers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from synapse_replication.app.observers import ProcessObservers
from synapse_replication.app.position_check import start_position_check
from synapse_replication.app.stop_steps import SENDING, StopSteps
from synapse_replication.config.shared_options import SharedOptions
from synapse_replication.handlers.command_handler import (
    HandlerOptions,
    ReplicationCommandHandler,
)
from synapse_replication.handlers.epochs import PeerEpochs
from synapse_replication.handlers.extension.extension import ReplicationExtension
from synapse_replication.handlers.receiving.partial_resync import (
    PartialResync,
    RequestRows,
)
from synapse_replication.handlers.sending.streamer import ReplicationStreamer
from synapse_replication.streams.backlog import Backlog
from synapse_replication.text import process_label
from synapse_replication.transport.reactor import IReactor

if TYPE_CHECKING:
    from synapse_replication.handlers.accepted_writers import DeclaredWriters
    from synapse_replication.handlers.interfaces import Clock
    from synapse_replication.storage.database import TransactionRunner
    from synapse_replication.storage.stuck_id_watch import StreamIds
    from synapse_replication.streams.standard.registry import StandardStream
    from synapse_replication.streams.table import TableStream


@attrs.frozen
class StoredStreams:
    """The streams in PostgreSQL whose stored positions are checked.

    :ivar streams: their declarations, by name.
    :ivar writers: the declared writers of each; none if every instance writes it.
    :ivar instances: the instances of the deployment.
    """

    database: TransactionRunner
    streams: Mapping[str, StandardStream | TableStream]
    writers: Mapping[str, Sequence[str]]
    instances: Collection[str]


class ResyncParts:
    """The parts for partial resync, which exist before the command handler.

    :param options: the options that all processes share.
    :param serves_backlog: whether peers can request rows from this process's memory.
    :ivar epochs: the epochs of the peers.
    :ivar backlog: the rows that this process sent most recently; ``None`` if peers
        cannot request them.
    """

    def __init__(
        self,
        clock: Clock,
        observers: ProcessObservers,
        options: SharedOptions,
        *,
        serves_backlog: bool,
    ) -> None:
        self._clock = clock
        self._observer = observers.observer
        self._options = options
        self.epochs = PeerEpochs()
        self.backlog: Backlog | None = None
        if options.backlog is not None and serves_backlog:
            self.backlog = Backlog(options.backlog)
            observers.metrics.watch_backlog(self.backlog)

    def handler_options(
        self,
        request_rows: RequestRows | None,
        *,
        expects_links: bool,
        writers: DeclaredWriters | None = None,
    ) -> HandlerOptions:
        """Return the options of the process's command handler.

        :param request_rows: requests rows from the backlog of another instance;
            ``None`` if this process requests none.
        :param expects_links: see :class:`.HandlerOptions`, also for ``writers``.
        """
        receiver, partial = self._options.receiving, None
        if self._options.backlog is not None and request_rows is not None:
            partial = PartialResync(
                self.epochs, request_rows, self._clock, self._observer
            )
        if not expects_links:
            receiver = attrs.evolve(receiver, position_check_seconds=0)
        return HandlerOptions(
            expects_links=expects_links,
            receiver=receiver,
            partial=partial,
            writers=writers,
        )


class Wiring:
    """The parts that every process has, between its host and its links.

    :param parts: the parts from which the handler's options came.
    :param options: the options that all processes share.
    :param stops: receives the steps of the stop.
    :ivar handler: the command handler.
    :ivar extension: the extension; ``None`` if it is disabled.
    """

    def __init__(
        self,
        handler: ReplicationCommandHandler,
        parts: ResyncParts,
        observers: ProcessObservers,
        options: SharedOptions,
        stops: StopSteps,
    ) -> None:
        self.handler = handler
        self._epochs = parts.epochs
        self._observers = observers
        self._options = options
        self._stops = stops
        self.extension: ReplicationExtension | None = None
        if options.backlog is not None:
            self.extension = ReplicationExtension(
                handler, parts.epochs, parts.backlog, where=process_label()
            )

    def start_observers(
        self,
        reactor: IReactor,
        ids: Callable[[], Mapping[str, StreamIds]],
        damage: str,
    ) -> None:
        """Start the observers; see :meth:`.ProcessObservers.start`."""
        self._observers.start(reactor, self.handler, ids, damage)
        self._stops.add("stopping the observers", self._observers.stop)

    def start_extension(self) -> None:
        """Start the extension. Call this method when the links are being opened."""
        if self.extension is not None:
            self.extension.start()
            self._stops.add("announcing the exit", self.extension.stop)
        self._stops.add("dropping unsent commands", self.handler.sender.drop_unsent)

    def start_sending(
        self, streamer: ReplicationStreamer, stored: StoredStreams | None
    ) -> None:
        """Start the streamer, and the check of stored positions.

        :param stored: the streams to check; ``None`` if there is no database.
        """
        self._stops.add(SENDING, streamer.stop)
        streamer.start()
        if stored is None:
            return
        check = start_position_check(
            stored.database,
            self.handler,
            self._epochs,
            stored.streams,
            stored.writers,
            stored.instances,
            interval=self._options.receiving.position_check_seconds,
        )
        if check is not None:
            self._stops.add("stopping the reads of positions", check.stop)
