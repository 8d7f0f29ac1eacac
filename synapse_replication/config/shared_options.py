"""The options that a stand-alone process and a process of a homeserver share.

A stand-alone process has them from its configuration files or from Python, see
:mod:`synapse_replication.config.replication_options`; a process of a homeserver has
them from its environment, see :mod:`synapse_replication.dropin.settings`.
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import attrs

from synapse_replication.handlers.receiving.context import ReceiverOptions
from synapse_replication.options import InvalidValueError, option
from synapse_replication.streams.backlog import BacklogOptions

#: A module that exists if the extra ``otlp`` is installed.
EXPORTER: Final = "opentelemetry.exporter.otlp.proto.http"
#: The endpoint that stands for standard output.
CONSOLE: Final = "console"

_ENDPOINT_HINT: Final = (
    "write the URL of a collector, for instance http://localhost:4318, or the URL of a "
    f"file, for instance file:///var/log/spans.jsonl, or {CONSOLE}"
)


def _spans_url(endpoint: str) -> str:
    if endpoint == CONSOLE:
        return endpoint
    problem = (
        f"is not {CONSOLE}, and no URL that begins with http://, https:// or file:"
    )
    if re.fullmatch(r"https?://[^\s/]+\S*|file:///\S+", endpoint) is None:
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
    """The destination of spans: a collector, a file, or standard output.

    :ivar endpoint: the URL of a collector, to which spans are sent by OTLP over HTTP,
        with the extra ``otlp``; ``/v1/traces`` is added to a URL without a path. Or
        the URL of a file, ``file:///PATH``, to which one JSON object per span is
        appended; or ``console`` for JSON on standard output.
    :ivar headers: headers of each request to a collector.
    :ivar sample_ratio: the fraction of traces that are recorded, from 0 to 1. It
        applies to traces that begin in this process.
    :ivar service_name: ``service.name`` of the spans.
    """

    endpoint: str = attrs.field(
        converter=_spans_url,
        metadata=option(
            variable="TRACING_ENDPOINT", hint=_ENDPOINT_HINT, check=_spans_url
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

    @property
    def file(self) -> Path | None:
        """The file to which the spans are appended; ``None`` for another endpoint."""
        if not self.endpoint.startswith("file:"):
            return None
        return Path(unquote(urlsplit(self.endpoint).path))

    @property
    def needs_exporter(self) -> bool:
        """Whether the spans are sent by OTLP, which needs the extra ``otlp``."""
        return self.endpoint.startswith("http")

    def why_unusable(self) -> tuple[str, str] | None:
        """Return why this process cannot export spans, and what to do.

        :return: ``None`` if it can.
        """
        if self.needs_exporter and not _can_export():
            return (
                "the exporter for spans is not installed",
                "install synapse_replication[otlp], or write a file or "
                f"{CONSOLE} as the endpoint",
            )
        path = self.file
        if path is None:
            return None
        is_file = path.is_file() or (not path.exists() and path.parent.is_dir())
        if is_file and os.access(path if path.exists() else path.parent, os.W_OK):
            return None
        hint = "write the URL of a file, in a folder that exists, that this user may"
        return f"spans cannot be written to {path}", f"{hint} write"


def _can_export() -> bool:
    """Return whether the extra ``otlp`` is installed."""
    try:
        return importlib.util.find_spec(EXPORTER) is not None
    except ModuleNotFoundError:
        return False


@attrs.frozen(kw_only=True)
class SharedOptions:
    """The options of any process of this package.

    :ivar writer_lock: whether a process that writes streams in PostgreSQL holds an
        advisory lock there. A second process with its name then waits for ten seconds
        and refuses to start. Behind a pooler, a transaction stays open for the lock,
        which needs one connection of the pool.
    :ivar receiving: the limits of the data and positions that are accepted from peers.
    :ivar tracing: the destination of spans; by default, none.
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
