"""Tests for :mod:`tests.support.forks`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tests.support.forks import fork


class ForkTests(SynchronousTestCase):
    def test_as_a_new_interpreter(self) -> None:
        """Status and output are those of a process that is not forked."""
        for arguments in (["--version"], ["check-config", "-c", "/none.yaml"]):
            out, log = Path(self.mktemp()), Path(self.mktemp())
            with out.open("wb") as out_file, log.open("wb") as log_file:
                process = fork(
                    "synapse_replication",
                    arguments,
                    out_file.fileno(),
                    log_file.fileno(),
                )
            status = process.wait(60)
            done = subprocess.run(
                [sys.executable, "-m", "synapse_replication", *arguments],
                capture_output=True,
                check=False,
            )
            self.assertEqual(
                (status, out.read_bytes(), log.read_bytes()),
                (done.returncode, done.stdout, done.stderr),
            )

    def test_killed(self) -> None:
        """A running process has no status; one that a signal ended, a negative one."""
        for_reading, out = os.pipe()
        self.addCleanup(os.close, for_reading)
        self.addCleanup(os.close, out)
        os.set_blocking(out, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(out, b"x" * 4096)
        os.set_blocking(out, True)
        # It waits until it can write to the pipe.
        process = fork("synapse_replication", ["--version"], out, out)
        self.assertIsNone(process.poll())
        self.assertRaises(subprocess.TimeoutExpired, process.wait, 0.0)
        process.kill()
        self.assertEqual(process.wait(60), -signal.SIGKILL)
        process.kill()
        self.assertEqual(process.poll(), -signal.SIGKILL)
