"""Tests for synapse_replication.app.http_site."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter
from treq.testing import StubTreq
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.resource import Resource
from twisted.web.static import Data

from synapse_replication.app.http_site import make_site


class MakeSiteTests(SynchronousTestCase):
    def get(self, path: str, *names: str) -> tuple[int, str]:
        registry = CollectorRegistry()
        Counter("seen", "A counter.", registry=registry).inc()
        replication: Resource = Data(b"rows", "text/plain")
        site = make_site(frozenset(names), replication, registry)
        http: Any = StubTreq(site.resource)
        response = self.successResultOf(http.get(f"http://process{path}"))
        self.addCleanup(http.flush)
        return response.code, self.successResultOf(response.text())

    def test_health(self) -> None:
        """A process that listens says that it is up."""
        self.assertEqual(self.get("/health", "health"), (200, "OK"))

    def test_metrics(self) -> None:
        """The metrics of the process's own registry are served at both paths."""
        for path in ("/metrics", "/_synapse/metrics"):
            code, text = self.get(path, "metrics")
            self.assertEqual(code, 200)
            self.assertIn("seen_total 1.0", text)

    def test_replication(self) -> None:
        """Rows are served below their path."""
        self.assertEqual(
            self.get("/_synapse/replication", "replication"), (200, "rows")
        )

    def test_only_what_is_named(self) -> None:
        """What a listener does not name, it does not serve."""
        self.assertEqual(self.get("/health", "metrics", "replication")[0], 404)
        self.assertEqual(self.get("/metrics", "health", "replication")[0], 404)
        self.assertEqual(self.get("/_synapse/replication", "health", "metrics")[0], 404)
