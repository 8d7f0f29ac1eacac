"""The archive job, with its metrics and its progress display."""

from __future__ import annotations

import sys
from contextlib import ExitStack

from prometheus_client import CollectorRegistry

from synapse_replication.pipeline.archive.metrics import ArchiveMetrics, serve_metrics
from synapse_replication.pipeline.archive.progress import Numbers, make_reporter
from synapse_replication.pipeline.archive.run import ArchiveSettings, run_archive


def run_job(settings: ArchiveSettings, metrics: tuple[str, int] | None) -> Numbers:
    """Archive until SIGTERM or SIGINT or, with ``settings.once``, for one cycle.

    :param metrics: the host and port to serve metrics on; ``None`` to serve none.
    :return: the totals since the start.
    :raises PipelineError: if the job cannot continue.
    """
    registry = CollectorRegistry()
    with ExitStack() as stack:
        archive_metrics = ArchiveMetrics(registry)
        if metrics is not None:
            stack.callback(serve_metrics(registry, *metrics))
        reporter = make_reporter(sys.stderr)
        stack.enter_context(reporter)
        return run_archive(settings, reporter, archive_metrics, with_signals=True)
