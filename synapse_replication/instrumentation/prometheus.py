"""Metrics for Prometheus.

Theory of operation: the rows of ``metrics.csv`` define all metrics. The first group has
the names that a homeserver's existing dashboards and alerts use; the second group has
further metrics. Every metric has the label ``server_name``, which distinguishes several
servers in one process. Counters are exposed with the suffix ``_total``, as Prometheus
requires.

:class:`ReplicationMetrics` provides every metric once per registry; one
:class:`PrometheusObserver` per server name updates them. The child of a metric for a
set of label values is cached in a dict, because ``labels()`` costs several times as
much as a lookup. The lengths of queues and the positions of writers, which change with
every chunk of rows, are stored in plain dicts and read at each scrape.

The number of label values that a peer can invent (names of connections and of writers)
is bounded: beyond a thousand children of a metric, further values are counted under
``other``. The status, from which the lag is read, omits further writers instead.
"""

from __future__ import annotations

import enum
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import attrs
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from synapse_replication.data_files import read_table
from synapse_replication.handlers import events
from synapse_replication.handlers.observer import ReplicationObserver, handles
from synapse_replication.instrumentation.status.model import Condition, ProcessStatus
from synapse_replication.instrumentation.status.status_observer import (
    BufferSource,
    StatusObserver,
)
from synapse_replication.instrumentation.turns import ReactorTurns
from synapse_replication.streams.backlog import StreamBacklog

#: The last label of every metric.
SERVER_NAME_LABEL = "server_name"

#: The maximum number of children of a metric for one server, in addition to the child
#: for ``OTHER``.
MAX_CHILDREN = 1000

#: Replaces the label values of children beyond ``MAX_CHILDREN``, and the names of
#: unknown streams.
OTHER = "other"


class MetricKind(enum.Enum):
    """The type of a metric, by its Prometheus name."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@attrs.frozen
class MetricDefinition:
    """One metric.

    :ivar name: the name, without the suffix that Prometheus adds to counters.
    :ivar labels: the labels, without ``server_name``, which every metric has.
    :ivar documentation: the help text: one sentence, with the unit.
    :ivar is_read_at_scrape: whether its values are read at each scrape, and not stored.
    :ivar event: the class of the events that it counts, whose attributes are its
        labels; empty if methods of the observer set its values.
    """

    name: str
    kind: MetricKind
    labels: tuple[str, ...]
    documentation: str
    is_read_at_scrape: bool
    event: str


METRICS = tuple(
    MetricDefinition(
        row["Name"],
        MetricKind(row["Kind"]),
        tuple(row["Labels"].split()),
        row["Meaning"],
        row["At scrape"] == "yes",
        row["Event"],
    )
    for row in read_table(Path(__file__).with_name("metrics.csv"))
)

_CATCH_UP_SECONDS = "synapse_replication_catch_up_seconds"
#: Further arguments of metrics. A catch-up may take minutes.
_OPTIONS: Mapping[str, Any] = {
    _CATCH_UP_SECONDS: {"buckets": (0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 300)}
}
_CACHE_SECONDS = "synapse_external_cache_response_time_seconds"

#: The classes of metrics, by kind and by whether they are read at each scrape.
_CLASSES: Mapping[tuple[MetricKind, bool], Any] = MappingProxyType(
    {
        (MetricKind.COUNTER, False): Counter,
        (MetricKind.GAUGE, False): Gauge,
        (MetricKind.HISTOGRAM, False): Histogram,
        (MetricKind.GAUGE, True): GaugeMetricFamily,
        (MetricKind.HISTOGRAM, True): HistogramMetricFamily,
    }
)

_PROTOCOL = "synapse_replication_tcp_protocol_"
#: Gauges that are read from :class:`ConnectionBuffers` at each scrape, by attribute.
_BUFFERS: Mapping[str, str] = MappingProxyType(
    {
        "pending_commands": f"{_PROTOCOL}pending_commands",
        "send_buffer": f"{_PROTOCOL}transport_send_buffer",
        "kernel_send_buffer": f"{_PROTOCOL}transport_kernel_send_buffer",
        "kernel_read_buffer": f"{_PROTOCOL}transport_kernel_read_buffer",
    }
)
_COUNTED_COMMANDS = {
    "USER_SYNC": "synapse_replication_tcp_resource_user_sync",
    "FEDERATION_ACK": "synapse_replication_tcp_resource_federation_ack",
    "USER_IP": "synapse_replication_tcp_resource_user_ip_cache",
}


#: A metric, the values of its labels without ``server_name``, and its value.
_Sample: TypeAlias = tuple[str, tuple[str, ...], float]

#: The metrics that count events, by the class of the event.
_COUNTED: Mapping[type, MetricDefinition] = MappingProxyType(
    {getattr(events, each.event): each for each in METRICS if each.event}
)
#: The attributes of events whose labels have other names.
_ATTRIBUTES = {"name": "connection", "reason_type": "reason"}


def _label(event: Any, label: str) -> str:
    """Return a label's value: an attribute of the event or of its catch-up."""
    attribute = _ATTRIBUTES.get(label, label)
    has_it = hasattr(event, attribute)
    value = getattr(event if has_it else event.catch_up, attribute)
    if isinstance(value, enum.Enum):
        return str(value.value)
    return type(value).__name__ if isinstance(value, Exception) else str(value)


def _count_of(event: Any) -> int:
    """Return the number of rows, tokens or other items that an event reports."""
    if hasattr(event, "tokens"):
        return len(event.tokens)
    return int(getattr(event, "rows", 0) or getattr(event, "count", 1))


class ReplicationMetrics(Collector):
    """All metrics in one registry, for any number of servers.

    :param registry: the host's registry. Each registry accepts only one object of this
        class.
    :param existing: metrics that the host has already registered, by name, with the
        same labels in the same order; they are used instead of new ones. Gauges that
        are read at each scrape are never taken from ``existing``.
    """

    def __init__(
        self, registry: CollectorRegistry, existing: Mapping[str, Any] | None = None
    ) -> None:
        existing = existing or {}
        #: The metrics whose values are stored.
        self.families: dict[str, Any] = {
            definition.name: existing.get(definition.name)
            or _make(
                definition,
                labelnames=_labels(definition),
                registry=registry,
                **_OPTIONS.get(definition.name, {}),
            )
            for definition in METRICS
            if not definition.is_read_at_scrape
        }
        # Weak references, so that the metrics do not keep a closed server in memory.
        self._scraped: weakref.WeakKeyDictionary[PrometheusObserver, str] = (
            weakref.WeakKeyDictionary()
        )
        registry.register(self)

    def scrape(self, server_name: str, observer: PrometheusObserver) -> None:
        """Read the gauges of an observer at each scrape, while the observer exists."""
        self._scraped[observer] = server_name

    def collect(self) -> Iterable[Metric]:
        """Return the gauges that are read at each scrape."""
        families: dict[str, Any] = {
            definition.name: _make(definition, labels=_labels(definition))
            for definition in METRICS
            if definition.is_read_at_scrape
        }
        for observer, server_name in self._scraped.items():
            if observer.turns is not None:
                turns = families["synapse_replication_reactor_turn_seconds"]
                turns.add_metric((server_name,), *observer.turns.buckets())
            for name, labels, value in observer.read_gauges():
                families[name].add_metric((*labels, server_name), value)
        return families.values()


def _make(definition: MetricDefinition, **options: Any) -> Any:
    make = _CLASSES[definition.kind, definition.is_read_at_scrape]
    return make(definition.name, definition.documentation, **options)


def _labels(definition: MetricDefinition) -> tuple[str, ...]:
    return (*definition.labels, SERVER_NAME_LABEL)


class Children:
    """The children of one metric for one server, cached by their label values."""

    __slots__ = ("_cache", "_family", "_server_name")

    def __init__(self, family: Any, server_name: str) -> None:
        self._family = family
        self._server_name = server_name
        self._cache: dict[tuple[str, ...], Any] = {}

    def get(self, *values: str) -> Any:
        """Return the child for these label values; beyond the limit, that of ``OTHER``.

        :param values: the label values, without ``server_name``.
        """
        child = self._cache.get(values)
        if child is None:
            if len(self._cache) >= MAX_CHILDREN:
                values = (OTHER,) * len(values)
            child = self._family.labels(*values, self._server_name)
            self._cache[values] = child
        return child


class PrometheusObserver(ReplicationObserver):
    """Updates the metrics of one server's replication.

    :param replication_metrics: the metrics to update.
    :param server_name: the value of the label ``server_name``.
    :param status: the source of the metrics of buffers, of lag and of stalls; it must
        receive the same events as this observer. ``None`` to omit these metrics.
    :param turns: measures the reactor's turns; ``None`` to omit the metric.
    """

    def __init__(
        self,
        replication_metrics: ReplicationMetrics,
        server_name: str,
        *,
        status: StatusObserver | None = None,
        turns: ReactorTurns | None = None,
    ) -> None:
        self.turns = turns
        self._metrics = {
            name: Children(family, server_name)
            for name, family in replication_metrics.families.items()
        }
        self._inbound = self._metrics[f"{_PROTOCOL}inbound_commands"]
        self._outbound = self._metrics[f"{_PROTOCOL}outbound_commands"]
        self._rdata = self._metrics[f"{_PROTOCOL}inbound_rdata_count"]
        self._queues: dict[str, int] = {}
        self._positions: dict[tuple[str, str], int] = {}
        self._current = self._metrics["synapse_storage_stream_current_position"]
        self._sent = self._metrics["synapse_replication_tcp_resource_stream_updates"]
        self._greatest: dict[str, int] = {}
        self._status = status
        self._buffer_sources: list[BufferSource] = []
        if status is not None:
            self._buffer_sources.append(status.buffers)
        self._backlog: Iterable[tuple[str, StreamBacklog]] = ()
        replication_metrics.scrape(server_name, self)

    def watch_buffers(self, source: BufferSource) -> None:
        """Read the buffers of a group of connections at each scrape.

        :param source: returns the buffers of the open connections in the group, unless
            the status has them, too.
        """
        self._buffer_sources.append(source)

    def watch_backlog(self, backlog: Iterable[tuple[str, StreamBacklog]]) -> None:
        """Read the sizes of the streams' backlogs at each scrape."""
        self._backlog = backlog

    def read_gauges(self) -> Iterator[_Sample]:
        """Yield the gauges that are read at each scrape."""
        for (name, connection), size in self._read_buffers().items():
            yield name, (connection,), size
        # dict.copy() is atomic: a scrape may run in a thread of its own.
        for stream_name, length in self._queues.copy().items():
            yield "synapse_replication_tcp_command_queue", (stream_name,), length
        for writer, token in self._positions.copy().items():
            yield "synapse_replication_position", writer, token
        for stream_name, backlog in self._backlog:
            yield "synapse_replication_backlog_rows", (stream_name,), backlog.rows
            yield "synapse_replication_backlog_bytes", (stream_name,), backlog.size
        if self._status is not None:
            yield from _status_gauges(self._status.snapshot())

    def _read_buffers(self) -> Mapping[tuple[str, str], int]:
        """Return the sizes of buffers by metric and connection.

        Those of connections with the same name are added up.
        """
        sizes: defaultdict[tuple[str, str], int] = defaultdict(int)
        connections: set[str] = set()
        for buffers in (each for source in self._buffer_sources for each in source()):
            is_known = buffers.connection in connections
            has_room = len(connections) < MAX_CHILDREN
            connection = buffers.connection if is_known or has_room else OTHER
            connections.add(connection)
            for attribute, name in _BUFFERS.items():
                sizes[name, connection] += getattr(buffers, attribute)
        return sizes

    def _count(self, name: str, *values: str, count: int = 1) -> None:
        self._metrics[name].get(*values).inc(count)

    @override
    def observe(self, event: events.Event) -> None:
        definition = _COUNTED.get(type(event))
        if definition is not None:
            labels = [_label(event, label) for label in definition.labels]
            self._count(definition.name, *labels, count=_count_of(event))
        super().observe(event)

    # -- commands and rows ----------------------------------------------------------

    @override
    def commands_received(self, connection: str, command: str, count: int) -> None:
        self._inbound.get(command, connection).inc(count)
        if (name := _COUNTED_COMMANDS.get(command)) is not None:
            self._count(name, count=count)

    @override
    def commands_sent(self, connection: str, command: str, count: int) -> None:
        self._outbound.get(command, connection).inc(count)

    @override
    def rows_received(self, stream_name: str, count: int) -> None:
        self._rdata.get(stream_name).inc(count)

    @handles(events.Discarded)
    def _discarded(self, event: events.Discarded) -> None:
        is_known = event.reason is not events.DiscardReason.UNKNOWN_STREAM
        stream_name = event.stream_name if is_known else OTHER
        self._count(
            "synapse_replication_discarded",
            stream_name,
            event.reason.value,
            count=event.count,
        )

    @override
    def queue_changed(self, stream_name: str, length: int) -> None:
        self._queues[stream_name] = length

    # -- positions and catch-up -----------------------------------------------------

    @override
    def position_changed(
        self, stream_name: str, instance_name: str, token: int
    ) -> None:
        self._set_position(stream_name, instance_name, token)
        if token > self._greatest.get(stream_name, -1):
            self._greatest[stream_name] = token
            self._current.get(stream_name).set(token)

    def _set_position(self, stream_name: str, instance_name: str, token: int) -> None:
        key = stream_name, instance_name
        if key not in self._positions and len(self._positions) >= MAX_CHILDREN:
            key = OTHER, OTHER
        self._positions[key] = token

    @handles(events.StreamReset, events.PositionLowered)
    def _position_moved_back(self, event: events.PositionMovedBack) -> None:
        self._set_position(event.stream_name, event.instance_name, event.to_token)
        name = event.stream_name
        tokens = [token for (of, _), token in self._positions.items() if of == name]
        self._greatest[name] = greatest = max(tokens, default=event.to_token)
        self._current.get(name).set(greatest)

    @handles(events.CatchUpStepEnded)
    def _catch_up_step_ended(self, event: events.CatchUpStepEnded) -> None:
        histogram = self._metrics[_CATCH_UP_SECONDS]
        histogram.get(event.catch_up.stream_name).observe(event.seconds)

    @handles(events.BacklogRequested)
    def _backlog_requested(self, event: events.BacklogRequested) -> None:
        outcome = "hits" if event.error is None else "misses"
        self._count(f"synapse_replication_backlog_{outcome}", event.stream_name)

    # -- sending, connections and the external cache -------------------------------

    @handles(events.RowsSent)
    def _rows_sent(self, event: events.RowsSent) -> None:
        # It occurs for each written row: counting it as other events takes twice as
        # long.
        self._sent.get(event.stream_name).inc(event.count)

    @handles(events.ConnectFailed)
    def _connect_failed(self, event: events.ConnectFailed) -> None:
        if event.why:
            self._count("synapse_replication_connection_failures", event.connection)

    @handles(events.LinksChanged)
    def _links_changed(self, event: events.LinksChanged) -> None:
        total = self._metrics["synapse_replication_tcp_resource_total_connections"]
        total.get().set(event.count)

    @handles(events.ExternalCacheSet)
    def _external_cache_set(self, event: events.ExternalCacheSet) -> None:
        self._metrics[_CACHE_SECONDS].get("set").observe(event.seconds)

    @handles(events.ExternalCacheGet)
    def _external_cache_get(self, event: events.ExternalCacheGet) -> None:
        self._metrics[_CACHE_SECONDS].get("get").observe(event.seconds)


def _status_gauges(status: ProcessStatus) -> Iterator[_Sample]:
    if status.damage:
        yield "synapse_replication_sink_damaged", (), 1
    if status.links:
        yield "synapse_replication_cut_off_seconds", (), status.cut_off_for
    for each in status.instances:
        name = (each.instance_name,)
        yield "synapse_replication_instance_up", name, int(each.is_up)
    for stuck in status.stuck_ids:
        key = stuck.stream_name, stuck.instance_name
        yield "synapse_replication_stuck_id_seconds", key, stuck.age
    for writer in status.writers:
        if writer.condition is Condition.WRITTEN_HERE:
            continue
        key = writer.stream_name, writer.instance_name
        yield "synapse_replication_lag_positions", key, writer.lag
        yield "synapse_replication_lag_seconds", key, writer.lag_seconds
        if writer.reason is not None:
            stalled = (*key, writer.reason.value)
            yield "synapse_replication_stalled_seconds", stalled, writer.stalled_for
