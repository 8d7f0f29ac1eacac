"""Sending spans to a collector by OTLP, if the configuration says so.

Spans wait in a bounded queue and are sent by a thread of OpenTelemetry's: the reactor
never waits for a collector. What cannot be sent is dropped and logged.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThreadPool
from twisted.logger import Logger, LogLevel

from synapse_replication import __version__
from synapse_replication.config.tracing import TracingConfig
from synapse_replication.instrumentation.logs import REPEAT_AFTER, RateLimit

__all__ = ["SpanExport"]

#: How long a request to the collector may take, in s, its repetitions included.
EXPORT_TIMEOUT = 5
#: How often what waits is sent, in ms.
EXPORT_EVERY_MS = 2000


class SpanExport:
    """Makes the tracer of a process.

    :param tracing: if ``None``, the tracer is that of the host's OpenTelemetry, which
        does nothing unless somebody set it up.
    :param server_name: of the homeserver.
    :param instance_name: of this process.
    :ivar tracer: for all of the process.
    """

    def __init__(
        self, tracing: TracingConfig | None, server_name: str, instance_name: str
    ) -> None:
        self._provider: TracerProvider | None = None
        self._exporter: SpanExporter | None = None
        if tracing is None:
            self.tracer = trace.get_tracer("synapse_replication", __version__)
            return
        # Of an extra, and slow to import.
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
            OTLPSpanExporter,
        )

        _log_what_fails()
        self._provider = provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(tracing.sample_ratio)),
            resource=Resource.create(
                {
                    "service.name": tracing.service_name,
                    "service.version": __version__,
                    "service.namespace": server_name,
                    "service.instance.id": instance_name,
                }
            ),
            # We end it, in order.
            shutdown_on_exit=False,
        )
        self._exporter = exporter = OTLPSpanExporter(
            endpoint=tracing.endpoint,
            headers=dict(tracing.headers),
            timeout=EXPORT_TIMEOUT,
        )
        provider.add_span_processor(
            BatchSpanProcessor(exporter, schedule_delay_millis=EXPORT_EVERY_MS)
        )
        self.tracer = provider.get_tracer("synapse_replication", __version__)

    def stop(self, reactor: Any) -> Deferred[None] | None:
        """Send what waits; fires when that is done, or failed.

        After :data:`EXPORT_TIMEOUT` no more requests are made: a collector that hangs
        would hold up the end by as long for each of them.
        """
        if self._provider is None or self._exporter is None:
            return None
        giving_up = reactor.callLater(EXPORT_TIMEOUT, self._exporter.shutdown)
        sent: Deferred[None] = deferToThreadPool(
            reactor, reactor.getThreadPool(), self._provider.shutdown
        )

        def ended(result: Any) -> Any:
            if giving_up.active():
                giving_up.cancel()
            return result

        return sent.addBoth(ended)


class _ToOurLog(logging.Handler):
    """Takes what OpenTelemetry logs to where all is logged; what repeats, seldom."""

    log = Logger("opentelemetry")

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._limit = RateLimit(REPEAT_AFTER, time.monotonic)

    def emit(self, record: logging.LogRecord) -> None:
        left_out = self._limit.admit("spans", record.name, record.msg)
        if left_out is None:
            return
        level = LogLevel.error if record.levelno >= logging.ERROR else LogLevel.warn
        text = "OpenTelemetry: {text}"
        if left_out:
            text += " (and {left_out} more like it since the last such line)"
        self.log.emit(level, text, text=record.getMessage(), left_out=left_out)


def _log_what_fails() -> None:
    theirs = logging.getLogger("opentelemetry")
    if not any(isinstance(handler, _ToOurLog) for handler in theirs.handlers):
        theirs.addHandler(_ToOurLog())
        # Else Python writes it to stderr, past our log.
        theirs.propagate = False
