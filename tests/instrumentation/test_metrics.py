"""Tests for :mod:`synapse_replication.instrumentation.metrics`."""

from __future__ import annotations

import re

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.instrumentation.metrics import METRICS, SERVER_NAME_LABEL

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
