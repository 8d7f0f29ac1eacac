"""Tests for synapse_replication.recordings.writer."""

from __future__ import annotations

import gzip
import json
import mmap
import os
import zlib
from pathlib import Path
from typing import Any

import attrs
from twisted.logger import LogLevel, capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.recordings.reader import (
    Record,
    RecordingError,
    read_recording,
)
from synapse_replication.recordings.writer import RecordingFiles, RecordingWriteError
from tests.support.crashes import kill_at_each_call, with_file_size

#: 2026-11-21T20:00:00Z.
_WALL = 1_795_291_200.0


class RecordingFilesTests(SynchronousTestCase):
    """Tests for the rotation of recording files."""

    compressed = False

    def setUp(self) -> None:
        self.folder = Path(self.mktemp())
        self.time = 100.0

    def record(self, **settings: Any) -> RecordingFiles:
        values: dict[str, Any] = {
            "roll_bytes": 10_000,
            "roll_seconds": 60.0,
            "compressed": self.compressed,
            "now": lambda: self.time,
            "wall": lambda: _WALL + self.time - 100,
        }
        files = RecordingFiles(self.folder, **values | settings)
        self.addCleanup(files.close)
        return files

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("2*"))

    def lines(self, name: str) -> list[str]:
        content = (self.folder / name).read_bytes()
        if self.compressed:
            content = gzip.decompress(content)
        return [json.loads(line)["line"] for line in content.splitlines()]

    def suffix(self) -> str:
        return ".jsonl.gz" if self.compressed else ".jsonl"

    def test_line(self) -> None:
        """A line has both times, the channel, and the exact line received."""
        files = self.record()
        files.write("x.test", b'RDATA caches m batch ["f", ["x"],  1]')
        files.close()
        (name,) = self.names()
        self.assertTrue(name.startswith("20261121T200000.000Z-"), name)
        self.assertTrue(name.endswith(self.suffix()))
        self.assertEqual((self.folder / name).stat().st_mode & 0o777, 0o600)
        content = (self.folder / name).read_bytes()
        if self.compressed:
            content = gzip.decompress(content)
        entry = json.loads(content)
        self.assertRegex(entry.pop("crc"), "[0-9a-f]{8}")
        self.assertEqual(
            entry,
            {
                "t": 100.0,
                "time_ms": 1_795_291_200_000,
                "channel": "x.test",
                "line": 'RDATA caches m batch ["f", ["x"],  1]',
            },
        )

    def test_partial_until_closed(self) -> None:
        """A file has a name that readers ignore until it is closed."""
        files = self.record()
        files.write("x", b"PING 1")
        (name,) = self.names()
        self.assertTrue(name.endswith(f"{self.suffix()}.partial"), name)
        files.close()
        (name,) = self.names()
        self.assertEqual(self.lines(name), ["PING 1"])

    def test_rolls_by_size(self) -> None:
        """
        A file that has reached the maximum size is closed, and the next one is begun.
        """
        files = self.record(roll_bytes=190)
        for number in range(7):
            files.write("x", b"PING %d" % number)
        files.close()
        self.assertEqual(len(self.names()), 3)
        self.assertEqual(
            [line for name in self.names() for line in self.lines(name)],
            [f"PING {number}" for number in range(7)],
        )

    def test_rolls_by_time(self) -> None:
        """
        A file that has reached the maximum age is closed, even if nothing more is
        recorded.
        """
        files = self.record()
        files.tick()
        self.assertEqual(self.names(), [])
        files.write("x", b"PING 1")
        self.time += 59
        files.tick()
        self.assertTrue(self.names()[0].endswith(".partial"))
        self.time += 1
        files.tick()
        self.assertEqual(self.lines(self.names()[0]), ["PING 1"])
        files.roll()
        self.assertEqual(len(self.names()), 1)

    def test_synced_each_second(self) -> None:
        """Recorded lines are synced to disk once, by the next tick."""
        synced: list[int] = []
        self.patch(os, "fsync", synced.append)
        files = self.record()
        files.write("x", b"PING 1")
        self.assertEqual(synced, [])
        files.tick()
        files.tick()
        self.assertEqual(len(synced), 1)
        (name,) = self.names()
        content = (self.folder / name).read_bytes()
        if self.compressed:
            content = zlib.decompressobj(31).decompress(content)
        self.assertIn(b"PING 1", content)

    def test_no_personal_data(self) -> None:
        """USER_IP is not written, in any spelling or on any channel."""
        files = self.record()
        files.write("x", b'USER_IP @u:s ["syt_secret","1.2.3.4","agent","DEV",17]')
        files.write("x", b' USER_IP\t["syt_secret"]')
        files.write("x.test/USER_IP", b"1.2.3.4")
        files.write("x", b"PING 1")
        files.close()
        self.assertEqual(self.lines(self.names()[0]), ["PING 1"])

    def test_killed(self) -> None:
        """After a kill, complete lines are recovered and an incomplete one is not."""
        files = self.record()
        for number in range(3):
            files.write("x", b"PING %d" % number)
        files.tick()
        (name,) = self.names()
        content = (self.folder / name).read_bytes()
        files.close()
        for cut, expected in self.cuts(content):
            for path in self.folder.glob("2*"):
                path.unlink()
            (self.folder / name).write_bytes(content[:cut])
            self.record().close()
            lines = [line for each in self.names() for line in self.lines(each)]
            self.assertEqual(lines, [f"PING {number}" for number in range(expected)])
            self.assertEqual([n for n in self.names() if "partial" in n], [])

    def cuts(self, content: bytes) -> list[tuple[int, int]]:
        line = len(content) // 3
        return [(len(content), 3), (len(content) - 1, 2), (line, 1), (5, 0), (0, 0)]

    def test_killed_during_repair(self) -> None:
        """A recovery that was interrupted is completed at the next start."""
        files = self.record()
        files.write("x", b"PING 1")
        files.close()
        (name,) = self.names()
        content = (self.folder / name).read_bytes()
        (self.folder / f"{name}.partial").write_bytes(content[:-3])
        self.record().close()
        self.assertEqual(self.names(), [name])
        self.assertEqual(self.lines(name), ["PING 1"])

    def continued(self) -> list[str]:
        """Start and stop a recorder as after a crash; return the recorded lines."""
        self.record().close()
        self.assertEqual([n for n in self.names() if not n.endswith(self.suffix())], [])
        return [line for name in self.names() for line in self.lines(name)]

    def test_killed_at_each_call(self) -> None:
        """
        Whichever system call a recorder is killed at, each line that was synced is
        recovered, once and in order, as are those that an earlier kill has left.
        """
        earlier = self.record()
        earlier.write("x", b"PING 0")
        earlier.tick()
        (name,) = self.names()
        left = (self.folder / name).read_bytes()
        earlier.close()
        self.time += 1
        with mmap.mmap(-1, 1) as synced:

            def work() -> None:
                files = self.record()
                for number in range(1, 4):
                    files.write("x", b"PING %d" % number)
                    files.tick()
                    synced[0] = number
                files.close()

            for number in kill_at_each_call(work):
                found = self.continued()
                self.assertEqual(found, [f"PING {i}" for i in range(len(found))])
                self.assertGreater(len(found), synced[0], number)
                for path in self.folder.glob("2*"):
                    path.unlink()
                (self.folder / name).write_bytes(left)
        self.assertGreater(number, 20)

    def test_full_at_each_byte(self) -> None:
        """
        Wherever the disk becomes full, the recorder fails, and each line that was
        synced is there after the next start.
        """
        with mmap.mmap(-1, 2) as counts:

            def work() -> None:
                counts[0] = counts[1] = 0
                files = self.record()
                try:
                    for number in range(3):
                        files.write("x", b"PING %d" % number)
                        files.tick()
                        counts[0] = number + 1
                    files.close()
                except RecordingWriteError as error:
                    counts[1] = 1
                    self.assertIn("correct this and restart", str(error))

            limit = 0
            while not limit or counts[1]:
                with_file_size(limit, work)
                found = self.continued()
                self.assertEqual(found, [f"PING {i}" for i in range(len(found))])
                self.assertGreaterEqual(len(found), counts[0], limit)
                for path in self.folder.glob("2*"):
                    path.unlink()
                limit += 7
            self.assertEqual(counts[0], 3)
        self.assertGreater(limit, 100)

    def record_two_lines(self) -> Path:
        """Record two lines, and return the path of the file."""
        files = self.record()
        for number in range(2):
            files.write("x", b"PING %d" % number)
        files.close()
        return self.folder / self.names()[0]

    def test_each_bit(self) -> None:
        """Whichever bit of a file flips, no line is read wrong, or silently missing."""
        path = self.record_two_lines()
        whole = path.read_bytes()
        right = [self.without_number(record) for record in read_recording(path)]
        for bit in range(8 * len(whole)):
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            found = list(read_recording(path))
            good = [self.without_number(each) for each in found]
            if good != right:
                # A bit of a compressed file changes many bytes; its end tells.
                if not self.compressed:
                    self.assertTrue({*good} <= {*right, None}, (bit, found))
                self.assertTrue(any(each is None for each in good), (bit, found))

    def without_number(self, record: Record | RecordingError) -> Record | None:
        return attrs.evolve(record, number=0) if isinstance(record, Record) else None

    def test_truncated_anywhere(self) -> None:
        """
        A file that was cut off at any byte has the first of its lines, and an error
        unless it was cut off at the end of a line.
        """
        path = self.record_two_lines()
        whole = path.read_bytes()
        right = list(read_recording(path))
        for end in range(len(whole)):
            path.write_bytes(whole[:end])
            good = list(read_recording(path))
            if end and (self.compressed or isinstance(good[-1], RecordingError)):
                self.assertIsInstance(good.pop(), RecordingError)
            elif end:
                # Only the line's end is missing, or nothing.
                self.assertIn(b'"}', whole[end - 3 : end])
            self.assertEqual(good, right[: len(good)])

    def test_two_recorders(self) -> None:
        """
        A second recorder in the same folder fails with an error that states the reason.
        """
        first = self.record()
        error = self.assertRaises(RecordingWriteError, self.record)
        self.assertIn("another process records into", str(error))
        first.close()
        self.record()

    def test_full_disk(self) -> None:
        """A full disk is an error with the folder and a hint."""
        files = self.record()
        files.write("x", b"PING 1")
        self.assertIsNotNone(files._current)
        full = os.open("/dev/full", os.O_WRONLY)
        current = files._current
        assert current is not None
        os.dup2(full, current.raw.fileno())
        os.close(full)
        error = self.assertRaises(RecordingWriteError, files.tick)
        self.assertIn("No space left on device; correct this and restart", str(error))
        self.assertIn(str(self.folder), str(error))
        self.assertRaises(RecordingWriteError, files.close)

    def test_folder_cannot_be_made(self) -> None:
        """The error for a folder that cannot be created names it."""
        self.folder.write_text("")
        error = self.assertRaises(RecordingWriteError, self.record)
        self.assertIn(str(self.folder), str(error))


class CompressedFilesTests(RecordingFilesTests):
    """Runs the tests of :class:`RecordingFilesTests` with gzip."""

    compressed = True

    def cuts(self, content: bytes) -> list[tuple[int, int]]:
        # Flushed data can be read although the end of the file is missing.
        return [(len(content), 3), (20, 0), (5, 0), (0, 0)]

    def test_first_page_lost(self) -> None:
        """
        A file whose beginning is zeros after a power failure is kept, and named in the
        log; other starts leave it as it is.
        """
        files = self.record()
        files.write("x", b"PING 1")
        (name,) = self.names()
        files.close()
        for path in self.folder.glob("2*"):
            path.unlink()
        content = bytes(4096) + b"\n"
        (self.folder / name).write_bytes(content)
        with capturedLogs() as events:
            self.record().close()
            self.record().close()
        (damaged,) = self.names()
        self.assertEqual(damaged, name.replace(".partial", ".damaged"))
        self.assertEqual((self.folder / damaged).read_bytes(), content)
        (event,) = events
        self.assertEqual(event["log_level"], LogLevel.error)
        self.assertIn(damaged, formatEvent(event))

    def test_damage_in_the_middle(self) -> None:
        """The lines before the damage are recovered, and the file is kept."""
        files = self.record(roll_bytes=1_000_000)
        for number in range(500):
            files.write("x", b"PING %d" % number)
        files.tick()
        (partial,) = self.names()
        content = bytearray((self.folder / partial).read_bytes())
        files.close()
        for path in self.folder.glob("2*"):
            path.unlink()
        middle = len(content) // 2
        content[middle : middle + 64] = b"\xff" * 64
        (self.folder / partial).write_bytes(content)
        self.record().close()
        recovered, damaged = self.names()
        self.assertEqual(damaged, partial.replace(".partial", ".damaged"))
        self.assertEqual((self.folder / damaged).read_bytes(), content)
        lines = [
            each.line
            for each in read_recording(self.folder / recovered)
            if isinstance(each, Record)
        ]
        # The block with the damage may have lines that are wrong.
        self.assertEqual(lines[:200], [b"PING %d" % number for number in range(200)])
