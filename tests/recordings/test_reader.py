"""Tests for :mod:`synapse_replication.recordings.reader`."""

from __future__ import annotations

import gzip
import json
import lzma
import random
import zlib
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.recordings.reader import (
    Record,
    RecordingError,
    read_recording,
    shipped_recording,
)
from tests.support.recordings import FULL_RECORDING

GOOD = b'{"t": 1.5, "channel": "a.b", "line": "PING \\u2615"}\n'
PING = Record(1, 1.5, "a.b", "PING \u2615".encode())


class ReadRecordingTests(SynchronousTestCase):
    """Tests for reading a file of recorded traffic."""

    def read(self, content: bytes) -> list[Record | RecordingError]:
        path = Path(self.mktemp())
        path.write_bytes(content)
        return list(read_recording(path))

    def test_plain_and_compressed(self) -> None:
        """A compressed recording is read like an uncompressed one."""
        self.assertEqual(self.read(GOOD), [PING])
        self.assertEqual(self.read(gzip.compress(GOOD)), [PING])
        self.assertEqual(self.read(lzma.compress(GOOD)), [PING])

    def test_xz_streams(self) -> None:
        """Several xz streams, padded and of any preset, are read as one file."""
        parts = [lzma.compress(GOOD, preset=preset) for preset in (0, 6, 9)]
        records = self.read(b"\0\0\0\0".join(parts) + b"\0" * 8)
        self.assertEqual([record.number for record in records], [1, 2, 3])
        truncated = self.read(parts[0] + parts[1][:-5])
        self.assertEqual(truncated[0], PING)
        self.assertIn("damaged: its end is missing", str(truncated[-1]))

    def test_xz_dictionary(self) -> None:
        """A file that declares a huge dictionary is refused before it is allocated."""
        filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1 << 20}]
        content = bytearray(lzma.compress(GOOD, check=lzma.CHECK_NONE, filters=filters))
        header = 12
        end = header + 4 * (content[header] + 1) - 4
        # The size of the dictionary of LZMA2 is one byte; 38 stands for 2 GiB.
        content[content.index(b"\x21\x01", header) + 2] = 38
        checksum = zlib.crc32(bytes(content[header:end]))
        content[end : end + 4] = checksum.to_bytes(4, "little")
        (error,) = self.read(bytes(content))
        self.assertIn("takes more than 72 MiB of memory", str(error))

    def test_lines_are_numbered_from_one(self) -> None:
        """Each record has its line number in the file; blank lines are skipped."""
        records = self.read(GOOD + b"\n" + GOOD.rstrip())

        self.assertEqual(
            [each.number for each in records if isinstance(each, Record)], [1, 3]
        )

    def test_only_the_line_is_needed(self) -> None:
        """A recording without times and channels can be read."""
        self.assertEqual(
            self.read(b'{"line": "PING 1", "more": []}'),
            [Record(1, 0.0, "", b"PING 1")],
        )

    def test_invalid_lines_are_reported_in_place(self) -> None:
        """An invalid line is reported with its number, and reading continues."""
        for wrong in (
            b"not json",
            b"[]",
            b'{"t": 1}',
            b'{"line": 1}',
            b'{"line": "\xff"}',
            b'{"line": "torn',
            b"[" * 100_000,
            b"x" * 300_000,
        ):
            first, second, third = self.read(GOOD + wrong + b"\n" + GOOD)
            self.assertEqual(first, PING)
            assert isinstance(second, RecordingError)
            self.assertEqual(second.number, 2)
            self.assertLess(len(str(second)), 300)
            assert isinstance(third, Record)
            self.assertEqual(third.line, PING.line)

    def test_truncated_file(self) -> None:
        """
        The intact part of a truncated compressed file is read, and the damage is
        reported.
        """
        whole = gzip.compress(b"".join(_numbered(n) for n in range(5000)))

        *records, last = self.read(whole[: len(whole) // 2])

        self.assertGreater(len(records), 100)
        assert isinstance(last, RecordingError)
        self.assertIn("damaged", str(last))

    def test_truncated_within_a_long_line(self) -> None:
        """A file that is truncated within a line that is too long is damaged, too."""
        noise = random.Random(1).randbytes(4 << 20).hex().encode()
        whole = gzip.compress(GOOD + noise + b"\n" + GOOD, 1)

        first, *errors = self.read(whole[: len(whole) // 2])

        self.assertEqual(first, PING)
        too_long, damaged = map(str, errors)
        self.assertIn("line 2: longer than", too_long)
        self.assertIn("line 2: the compressed file is damaged", damaged)

    def test_no_such_file(self) -> None:
        """A missing file is an OSError."""
        self.assertRaises(OSError, list, read_recording(Path(self.mktemp())))


def _numbered(number: int) -> bytes:
    return json.dumps(
        {"t": number, "channel": "", "line": f"PING {number}"}
    ).encode() + (b"\n")


class ShippedRecordingTests(SynchronousTestCase):
    """Tests for the recording that comes with the package."""

    def test_readable(self) -> None:
        """The shipped recording is readable and is the beginning of the full one."""
        records = list(read_recording(shipped_recording()))

        self.assertEqual(len(records), 9_000)
        self.assertEqual(records, list(read_recording(FULL_RECORDING))[:9_000])
        self.assertTrue(all(isinstance(each, Record) for each in records))
