"""Tests for :mod:`synapse_replication.app.sources`."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.app.sources import HostSources
from synapse_replication.errors import CatchUpError


class HostSourcesTests(SynchronousTestCase):
    def test_without_client(self) -> None:
        """Without an HTTP client, an error names the stream."""
        with self.assertRaisesRegex(CatchUpError, "rows of cursors cannot"):
            HostSources().fetch_from_writer("cursors")
