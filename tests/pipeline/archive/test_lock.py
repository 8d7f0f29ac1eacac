"""Tests for synapse_replication.pipeline.archive.lock."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive.layout import open_archive
from synapse_replication.pipeline.archive.lock import lock_archive, lock_archive_in_java
from tests.pipeline.shared_session import shared_session

#: Holds a lock as Java does, until it is killed.
_HOLD_AS_JAVA = """
    import fcntl, sys, time
    file = open(sys.argv[1], "a")
    fcntl.lockf(file, fcntl.LOCK_EX)
    print("locked", flush=True)
    time.sleep(60)
"""

#: Holds the lock of Python, until it is killed.
_HOLD = """
    import sys, time
    from synapse_replication.pipeline.archive.layout import open_archive
    from synapse_replication.pipeline.archive.lock import lock_archive
    with lock_archive(open_archive(sys.argv[1])):
        print("locked", flush=True)
        time.sleep(60)
"""


class LockTests(SynchronousTestCase):
    """Tests for one driver at a time."""

    def setUp(self) -> None:
        self.layout = open_archive(self.mktemp(), create=True)
        self.slept: list[float] = []

    def hold(self, program: str, path: object) -> subprocess.Popen[bytes]:
        """Start another process that holds a lock."""
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program), str(path)],
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        self.assertEqual(process.stdout.readline(), b"locked\n")
        return process

    def test_second_driver(self) -> None:
        """A second driver is refused, and told which process is at work; a kill -9 of
        that one frees the lock."""
        process = self.hold(_HOLD, self.layout.folder)
        with self.assertRaises(PipelineError) as caught, lock_archive(self.layout):
            pass
        self.assertIn(f"process {process.pid} on", str(caught.exception))
        self.assertIn("one driver at a time", str(caught.exception))
        process.send_signal(signal.SIGKILL)
        process.wait()
        with lock_archive(self.layout):
            pass

    def test_holder_not_written_yet(self) -> None:
        """Who did not say yet who it is is another process."""
        with lock_archive(self.layout):
            os.truncate(self.layout.lock, 0)
            with self.assertRaises(PipelineError) as caught, lock_archive(self.layout):
                pass
        self.assertIn("by another process", str(caught.exception))

    def test_java_outlives_python(self) -> None:
        """The Java of a driver that was killed is waited for."""
        process = self.hold(_HOLD_AS_JAVA, self.layout.jvm_lock)

        def sleep(seconds: float) -> None:
            self.slept.append(seconds)
            process.kill()
            process.wait()

        with lock_archive_in_java(self.layout, shared_session(), sleep=sleep):
            pass
        self.assertEqual(len(self.slept), 1)

    def test_java_does_not_end(self) -> None:
        """A Java that stays is an error, in the end."""
        self.hold(_HOLD_AS_JAVA, self.layout.jvm_lock)
        with (
            self.assertRaises(PipelineError) as caught,
            lock_archive_in_java(
                self.layout,
                shared_session(),
                patience=3,
                now=lambda: float(len(self.slept)),
                sleep=self.slept.append,
            ),
        ):
            pass
        self.assertEqual(len(self.slept), 3)
        self.assertIn(str(self.layout.jvm_lock), str(caught.exception))

    def test_java_holds_it_against_others(self) -> None:
        """What Java locks, no other process can, nor another session of the same; then
        it is free again."""
        session = shared_session()
        with (
            lock_archive_in_java(self.layout, session),
            self.assertRaises(PipelineError),
            lock_archive_in_java(self.layout, session, patience=0),
        ):
            pass
        self.hold(_HOLD_AS_JAVA, self.layout.jvm_lock)

    def test_other_failure_of_java(self) -> None:
        """What Java says of something else is not taken for a lock."""
        self.layout.jvm_lock.mkdir()
        with (
            self.assertRaises(Exception) as caught,
            lock_archive_in_java(self.layout, shared_session()),
        ):
            pass
        self.assertIn("Is a directory", str(caught.exception))
