"""The options that a stand-alone process and a process of a homeserver share.

A stand-alone process has them from its configuration files or from Python, see
:mod:`synapse_replication.config.replication_options`; a process of a homeserver has
them from its environment, see :mod:`synapse_replication.dropin.settings`.
"""

from __future__ import annotations

import re
from typing import Final

import attrs

from synapse_replication.handlers.receiving.context import ReceiverOptions
from synapse_replication.options import InvalidValueError, option
from synapse_replication.streams.backlog import BacklogOptions

_ENDPOINT_HINT: Final = (
    "write the URL of a collector, for instance http://localhost:4318"
)


def _traces_url(endpoint: str) -> str:
    problem = "is not a URL that begins with http:// or https://"
    if re.fullmatch(r"https?://[^\s/]+\S*", endpoint) is None:
        raise InvalidValueError(problem, _ENDPOINT_HINT)
    # Imported here, because it takes 0.5 MiB and few processes send spans.
    from hyperlink import URL

    try:
        url = URL.from_text(endpoint)
    except ValueError:
        raise InvalidValueError(problem, _ENDPOINT_HINT) from None
    if not any(url.path):
        url = url.replace(path=("v1", "traces"))
    return url.to_text()


def _not_blank(text: str) -> str:
    if not text:
        raise InvalidValueError("is empty", "write at least one character")
    return text


@attrs.frozen(kw_only=True)
class TracingOptions:
    """A collector to which spans are sent, by OTLP over HTTP.

    :ivar endpoint: URL of the collector; ``/v1/traces`` is added to a URL without a
        path.
    :ivar headers: headers of each request.
    :ivar sample_ratio: the fraction of traces that are recorded, from 0 to 1. It
        applies to traces that begin in this process.
    :ivar service_name: ``service.name`` of the spans.
    """

    endpoint: str = attrs.field(
        converter=_traces_url,
        metadata=option(
            variable="TRACING_ENDPOINT", hint=_ENDPOINT_HINT, check=_traces_url
        ),
    )
    headers: dict[str, str] = attrs.field(
        factory=dict, repr=False, metadata=option(is_secret=True)
    )
    sample_ratio: float = attrs.field(
        default=1.0,
        metadata=option(
            minimum=0,
            maximum=1,
            variable="TRACING_SAMPLE_RATIO",
            hint="write a number from 0 to 1",
        ),
    )
    service_name: str = attrs.field(
        default="synapse_replication",
        metadata=option(
            variable="TRACING_SERVICE_NAME",
            hint="write at least one character",
            check=_not_blank,
        ),
    )


@attrs.frozen(kw_only=True)
class SharedOptions:
    """The options of any process of this package.

    :ivar writer_lock: whether a process that writes streams in PostgreSQL holds an
        advisory lock there. A second process with its name then waits for ten seconds
        and refuses to start. The lock has no effect behind a pooler in transaction
        mode.
    :ivar receiving: the limits of the data and positions that are accepted from peers.
    :ivar tracing: the collector that receives spans; by default, none.
    :ivar backlog: the limits of the backlog of each stream; ``None`` if this process
        does not use the extension.
    """

    writer_lock: bool = attrs.field(
        default=True, metadata=option("synapse_replication.writer_lock")
    )
    receiving: ReceiverOptions = attrs.field(
        factory=ReceiverOptions, metadata=option("synapse_replication.receiving")
    )
    tracing: TracingOptions | None = attrs.field(
        default=None, metadata=option("synapse_replication.tracing")
    )
    backlog: BacklogOptions | None = attrs.field(
        factory=BacklogOptions,
        metadata=option(
            "synapse_replication.extension",
            switch="enabled",
            switch_meaning="Whether to use the extension, the optional protocol "
            "between instances of this package. Instances without it are not affected.",
            variable="EXTENSION",
        ),
    )
