"""Prometheus metrics of the archive job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import start_http_server

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.source.offsets import StreamOffset

_PREFIX = "synapse_replication_archive"


class ArchiveMetrics:
    """The metrics of an archive's driver. Thread-safe.

    :param registry: the registry of the metrics.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, namespace=_PREFIX, registry=registry)
        gauge = partial(Gauge, namespace=_PREFIX, registry=registry)
        self.rows = counter("rows", "Rows archived.", ["stream"])
        self.skipped = counter(
            "skipped_ids",
            "Ids whose rows PostgreSQL cannot convert, and which are not archived.",
            ["stream"],
        )
        self.commands = counter("wire_commands", "Commands of recordings archived.")
        self.rows_per_second = gauge(
            "rows_per_second", "Rows per second in the last batch with rows."
        )
        self.batch_seconds = Histogram(
            "batch_seconds",
            "Duration of batches in seconds.",
            namespace=_PREFIX,
            registry=registry,
            buckets=(0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600),
        )
        self.position = gauge(
            "position",
            "Token up to which a writer's rows are archived.",
            ["stream", "instance_name"],
        )
        self.lag = gauge(
            "lag_ids",
            "Ids between the archived token and the writer's position in the database.",
            ["stream", "instance_name"],
        )
        self.caught_up = gauge(
            "caught_up_timestamp_seconds",
            "Last time at which no writer was ahead of the archive, in seconds since "
            "1970.",
        )
        self.compacted = counter(
            "compacted_files", "Small files that were merged into larger ones."
        )
        self.vacuumed = counter("vacuumed_files", "Unused files that were removed.")

    def set_offsets(self, archived: Mapping[str, StreamOffset]) -> None:
        """Set the token up to which each writer's rows are archived."""
        for stream, offset in archived.items():
            for writer, token in offset.writers.items():
                self.position.labels(stream, writer).set(token)
            if not offset.writers:
                self.position.labels(stream, "").set(offset.minimum)

    def set_lag(self, lag: Mapping[tuple[str, str], int], now: float) -> None:
        """Set the archive's lag behind each writer.

        If it is not behind any writer, record the time.

        :param lag: the lag in ids, by ``(stream, writer)``.
        :param now: the time, in s since 1970.
        """
        for labels, ids in lag.items():
            self.lag.labels(*labels).set(ids)
        if not any(lag.values()):
            self.caught_up.set(now)


def serve_metrics(
    registry: CollectorRegistry, host: str, port: int
) -> Callable[[], None]:
    """Serve the metrics over HTTP, in a separate thread.

    :param host: the address or host name to listen on.
    :param port: the port; 0 for any free port.
    :return: a function that stops the server.
    :raises PipelineError: if the host or the port cannot be used.
    """
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise PipelineError(
            f"cannot serve metrics on {host} port {port}: {error.strerror}; choose "
            "another --metrics-host or --metrics-port"
        ) from error

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
