"""Tests that alert rules, dashboard and runbook match each other and the metrics."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml
from twisted.trial.unittest import SkipTest, SynchronousTestCase

from synapse_replication.handlers.events import DiscardReason
from synapse_replication.instrumentation.prometheus import METRICS, MetricKind
from synapse_replication.instrumentation.status.model import StallReason
from synapse_replication.pipeline.archive.metrics import ArchiveMetrics

DOCS = Path(__file__).parent.parent / "docs"
MONITORING = DOCS / "monitoring"

#: Labels that Prometheus adds, and the label of all our metrics.
COMMON = {"instance", "job", "server_name"}


def exposed() -> dict[str, set[str]]:
    """Return the labels of each metric by its exposed name."""
    suffixes: dict[MetricKind, dict[str, tuple[str, ...]]] = {
        MetricKind.COUNTER: {"_total": ()},
        MetricKind.GAUGE: {"": ()},
        MetricKind.HISTOGRAM: {"_count": (), "_sum": (), "_bucket": ("le",)},
    }
    (archive,) = ArchiveMetrics()["skipped_ids"].describe()
    return {f"{archive.name}_total": {"stream", *COMMON}} | {
        metric.name + suffix: {*metric.labels, *more, *COMMON}
        for metric in METRICS
        for suffix, more in suffixes[metric.kind].items()
    }


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((MONITORING / "dashboard.json").read_text())
    return found


def panel_targets() -> list[dict[str, Any]]:
    return [target for panel in dashboard()["panels"] for target in panel["targets"]]


def run_promtool(*arguments: str) -> None:
    """Run promtool on files of ``docs/monitoring``.

    :raises SkipTest: if promtool is not installed.
    :raises AssertionError: if it reports an error.
    """
    promtool = shutil.which("promtool")
    if promtool is None:
        raise SkipTest(
            "promtool is not installed, so rules and expressions are not checked by "
            "Prometheus itself; install Debian's package prometheus"
        )
    done = subprocess.run(
        [promtool, *arguments],
        cwd=MONITORING,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


class MonitoringTests(SynchronousTestCase):
    def check(self, expression: str, text: str) -> None:
        """
        Check that an expression's metrics exist and have the labels used in the text.
        """
        names = re.findall(r"synapse_\w+", expression)
        self.assertTrue(names, expression)
        for name in names:
            self.assertIn(name, exposed())
            used = set(re.findall(r"(\w+)=~?\"", expression))
            used.update(re.findall(r"\$labels\.(\w+)", text))
            used.update(re.findall(r"\{\{(\w+)\}\}", text))
            for names_of in re.findall(r"by \(([^)]*)\)", expression):
                used.update(names_of.split(", "))
            self.assertLessEqual(used, exposed()[name], expression)

    def test_rules(self) -> None:
        """Each alert uses existing metrics and labels."""
        for rule in rules():
            self.check(rule["expr"], rule["annotations"]["summary"])

    def test_dashboard(self) -> None:
        """Each panel uses existing metrics and labels."""
        for target in panel_targets():
            self.check(target["expr"], target["legendFormat"])

    def test_dashboard_has_room(self) -> None:
        """No two panels overlap or have the same number."""
        panels = dashboard()["panels"]
        taken: set[tuple[int, int]] = set()
        for panel in panels:
            at = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(at["x"], at["x"] + at["w"])
                for y in range(at["y"], at["y"] + at["h"])
            }
            self.assertFalse(taken & cells, panel["title"])
            self.assertLessEqual(at["x"] + at["w"], 24)
            taken |= cells
        numbers = [panel["id"] for panel in panels]
        self.assertEqual(len(set(numbers)), len(numbers))

    def test_runbook(self) -> None:
        """The runbook has a section for each alert, and an answer for each reason."""
        sections = re.split(r"\n(\w+)\n-+\n", (DOCS / "runbook.rst").read_text())
        answers = dict(zip(sections[1::2], sections[2::2], strict=True))
        self.assertEqual(list(answers), [rule["alert"] for rule in rules()])
        stalled = answers["ReplicationStalled"]
        for reason in StallReason:
            self.assertIn(f"``{reason.value}``\n", stalled)
        (rule,) = [r for r in rules() if r["alert"] == "ReplicationRowsDiscarded"]
        reasons = re.findall(r"=~\"([^\"]*)\"", rule["expr"])[0].split("|")
        for name in reasons:
            self.assertIn(f"``{DiscardReason(name).value}``\n", answers[rule["alert"]])

    def test_each_alert_is_tested(self) -> None:
        """The promtool tests have a case in which each alert fires."""
        cases = yaml.safe_load((MONITORING / "alerts_test.yaml").read_text())["tests"]
        fires = {
            rule_test["alertname"]
            for case in cases
            for rule_test in case["alert_rule_test"]
            if rule_test["exp_alerts"]
        }
        self.assertEqual(fires, {rule["alert"] for rule in rules()})

    def test_promtool(self) -> None:
        """
        According to promtool, alerts fire when they should, and not for a short stall.
        """
        run_promtool("check", "rules", "alerts.yaml")
        run_promtool("test", "rules", "alerts_test.yaml")

    def test_dashboard_is_understood(self) -> None:
        """Prometheus can parse each panel's expression."""
        rules = [
            {
                "record": f"panel:{index}",
                "expr": target["expr"]
                .replace("$server_name", ".*")
                .replace("$instance", ".*"),
            }
            for index, target in enumerate(panel_targets())
        ]
        self.assertNotIn("$", json.dumps(rules), "a variable is not replaced")
        path = Path(self.mktemp()).absolute()
        path.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
        run_promtool("check", "rules", str(path))

    def test_variables(self) -> None:
        """The dashboard's variables use existing metrics and labels."""
        queries = [
            variable["query"]
            for variable in dashboard()["templating"]["list"]
            if variable["type"] == "query"
        ]
        self.assertTrue(queries)
        for query in queries:
            found = re.fullmatch(r"label_values\((\w+), (\w+)\)", query)
            assert found is not None, query
            self.assertIn(found[2], exposed()[found[1]])
