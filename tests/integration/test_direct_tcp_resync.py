"""
Tests for a reader over direct TCP that is disconnected from its writer and returns.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter

import psycopg2

from synapse_replication.testing.private_process import free_port
from tests.integration.deployment import (
    DeploymentTestCase,
    get_over_socket,
    read_resyncs,
)
from tests.support.link_proxy import LinkProxy


class DirectTcpResyncTests(DeploymentTestCase):
    """Two readers of main without Redis, one of them through a proxy."""

    def setUp(self) -> None:
        super().setUp()
        self.tcp_port = free_port()
        self.proxy = LinkProxy(("127.0.0.1", self.tcp_port))
        self.addCleanup(lambda: self.proxy.close())
        del self.shared["redis"]
        self.main["listeners"].append(
            {
                "type": "replication",
                "port": self.tcp_port,
                "bind_addresses": ["127.0.0.1"],
            }
        )
        self.metrics = self.folder / "metrics.sock"
        self.worker["worker_listeners"] = [
            {"type": "metrics", "path": str(self.metrics)}
        ]
        self.connect_worker(self.proxy.port)
        self.start("main", self.main)
        self.start("worker", self.worker)
        # The second reader shows what main sends while the first one is disconnected.
        journal = self.folder / "journal2.jsonl"
        sink = self.worker["synapse_replication"]["row_sink"]
        self.worker = {
            "worker_name": "reader2",
            "synapse_replication": {
                "row_sink": sink | {"config": {"path": str(journal)}}
            },
        }
        self.connect_worker(self.tcp_port)
        self.start("worker", self.worker, name="reader2")
        self.journal2 = journal
        for name in ("main", "worker", "reader2"):
            self.wait_until_up(name)
        self.write_upto(10)
        self.wait_for_rows(10)
        self.wait_until("10 tokens at reader2", lambda: self.other_has(10))

    def connect_worker(self, port: int) -> None:
        """Configure the port to which the next worker connects."""
        section = self.worker["synapse_replication"]
        section["direct_tcp"] = {"connect": f"tcp:127.0.0.1:{port}"}

    def other_has(self, token: int) -> bool:
        """Return whether the second reader has ``token`` tokens of both streams."""
        lines = self.journal2.read_bytes().splitlines(keepends=True)
        entries = [json.loads(line) for line in lines if line.endswith(b"\n")]
        return all(
            sum(e["stream"] == name and bool(e["rows"]) for e in entries) >= token
            for name in ("notes", "typing")
        )

    def reader_metrics(self) -> str:
        """Return the metrics of the reader behind the proxy."""
        return get_over_socket(self.metrics, "/metrics")

    def refuse_connections(self) -> None:
        """Close the link, and refuse new connections."""
        self.proxy.close()
        self.wait_until(
            "the link is down", lambda: "Disconnected: to " in self.log_of("worker")
        )

    def accept_connections(self) -> None:
        """Accept connections again."""
        self.proxy = LinkProxy(("127.0.0.1", self.tcp_port), self.proxy.port)

    def hide_table(self) -> None:
        """Rename the table of notes, so that nothing can be fetched from it."""
        with contextlib.closing(psycopg2.connect(self.dsn)) as connection:
            connection.cursor().execute("ALTER TABLE notes RENAME TO hidden")
            connection.commit()

    def test_partial_resync(self) -> None:
        """
        The missed rows come from the writer's backlog, even if the table does not
        exist.
        """
        before = read_resyncs(self.reader_metrics())
        self.refuse_connections()
        self.write_upto(20)
        self.wait_until("20 tokens at reader2", lambda: self.other_has(20))
        self.assertEqual(len(self.journal("notes")), 10)
        self.hide_table()
        self.accept_connections()
        self.wait_for_rows(20)
        more = Counter({("notes", "partial"): 1, ("typing", "partial"): 1})
        self.assertEqual(read_resyncs(self.reader_metrics()), before + more)
