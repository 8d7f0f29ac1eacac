"""The names of all metrics, as data.

The first group carries the names that a homeserver's dashboards and alerts know
already; the second adds what those lack. Every one also carries ``server_name``,
so that several servers in one process do not mix. Counters are exposed with the
ending ``_total``, as Prometheus wants it.
"""

from __future__ import annotations

import enum

import attrs

__all__ = ["METRICS", "SERVER_NAME_LABEL", "MetricDefinition", "MetricKind"]

#: The label that every metric has, last.
SERVER_NAME_LABEL = "server_name"


class MetricKind(enum.Enum):
    """What Prometheus calls the type of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@attrs.frozen
class MetricDefinition:
    """One metric.

    :ivar name: without the ending that Prometheus gives to counters.
    :ivar labels: without ``server_name``, which all have.
    :ivar documentation: one sentence, with the unit.
    """

    name: str
    kind: MetricKind
    labels: tuple[str, ...]
    documentation: str


def _counter(name: str, *labels: str, says: str) -> MetricDefinition:
    return MetricDefinition(name, MetricKind.COUNTER, labels, says)


def _gauge(name: str, *labels: str, says: str) -> MetricDefinition:
    return MetricDefinition(name, MetricKind.GAUGE, labels, says)


def _histogram(name: str, *labels: str, says: str) -> MetricDefinition:
    return MetricDefinition(name, MetricKind.HISTOGRAM, labels, says)


_PROTOCOL = "synapse_replication_tcp_protocol_"
_RESOURCE = "synapse_replication_tcp_resource_"

INBOUND_COMMANDS = _counter(
    _PROTOCOL + "inbound_commands",
    "command",
    "name",
    says="Commands received on a connection.",
)
OUTBOUND_COMMANDS = _counter(
    _PROTOCOL + "outbound_commands",
    "command",
    "name",
    says="Commands written to a connection.",
)
INBOUND_RDATA = _counter(
    _PROTOCOL + "inbound_rdata_count",
    "stream_name",
    says="Rows received.",
)
CLOSE_REASON = _counter(
    _PROTOCOL + "close_reason",
    "reason_type",
    says="Connections closed, by reason.",
)
PENDING_COMMANDS = _gauge(
    _PROTOCOL + "pending_commands",
    "name",
    says="Commands that wait because their transport is paused.",
)
SEND_BUFFER = _gauge(
    _PROTOCOL + "transport_send_buffer",
    "name",
    says="Bytes that the transport holds and has not given to the kernel.",
)
KERNEL_SEND_BUFFER = _gauge(
    _PROTOCOL + "transport_kernel_send_buffer",
    "name",
    says="Bytes in the kernel that the peer has not acknowledged.",
)
KERNEL_READ_BUFFER = _gauge(
    _PROTOCOL + "transport_kernel_read_buffer",
    "name",
    says="Bytes in the kernel that this process has not read.",
)
STREAM_UPDATES = _counter(
    _RESOURCE + "stream_updates",
    "stream_name",
    says="Rows sent by this process.",
)
USER_SYNC = _counter(_RESOURCE + "user_sync", says="USER_SYNC commands received.")
FEDERATION_ACK = _counter(
    _RESOURCE + "federation_ack", says="FEDERATION_ACK commands received."
)
USER_IP = _counter(_RESOURCE + "user_ip_cache", says="USER_IP commands received.")
TOTAL_CONNECTIONS = _gauge(
    _RESOURCE + "total_connections", says="Replication links of this process."
)
COMMAND_QUEUE = _gauge(
    "synapse_replication_tcp_command_queue",
    "stream_name",
    says="Rows and positions of a stream that wait to be handled.",
)
CURRENT_POSITION = _gauge(
    "synapse_storage_stream_current_position",
    "stream_name",
    says="The greatest position of any writer that this process has handled.",
)
EXTERNAL_CACHE_SET = _counter(
    "synapse_external_cache_set",
    "cache_name",
    says="Values written to the external cache.",
)
EXTERNAL_CACHE_GET = _counter(
    "synapse_external_cache_get",
    "cache_name",
    "hit",
    says="Values asked of the external cache, by whether it had them.",
)
EXTERNAL_CACHE_SECONDS = _histogram(
    "synapse_external_cache_response_time_seconds",
    "method",
    says="Seconds that the external cache took to answer.",
)

POSITION = _gauge(
    "synapse_replication_position",
    "stream_name",
    "instance_name",
    says="How far this process has handled a writer's rows.",
)
LAG_POSITIONS = _gauge(
    "synapse_replication_lag_positions",
    "stream_name",
    "instance_name",
    says="Positions between what a writer announced and what was handled here.",
)
LAG_SECONDS = _gauge(
    "synapse_replication_lag_seconds",
    "stream_name",
    "instance_name",
    says="Age in seconds of the oldest write of a writer that was not handled here; 0 "
    "if there is none.",
)
STALLED_SECONDS = _gauge(
    "synapse_replication_stalled_seconds",
    "stream_name",
    "instance_name",
    "reason",
    says="Seconds since a writer's rows ceased to arrive, by reason; there are no "
    "values for those whose rows do.",
)
CATCH_UP_ROWS = _counter(
    "synapse_replication_catch_up_rows",
    "stream_name",
    "instance_name",
    says="Rows fetched because they did not come over a link.",
)
CATCH_UP_SECONDS = _histogram(
    "synapse_replication_catch_up_seconds",
    "stream_name",
    says="Seconds that a catch-up took, its retries included.",
)
CATCH_UP_FAILURES = _counter(
    "synapse_replication_catch_up_failures",
    "stream_name",
    says="Attempts to catch up that failed and are made again.",
)
CONNECTIONS_MADE = _counter(
    "synapse_replication_connections_made",
    "name",
    says="Times that a link came up; all but the first are reconnects.",
)
CONNECTION_FAILURES = _counter(
    "synapse_replication_connection_failures",
    "name",
    says="Attempts to bring a link up that failed and are made again.",
)
DISCARDED = _counter(
    "synapse_replication_discarded",
    "stream_name",
    "reason",
    says="Rows and positions that were not delivered, by reason.",
)
REFUSED_LINES = _counter(
    "synapse_replication_refused_lines",
    "name",
    "error",
    says="Lines that were skipped: they did not parse or are not allowed.",
)
REFUSED_REQUESTS = _counter(
    "synapse_replication_refused_requests",
    "status",
    says="Requests for rows over HTTP that were refused, by status: 401 without the "
    "secret, 400 for bad parameters; 409 and 410 are a backlog's orderly answers.",
)
EXTRA_FIELDS = _counter(
    "synapse_replication_rows_with_extra_fields",
    "stream_name",
    says="Rows with more fields than are known here: from a newer peer.",
)
STREAM_RESETS = _counter(
    "synapse_replication_stream_resets",
    "stream_name",
    says="Times that a stream went back, since its writer started again.",
)
RESYNCS = _counter(
    "synapse_replication_resyncs",
    "stream_name",
    "kind",
    says="Catch-ups by where the rows came from: partial (what the writer sent last, "
    "or its memory), full (the database, or all that a writer which started again "
    "has), or failed.",
)
BACKLOG_HITS = _counter(
    "synapse_replication_backlog_hits",
    "stream_name",
    says="Pages of rows that a writer still had in memory.",
)
BACKLOG_MISSES = _counter(
    "synapse_replication_backlog_misses",
    "stream_name",
    says="Pages of rows that a writer was asked for and did not have, or did not give.",
)
BACKLOG_ROWS = _gauge(
    "synapse_replication_backlog_rows",
    "stream_name",
    says="Rows of this process that it has in memory for readers that missed them.",
)
BACKLOG_BYTES = _gauge(
    "synapse_replication_backlog_bytes",
    "stream_name",
    says="Bytes of memory that these take, about.",
)
GAPS_FOUND = _counter(
    "synapse_replication_gaps_found",
    "stream_name",
    says="Times that a writer told of rows which did not come; they are fetched.",
)
EPOCH_CHANGES = _counter(
    "synapse_replication_epoch_changes",
    "instance_name",
    says="Times that another process started again.",
)
DUPLICATE_INSTANCES = _counter(
    "synapse_replication_duplicate_instances",
    "instance_name",
    says="Messages of a second process of the same name.",
)
UNKNOWN_FIELDS = _counter(
    "synapse_replication_extension_unknown_fields",
    says="Fields of messages of the extension that are not known here: a newer peer.",
)
SENDING_FAILURES = _counter(
    "synapse_replication_sending_failures",
    "stream_name",
    says="Times that rows of ours could not be fetched or sent.",
)
DROPPED_COMMANDS = _counter(
    "synapse_replication_dropped_commands",
    "command",
    "reason",
    says="Commands of this process that were never sent, by reason: queue_full (too "
    "many waited for a link), stopped (there was no link before the process stopped) "
    "or failed.",
)
FAILURES = _counter(
    "synapse_replication_failures",
    says="Failures of background work of ours.",
)

#: Every definition, in the order of the reference.
METRICS: tuple[MetricDefinition, ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, MetricDefinition)
)
