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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, get_args

from attrs import fields
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from typing_extensions import override

from synapse_replication.handlers import events
from synapse_replication.handlers.observer import ReplicationObserver

_REQUEST = "GET get_repl_stream_updates"
_propagator = TraceContextTextMapPropagator()


#: The fields that become attributes of spans; to find them each time would cost more
#: than a span that is not recorded. The description of a task is the span's name.
_FIELDS: Final[Mapping[type[Any], Sequence[str]]] = {
    kind: tuple(field.name for field in fields(kind))
    for kind in get_args(events.Work)
    if kind is not events.BackgroundTask
}


class TracingObserver(ReplicationObserver):
    """Creates OpenTelemetry spans for events that have a duration.

    :param tracer: creates the spans.
    :param server_name: the value of the attribute ``server_name`` of each span.
    """

    def __init__(self, tracer: Tracer, server_name: str) -> None:
        self._tracer = tracer
        self._server_name = server_name

    @override
    def span(self, work: events.Work) -> AbstractContextManager[object]:
        attributes = self._attributes(work)
        start = self._tracer.start_as_current_span
        if isinstance(work, events.BackgroundTask):
            return start(work.description, context=Context(), attributes=attributes)
        if isinstance(work, events.CatchUpEvent):
            return start("replication-catch-up", attributes=attributes)
        if isinstance(work, events.RowsRequest):
            return self._request_span(work, attributes)
        if isinstance(work, events.RowsServed):
            # The parent is the span that the reader sent, never a local span.
            parent = _propagator.extract(work.headers, Context())
            kind = SpanKind.SERVER
            return start(_REQUEST, context=parent, kind=kind, attributes=attributes)
        # Do not make this the current span: one write serves several callers.
        return self._tracer.start_span(
            "replication-position-write", context=Context(), attributes=attributes
        )

    def _attributes(self, work: events.Work) -> dict[str, str | int]:
        """Return the attributes of a span: the server's name, and those of the work."""
        found: dict[str, str | int] = {"server_name": self._server_name}
        for name in _FIELDS.get(type(work), ()):
            value = getattr(work, name)
            if isinstance(value, (str, int)):
                found[name] = value
        return found

    @contextlib.contextmanager
    def _request_span(
        self, work: events.RowsRequest, attributes: dict[str, str | int]
    ) -> Iterator[None]:
        with self._tracer.start_as_current_span(
            _REQUEST, kind=SpanKind.CLIENT, attributes=attributes
        ):
            _propagator.inject(work.headers)
            yield
