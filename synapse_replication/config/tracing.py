"""The section ``synapse_replication.tracing``: the collector that receives spans."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

import attrs
from hyperlink import URL

from synapse_replication.config.files import OWN_SECTION, MergedFiles
from synapse_replication.config.own_section import TracingSection
from synapse_replication.errors import ConfigProblem

#: A module that exists if the extra ``otlp`` is installed.
EXPORTER = "opentelemetry.exporter.otlp.proto.http"

#: The path to which spans are sent if the configured endpoint has none.
_PATH = ("v1", "traces")


@attrs.frozen
class TracingConfig:
    """The collector that receives spans by OTLP over HTTP.

    :ivar endpoint: the complete URL.
    :ivar headers: the headers of each request; they may contain secrets.
    :ivar sample_ratio: the ratio, from 0 to 1, of recorded traces to all traces that
        begin in this process.
    :ivar service_name: the value of ``service.name``.
    """

    endpoint: str
    headers: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    sample_ratio: float = 1.0
    service_name: str = "synapse_replication"


def read_tracing(
    section: TracingSection | None, merged: MergedFiles, problems: list[ConfigProblem]
) -> TracingConfig | None:
    """Check the section, and return its settings.

    :param problems: problems are added to this list.
    :return: ``None`` if there is no such section.
    """
    if section is None:
        return None
    if not _is_installed():
        problems.append(
            merged.problem(
                (OWN_SECTION, "tracing"),
                "the exporter for spans is not installed",
                "install synapse_replication[otlp], or remove this section",
            )
        )
    return TracingConfig(
        traces_url(section.endpoint),
        {name: value.get_secret_value() for name, value in section.headers.items()},
        section.sample_ratio,
        section.service_name,
    )


def traces_url(endpoint: str) -> str:
    """Return the URL to which spans are sent.

    :param endpoint: the collector's URL, with or without a path.
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
