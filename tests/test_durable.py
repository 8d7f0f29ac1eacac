"""Tests for synapse_replication.durable."""

from __future__ import annotations

import os
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.durable import write_durably


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
