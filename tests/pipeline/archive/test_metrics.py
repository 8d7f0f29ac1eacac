"""Tests for :mod:`synapse_replication.pipeline.archive.metrics`."""

from __future__ import annotations

import socket
from urllib.request import urlopen

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive.metrics import ArchiveMetrics
from synapse_replication.pipeline.source.offsets import StreamOffset


class ArchiveMetricsTests(SynchronousTestCase):
    """Tests for the metrics of the archive, and for the port that serves them."""

    def setUp(self) -> None:
        self.metrics = ArchiveMetrics()

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(
            f"synapse_replication_archive_{name}", labels
        )

    def test_positions(self) -> None:
        """
        Each writer has a position. A stream whose offset has no writers has a single
        one.
        """
        self.metrics.set_offsets(
            {
                "events": StreamOffset(3, {"w1": 7, "w2": 3}),
                "account_data": StreamOffset(9),
            }
        )
        for stream, writer, token in (
            ("events", "w1", 7),
            ("events", "w2", 3),
            ("account_data", "", 9),
        ):
            self.assertEqual(
                self.value("position", stream=stream, instance_name=writer), token
            )

    def test_lag(self) -> None:
        """While a writer is behind, the caught-up timestamp does not advance."""
        self.metrics.set_lag({("events", "w1"): 4, ("events", "w2"): 0}, 100.0)
        self.assertEqual(self.value("lag_ids", stream="events", instance_name="w1"), 4)
        self.assertEqual(self.value("caught_up_timestamp_seconds"), 0)
        self.metrics.set_lag({("events", "w1"): 0, ("events", "w2"): 0}, 200.0)
        self.assertEqual(self.value("caught_up_timestamp_seconds"), 200)

    def test_removed_writer(self) -> None:
        """A writer that was removed has no lag any more."""
        self.metrics.set_lag({("events", "w1"): 4, ("events", "w2"): 0}, 100.0)
        self.metrics.set_lag({("events", "w2"): 0}, 200.0)
        gone = self.value("lag_ids", stream="events", instance_name="w1")
        self.assertIsNone(gone)
        self.assertEqual(self.value("lag_ids", stream="events", instance_name="w2"), 0)

    def test_served(self) -> None:
        """
        Metrics are served at the given address until the context ends; a used port
        is an error.
        """
        with socket.create_server(("127.0.0.1", 0)) as busy:
            port = busy.getsockname()[1]
            with (
                self.assertRaises(PipelineError) as raised,
                self.metrics.served("127.0.0.1", port),
            ):
                pass
            self.assertIn(f"port {port}: Address already in use", str(raised.exception))
        with (
            self.metrics.served("127.0.0.1", port),
            urlopen(f"http://127.0.0.1:{port}/metrics") as answer,
        ):
            content = answer.read().decode()
        self.assertIn("synapse_replication_archive_rows_per_second 0.0", content)
        self.assertRaises(OSError, urlopen, f"http://127.0.0.1:{port}/metrics")
