"""Tests for :mod:`synapse_replication.instrumentation.log_file`."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.instrumentation import log_file
from synapse_replication.instrumentation.log_file import LogFile


class LogFileTests(SynchronousTestCase):
    """Tests for :class:`LogFile`."""

    def setUp(self) -> None:
        self.patch(log_file, "_PATIENCE", 0.0)
        reading, writing = os.pipe()
        self.reader = os.fdopen(reading, "rb", buffering=0)
        stream = os.fdopen(writing, "w")
        self.addCleanup(self.reader.close)
        self.addCleanup(stream.close)
        self.log = LogFile(stream)

    def test_pipe_that_nobody_reads(self) -> None:
        """Lines are dropped while a pipe is full, and counted afterwards."""
        for number in range(1000):
            self.log.write(f"{number} {'x' * 1000}\n")
        text = self.reader.read(1 << 20).decode()
        self.log.write("more\n")
        written = text.count("\n") + (not text.endswith("\n"))
        self.assertLess(written, 100)
        lost = 1000 - text.count("\n")
        self.assertEqual(
            self.reader.read(1 << 20).decode().removeprefix("\n"),
            f"{lost} log lines could not be written: nobody reads the log\nmore\n",
        )
        self.log.write("last\n")
        self.assertEqual(self.reader.read(100), b"last\n")

    def test_full_disk(self) -> None:
        """A full disk stops nothing; the lost lines are counted once it has room."""
        path = Path(self.mktemp())
        with path.open("w") as stream:
            log = LogFile(stream)
            written, is_full = os.write, False

            def write(descriptor: int, data: bytes) -> int:
                if is_full:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return written(descriptor, data)

            self.patch(os, "write", write)
            log.write("one\n")
            is_full = True
            log.write("two\nthree\n")
            log.write("four\n")
            is_full = False
            log.write("five\n")
        self.assertEqual(
            path.read_text(),
            "one\n3 log lines could not be written: No space left on device\nfive\n",
        )
