"""Tests that a row which a stock writer discarded is delivered late, and reported."""

from __future__ import annotations

import os
import tempfile
import time
import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.testing.servers import PrivateRedis
from tests.external import skip_reason
from tests.external.synapse.real import Chat, eventually, json_lines, new_deployment
from tests.support.link_proxy import Cut, LinkProxy
from tests.support.synapse_process import WorkerSpec, ours

skip = skip_reason("synapse")

#: The time in s within which a writer publishes a row.
SETTLE = 0.3
#: The number of rows after a discarded one; the writer connects again meanwhile.
LATER = 10

#: A module that records each event of the hook.
RECORDER = """
import json

from synapse_replication.handlers.events import LateRows


def subscribe(host, config):
    def record(event):
        with open({path!r}, "a") as file:
            found = [event.stream_name, event.instance_name, event.tokens]
            print(json.dumps({{"late": found}}), file=file)

    host.hooks.subscribe(LateRows, record)
"""


class LateRowTests(SynchronousTestCase):
    """Main on ours, and a stock persister whose link has a proxy."""

    def setUp(self) -> None:
        redis = PrivateRedis().start()
        self.addCleanup(redis.stop)
        self.proxy = LinkProxy((redis.host, redis.port))
        self.addCleanup(self.proxy.close)
        by_proxy = {"enabled": True, "host": "127.0.0.1", "port": self.proxy.port}
        folder = tempfile.TemporaryDirectory(prefix="late-row-")
        self.addCleanup(folder.cleanup)
        self.recorded = Path(folder.name) / "recorded"
        (Path(folder.name) / "recorder.py").write_text(
            RECORDER.format(path=str(self.recorded))
        )
        paths = [folder.name, os.environ.get("PYTHONPATH", "")]
        self.deployment = new_deployment(
            redis,
            [WorkerSpec("persister1", ("client",), {"redis": by_proxy})],
            {"events": ["persister1"]},
            # Longer than a cut and the rows after it.
            {
                "master": ours(
                    *("--hooks", "recorder.subscribe"),
                    *("--position-check-seconds", "15"),
                )
            },
            {"enable_metrics": True},
            {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
        self.addCleanup(self.deployment.stop)
        self.deployment.start()

    def late_tokens(self) -> list[int]:
        """Return the tokens of late events that the hook received."""
        return [
            token
            for line in json_lines(self.recorded)
            for token in line["late"][2]
            if line["late"][:2] == ["events", "persister1"]
        ]

    def counted(self) -> int:
        """Return the number of late events in the metrics of the main process."""
        url = f"http://127.0.0.1:{self.deployment.main.api.port}/_synapse/metrics"
        with urllib.request.urlopen(url, timeout=30) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        return sum(
            int(sample.value)
            for family in families
            for sample in family.samples
            if sample.name == "synapse_replication_late_rows_total"
            and sample.labels["stream_name"] == "events"
        )

    def test_discarded_row(self) -> None:
        """
        A row that its writer discarded, and hid with later rows, is reported to the
        hook, in the metrics and in the log.
        """
        chat = Chat.begin(self.deployment)

        def is_unreported() -> bool:
            """Make the writer discard a row and publish later ones; return the result.

            If the positions are compared during the cut, that row is not late.
            """
            self.proxy.cut(Cut.PUBLISHES)
            chat.send_messages(1)
            time.sleep(SETTLE)
            self.proxy.heal()
            for _ in range(LATER):
                # Until the writer is connected again, it discards these, too.
                chat.send_messages(1)
                time.sleep(SETTLE)
            return not self.late_tokens()

        eventually("a late row", is_unreported)
        eventually(
            "as many in the metrics as for the hook",
            lambda: self.counted() - len(self.late_tokens()),
        )
        first = self.late_tokens()[0]
        self.assertRegex(
            self.deployment.main.log_tail(10**8),
            rf"Delivered \d+ tokens? of events of persister1 late, .* {first}\b",
        )
