"""Tests for synapse_replication.durable."""

from __future__ import annotations

import os
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.durable import write_durably
from tests.support.crashes import kill_at_each_call


class WriteDurablyTests(SynchronousTestCase):
    """Tests for write_durably."""

    def test_order(self) -> None:
        """
        The content is synced before the file is renamed, and the folder afterwards.
        """
        folder = Path(self.mktemp())
        folder.mkdir()
        path = folder / "a"
        path.write_bytes(b"old")
        synced: list[tuple[bool, bytes]] = []
        fsync = os.fsync

        def note(descriptor: int) -> None:
            is_folder = Path(f"/proc/self/fd/{descriptor}").resolve().is_dir()
            synced.append((is_folder, path.read_bytes()))
            fsync(descriptor)

        self.patch(os, "fsync", note)
        write_durably(path, b"new")
        self.assertEqual(synced, [(False, b"old"), (True, b"new")])
        self.assertEqual(os.listdir(folder), ["a"])

    def test_killed_at_each_call(self) -> None:
        """Whichever system call a process is killed at, the file is old or new."""
        folder = Path(self.mktemp())
        folder.mkdir()
        path = folder / "x"
        path.write_bytes(b"old")
        found = []
        for _ in kill_at_each_call(lambda: write_durably(path, b"new")):
            found.append(path.read_bytes())
            path.write_bytes(b"old")
        change = found.index(b"new")
        self.assertEqual(found, [b"old"] * change + [b"new"] * (len(found) - change))
        self.assertGreater(change, 4)

    def test_two_processes(self) -> None:
        """
        If another process replaces the file at the same time, the file is one of both.
        """
        folder = Path(self.mktemp())
        folder.mkdir()
        path = folder / "x"
        number = 0
        for number in kill_at_each_call(lambda: write_durably(path, b"first")):
            write_durably(path, b"2")
            self.assertEqual(path.read_bytes(), b"2", number)
