"""Tests for :mod:`synapse_replication.demo.processes`."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.demo.processes import (
    ReplicationProcess,
    wait_until_ready,
)
from synapse_replication.errors import ServerStartError


class ReplicationProcessTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.process = ReplicationProcess(
            "reader9",
            ["worker", "-c", "/nowhere/homeserver.yaml"],
            Path("/nowhere/reader9.sock"),
            Path(self.mktemp()),
        )
        self.addCleanup(self.process.kill)

    def test_failed_start_is_reported_with_log(self) -> None:
        """A process that does not start is reported with the end of its log."""
        self.process.start()
        with self.assertRaises(ServerStartError) as caught:
            wait_until_ready([self.process])
        self.assertIn("reader9 ended with status 2", str(caught.exception))
        self.assertIn("/nowhere/homeserver.yaml", str(caught.exception))

    def test_process_not_started(self) -> None:
        """A process that was not started is not ready and need not be stopped."""
        self.process.check()
        self.process.request_stop()
        self.assertFalse(self.process.is_ready())
        self.assertIsNone(self.process.wait())

    def test_interrupted_while_it_is_checked(self) -> None:
        """An interruption arrives after the check, which holds a lock."""
        previous = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.addCleanup(signal.signal, signal.SIGINT, previous)
        checked: list[bool] = []

        def poll(process: subprocess.Popen[bytes]) -> None:
            signal.raise_signal(signal.SIGINT)
            checked.append(True)

        self.process.start()
        self.patch(subprocess.Popen, "poll", poll)
        self.assertRaises(KeyboardInterrupt, self.process.check)
        self.assertEqual(checked, [True])

    def test_kill(self) -> None:
        """A killed process may be started again."""
        self.process.start()
        self.process.kill()
        self.process.check()
        self.process.start()
        self.process.request_stop()
        self.assertIsNotNone(self.process.wait())
