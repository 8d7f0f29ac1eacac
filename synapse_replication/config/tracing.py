"""Where spans are sent: ``synapse_replication.tracing``."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

import attrs
from hyperlink import URL

from synapse_replication.config.files import OWN_SECTION, MergedFiles
from synapse_replication.config.own_section import TracingSection
from synapse_replication.errors import ConfigProblem

__all__ = ["EXPORTER", "TracingConfig", "read_tracing", "traces_url"]

#: The module that is there if the extra ``otlp`` is installed.
EXPORTER = "opentelemetry.exporter.otlp.proto.http"

#: Where collectors take spans, if the endpoint has no path.
_PATH = ("v1", "traces")


@attrs.frozen
class TracingConfig:
    """Where spans are sent by OTLP over HTTP.

    :ivar endpoint: the whole URL.
    :ivar headers: sent with each request; may hold secrets.
    :ivar sample_ratio: the share of traces that begin here and are kept, 0 to 1.
    :ivar service_name: under which they are found.
    """

    endpoint: str
    headers: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    sample_ratio: float = 1.0
    service_name: str = "synapse_replication"


def read_tracing(
    section: TracingSection | None, merged: MergedFiles, problems: list[ConfigProblem]
) -> TracingConfig | None:
    """Read the section; mistakes are added to ``problems``."""
    if section is None:
        return None
    if not _is_installed():
        problems.append(
            merged.problem(
                (OWN_SECTION, "tracing"),
                "what sends spans is not installed",
                "install synapse_replication[otlp], or leave this section out",
            )
        )
    return TracingConfig(
        traces_url(section.endpoint),
        {name: value.get_secret_value() for name, value in section.headers.items()},
        section.sample_ratio,
        section.service_name,
    )


def traces_url(endpoint: str) -> str:
    """Return where a collector takes spans.

    :param endpoint: its URL, with or without the path.
    """
    url = URL.from_text(endpoint)
    if not any(url.path):
        url = url.replace(path=_PATH)
    return url.to_text()


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec(EXPORTER) is not None
    except ModuleNotFoundError:
        return False
