"""Tests for ``synapse-replication demo`` as a whole."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

COMMAND = [sys.executable, "-m", "synapse_replication", "demo"]


def processes_that_name(text: str) -> list[str]:
    """Return the command lines of running processes that contain a text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:
            continue
        if text in line:
            found.append(line)
    return found


class DemoCase(SynchronousTestCase):
    """A test that runs the demonstration, with temporary files of its own."""

    def setUp(self) -> None:
        # Do not use trial's folder: the private PostgreSQL runs as another user, which
        # must have access to the folder.
        self.folder = tempfile.mkdtemp(prefix="sr-demo-test-")
        Path(self.folder).chmod(0o755)
        self.addCleanup(shutil.rmtree, self.folder)
        self.environ = os.environ | {"TMPDIR": self.folder}

    def demo(self, *arguments: str) -> str:
        done = subprocess.run(
            [*COMMAND, "--rows", "1200", "--rate", "300", *arguments],
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=110,
        )
        output = done.stdout.decode()
        self.assertEqual(done.returncode, 0, output)
        self.assert_nothing_left()
        return output

    def assert_nothing_left(self) -> None:
        self.assertEqual(os.listdir(self.folder), [])
        self.assertEqual(processes_that_name(self.folder), [])


class DemoTests(DemoCase):
    """Tests with Redis; :mod:`tests.external.long.test_demo` uses direct TCP."""

    def test_useless_recording(self) -> None:
        """A recording without rows of the demonstration is an error of the option."""
        path = Path(self.folder, "x.jsonl")
        path.write_text('{"t":1.0,"time_ms":5,"channel":"c","line":"REPLICATE"}\n')
        done = subprocess.run(
            [*COMMAND, "--recording", str(path)],
            capture_output=True,
            check=False,
            timeout=60,
        )
        self.assertEqual(done.returncode, 2)
        self.assertIn(f"{path}: the recording has no rows", done.stderr.decode())

    def test_redis_with_faults(self) -> None:
        """
        A reader is killed and Redis is restarted; each row is delivered exactly once.
        """
        output = self.demo()
        self.assertIn("Killing reader1", output)
        self.assertIn("Restarting Redis", output)
        self.assertIn("No row is missing, duplicated or out of order", output)

    def test_interrupted(self) -> None:
        """SIGINT during the run stops all processes and leaves no file behind."""
        with subprocess.Popen(
            [*COMMAND, "--rows", "4000"],
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # Shells make background commands ignore SIGINT.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("Writing"):
                    process.send_signal(signal.SIGINT)
            status = process.wait(60)
        self.assertEqual(status, 130)
        self.assert_nothing_left()
