"""Prometheus metrics of the archive job, which are the rows of ``metrics.csv``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import start_http_server

from synapse_replication.data_files import read_table
from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.source.offsets import StreamOffset

_KINDS: Final[Mapping[str, Callable[..., Any]]] = {
    "counter": Counter,
    "gauge": Gauge,
    "histogram": partial(Histogram, buckets=(0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)),
}


class ArchiveMetrics:
    """The metrics of an archive's driver, in a registry of their own. Thread-safe."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._metrics: dict[str, Any] = {
            row["Name"]: _KINDS[row["Kind"]](
                row["Name"],
                row["Meaning"],
                row["Labels"].split(),
                namespace="synapse_replication_archive",
                registry=self.registry,
            )
            for row in read_table(Path(__file__).with_suffix(".csv"))
        }
        #: The (stream, writer) pairs that have a lag.
        self._lagging: set[tuple[str, str]] = set()

    def __getitem__(self, name: str) -> Any:
        """Return a metric by its name in ``metrics.csv``."""
        return self._metrics[name]

    def set_offsets(self, archived: Mapping[str, StreamOffset]) -> None:
        """Set the token up to which each writer's rows are archived."""
        for stream, offset in archived.items():
            for writer, token in offset.writers.items():
                self["position"].labels(stream, writer).set(token)
            if not offset.writers:
                self["position"].labels(stream, "").set(offset.minimum)

    def set_lag(self, lag: Mapping[tuple[str, str], int], now: float) -> None:
        """Set the archive's lag behind each writer; remove that of a removed writer.

        If it is not behind any writer, record the time.

        :param lag: the lag in ids, by ``(stream, writer)``.
        :param now: the time, in s since 1970.
        """
        for labels in self._lagging - lag.keys():
            self["lag_ids"].remove(*labels)
        self._lagging = set(lag)
        for labels, ids in lag.items():
            self["lag_ids"].labels(*labels).set(ids)
        if not any(lag.values()):
            self["caught_up_timestamp_seconds"].set(now)

    @contextmanager
    def served(self, host: str, port: int) -> Iterator[None]:
        """Serve the metrics over HTTP within the context, in a separate thread.

        :param host: the address or host name to listen on.
        :param port: the port; 0 for any free port.
        :raises PipelineError: if the host or the port cannot be used.
        """
        try:
            server, thread = start_http_server(port, host, self.registry)
        except OSError as error:
            raise PipelineError(
                f"cannot serve metrics on {host} port {port}: {error.strerror}; choose "
                "another --metrics-host or --metrics-port"
            ) from error
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
