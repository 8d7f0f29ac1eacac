"""Tests for synapse_replication.app.http_site."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter
from treq.testing import StubTreq
from twisted.logger import LogEvent, formatEvent, globalLogPublisher
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.resource import Resource
from twisted.web.static import Data

from synapse_replication.app.http_limits import BoundedSite, served_hosts
from synapse_replication.app.http_site import make_root
from synapse_replication.instrumentation.status.model import decode_status
from synapse_replication.instrumentation.status.status_observer import StatusObserver


class MakeRootTests(SynchronousTestCase):
    def get(self, path: str, *names: str) -> tuple[int, str]:
        registry = CollectorRegistry()
        Counter("seen", "A counter.", registry=registry).inc()
        replication: Resource = Data(b"rows", "text/plain")
        status = StatusObserver("x.test", "me")
        site = BoundedSite(
            make_root(frozenset(names), registry, status.snapshot, replication),
            served_hosts(["process"], []),
            guarded=None,
            max_connections=1,
            refused=lambda status, why: self.fail(why),
        )
        http: Any = StubTreq(site.resource)
        response = self.successResultOf(http.get(f"http://process{path}"))
        self.addCleanup(http.flush)
        return response.code, self.successResultOf(response.text())

    def test_health(self) -> None:
        """A listening process reports that it is healthy."""
        self.assertEqual(self.get("/health", "health"), (200, "OK"))

    def test_head_of_health(self) -> None:
        """A load balancer may request only the headers; this is not logged."""
        logged: list[LogEvent] = []
        log: Any = logged.append
        globalLogPublisher.addObserver(log)
        self.addCleanup(globalLogPublisher.removeObserver, log)
        status = StatusObserver("x.test", "me")
        http: Any = StubTreq(
            make_root(frozenset({"health"}), CollectorRegistry(), status.snapshot)
        )
        response = self.successResultOf(http.head("http://process/health"))
        http.flush()
        self.assertEqual(response.code, 200)
        self.assertEqual(response.headers.getRawHeaders("Content-Length"), ["2"])
        self.assertEqual(self.successResultOf(response.text()), "")
        self.assertEqual(
            [each for each in map(formatEvent, logged) if "HEAD" in each], []
        )

    def test_ready(self) -> None:
        """An instance that reads from no writer is ready immediately."""
        self.assertEqual(self.get("/ready", "health"), (200, "ready\n"))

    def test_status(self) -> None:
        """The status is served as a page and as JSON, beside the metrics."""
        code, text = self.get("/status", "metrics")
        self.assertEqual(code, 200)
        self.assertIn("All rows arrive", text)
        code, text = self.get("/status.json", "metrics")
        self.assertEqual(decode_status(text.encode()).instance_name, "me")

    def test_metrics(self) -> None:
        """The metrics of the process's own registry are served at both paths."""
        for path in ("/metrics", "/_synapse/metrics"):
            code, text = self.get(path, "metrics")
            self.assertEqual(code, 200)
            self.assertIn("seen_total 1.0", text)

    def test_replication(self) -> None:
        """The replication resource is served at its path."""
        self.assertEqual(
            self.get("/_synapse/replication", "replication"), (200, "rows")
        )

    def test_only_named_resources(self) -> None:
        """A listener serves only the resources that it names."""
        self.assertEqual(self.get("/health", "metrics", "replication")[0], 404)
        self.assertEqual(self.get("/ready", "metrics", "replication")[0], 404)
        for path in ("/metrics", "/status", "/status.json"):
            self.assertEqual(self.get(path, "health", "replication")[0], 404)
        self.assertEqual(self.get("/_synapse/replication", "health", "metrics")[0], 404)
