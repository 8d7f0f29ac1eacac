"""Tests for the observers of an instance of the host, and for its metrics and logs."""

from __future__ import annotations

import json
import logging
import os
import socket
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication import __version__
from synapse_replication.app.observers import SAMPLE_INTERVAL
from synapse_replication.dropin.observer import (
    HostObservers,
    adopt_metrics,
    announce,
    hooks_of,
    load_hooks,
    observer_of,
    prepare_announcement,
)
from synapse_replication.errors import HooksNotFoundError
from synapse_replication.handlers.events import LinkUp
from synapse_replication.instrumentation.hooks import (
    ModuleLoaded,
    ModuleUnloaded,
    Stopping,
)
from synapse_replication.instrumentation.prometheus import (
    PrometheusObserver,
    ReplicationMetrics,
)
from synapse_replication.instrumentation.status.records import HearingRecord
from tests.dropin.host import FakeHomeserver, fake_modules

published: list[object] = []


def subscribe(host: Any, config: dict[str, Any]) -> None:
    """Subscribe to events, as a function named with ``--hooks`` does."""
    for kind in (LinkUp, ModuleLoaded, ModuleUnloaded, Stopping):
        host.hooks.subscribe(kind, published.append)


class MonitoringTests(SynchronousTestCase):
    """
    Tests with a worker ``w`` of a host made of doubles, which reads from the main
    process.
    """

    def setUp(self) -> None:
        self.patch(os, "environ", {})
        published.clear()
        self.generator = SimpleNamespace(
            get_first_unfinished=lambda: None,
            lost_answers=list,
            stream=SimpleNamespace(tables=[]),
            database=SimpleNamespace(transact=lambda *a, **k: Deferred()),
        )
        fake_modules(self, {"typing": lambda hs: None, "receipts": lambda hs: None})  # type: ignore[dict-item,return-value]
        self.hs = FakeHomeserver("w")
        self.hs.config.worker.writers.typing = ["master"]
        self.hs.config.worker.writers.receipts = ["w"]

    def start(self) -> HostObservers:
        observers = HostObservers(self.hs, ReplicationMetrics(CollectorRegistry()))
        stream = SimpleNamespace(description=SimpleNamespace(name="receipts"))
        host: Any = SimpleNamespace(
            streams=SimpleNamespace(
                get_streams_to_replicate=lambda: [stream],
                get_generators=lambda: {"receipts": self.generator},
            ),
            hooks=observers.hooks,
        )
        handler: Any = SimpleNamespace(
            host=host,
            sender=SimpleNamespace(last_sent_token=lambda stream: 7),
            readers=dict,
        )
        reactor: Any = self.hs.get_reactor()
        observers.start(reactor, handler, host.streams.get_generators, "")
        return observers

    def test_status(self) -> None:
        """
        The status lists the expected writers, and the token that this instance has
        sent.
        """
        observers = self.start()
        status = json.loads(observers.encode_status())
        self.assertEqual(
            [
                (writer["stream_name"], writer["instance_name"], writer["position"])
                for writer in status["writers"]
            ],
            [("receipts", "w", 7), ("typing", "master", None)],
        )

    def test_stuck_ids(self) -> None:
        """The status lists stuck ids."""
        observers = self.start()
        self.generator.get_first_unfinished = lambda: (8, "w")
        for _ in range(3):
            self.hs.get_reactor().advance(SAMPLE_INTERVAL)
        (stuck,) = json.loads(observers.encode_status())["stuck_ids"]
        self.assertEqual((stuck["stream_name"], stuck["id"]), ("receipts", 8))

    def test_stalls(self) -> None:
        """A stalled writer is logged in the host's log."""
        now = 0.0
        observers = self.start()
        self.patch(observers.status, "_monotonic", lambda: now)
        self.patch(observers.status, "_started", 0.0)
        for writer in observers.status._writers.values():
            writer.since = writer.progress_at = 0.0
        self.patch(observers.status, "_hearing", HearingRecord(since=0.0))
        with self.assertLogs(logging.getLogger("synapse_replication")) as caught:
            now = 20.0
            self.hs.reactor.advance(SAMPLE_INTERVAL)
        (record,) = caught.records
        self.assertIn("typing/master stalled for 20 s", record.getMessage())

    def test_log(self) -> None:
        """Lines go to Python's log with their level; a failure has its cause."""
        observer = HostObservers(
            self.hs, ReplicationMetrics(CollectorRegistry())
        ).observer
        error = ValueError("bad")
        with self.assertLogs(logging.getLogger("synapse_replication")) as caught:
            observer.observe(LinkUp("redis"))
            observer.failure("work", error)
        self.assertEqual(
            [(record.levelname, record.getMessage()) for record in caught.records],
            [("INFO", "Connected: redis"), ("CRITICAL", "work failed: bad")],
        )
        exc_info = caught.records[-1].exc_info
        assert isinstance(exc_info, tuple)
        self.assertIs(exc_info[1], error)

    def test_hooks(self) -> None:
        """
        Functions named in the environment subscribe; Stopping is published on stop.
        """
        os.environ["SYNAPSE_REPLICATION_HOOKS"] = f" {__name__}.subscribe,"
        observers = self.start()
        observers.observer.observe(LinkUp("redis"))
        observers.stopping()
        self.assertIsNone(observers.stop())
        name = f"{__name__}.subscribe"
        self.assertEqual(
            published,
            [ModuleLoaded(name), LinkUp("redis"), Stopping(), ModuleUnloaded(name)],
        )
        self.assertEqual(self.hs.reactor.getDelayedCalls(), [])

    def test_hooks_for_modules_of_the_host(self) -> None:
        """Code inside the host finds the hooks by its homeserver or its module API."""
        self.assertIs(hooks_of(self.hs), self.hs.observers.hooks)
        module_api = SimpleNamespace(_hs=self.hs)
        self.assertIs(hooks_of(module_api), self.hs.observers.hooks)

    def test_no_such_hooks(self) -> None:
        """If a function cannot be imported, the error names it."""
        for name in (f"{__name__}.missing", "no_such_module.subscribe", "word"):
            with self.assertRaises(HooksNotFoundError) as caught:
                load_hooks(name)
            self.assertIn(f"{name} cannot be imported", str(caught.exception))

    def test_systemd(self) -> None:
        """
        STATUS and WATCHDOG are sent to systemd, but not READY, which the host sends.
        """
        folder = tempfile.TemporaryDirectory(prefix="notify-")
        self.addCleanup(folder.cleanup)
        path = str(Path(folder.name) / "socket")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.addCleanup(listener.close)
        listener.bind(path)
        listener.setblocking(False)
        os.environ |= {"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "20000000"}
        observers = self.start()
        self.hs.reactor.advance(10)
        observers.stopping()
        observers.stop()
        sent = []
        while True:
            try:
                sent += listener.recv(1000).decode().splitlines()
            except BlockingIOError:
                break
        self.assertEqual(sent.count("WATCHDOG=1"), 2)
        self.assertEqual(sent[-1], "STATUS=stopping")
        self.assertEqual(
            {line.partition("=")[0] for line in sent}, {"STATUS", "WATCHDOG"}
        )

    def test_invalid_socket(self) -> None:
        """
        If systemd's variables are invalid, an error is logged, and the host starts.
        """
        os.environ["NOTIFY_SOCKET"] = "tcp:1"
        with self.assertLogs(logging.getLogger("synapse_replication")) as caught:
            self.start()
        self.assertIn("NOTIFY_SOCKET", caught.records[0].getMessage())


_COMMANDS = "synapse_replication_tcp_protocol_inbound_commands"
_QUEUE = "synapse_replication_tcp_command_queue"


class _ComputedGauge(Collector):
    """A metric that is computed when it is read."""

    name = _QUEUE

    def collect(self) -> list[GaugeMetricFamily]:
        return [GaugeMetricFamily(self.name, "of the host", value=1)]


class AdoptMetricsTests(SynchronousTestCase):
    """Tests for adopt_metrics."""

    def test_counters_continue(self) -> None:
        """The host's counters are continued, and its computed metrics are replaced."""
        registry = CollectorRegistry()
        counter = Counter(
            _COMMANDS,
            "of the host",
            ("command", "name", "server_name"),
            registry=registry,
        )
        counter.labels("PING", "redis", "test").inc(5)
        gauge = _ComputedGauge()
        registry.register(gauge)
        namespace = {"counter": counter, "gauge": gauge, "other": 7}
        found = adopt_metrics(namespace, registry)
        metrics = PrometheusObserver(ReplicationMetrics(registry, found), "test")
        metrics.commands_received("redis", "PING", 2)
        metrics.queue_changed("events", 3)
        labels = {"command": "PING", "name": "redis", "server_name": "test"}
        self.assertEqual(registry.get_sample_value(f"{_COMMANDS}_total", labels), 7)
        labels = {"stream_name": "events", "server_name": "test"}
        self.assertEqual(registry.get_sample_value(_QUEUE, labels), 3)


class ObserverOfTests(SynchronousTestCase):
    """Tests for observer_of."""

    def test_one_for_all_parts(self) -> None:
        """All parts of a homeserver share one observer."""
        hs = FakeHomeserver()
        self.assertIs(observer_of(hs), observer_of(hs))
        self.assertIsNot(observer_of(hs), observer_of(FakeHomeserver()))


class AnnouncementTests(SynchronousTestCase):
    """Tests for prepare_announcement and announce."""

    def _lines(self) -> list[tuple[str, str]]:
        with self.assertLogs("synapse_replication") as logs:
            announce()
        return [(record.levelname, record.getMessage()) for record in logs.records]

    def test_tested_version(self) -> None:
        """One line names the drop-in's version, the host's version and the parts."""
        prepare_announcement(["handler", "ids"], "1.2.3", None)
        ((level, text),) = self._lines()
        self.assertEqual(level, "INFO")
        for word in (__version__, "handler, ids", "Synapse 1.2.3"):
            self.assertIn(word, text)

    def test_untested_version(self) -> None:
        """For an untested version, a warning is logged."""
        prepare_announcement(["ids"], "9.9", "matrix-synapse 9.9 was not tried")
        (_, (level, text)) = self._lines()
        self.assertEqual(level, "WARNING")
        self.assertIn("9.9 was not tried", text)

    def test_once(self) -> None:
        """The lines are logged once, however many homeserver objects exist."""
        prepare_announcement(["ids"], "1.2.3", None)
        self._lines()
        with self.assertNoLogs("synapse_replication"):
            announce()
