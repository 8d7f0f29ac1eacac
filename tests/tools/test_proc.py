"""Tests for :mod:`scripts.tools.proc`."""

from __future__ import annotations

import os
import time
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.proc import (
    processor_seconds,
    proportional_mebibytes,
    resident_mebibytes,
)


class ProcessorSecondsTests(SynchronousTestCase):
    def test_fields(self) -> None:
        """User and system time are added, whatever the name of the process contains."""
        ticks = os.sysconf("SC_CLK_TCK")
        stat = "7 (a (b) c) S 1 7 7 0 -1 4194560 100 0 0 0 250 150 9 9 20 0 1 0 5 6 7"
        self.assertEqual(processor_seconds(stat), 400 / ticks)

    def test_own_process(self) -> None:
        """The result agrees with the process's own measurement within 0.5 s."""
        found = processor_seconds(Path("/proc/self/stat").read_text("utf-8"))
        self.assertLess(abs(found - time.process_time()), 0.5)


class MemoryTests(SynchronousTestCase):
    def test_same_unit(self) -> None:
        """Both measures are of one order: only shared memory makes them differ."""
        pid = os.getpid()
        ratio = resident_mebibytes(pid) / proportional_mebibytes(pid)
        self.assertGreater(ratio, 0.5)
        self.assertLess(ratio, 20)
