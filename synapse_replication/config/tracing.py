"""The section ``synapse_replication.tracing``: the collector that receives spans."""

from __future__ import annotations

import importlib.util

from synapse_replication.config.own_section import TracingSection
from synapse_replication.config.yaml_files import OWN_SECTION, MergedFiles

#: A module that exists if the extra ``otlp`` is installed.
EXPORTER = "opentelemetry.exporter.otlp.proto.http"


def check_tracing(
    section: TracingSection | None, merged: MergedFiles
) -> TracingSection | None:
    """Return the section; report a problem if the exporter is not installed."""
    if section is not None and not _is_installed():
        merged.report(
            (OWN_SECTION, "tracing"),
            "the exporter for spans is not installed",
            "install synapse_replication[otlp], or remove this section",
        )
    return section


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec(EXPORTER) is not None
    except ModuleNotFoundError:
        return False
