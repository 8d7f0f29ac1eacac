"""Tests that nothing false is reported while processes change to stock and back."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import attrs
from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.faults.stalls import RESET, LoggedStall, read_stalls
from synapse_replication.testing.servers import PrivateRedis
from tests.external import skip_reason
from tests.external.synapse.real import Chat, eventually, new_deployment
from tests.support.synapse_process import Launcher, WorkerSpec, ours, stock

skip = skip_reason("synapse")

PROCESSES = ("master", "persister1", "persister2", "writer1", "sync1")
#: The time in s that all processes run before the next one is changed: longer than any
#: threshold of the status.
SETTLE = 17.0
#: The greatest difference in s between the beginning of a stall and what caused it.
MARGIN = 6.5


@attrs.frozen
class _Down:
    """A time in which a process did not run, in s since the Unix epoch."""

    name: str
    start: float
    end: float


class RollingChangeTests(SynchronousTestCase):
    """Five processes on ours, which are changed to stock and back, one at a time."""

    def setUp(self) -> None:
        redis = PrivateRedis().start()
        self.addCleanup(redis.stop)
        self.deployment = new_deployment(
            redis,
            [WorkerSpec(name, ("client",)) for name in PROCESSES[1:]],
            {
                "events": ["persister1", "persister2"],
                "typing": ["writer1"],
                "receipts": ["writer1"],
                "to_device": ["writer1"],
            },
            dict.fromkeys(PROCESSES, ours()),
        )
        self.addCleanup(self.deployment.stop)
        start = time.time()
        self.deployment.start()
        self.on_ours = set(PROCESSES)
        # On a slow machine, the main process waits for the others for a while.
        self.downs = [_Down(name, start, time.time()) for name in PROCESSES]

    def test_to_stock_and_back(self) -> None:
        """Each stall that is logged or shown, and each reset, is a true one."""
        chat = Chat.begin(self.deployment)
        chat.do_everything()
        self.settle(chat)
        for launcher in (stock, ours()):
            for name in PROCESSES:
                self.change(name, launcher)
                self.settle(chat)
        stalls, false = self.judge()
        lines = [f"{len(stalls)} reports, {len(false)} of them false:", *stalls]
        sys.stdout.write("\n  ".join(lines) + "\n")
        self.assertEqual(false, [])

    def change(self, name: str, launcher: Launcher) -> None:
        start = time.time()
        self.deployment.processes[name].restart(launcher)
        self.downs.append(_Down(name, start, time.time()))
        (self.on_ours.discard if launcher is stock else self.on_ours.add)(name)

    def settle(self, chat: Chat) -> None:
        """Let users write, and check that no running process shows a stall."""
        chat.do_everything()
        time.sleep(SETTLE)
        eventually("no stall is shown", self.shown, 10.0)

    def shown(self) -> list[str]:
        """Return the writers that a process on ours shows as stalled."""
        done = subprocess.run(
            [
                *(sys.executable, "-m", "synapse_replication", "status", "--json"),
                *("-c", str(self.deployment.config_file)),
            ],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        processes: dict[str, Any] = json.loads(done.stdout)["processes"]
        self.assertLessEqual(self.on_ours, processes.keys())
        return [
            f"{name}: {writer['stream_name']}/{writer['instance_name']} "
            f"{writer['reason']} {writer['detail']}"
            for name, status in processes.items()
            for writer in status["writers"]
            if writer["condition"] == "stalled"
        ]

    def judge(self) -> tuple[list[str], list[str]]:
        """Return the stalls and resets in the logs, and those that are false."""
        found = [
            report
            for name in PROCESSES
            for report in read_stalls(
                name, self.deployment.processes[name].log_tail(10**8)
            )
        ]
        false = [report for report in found if not self.is_true(report)]
        return list(map(str, found)), list(map(str, false))

    def is_true(self, report: LoggedStall) -> bool:
        """Return whether a writer did not run then, or was restarted before a reset."""
        is_reset = report.reason == RESET
        if is_reset and not report.writers.startswith("typing/"):
            return False
        return any(
            report.names <= {down.name}
            and down.start - MARGIN <= report.since
            and report.at <= down.end + (MARGIN if is_reset else 1.0)
            for down in self.downs
        )
