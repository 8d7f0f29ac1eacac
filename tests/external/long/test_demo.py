"""Tests for ``synapse-replication demo`` without Redis."""

from __future__ import annotations

from tests.cli.test_demo import DemoCase
from tests.external import skip_reason

skip = skip_reason("long")


class DirectTcpTests(DemoCase):
    """Tests with direct TCP."""

    def test_direct_tcp(self) -> None:
        """With direct TCP, the demo runs without Redis."""
        output = self.demo("--transport", "tcp")
        self.assertIn("Killing reader1", output)
        self.assertNotIn("Redis", output)
