"""
Tests that Prometheus, the page and ``status`` report a stalled stream, and that the
runbook's repair works.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import yaml
from twisted.trial.unittest import SkipTest

from synapse_replication.testing.private_process import die_with_parent, free_port
from tests.integration.deployment import (
    DeploymentTestCase,
    expected_rows,
    get_over_socket,
)

_MONITORING = Path(__file__).parent.parent.parent / "docs" / "monitoring"


def quick_rules() -> dict[str, Any]:
    """Return the alert rules with seconds instead of minutes."""
    rules = yaml.safe_load((_MONITORING / "alerts.yaml").read_text())
    for rule in rules["groups"][0]["rules"]:
        if rule["alert"] == "ReplicationStalled":
            rule["expr"] = re.sub(r"> \d+$", "> 1", rule["expr"])
            rule["for"] = "2s"
    found: dict[str, Any] = rules
    return found


class AlertTests(DeploymentTestCase):
    def setUp(self) -> None:
        prometheus = shutil.which("prometheus")
        if prometheus is None:
            raise SkipTest(
                "no prometheus is installed, so no alert can fire; install Debian's "
                "package prometheus"
            )
        super().setUp()
        self.metrics_port, self.port = free_port(), free_port()
        self.socket_of_reader = self.folder / "reader.sock"
        self.shared["instance_map"]["reader1"] = {"path": str(self.socket_of_reader)}
        self.worker["worker_listeners"] = [
            {
                "type": "metrics",
                "port": self.metrics_port,
                "bind_addresses": ["127.0.0.1"],
            },
            {
                "type": "http",
                "path": str(self.socket_of_reader),
                "resources": [{"names": ["replication", "metrics", "health"]}],
            },
        ]
        self.start_prometheus(prometheus)

    def start_prometheus(self, program: str) -> None:
        (self.folder / "rules.json").write_text(json.dumps(quick_rules()))
        target = {
            "targets": [f"127.0.0.1:{self.metrics_port}"],
            "labels": {"instance": "reader1"},
        }
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(self.folder / "rules.json")],
            "scrape_configs": [{"job_name": "sut", "static_configs": [target]}],
        }
        (self.folder / "prometheus.json").write_text(json.dumps(config))
        with (self.folder / "prometheus.log").open("ab") as log:
            process = subprocess.Popen(
                [
                    program,
                    f"--config.file={self.folder / 'prometheus.json'}",
                    f"--storage.tsdb.path={self.folder / 'tsdb'}",
                    f"--web.listen-address=127.0.0.1:{self.port}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent(signal.SIGKILL),
            )
        self.running.append(process)

    def query_prometheus(self, path: str, **query: str) -> Any:
        """Query Prometheus; return ``None`` if it does not answer yet."""
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}"
        if query:
            url += "?" + urllib.parse.urlencode(query)
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(url, timeout=10) as answer,
        ):
            return json.load(answer)["data"]
        return None

    def alerts(self) -> list[dict[str, Any]]:
        return [
            alert
            for alert in (self.query_prometheus("alerts") or {"alerts": []})["alerts"]
            if alert["state"] == "firing"
        ]

    def is_scraped(self) -> bool:
        answer = self.query_prometheus("query", query="synapse_replication_lag_seconds")
        return bool(answer and answer["result"])

    def notes(self) -> list[Any]:
        return [row for entry in self.journal("notes") for row in entry["rows"]]

    def test_a_writer_that_hangs(self) -> None:
        """
        If a writer hangs, the alert, the page, ``status`` and the log report the
        reason; after its restart every row arrives and the alert ends.
        """
        main = self.start("main", self.main)
        self.start("worker", self.worker)
        self.wait_until_up("worker")
        self.write_upto(10)
        self.wait_for_rows(10)
        self.wait_until("Prometheus has scraped", self.is_scraped)
        self.assertEqual(self.alerts(), [])
        code, text = self.call("status")
        self.assertEqual(code, 0, text)
        self.check_dashboard()

        main.send_signal(signal.SIGSTOP)
        self.wait_until("the alert fires", lambda: len(self.alerts()) == 2)
        for alert in self.alerts():
            self.assertEqual(alert["labels"]["alertname"], "ReplicationStalled")
            self.assertEqual(alert["labels"]["instance_name"], "master")
            self.assertEqual(alert["labels"]["instance"], "reader1")
            self.assertEqual(alert["labels"]["reason"], "writer_gone")
        page = get_over_socket(self.socket_of_reader, "/status")
        self.assertIn("2 of 2 streams stalled", page)
        self.assertIn("master no longer sends heartbeats", page)
        self.assertIn("<code>writer_gone</code>", page)
        code, text = self.call("status")
        self.assertEqual(code, 1, text)
        self.assertIn("reader1: 2 of 2 streams stalled", text)
        self.assertIn("master: no valid status: ", text)
        self.assertIn("no response within 5 s", text)
        self.assertIn("ReplicationStalled, writer_gone", self.log_of("worker"))

        # The runbook's repair of a writer that hangs is a restart.
        main.kill()
        main.wait()
        self.write_upto(5)
        self.start("main", self.main)
        # The tests' writer starts at note 1 again.
        expected = expected_rows(10) + expected_rows(5)
        self.wait_until("all rows in the journal", lambda: self.notes() == expected)
        self.wait_until("the alert is over", lambda: not self.alerts())
        code, text = self.call("status")
        self.assertEqual(code, 0, text)
        self.wait_until(
            "a line in the log",
            lambda: "no longer stalled" in self.log_of("worker"),
        )

    def check_dashboard(self) -> None:
        """Check that Prometheus can evaluate the expression of each panel."""
        dashboard = json.loads((_MONITORING / "dashboard.json").read_text())
        for panel in dashboard["panels"]:
            for target in panel["targets"]:
                expression = target["expr"].replace("$server_name", ".*")
                expression = expression.replace("$instance", ".*")
                self.assertIsNotNone(
                    self.query_prometheus("query", query=expression), expression
                )
