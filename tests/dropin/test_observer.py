"""Tests for the host's metrics and logs in the drop-in."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.dropin.observer import adopt_metrics, observer_of
from synapse_replication.instrumentation.prometheus import (
    PrometheusObserver,
    ReplicationMetrics,
)
from tests.dropin.host import FakeHomeserver

_COMMANDS = "synapse_replication_tcp_protocol_inbound_commands"
_QUEUE = "synapse_replication_tcp_command_queue"


class _ComputedGauge(Collector):
    """A metric that is computed when it is read."""

    name = _QUEUE

    def collect(self) -> list[GaugeMetricFamily]:
        return [GaugeMetricFamily(self.name, "of the host", value=1)]


class AdoptMetricsTests(SynchronousTestCase):
    """Tests for adopt_metrics."""

    def test_counters_continue(self) -> None:
        """The host's counters are continued, and its computed metrics are replaced."""
        registry = CollectorRegistry()
        counter = Counter(
            _COMMANDS,
            "of the host",
            ("command", "name", "server_name"),
            registry=registry,
        )
        counter.labels("PING", "redis", "test").inc(5)
        gauge = _ComputedGauge()
        registry.register(gauge)
        namespace = {"counter": counter, "gauge": gauge, "other": 7}
        found = adopt_metrics(namespace, registry)
        observer = PrometheusObserver(ReplicationMetrics(registry, found), "test")
        observer.commands_received("redis", "PING", 2)
        observer.queue_changed("events", 3)
        labels = {"command": "PING", "name": "redis", "server_name": "test"}
        self.assertEqual(registry.get_sample_value(f"{_COMMANDS}_total", labels), 7)
        labels = {"stream_name": "events", "server_name": "test"}
        self.assertEqual(registry.get_sample_value(_QUEUE, labels), 3)


class ObserverOfTests(SynchronousTestCase):
    """Tests for observer_of."""

    def test_one_for_all_parts(self) -> None:
        """All parts of a homeserver share one observer."""
        hs = FakeHomeserver()
        self.assertIs(observer_of(hs), observer_of(hs))
        self.assertIsNot(observer_of(hs), observer_of(FakeHomeserver()))
