"""The observers of a process, and the data that they sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from twisted.logger import Logger

from synapse_replication.app.tracing_export import SpanExport
from synapse_replication.clock import ReactorClock
from synapse_replication.config.options import ReplicationOptions
from synapse_replication.handlers.events import ConnectionBuffers
from synapse_replication.handlers.interfaces import DelayedCall
from synapse_replication.instrumentation.composite import CompositeObserver
from synapse_replication.instrumentation.hooks import ReplicationHooks
from synapse_replication.instrumentation.logs import LoggingObserver
from synapse_replication.instrumentation.prometheus import (
    PrometheusObserver,
    ReplicationMetrics,
)
from synapse_replication.instrumentation.status.observer import StatusObserver
from synapse_replication.instrumentation.status.stalls import StallLog
from synapse_replication.instrumentation.tracing import TracingObserver
from synapse_replication.instrumentation.turns import ReactorTurns
from synapse_replication.storage.stuck_ids import StuckIdWatch
from synapse_replication.streams.reader import Reader
from synapse_replication.tcp.factory import outgoing_label

#: The interval in s at which the lag is sampled for the status page, and stalls are
#: logged.
SAMPLE_EVERY = 5.0


class ProcessObservers:
    """Status, hooks, metrics, log and spans of one process.

    :ivar observer: receives all events, and passes them to all parts.
    :ivar registry: the registry of the metrics.
    """

    def __init__(self, config: ReplicationOptions, clock: ReactorClock) -> None:
        self._clock = clock
        self._sampling: DelayedCall
        self._stuck_ids: StuckIdWatch
        self._stalls = StallLog(Logger("synapse_replication"))
        self.registry = CollectorRegistry()
        self.status = StatusObserver(
            config.server_name,
            config.instance_name,
            [
                (stream, writer)
                for stream, writers in config.writers.items()
                for writer in writers
            ],
            needs_link=config.redis is not None or bool(config.tcp_connect),
            own_links=[outgoing_label(each) for each in config.tcp_connect],
        )
        self.hooks = ReplicationHooks(
            clock,
            self.status.snapshot,
            lambda what, error: self.observer.failure(what, error),
        )
        self.spans = SpanExport(
            config.tracing, config.server_name, config.instance_name
        )
        self._turns = ReactorTurns()
        self.metrics = PrometheusObserver(
            ReplicationMetrics(self.registry),
            config.server_name,
            status=self.status,
            turns=self._turns,
        )
        self.observer = CompositeObserver(
            [
                self.status,
                self.hooks,
                self.metrics,
                LoggingObserver(Logger("synapse_replication")),
                TracingObserver(self.spans.tracer, config.server_name),
            ]
        )

    def watch_buffers(self, source: Callable[[], list[ConnectionBuffers]]) -> None:
        """Add connections whose buffers are shown in the metrics and the status."""
        self.metrics.watch_buffers(source)
        self.status.watch_buffers(source)

    def start(
        self,
        reactor: Any,
        own_positions: Callable[[], Mapping[str, int]],
        readers: Callable[[], Mapping[tuple[str, str], Reader]],
        stuck_ids: StuckIdWatch,
    ) -> None:
        """Begin to sample the lag, to measure turns, and to call hooks.

        :param reactor: the reactor whose turns are measured.
        :param own_positions: returns, for each stream that this process writes, the
            token up to which its rows were sent or skipped, by the stream's name.
        :param readers: returns the readers of all writers, by (stream, writer).
        :param stuck_ids: finds stuck ids.
        """
        self.status.watch_readers(readers)
        self.status.watch_own_positions(own_positions)
        self._stuck_ids = stuck_ids
        self.status.watch_stuck_ids(stuck_ids.stuck)
        self._turns.start(reactor)
        self._sample()
        self.hooks.start()

    def _sample(self) -> None:
        self._sampling = self._clock.call_later(SAMPLE_EVERY, self._sample)
        self.status.sample()
        self._stuck_ids.check()
        self._stalls.check(self.status)
        self._stalls.report_turns(self._turns.take_stall())

    def stop_sampling(self) -> None:
        """Stop sampling the lag, and measuring turns."""
        self._sampling.cancel()
        self._turns.stop()
