"""OpenTelemetry spans for events that have a duration, never for single rows.

These are background processes, catch-ups, requests for rows and writes of positions. A
command that is handled synchronously has no span. Each background process and each
write of a position starts a trace of its own, because it serves many requests and
belongs to none of their traces. A request for rows carries its trace in the header
``traceparent`` (W3C Trace Context), so that the writer's spans for the request are part
of that trace.

See docs/failure-modes.rst: failure-separate-traces.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from typing_extensions import override

from synapse_replication.handlers.observer import CatchUpEvent, ReplicationObserver

_REQUEST = "GET get_repl_stream_updates"
_propagator = TraceContextTextMapPropagator()


class TracingObserver(ReplicationObserver):
    """Creates OpenTelemetry spans for events that have a duration.

    :param tracer: creates the spans.
    :param server_name: the value of the attribute ``server_name`` of each span.
    """

    def __init__(self, tracer: Tracer, server_name: str) -> None:
        self._tracer = tracer
        self._server_name = server_name

    @override
    def background_process(self, description: str) -> AbstractContextManager[object]:
        return self._tracer.start_as_current_span(
            description,
            context=Context(),
            attributes={"server_name": self._server_name},
        )

    @override
    def catch_up(self, event: CatchUpEvent) -> AbstractContextManager[object]:
        return self._tracer.start_as_current_span(
            "replication-catch-up",
            attributes={
                "server_name": self._server_name,
                "stream_name": event.stream_name,
                "instance_name": event.instance_name,
                "from_token": event.from_token,
                "upto_token": event.upto_token,
            },
        )

    @contextlib.contextmanager
    def _request_span(
        self, stream_name: str, instance_name: str, headers: MutableMapping[str, str]
    ) -> Iterator[None]:
        with self._tracer.start_as_current_span(
            _REQUEST,
            kind=SpanKind.CLIENT,
            attributes={
                "server_name": self._server_name,
                "stream_name": stream_name,
                "instance_name": instance_name,
            },
        ):
            _propagator.inject(headers)
            yield

    @override
    def requesting_rows(
        self, stream_name: str, instance_name: str, headers: MutableMapping[str, str]
    ) -> AbstractContextManager[object]:
        return self._request_span(stream_name, instance_name, headers)

    @override
    def serving_rows(
        self, stream_name: str, headers: Mapping[str, str]
    ) -> AbstractContextManager[object]:
        return self._tracer.start_as_current_span(
            _REQUEST,
            # The parent is the span that the reader sent, if any, never a local span.
            context=_propagator.extract(headers, Context()),
            kind=SpanKind.SERVER,
            attributes={
                "server_name": self._server_name,
                "stream_name": stream_name,
            },
        )

    @override
    def position_write(
        self, stream_name: str, instance_name: str, token: int
    ) -> AbstractContextManager[object]:
        # Do not make this the current span: it begins and ends in different contexts.
        return self._tracer.start_span(
            "replication-position-write",
            context=Context(),
            attributes={
                "server_name": self._server_name,
                "stream_name": stream_name,
                "instance_name": instance_name,
                "token": token,
            },
        )
