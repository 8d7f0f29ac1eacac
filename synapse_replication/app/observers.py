"""The observers of a process, and the data that they sample."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from twisted.logger import Logger

from synapse_replication.handlers.command_handler import ReplicationCommandHandler
from synapse_replication.handlers.observer import CompositeObserver, ReplicationObserver
from synapse_replication.handlers.timer import Timer, until_next
from synapse_replication.instrumentation import prometheus
from synapse_replication.instrumentation.hooks import ReplicationHooks
from synapse_replication.instrumentation.logs import LoggingObserver
from synapse_replication.instrumentation.status.stalls import StallLog
from synapse_replication.instrumentation.status.status_observer import (
    StatusObserver,
    StatusSources,
)
from synapse_replication.instrumentation.turns import ReactorTurns
from synapse_replication.storage.stuck_id_watch import StreamIds, StuckIdWatch
from synapse_replication.transport.reactor import IReactor

if TYPE_CHECKING:
    from synapse_replication.app.tracing_export import SpanExport
    from synapse_replication.handlers.interfaces import Clock

#: The interval in s at which the lag is sampled for the status page, and stalls are
#: logged.
SAMPLE_INTERVAL = 5.0


class ProcessObservers:
    """Status, hooks, metrics, log and spans of one process.

    :param spans: exports spans; ``None`` to create none.
    :ivar observer: receives all events, and passes them to all parts.
    :ivar status: tracks the replication status.
    :ivar hooks: delivers events to subscribed callbacks.
    :ivar metrics: updates the metrics.
    """

    def __init__(
        self,
        server_name: str,
        clock: Clock,
        status: StatusObserver,
        metrics: prometheus.ReplicationMetrics,
        logger: Logger,
        spans: SpanExport | None,
    ) -> None:
        self.status = status
        self._clock = clock
        self._spans = spans
        self._sampling = Timer(clock)
        self._stuck_ids: StuckIdWatch
        self._stalls = StallLog(logger)
        self._turns = ReactorTurns()
        self.hooks = ReplicationHooks(
            clock,
            status.snapshot,
            lambda what, error: self.observer.failure(what, error),
        )
        self.metrics = prometheus.PrometheusObserver(
            metrics, server_name, status=status, turns=self._turns
        )
        observers = [status, self.hooks, self.metrics, LoggingObserver(logger)]
        if spans is not None:
            # Importing OpenTelemetry takes time and memory.
            from synapse_replication.instrumentation.tracing import TracingObserver

            observers.append(TracingObserver(spans.tracer, server_name))
        self.observer: ReplicationObserver = CompositeObserver(observers)

    def start(
        self,
        reactor: IReactor,
        handler: ReplicationCommandHandler,
        ids: Callable[[], Mapping[str, StreamIds]],
        damage: str,
    ) -> None:
        """Begin to sample the lag, to measure turns, and to call hooks.

        :param reactor: the reactor whose turns are measured.
        :param handler: knows the readers, the streams that this process writes, and the
            tokens that were sent.
        :param ids: returns what is known of ids, by the names of their streams.
        :param damage: see :class:`.StatusSources`.
        """
        self._stuck_ids = StuckIdWatch(ids, self._clock)
        self.status.connect(
            StatusSources(
                readers=handler.readers,
                own_positions=lambda: {
                    stream.description.name: handler.sender.last_sent_token(stream)
                    for stream in handler.host.streams.get_streams_to_replicate()
                },
                stuck_ids=self._stuck_ids.stuck,
                damage=damage,
            )
        )
        self._turns.start(reactor)
        self.hooks.start()
        self._sample()

    def _sample(self) -> None:
        # Reschedule first, so that an exception cannot stop the timer.
        delay = until_next(self._clock, SAMPLE_INTERVAL)
        self._sampling.start(delay, self._sample)
        self.status.sample()
        self._stuck_ids.check()
        self._stalls.check(self.status)
        self._stalls.report_turns(self._turns.take_stall())

    def stop(self) -> Awaitable[None] | None:
        """Stop the hooks, the sampling and the measurement of turns."""
        self.hooks.stop()
        self._sampling.stop()
        self._turns.stop()
        return None
