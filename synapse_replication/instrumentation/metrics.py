"""The definitions of all metrics, as data.

The first group has the names that a homeserver's existing dashboards and alerts use;
the second group has further metrics. Every metric has the label ``server_name``, which
distinguishes several servers in one process. Counters are exposed with the suffix
``_total``, as Prometheus requires.
"""

from __future__ import annotations

import enum
from functools import partial

from msgspec import Struct

#: The last label of every metric.
SERVER_NAME_LABEL = "server_name"


class MetricKind(enum.Enum):
    """The type of a metric, by its Prometheus name."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class MetricDefinition(Struct, frozen=True):
    """One metric.

    :ivar name: the name, without the suffix that Prometheus adds to counters.
    :ivar labels: the labels, without ``server_name``, which every metric has.
    :ivar documentation: the help text: one sentence, with the unit.
    :ivar is_read_at_scrape: whether its values are read at each scrape, and not stored.
    """

    name: str
    kind: MetricKind
    labels: tuple[str, ...]
    documentation: str
    is_read_at_scrape: bool


def _define(
    kind: MetricKind,
    name: str,
    *labels: str,
    help_text: str,
    is_read_at_scrape: bool = False,
) -> MetricDefinition:
    return MetricDefinition(name, kind, labels, help_text, is_read_at_scrape)


_counter = partial(_define, MetricKind.COUNTER)
_gauge = partial(_define, MetricKind.GAUGE)
_gauge_at_scrape = partial(_define, MetricKind.GAUGE, is_read_at_scrape=True)
_histogram = partial(_define, MetricKind.HISTOGRAM)

#: The labels of a writer of a stream.
_WRITER = "stream_name", "instance_name"
_PROTOCOL = "synapse_replication_tcp_protocol_"
_RESOURCE = "synapse_replication_tcp_resource_"

INBOUND_COMMANDS = _counter(
    _PROTOCOL + "inbound_commands",
    "command",
    "name",
    help_text="Commands received on a connection.",
)
OUTBOUND_COMMANDS = _counter(
    _PROTOCOL + "outbound_commands",
    "command",
    "name",
    help_text="Commands written to a connection.",
)
INBOUND_RDATA = _counter(
    _PROTOCOL + "inbound_rdata_count",
    "stream_name",
    help_text="Rows received.",
)
CLOSE_REASON = _counter(
    _PROTOCOL + "close_reason",
    "reason_type",
    help_text="Connections closed, by reason.",
)
PENDING_COMMANDS = _gauge_at_scrape(
    _PROTOCOL + "pending_commands",
    "name",
    help_text="Commands that have not been passed to the transport yet.",
)
SEND_BUFFER = _gauge_at_scrape(
    _PROTOCOL + "transport_send_buffer",
    "name",
    help_text="Bytes in the transport's buffer, not yet passed to the kernel.",
)
KERNEL_SEND_BUFFER = _gauge_at_scrape(
    _PROTOCOL + "transport_kernel_send_buffer",
    "name",
    help_text="Bytes in the kernel's send buffer that the peer has not acknowledged.",
)
KERNEL_READ_BUFFER = _gauge_at_scrape(
    _PROTOCOL + "transport_kernel_read_buffer",
    "name",
    help_text="Bytes in the kernel's receive buffer that this process has not read.",
)
STREAM_UPDATES = _counter(
    _RESOURCE + "stream_updates",
    "stream_name",
    help_text="Rows sent by this process.",
)
USER_SYNC = _counter(_RESOURCE + "user_sync", help_text="USER_SYNC commands received.")
FEDERATION_ACK = _counter(
    _RESOURCE + "federation_ack", help_text="FEDERATION_ACK commands received."
)
USER_IP = _counter(_RESOURCE + "user_ip_cache", help_text="USER_IP commands received.")
TOTAL_CONNECTIONS = _gauge(
    _RESOURCE + "total_connections", help_text="Replication links of this process."
)
COMMAND_QUEUE = _gauge_at_scrape(
    "synapse_replication_tcp_command_queue",
    "stream_name",
    help_text="Rows and positions of a stream that wait to be delivered.",
)
CURRENT_POSITION = _gauge(
    "synapse_storage_stream_current_position",
    "stream_name",
    help_text="The greatest current position of any writer.",
)
EXTERNAL_CACHE_SET = _counter(
    "synapse_external_cache_set",
    "cache_name",
    help_text="Values written to the external cache.",
)
EXTERNAL_CACHE_GET = _counter(
    "synapse_external_cache_get",
    "cache_name",
    "hit",
    help_text="Values requested from the external cache, by whether they were found.",
)
EXTERNAL_CACHE_SECONDS = _histogram(
    "synapse_external_cache_response_time_seconds",
    "method",
    help_text="Response time of the external cache in seconds.",
)

POSITION = _gauge_at_scrape(
    "synapse_replication_position",
    *_WRITER,
    help_text="The position up to which this process has delivered a writer's rows.",
)
LAG_POSITIONS = _gauge_at_scrape(
    "synapse_replication_lag_positions",
    *_WRITER,
    help_text="Difference between a writer's announced and delivered positions.",
)
LAG_SECONDS = _gauge_at_scrape(
    "synapse_replication_lag_seconds",
    *_WRITER,
    help_text="Age in seconds of a writer's oldest write that was not delivered here; "
    "0 if there is none.",
)
STALLED_SECONDS = _gauge_at_scrape(
    "synapse_replication_stalled_seconds",
    *_WRITER,
    "reason",
    help_text="Seconds for which a writer has been stalled, by reason; a writer that "
    "is not stalled has no value.",
)
STUCK_ID_SECONDS = _gauge_at_scrape(
    "synapse_replication_stuck_id_seconds",
    *_WRITER,
    help_text="Seconds for which an id of a writer has not been finished, which delays "
    "the rows of all writers of the stream; no value if there is no such id.",
)
SINK_DAMAGED = _gauge_at_scrape(
    "synapse_replication_sink_damaged",
    help_text="Rows that the sink stored are damaged (1); no value if none are.",
)
CATCH_UP_ROWS = _counter(
    "synapse_replication_catch_up_rows",
    *_WRITER,
    help_text="Rows fetched by catch-ups.",
)
CATCH_UP_SECONDS = _histogram(
    "synapse_replication_catch_up_seconds",
    "stream_name",
    help_text="Duration in seconds of each continuous run of a catch-up; a catch-up "
    "that yields to other work or is retried has several.",
)
CATCH_UP_FAILURES = _counter(
    "synapse_replication_catch_up_failures",
    "stream_name",
    help_text="Failed attempts to catch up; they are retried unless the link is lost.",
)
CONNECTIONS_MADE = _counter(
    "synapse_replication_connections_made",
    "name",
    help_text="Number of times that a connection came up, including reconnections.",
)
CONNECTION_FAILURES = _counter(
    "synapse_replication_connection_failures",
    "name",
    help_text="Failed attempts to connect a link; they are retried.",
)
DISCARDED = _counter(
    "synapse_replication_discarded",
    "stream_name",
    "reason",
    help_text="Received rows, positions and commands that were not delivered, by "
    "reason.",
)
REFUSED_LINES = _counter(
    "synapse_replication_refused_lines",
    "name",
    "error",
    help_text="Lines, and messages of the extension, that were rejected because they "
    "are invalid or not allowed.",
)
REFUSED_REQUESTS = _counter(
    "synapse_replication_refused_requests",
    "status",
    help_text="HTTP requests and connections that were refused, by status, for "
    "instance 401 without the secret, 400 for bad parameters, or 503 for too many "
    "connections; 409 (another epoch) and 410 (rows that are not in the backlog) are "
    "normal.",
)
EXTRA_FIELDS = _counter(
    "synapse_replication_rows_with_extra_fields",
    "stream_name",
    help_text="Rows with unknown additional fields, which a newer peer sends.",
)
STREAM_RESETS = _counter(
    "synapse_replication_stream_resets",
    "stream_name",
    help_text="Number of times that a position moved back below delivered rows, "
    "because the writer has (or may have) restarted.",
)
RESYNCS = _counter(
    "synapse_replication_resyncs",
    "stream_name",
    "kind",
    help_text="Catch-ups by the source of their rows: partial (the writer's memory or "
    "backlog), full (the database, or any source after the position moved back), or "
    "failed (counted at each failed attempt).",
)
BACKLOG_HITS = _counter(
    "synapse_replication_backlog_hits",
    "stream_name",
    help_text="Pages of rows that a writer returned from its backlog.",
)
BACKLOG_MISSES = _counter(
    "synapse_replication_backlog_misses",
    "stream_name",
    help_text="Pages of rows that were requested from a writer and that it did not "
    "return from its backlog.",
)
BACKLOG_ROWS = _gauge_at_scrape(
    "synapse_replication_backlog_rows",
    "stream_name",
    help_text="Rows in this process's backlogs, for readers that missed them.",
)
BACKLOG_BYTES = _gauge_at_scrape(
    "synapse_replication_backlog_bytes",
    "stream_name",
    help_text="Approximate size of this process's backlogs in bytes.",
)
GAPS_FOUND = _counter(
    "synapse_replication_gaps_found",
    "stream_name",
    help_text="Number of times that a writer reported rows which did not arrive; they "
    "are fetched.",
)
UNANNOUNCED_FOUND = _counter(
    "synapse_replication_unannounced_found",
    *_WRITER,
    help_text="Number of times that a writer's stored position was ahead of what it "
    "announced; the rows are fetched.",
)
UNANNOUNCED_ROWS = _counter(
    "synapse_replication_unannounced_rows",
    *_WRITER,
    help_text="Committed tokens that their writer did not announce.",
)
LATE_ROWS = _counter(
    "synapse_replication_late_rows",
    *_WRITER,
    help_text="Tokens that were not announced and were delivered after greater ones.",
)
EPOCH_CHANGES = _counter(
    "synapse_replication_epoch_changes",
    "instance_name",
    help_text="Number of times that the epoch of another instance changed, usually "
    "because it restarted.",
)
DUPLICATE_INSTANCES = _counter(
    "synapse_replication_duplicate_instances",
    "instance_name",
    help_text="Messages that indicate a second process with the same instance name.",
)
UNKNOWN_FIELDS = _counter(
    "synapse_replication_extension_unknown_fields",
    help_text="Unknown fields in messages of the extension, which a newer peer sends.",
)
SENDING_FAILURES = _counter(
    "synapse_replication_sending_failures",
    "stream_name",
    help_text="Failed attempts of this process to fetch or send its own rows.",
)
DROPPED_COMMANDS = _counter(
    "synapse_replication_dropped_commands",
    "command",
    "reason",
    help_text="Commands of this process that were never sent, by reason: queue_full "
    "(too many were waiting for a link), stopped (the process stopped while it had no "
    "link) or failed.",
)
FAILURES = _counter(
    "synapse_replication_failures",
    help_text="Errors in this process that no caller receives, for instance while "
    "decoding rows or handling a command.",
)

REACTOR_TURNS = _histogram(
    "synapse_replication_reactor_turn_seconds",
    is_read_at_scrape=True,
    help_text="Duration in seconds of each turn of the reactor, during which nothing "
    "else is handled; absent if the reactor cannot be measured.",
)

#: All definitions, in the order of the reference documentation.
METRICS: tuple[MetricDefinition, ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, MetricDefinition)
)
