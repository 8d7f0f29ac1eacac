"""
Tests that running processes export the metrics of the reference, with correct values.
"""

from __future__ import annotations

import time
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from synapse_replication.instrumentation.prometheus import METRICS, SERVER_NAME_LABEL
from tests.integration.deployment import DeploymentTestCase, get_over_socket

#: Labels that Prometheus adds to samples of some kinds.
_KIND_LABELS = {"le"}

#: The greatest number of values of a label in this deployment.
_MAX_VALUES = 25


class ExportsTests(DeploymentTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.sockets = {name: self.folder / f"{name}.m" for name in ("main", "worker")}
        self.main["listeners"].append(
            {"type": "metrics", "path": str(self.sockets["main"])}
        )
        self.worker["worker_listeners"] = [
            {"type": "metrics", "path": str(self.sockets["worker"])}
        ]

    def families(self, name: str) -> dict[str, Any]:
        """Scrape a process; return its metric families by name."""
        text = get_over_socket(self.sockets[name], "/metrics")
        return {family.name: family for family in text_string_to_metric_families(text)}

    def value(self, process: str, metric: str, /, **labels: str) -> float:
        """Return the sum of the samples with these labels."""
        return sum(
            float(sample.value)
            for family in self.families(process).values()
            for sample in family.samples
            if sample.name == metric and labels.items() <= sample.labels.items()
        )

    def test_reference(self) -> None:
        """
        Each process exports exactly the metrics of the reference, with their labels,
        and few values of each label.
        """
        self.start("main", self.main)
        worker = self.start("worker", self.worker)
        self.wait_until_up("worker")
        self.write_upto(10)
        self.wait_for_rows(10)
        worker.kill()
        worker.wait()
        self.sockets["worker"].unlink()
        self.write_upto(30)
        self.wait_until_main_wrote(30)
        self.start("worker", self.worker)
        self.wait_for_rows(30)
        reference = {metric.name: metric for metric in METRICS}
        for process in self.sockets:
            families = self.families(process)
            # Counters and histograms also export the time of their creation.
            created = {name for name in families if name.endswith("_created")}
            self.assertEqual(families.keys() - created, reference.keys())
            values: dict[tuple[str, str], set[str]] = {}
            for name, metric in reference.items():
                family = families[name]
                self.assertEqual(family.type, metric.kind.value, name)
                self.assertEqual(family.documentation, metric.documentation, name)
                for sample in family.samples:
                    self.assertEqual(
                        sample.labels.keys() - _KIND_LABELS,
                        {*metric.labels, SERVER_NAME_LABEL},
                        sample.name,
                    )
                    for label, value in sample.labels.items():
                        values.setdefault((name, label), set()).add(value)
            for where, found in values.items():
                self.assertLessEqual(len(found), _MAX_VALUES, (where, found))
        self.check_counts()

    def check_counts(self) -> None:
        """Check that events were counted."""
        rows = {"stream_name": "notes"}
        self.assertGreater(
            self.value("worker", "synapse_replication_catch_up_rows_total", **rows), 0
        )
        self.assertEqual(
            self.value("worker", "synapse_replication_catch_up_seconds_count", **rows),
            1,
        )
        self.assertEqual(
            self.value(
                "worker", "synapse_replication_resyncs_total", kind="partial", **rows
            ),
            1,
        )
        for link in ("redis", "redis_out"):
            self.assertEqual(
                self.value(
                    "main", "synapse_replication_connections_made_total", name=link
                ),
                1,
            )
            self.assertIn(
                link,
                {
                    sample.labels["name"]
                    for sample in self.families("main")[
                        "synapse_replication_tcp_protocol_transport_send_buffer"
                    ].samples
                },
            )
        # 30 tokens have 60 rows.
        self.assertEqual(
            self.value("main", "synapse_replication_backlog_rows", **rows), 60
        )
        self.assertGreater(
            self.value(
                "main", "synapse_replication_discarded_total", reason="own_echo"
            ),
            0,
        )

    def test_lag_is_the_age_of_the_write(self) -> None:
        """
        Lag in s counts from the time of the write, as reported by the writer's
        heartbeats, and not from the reader's return.
        """
        gate = self.folder / "gate"
        self.worker["synapse_replication"]["row_sink"] = {
            "module": "tests.integration.blocking_module.make_gated_journal",
            "config": {"path": str(self.folder / "journal.jsonl"), "gate": str(gate)},
        }
        self.start("main", self.main)
        worker = self.start("worker", self.worker)
        self.wait_until_up("worker")
        self.write_upto(3)
        self.wait_for_rows(3)
        worker.kill()
        worker.wait()
        self.sockets["worker"].unlink()
        self.write_upto(6)
        self.wait_until_main_wrote(6)
        written = time.monotonic()
        self.wait_until("the writes are old", lambda: time.monotonic() > written + 4)
        gate.touch()
        started = time.monotonic()
        self.start("worker", self.worker)
        self.wait_until_up("worker", 2)

        def lag() -> float:
            return self.value(
                "worker", "synapse_replication_lag_seconds", stream_name="notes"
            )

        self.wait_until(
            "lag of more than is known from here",
            lambda: (
                self.sockets["worker"].exists()
                and lag() > time.monotonic() - started + 3
            ),
        )
        self.assertLessEqual(lag(), time.monotonic() - written + 1)
        behind = self.value(
            "worker", "synapse_replication_lag_positions", stream_name="notes"
        )
        self.assertEqual(behind, 3)
        gate.unlink()
        self.wait_for_rows(6)
        self.wait_until("no lag", lambda: lag() == 0)
