"""Tests for :mod:`synapse_replication.instrumentation.prometheus`."""

from __future__ import annotations

import re

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import CatchUpError, UnknownCommandError
from synapse_replication.handlers.events import (
    BacklogRequested,
    CatchUpEvent,
    CatchUpFailed,
    CatchUpPage,
    CatchUpStepEnded,
    CommandDropReason,
    CommandsDropped,
    ConnectFailed,
    ConnectionBuffers,
    Discarded,
    DiscardReason,
    DuplicateInstance,
    EpochChanged,
    ExternalCacheGet,
    ExternalCacheSet,
    ExtraFields,
    GapFound,
    LateRows,
    LineRefused,
    LinkDown,
    LinksChanged,
    LinkUp,
    PositionLowered,
    RequestRefused,
    Resync,
    Resynced,
    RowsSent,
    RowsUnannounced,
    SendingFailed,
    StreamConnected,
    StreamReset,
    UnannouncedFound,
    UnknownFields,
)
from synapse_replication.handlers.observer import CompositeObserver, ReplicationObserver
from synapse_replication.instrumentation.prometheus import (
    MAX_CHILDREN,
    METRICS,
    OTHER,
    SERVER_NAME_LABEL,
    PrometheusObserver,
    ReplicationMetrics,
)
from synapse_replication.instrumentation.status.model import InstanceStatus
from synapse_replication.instrumentation.status.status_observer import StatusObserver
from synapse_replication.instrumentation.turns import ReactorTurns
from synapse_replication.streams.backlog import Backlog, BacklogOptions
from synapse_replication.streams.stuck_ids import StuckId
from synapse_replication.wire.close_reason import CloseReason
from tests.support.known_readers import KnownReaders

PROTOCOL = "synapse_replication_tcp_protocol_"

KNOWN_TO_DASHBOARDS = {
    "synapse_replication_tcp_protocol_inbound_commands": {"command", "name"},
    "synapse_replication_tcp_protocol_outbound_commands": {"command", "name"},
    "synapse_replication_tcp_protocol_inbound_rdata_count": {"stream_name"},
    "synapse_replication_tcp_protocol_close_reason": {"reason_type"},
    "synapse_replication_tcp_protocol_pending_commands": {"name"},
    "synapse_replication_tcp_protocol_transport_send_buffer": {"name"},
    "synapse_replication_tcp_protocol_transport_kernel_send_buffer": {"name"},
    "synapse_replication_tcp_protocol_transport_kernel_read_buffer": {"name"},
    "synapse_replication_tcp_resource_stream_updates": {"stream_name"},
    "synapse_replication_tcp_resource_user_sync": set(),
    "synapse_replication_tcp_resource_federation_ack": set(),
    "synapse_replication_tcp_resource_user_ip_cache": set(),
    "synapse_replication_tcp_resource_total_connections": set(),
    "synapse_replication_tcp_command_queue": {"stream_name"},
    "synapse_storage_stream_current_position": {"stream_name"},
    "synapse_external_cache_set": {"cache_name"},
    "synapse_external_cache_get": {"cache_name", "hit"},
    "synapse_external_cache_response_time_seconds": {"method"},
}


class MetricDefinitionTests(SynchronousTestCase):
    def test_dashboard_metrics_exist(self) -> None:
        """Each metric that existing dashboards read has its name and labels."""
        defined = {metric.name: set(metric.labels) for metric in METRICS}
        for name, labels in KNOWN_TO_DASHBOARDS.items():
            self.assertEqual(defined.get(name), labels, name)

    def test_definitions_are_well_formed(self) -> None:
        """Names are unique and well formed, and each description is one sentence."""
        self.assertEqual(len({metric.name for metric in METRICS}), len(METRICS))
        for metric in METRICS:
            self.assertRegex(metric.name, re.compile("^synapse_[a-z_]+[a-z]$"))
            self.assertRegex(metric.documentation, re.compile(r"^[A-Z][^.]*\.$"))
            self.assertNotIn(SERVER_NAME_LABEL, metric.labels)


class PrometheusObserverTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.registry = CollectorRegistry()
        self.clock = Clock()
        self.metrics = ReplicationMetrics(self.registry)
        self.status = StatusObserver("test", "me", monotonic=self.clock.seconds)
        self.counting = PrometheusObserver(
            self.metrics,
            "test",
            status=self.status,
            turns=ReactorTurns(),
        )
        self.observer = CompositeObserver([self.status, self.counting])
        self.known = KnownReaders(self.status, self.observer)

    def value(self, sample: str, **labels: str) -> float | None:
        labels.setdefault("server_name", "test")
        return self.registry.get_sample_value(sample, labels)

    def test_commands_are_counted_by_name_and_connection(self) -> None:
        """A batch of commands adds its size to the counters of its direction."""
        self.observer.commands_received("redis", "RDATA", 40)
        self.observer.commands_received("redis", "RDATA", 2)
        self.observer.commands_sent("redis", "PING", 1)
        self.assertEqual(
            self.value(
                PROTOCOL + "inbound_commands_total", command="RDATA", name="redis"
            ),
            42,
        )
        self.assertEqual(
            self.value(
                PROTOCOL + "outbound_commands_total", command="PING", name="redis"
            ),
            1,
        )

    def test_some_commands_have_a_counter_of_their_own(self) -> None:
        """
        USER_SYNC, FEDERATION_ACK and USER_IP also have the counters of the dashboards.
        """
        for command in ("USER_SYNC", "FEDERATION_ACK", "USER_IP"):
            self.observer.commands_received("redis", command, 3)
        for name in ("user_sync", "federation_ack", "user_ip_cache"):
            sample = f"synapse_replication_tcp_resource_{name}_total"
            self.assertEqual(self.value(sample), 3, name)

    def test_every_metric_carries_the_server_name(self) -> None:
        """
        Every exposed sample has the label server_name, and every family a definition.
        """
        self.report_everything()
        exposed = generate_latest(self.registry).decode()
        names = set()
        for family in text_string_to_metric_families(exposed):
            names.add(family.name.removesuffix("_created"))
            for sample in family.samples:
                self.assertEqual(sample.labels.get("server_name"), "test", sample)
        self.assertEqual(names, {metric.name for metric in METRICS})

    def test_every_metric_has_a_sample(self) -> None:
        """After one event of each kind, every defined metric has a sample."""
        self.report_everything()
        exposed = generate_latest(self.registry).decode()
        with_samples = {
            family.name.removesuffix("_created")
            for family in text_string_to_metric_families(exposed)
            if family.samples
        }
        self.assertEqual(with_samples, {metric.name for metric in METRICS})

    def report_everything(self) -> None:
        self.known.connect(
            stuck_ids=lambda: [StuckId("events", 7, "w1", 11.0)],
            damage="journal has 1 damaged line(s)",
        )
        instances = (InstanceStatus("w1", "stock", "", 1.0),)
        snapshot = self.status.snapshot
        self.patch(
            self.status,
            "snapshot",
            lambda: msgspec.structs.replace(snapshot(), instances=instances),
        )
        observer: ReplicationObserver = self.observer
        observer.observe(Resynced("events", "w1", Resync.PARTIAL))
        observer.observe(BacklogRequested("events", "w1", None))
        observer.observe(BacklogRequested("events", "w1", CatchUpError("no")))
        observer.observe(GapFound("events", "w1", 1, 2))
        observer.observe(UnannouncedFound("events", "w1", 1, 2))
        observer.observe(RowsUnannounced("events", "w1", (1, 2)))
        observer.observe(LateRows("events", "w1", (1, 2)))
        observer.observe(EpochChanged("w1"))
        observer.observe(DuplicateInstance("w1", "here and there"))
        observer.observe(UnknownFields("redis", 2))
        event = CatchUpEvent("events", "w1", 1, 10)
        error = UnknownCommandError("WHAT")
        for command in ("RDATA", "USER_SYNC", "FEDERATION_ACK", "USER_IP"):
            observer.commands_received("redis", command, 1)
        observer.commands_sent("redis", "RDATA", 1)
        observer.observe(LineRefused("redis", error))
        observer.observe(RequestRefused(401, "no secret"))
        observer.rows_received("events", 1)
        observer.observe(Discarded("events", "w1", DiscardReason.OLD_TOKEN, 1))
        observer.observe(ExtraFields("events", 1))
        observer.queue_changed("events", 1)
        observer.position_changed("events", "w1", 1)
        observer.observe(StreamConnected("redis", "events", "w1"))
        observer.observe(StreamReset("typing", "w1", 5, 1))
        observer.observe(event)
        observer.observe(CatchUpPage(event, 3, 10))
        observer.observe(CatchUpStepEnded(event, 0.5))
        observer.observe(CatchUpFailed(event, error, 1, 1.0))
        observer.observe(RowsSent("events", 1))
        observer.observe(SendingFailed("events", error))
        observer.observe(CommandsDropped("USER_SYNC", CommandDropReason.QUEUE_FULL, 2))
        observer.observe(LinkUp("redis"))
        observer.observe(LinkDown("redis", CloseReason.LOST, "gone"))
        observer.observe(ConnectFailed("redis", "refused", 1.0))
        observer.observe(LinksChanged(1))
        observer.observe(ExternalCacheSet("c", 0.1))
        observer.observe(ExternalCacheGet("c", True, 0.1))
        observer.failure("work", error)
        self.status.watch_buffers(lambda: [ConnectionBuffers("redis", 1, 2, 3, 4)])
        backlog = Backlog(BacklogOptions())
        backlog.of("events").skip_range(1, 2)
        self.counting.watch_backlog(backlog)
        self.clock.advance(60)

    def test_labels_made_up_by_peers_are_bounded(self) -> None:
        """Names beyond a bound are counted together under one label."""
        for number in range(MAX_CHILDREN + 50):
            self.observer.commands_received(f"peer{number}", "PING", 1)
        sample = PROTOCOL + "inbound_commands_total"
        self.assertEqual(self.value(sample, command=OTHER, name=OTHER), 50)
        self.assertEqual(
            self.value(sample, command="PING", name=f"peer{MAX_CHILDREN}"), None
        )

    def test_positions_of_made_up_writers_are_bounded(self) -> None:
        """Positions of writers beyond a bound share one label."""
        for number in range(MAX_CHILDREN + 50):
            self.observer.position_changed("events", f"w{number}", number)
        self.observer.position_changed("events", "w0", 9)
        sample = "synapse_replication_position"
        self.assertEqual(
            self.value(sample, stream_name="events", instance_name="w0"), 9
        )
        self.assertEqual(
            self.value(sample, stream_name=OTHER, instance_name=OTHER),
            MAX_CHILDREN + 49,
        )
        name = f"w{MAX_CHILDREN}"
        self.assertIsNone(self.value(sample, stream_name="events", instance_name=name))

    def test_an_unknown_stream_makes_no_label(self) -> None:
        """The name of an unknown stream never becomes a label."""
        self.observer.observe(
            Discarded("made-up", "w1", DiscardReason.UNKNOWN_STREAM, 2)
        )
        sample = "synapse_replication_discarded_total"
        self.assertEqual(
            self.value(sample, stream_name=OTHER, reason="unknown_stream"), 2
        )
        self.assertNotIn(b"made-up", generate_latest(self.registry))

    def test_lag_shrinks_with_the_pages_of_a_catch_up(self) -> None:
        """
        Lag is the number of announced ids that are not delivered yet, and their age.
        """
        writer = {"stream_name": "events", "instance_name": "w1"}
        event = CatchUpEvent("events", "w1", 100, 150)
        self.observer.observe(event)
        self.assertEqual(self.lag(**writer), (50, 0))
        self.clock.advance(3)
        self.observer.observe(CatchUpPage(event, 10, 120))
        self.assertEqual(self.lag(**writer), (30, 3))
        self.observer.position_changed("events", "w1", 120)
        self.assertEqual(self.lag(**writer), (30, 3))
        self.observer.observe(CatchUpStepEnded(event, 3.0))
        self.observer.position_changed("events", "w1", 150)
        self.clock.advance(1)
        self.assertEqual(self.lag(**writer), (0, 0))
        sample = "synapse_replication_catch_up_seconds_sum"
        self.assertEqual(self.value(sample, stream_name="events"), 3)

    def lag(self, **writer: str) -> tuple[float | None, float | None]:
        return (
            self.value("synapse_replication_lag_positions", **writer),
            self.value("synapse_replication_lag_seconds", **writer),
        )

    def test_cut_off(self) -> None:
        """A process with links shows for how long none of them has been up."""
        sample = "synapse_replication_cut_off_seconds"
        self.assertIsNone(self.value(sample))
        self.known.link_up()
        self.clock.advance(5)
        self.assertEqual(self.value(sample), 0)
        self.known.link_lost()
        self.clock.advance(7)
        self.assertEqual(self.value(sample), 7)

    def test_stalled_writers_have_seconds_by_reason(self) -> None:
        """A stalled writer has a sample with its reason until it advances."""
        sample = "synapse_replication_stalled_seconds"
        event = CatchUpEvent("events", "w1", 100, 150)
        self.known.link_up()
        self.known.go_live("events", "w1", 100)
        self.observer.observe(event)
        self.observer.observe(CatchUpFailed(event, CatchUpError("no"), 1, 1.0))
        writer = {"stream_name": "events", "instance_name": "w1"}
        self.clock.advance(5)
        self.assertIsNone(self.value(sample, **writer, reason="catch_up_fails"))
        self.clock.advance(10)
        self.assertEqual(self.value(sample, **writer, reason="catch_up_fails"), 15)
        self.observer.position_changed("events", "w1", 150)
        self.assertIsNone(self.value(sample, **writer, reason="catch_up_fails"))

    def test_current_position_is_the_greatest(self) -> None:
        """A stream's current position is that of its foremost writer."""
        sample = "synapse_storage_stream_current_position"
        self.observer.position_changed("events", "w1", 7)
        self.observer.position_changed("events", "w2", 5)
        self.assertEqual(self.value(sample, stream_name="events"), 7)

    def test_reset_lowers_position(self) -> None:
        """After a reset a stream shows its lower position."""
        self.observer.position_changed("typing", "w1", 90)
        self.observer.observe(StreamReset("typing", "w1", 90, 2))
        self.observer.position_changed("typing", "w1", 3)
        sample = "synapse_storage_stream_current_position"
        self.assertEqual(self.value(sample, stream_name="typing"), 3)

    def test_reset_of_one_writer(self) -> None:
        """After the reset of one writer, the position is that of the next foremost."""
        self.observer.position_changed("events", "w1", 90)
        self.observer.position_changed("events", "w2", 80)
        self.observer.position_changed("receipts", "w1", 1000)
        self.observer.observe(StreamReset("events", "w1", 90, 2))
        sample = "synapse_storage_stream_current_position"
        self.assertEqual(self.value(sample, stream_name="events"), 80)
        self.observer.observe(PositionLowered("events", "w2", 80, 70))
        self.assertEqual(self.value(sample, stream_name="events"), 70)
        resets = "synapse_replication_stream_resets_total"
        self.assertEqual(self.value(resets, stream_name="events"), 1)

    def test_buffers_are_read_at_each_scrape(self) -> None:
        """The gauges of buffers show the connections that are open at the scrape."""
        open_now = [ConnectionBuffers("w1", 1, 2, 3, 4)]
        self.status.watch_buffers(lambda: open_now)
        pending = PROTOCOL + "pending_commands"
        self.assertEqual(self.value(pending, name="w1"), 1)
        open_now.append(ConnectionBuffers("w1", 10, 0, 0, 0))
        self.assertEqual(self.value(pending, name="w1"), 11)
        self.assertEqual(
            self.value(PROTOCOL + "transport_kernel_read_buffer", name="w1"), 4
        )
        open_now.clear()
        self.assertIsNone(self.value(pending, name="w1"))

    def test_buffers_without_a_status(self) -> None:
        """An application that has no status registers the buffers with this one."""
        counting = PrometheusObserver(self.metrics, "other")
        counting.watch_buffers(lambda: [ConnectionBuffers("w1", 1, 2, 3, 4)])
        counting.watch_buffers(lambda: [ConnectionBuffers("w1", 10, 0, 0, 0)])
        pending = PROTOCOL + "pending_commands"
        self.assertEqual(self.value(pending, name="w1", server_name="other"), 11)

    def test_names_of_connections_are_bounded(self) -> None:
        """Buffers of connections beyond a bound are added up under one label."""
        self.status.watch_buffers(
            lambda: [
                ConnectionBuffers(f"peer{number}", 1, 0, 0, 0)
                for number in (*range(MAX_CHILDREN + 50), 0)
            ]
        )
        sample = PROTOCOL + "pending_commands"
        self.assertEqual(self.value(sample, name=OTHER), 50)
        self.assertEqual(self.value(sample, name="peer0"), 2)
        self.assertEqual(self.value(sample, name=f"peer{MAX_CHILDREN}"), None)

    def test_backlogs_are_read_at_each_scrape(self) -> None:
        """The gauges of backlogs show their size at the scrape."""
        backlog = Backlog(BacklogOptions(max_rows=2))
        self.counting.watch_backlog(backlog)
        rows = "synapse_replication_backlog_rows"
        self.assertIsNone(self.value(rows, stream_name="events"))
        backlog.of("events").add(1, [(2, [b"[1]"]), (3, [b"[2]"]), (4, [b"[3]"])])
        self.assertEqual(self.value(rows, stream_name="events"), 2)
        size = self.value("synapse_replication_backlog_bytes", stream_name="events")
        self.assertEqual(size, backlog.of("events").size)

    def test_two_servers_share_a_registry(self) -> None:
        """Two servers in one process are counted separately, in valid exposition."""
        status = StatusObserver("other", "me", monotonic=self.clock.seconds)
        counting = PrometheusObserver(self.metrics, "other", status=status)
        other = CompositeObserver([status, counting])
        self.observer.rows_received("events", 1)
        other.rows_received("events", 2)
        for observer in (self.observer, other):
            observer.observe(StreamConnected("redis", "events", "w1"))
        sample = PROTOCOL + "inbound_rdata_count_total"
        self.assertEqual(
            self.value(sample, stream_name="events", server_name="other"), 2
        )
        self.assertEqual(self.value(sample, stream_name="events"), 1)
        exposed = generate_latest(self.registry).decode()
        self.assertEqual(exposed.count("# TYPE synapse_replication_lag_seconds "), 1)
