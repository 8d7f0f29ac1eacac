"""Export of spans to a collector, a file or standard output, if it is configured.

OpenTelemetry's SDK writes to a file or standard output; a collector needs the exporter
for OTLP, which is an extra. Spans wait in a bounded queue and are exported by a thread
of OpenTelemetry, so that the reactor never waits for a collector or a disk. Spans that
cannot be exported are discarded, which is logged.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    ConsoleSpanExporter,
    SpanExporter,
)
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThreadPool
from twisted.logger import Logger, LogLevel

from synapse_replication import __version__
from synapse_replication.config.shared_options import TracingOptions
from synapse_replication.instrumentation.logs import RateLimit
from synapse_replication.transport.reactor import IReactor

#: The timeout of a request to the collector, in s. In recent versions of the exporter,
#: it includes the retries; in older versions, it applies to each attempt.
EXPORT_TIMEOUT = 5
#: The interval at which waiting spans are sent, in ms.
EXPORT_INTERVAL_MS = 2000


class SpanExport:
    """Creates the tracer of a process, and exports its spans.

    :param tracing: the destination; if ``None``, the tracer is that of the global
        OpenTelemetry provider, and does nothing unless the host set up a provider.
    :param server_name: the name of the homeserver.
    :param instance_name: the name of this process.
    :ivar tracer: the tracer for all parts of the process.
    """

    def __init__(
        self, tracing: TracingOptions | None, server_name: str, instance_name: str
    ) -> None:
        self._provider: TracerProvider | None = None
        self._exporter: SpanExporter | None = None
        if tracing is None:
            self.tracer = trace.get_tracer("synapse_replication", __version__)
            return
        _redirect_log()
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
            # stop() shuts the provider down, before the reactor stops.
            shutdown_on_exit=False,
        )
        self._exporter = exporter = _make_exporter(tracing)
        provider.add_span_processor(
            BatchSpanProcessor(exporter, schedule_delay_millis=EXPORT_INTERVAL_MS)
        )
        self.tracer = provider.get_tracer("synapse_replication", __version__)

    def stop(self, reactor: IReactor) -> Deferred[None] | None:
        """Send the waiting spans.

        If this takes longer than :data:`EXPORT_TIMEOUT`, no further batch of spans is
        sent, and the remaining spans are discarded. An older exporter still retries the
        batch in progress.

        :return: a Deferred that fires when the spans have been sent or discarded;
            ``None`` if no destination is configured.
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


def _make_exporter(tracing: TracingOptions) -> SpanExporter:
    if tracing.needs_exporter:
        # Imported here, because it belongs to an extra, and because it is slow.
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
            OTLPSpanExporter,
        )

        return OTLPSpanExporter(
            endpoint=tracing.endpoint,
            headers=tracing.headers,
            timeout=EXPORT_TIMEOUT,
        )
    out = sys.stdout
    if tracing.file is not None:
        # Only the owner may read it: attributes name the streams and instances.
        opener = functools.partial(os.open, mode=0o600)
        # It stays open as long as the process runs.
        out = open(tracing.file, "a", encoding="utf-8", opener=opener)  # noqa: SIM115
    return ConsoleSpanExporter(out=out, formatter=_as_line)


def _as_line(span: ReadableSpan) -> str:
    text: str = span.to_json(indent=None)
    return text + "\n"


class _TwistedLogHandler(logging.Handler):
    """Writes OpenTelemetry's log records to Twisted's log, with a rate limit."""

    log = Logger("opentelemetry")

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._limit = RateLimit(time.monotonic)

    def emit(self, record: logging.LogRecord) -> None:
        left_out = self._limit.admit("spans", record.name, record.msg)
        if left_out is None:
            return
        level = LogLevel.error if record.levelno >= logging.ERROR else LogLevel.warn
        text = "OpenTelemetry: {text}"
        if left_out:
            text += " (and {left_out} more like it since the last such line)"
        self.log.emit(level, text, text=record.getMessage(), left_out=left_out)


def _redirect_log() -> None:
    logger = logging.getLogger("opentelemetry")
    if not any(isinstance(handler, _TwistedLogHandler) for handler in logger.handlers):
        logger.addHandler(_TwistedLogHandler())
        # Otherwise, any handlers of the root logger would write the records, too.
        logger.propagate = False
