"""Tests for the monitoring of an instance of the host."""

from __future__ import annotations

import json
import logging
import os
import socket
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.app.observers import SAMPLE_INTERVAL
from synapse_replication.dropin.monitoring import Monitoring, load_hooks
from synapse_replication.dropin.observer import hooks_of
from synapse_replication.errors import HooksNotFoundError
from synapse_replication.handlers.events import LinkUp
from synapse_replication.instrumentation.hooks import Stopping
from synapse_replication.instrumentation.prometheus import ReplicationMetrics
from synapse_replication.instrumentation.status.records import HearingRecord
from tests.dropin.host import FakeHomeserver, fake_modules

published: list[object] = []


def subscribe(host: Any, config: dict[str, Any]) -> None:
    """Subscribe to events, as a function named with ``--hooks`` does."""
    for kind in (LinkUp, Stopping):
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
            stream=SimpleNamespace(tables=[]),
            database=SimpleNamespace(transact=lambda *a, **k: Deferred()),
        )
        fake_modules(self, {"typing": lambda hs: None, "receipts": lambda hs: None})  # type: ignore[dict-item,return-value]
        self.hs = FakeHomeserver("w")
        self.hs.config.worker.writers.typing = ["master"]
        self.hs.config.worker.writers.receipts = ["w"]

    def start(self) -> Monitoring:
        monitoring = Monitoring(self.hs, ReplicationMetrics(CollectorRegistry()))
        stream = SimpleNamespace(description=SimpleNamespace(name="receipts"))
        host: Any = SimpleNamespace(
            streams=SimpleNamespace(
                get_streams_to_replicate=lambda: [stream],
                get_generators=lambda: {"receipts": self.generator},
            ),
            hooks=monitoring.hooks,
        )
        handler: Any = SimpleNamespace(
            sender=SimpleNamespace(last_sent_token=lambda stream: 7), readers=dict
        )
        monitoring.begin(handler, host)
        return monitoring

    def test_status(self) -> None:
        """
        The status lists the expected writers, and the token that this instance has
        sent.
        """
        monitoring = self.start()
        status = json.loads(monitoring.encode_status())
        self.assertEqual(
            [
                (writer["stream_name"], writer["instance_name"], writer["position"])
                for writer in status["writers"]
            ],
            [("receipts", "w", 7), ("typing", "master", None)],
        )

    def test_stuck_ids(self) -> None:
        """The status lists stuck ids."""
        monitoring = self.start()
        self.generator.get_first_unfinished = lambda: (8, "w")
        for _ in range(3):
            self.hs.get_reactor().advance(SAMPLE_INTERVAL)
        (stuck,) = json.loads(monitoring.encode_status())["stuck_ids"]
        self.assertEqual((stuck["stream_name"], stuck["id"]), ("receipts", 8))

    def test_stalls(self) -> None:
        """A stalled writer is logged in the host's log."""
        now = 0.0
        monitoring = self.start()
        self.patch(monitoring.status, "_monotonic", lambda: now)
        self.patch(monitoring.status, "_started", 0.0)
        for writer in monitoring.status._writers.values():
            writer.since = writer.progress_at = 0.0
        self.patch(monitoring.status, "_hearing", HearingRecord(since=0.0))
        with self.assertLogs(logging.getLogger("synapse_replication")) as caught:
            now = 20.0
            self.hs.reactor.advance(SAMPLE_INTERVAL)
        (record,) = caught.records
        self.assertIn("typing/master stalled for 20 s", record.getMessage())

    def test_log(self) -> None:
        """Lines go to Python's log with their level; a failure has its cause."""
        observer = Monitoring(self.hs, ReplicationMetrics(CollectorRegistry())).observer
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
        monitoring = self.start()
        monitoring.observer.observe(LinkUp("redis"))
        self.assertIsNone(monitoring.end())
        self.assertEqual(published, [LinkUp("redis"), Stopping()])
        self.assertEqual(self.hs.reactor.getDelayedCalls(), [])

    def test_hooks_for_modules_of_the_host(self) -> None:
        """Code inside the host finds the hooks by its homeserver or its module API."""
        self.assertIs(hooks_of(self.hs), self.hs.monitoring.hooks)
        module_api = SimpleNamespace(_hs=self.hs)
        self.assertIs(hooks_of(module_api), self.hs.monitoring.hooks)

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
        monitoring = self.start()
        self.hs.reactor.advance(10)
        monitoring.end()
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
