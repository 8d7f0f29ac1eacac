"""``synapse-replication follow --verify``: reports rows that were never announced."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, TextIO

import attrs
from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.table import Table
from twisted.internet.defer import maybeDeferred
from twisted.logger import Logger
from twisted.web.resource import Resource
from twisted.web.server import Site

from synapse_replication.app.announcements import AnnouncementReader
from synapse_replication.app.http_site import metrics_resource
from synapse_replication.app.loss_meter import LossFinding, LossMeter
from synapse_replication.app.passive import Follower
from synapse_replication.cli.common import cell
from synapse_replication.cli.output import Output
from synapse_replication.config.process import ProcessConfig
from synapse_replication.handlers.host_parts import ReactorClock
from synapse_replication.handlers.observer import CompositeObserver
from synapse_replication.instrumentation.logs import LoggingObserver
from synapse_replication.instrumentation.prometheus import (
    PrometheusObserver,
    ReplicationMetrics,
)
from synapse_replication.storage.database import Database
from synapse_replication.storage.id_streams import row_stream_of
from synapse_replication.streams.rows import encode_json
from synapse_replication.text import printable
from synapse_replication.transport.reactor import IReactor


def print_json(out: Any, finding: LossFinding) -> None:
    """Print a finding as JSON on one line."""
    out.write(encode_json(attrs.asdict(finding)).decode() + "\n")


def print_text(out: Any, finding: LossFinding) -> None:
    """Print a finding as text."""
    name = printable(f"{finding.stream_name} {finding.instance_name}")
    what = "announced after" if finding.is_announced else "not announced for"
    out.write(f"{name} {finding.token}: {what} {finding.seconds:.0f} s\n")


def summarise(meter: LossMeter) -> dict[str, Any]:
    """Return the totals of a meter, as JSON."""
    return {
        "observed_seconds": round(meter.observed(), 1),
        "waiting": meter.waiting(),
        "writers": [
            {"stream_name": stream, "instance_name": writer, **attrs.asdict(tally)}
            for (stream, writer), tally in meter.tallies().items()
        ],
    }


def print_summary(summary: Mapping[str, Any], out: TextIO) -> None:
    """Print the totals of a meter as a table."""
    writers = summary["writers"]
    table = Table("Stream", "Writer", box=None, pad_edge=False)
    for title in ("Committed", "Never announced", "Late", "Slowest, s"):
        table.add_column(title, justify="right")
    for each in writers:
        table.add_row(
            cell(each["stream_name"]),
            cell(each["instance_name"]),
            f"{each['verified']:,}",
            f"{each['lost']:,}",
            f"{each['late']:,}",
            f"{each['slowest']:.0f}",
        )
    console = Console(file=out, highlight=False)
    console.print(table)
    lost = sum(each["lost"] for each in writers)
    verified = sum(each["verified"] for each in writers)
    console.print(
        f"Observed for {summary['observed_seconds']:,.0f} s: {verified:,} committed "
        f"tokens, {lost:,} never announced, {summary['waiting']:,} not announced yet."
    )


@attrs.define(eq=False, repr=False)
class _Run:
    """What a meter does while its process follows.

    :param serve_metrics: listens, and returns the port; ``None`` for no metrics.
    """

    _meter: LossMeter
    _database: Database
    _output: Output
    _as_json: bool
    _serve_metrics: Callable[[], Any] | None
    _port: Any = attrs.field(default=None, init=False)

    def begin(self) -> None:
        if self._serve_metrics is not None:
            self._port = self._serve_metrics()
        self._meter.start()

    async def finish(self) -> None:
        self._meter.stop()
        summary = summarise(self._meter)
        if self._as_json:
            self._output.write(encode_json({"summary": summary}).decode() + "\n")
            self._output.finish()
        else:
            print_summary(summary, sys.stderr)
        if self._port is not None:
            await maybeDeferred(self._port.stopListening)
        await self._database.close()


def make_meter(
    config: ProcessConfig,
    reactor: IReactor,
    *,
    streams: Collection[str],
    as_json: bool,
    patience: float,
    metrics_port: int | None,
) -> Follower:
    """Return a service that reports rows that were committed and never announced.

    :param streams: the names of the streams to verify; all if empty.
    :param patience: how long a committed row may wait for its announcement, in s.
    :param metrics_port: the port of 127.0.0.1 that serves the metrics; ``None`` for
        none.
    :raises ConfigError: if no database is configured.
    """
    if config.database is None:
        raise config.error(
            "database",
            "there is no database to compare with",
            "add the section `database` of the homeserver, with a role that may SELECT",
        )
    clock = ReactorClock(reactor)
    database = Database(config.database.conninfo, reactor, max_connections=1)
    registry = CollectorRegistry()
    metrics = PrometheusObserver(ReplicationMetrics(registry), config.server_name)
    output = Output(sys.stdout, reactor, lambda error: follower.fail(error))
    observer = CompositeObserver([metrics, LoggingObserver(Logger())])
    meter = LossMeter(
        {
            name: row_stream_of(stream, config.writers[name])
            for name, stream in config.stored.items()
            if not streams or name in streams
        },
        database,
        clock,
        observer,
        functools.partial(print_json if as_json else print_text, output),
        links=1 if config.redis is not None else len(config.tcp_connect),
        patience=patience,
    )
    serve_metrics = None
    if metrics_port is not None:
        serve_metrics = functools.partial(
            _serve_metrics, reactor, metrics_port, registry
        )
    run = _Run(meter, database, output, as_json, serve_metrics)
    follower = Follower(
        config,
        reactor,
        "follow",
        AnnouncementReader(config.declared, observer, meter.receive).tap,
        run.finish,
        run.begin,
        observers=[meter],
    )
    return follower


def _serve_metrics(reactor: IReactor, port: int, registry: CollectorRegistry) -> Any:
    root = Resource()  # type: ignore[no-untyped-call]
    root.putChild(b"metrics", metrics_resource(registry))
    site: Any = Site(root)  # type: ignore[no-untyped-call]
    return reactor.listenTCP(port, site, interface="127.0.0.1")
