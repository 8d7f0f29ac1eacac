"""Spans: one for each background process that does real work, none for a row.

Sending and commands that are handled at once make no span. Each background
process is a trace of its own: it serves many requests, so it belongs into none
of theirs. Spec, section 11.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from opentelemetry.context import Context
from opentelemetry.trace import Tracer

from synapse_replication.handlers.observer import CatchUp, ReplicationObserver

__all__ = ["TracingObserver"]


class TracingObserver(ReplicationObserver):
    """Make OpenTelemetry spans of what lasts.

    :param tracer: of the host's provider.
    :param server_name: an attribute of each span.
    """

    def __init__(self, tracer: Tracer, server_name: str) -> None:
        self._tracer = tracer
        self._server_name = server_name

    def background_process(self, description: str) -> AbstractContextManager[object]:
        return self._tracer.start_as_current_span(
            description,
            context=Context(),
            attributes={"server_name": self._server_name},
        )

    def catch_up(self, event: CatchUp) -> AbstractContextManager[object]:
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
