"""Tests for :mod:`synapse_replication.pipeline.wire_lines`."""

from __future__ import annotations

import datetime
import gzip
import io
import json
import lzma
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.cli.follow import parse_line, print_as_json
from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.schemas import WIRE_SCHEMA
from synapse_replication.pipeline.wire_lines import find_recordings, scan_recordings
from tests.pipeline.scans import read_here
from tests.pipeline.shared_session import shared_session
from tests.support.recordings import FULL_RECORDING

SECRET = "syt_c2VjcmV0_access_token"
USER_IP = f'USER_IP @a:b ["{SECRET}","10.1.2.3","Firefox",null,1700000000000]'


def entry(line: str, **more: Any) -> bytes:
    record = {"t": 1.5, "channel": "hs.test", "line": line, **more}
    return json.dumps(record).encode() + b"\n"


class ReadRecordingsTests(SynchronousTestCase):
    """Tests for reading recordings into a data frame."""

    def setUp(self) -> None:
        self.folder = Path(self.mktemp())
        self.folder.mkdir()

    def write(self, name: str, *entries: bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True, parents=True)
        content = b"".join(entries)
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return path

    def read(self, *paths: Path) -> list[Any]:
        batches = read_here(scan_recordings(paths))
        table = pa.Table.from_batches(batches, WIRE_SCHEMA)
        rows = [SimpleNamespace(**row) for row in table.to_pylist()]
        return sorted(rows, key=lambda row: (row.recording, row.line_number))

    def test_the_full_recording(self) -> None:
        """All commands of the real recording are read, in the order of the file."""
        rows = self.read(FULL_RECORDING)

        with lzma.open(FULL_RECORDING) as file:
            lines = [json.loads(text)["line"] for text in file]
        self.assertEqual([row.line_number for row in rows], [*range(1, 21_169)])
        masked = [line if line[:7] != "USER_IP" else "USER_IP" for line in lines]
        self.assertEqual([row.line for row in rows], masked)
        commands = Counter(row.command for row in rows)
        self.assertEqual(
            [commands[name] for name in ("RDATA", "POSITION", "USER_IP", None)],
            [10_159, 3_360, 207, 0],
        )
        self.assertEqual({row.recording for row in rows}, {"startup_drive.jsonl.xz"})

    def test_fields(self) -> None:
        """
        RDATA and POSITION are split into columns; other commands have only a name.
        """
        row = '["ev", {"a b": 1}]'
        path = self.write(
            "a.jsonl",
            entry(f"RDATA events w1 5 {row}", time_ms=1_700_000_000_123),
            entry("RDATA events w1 batch []"),
            entry("POSITION events w1 4 6"),
            entry("REMOTE_SERVER_UP far.test"),
        )

        rows = self.read(path)

        when = datetime.datetime(
            2023, 11, 14, 22, 13, 20, 123_000, datetime.timezone.utc
        )
        self.assertEqual(
            [tuple(vars(row).values())[2:11] for row in rows],
            [
                (1.5, when, "hs.test", "RDATA", "events", "w1", 5, None, row),
                (1.5, None, "hs.test", "RDATA", "events", "w1", None, None, "[]"),
                (1.5, None, "hs.test", "POSITION", "events", "w1", 6, 4, None),
                (1.5, None, "hs.test", "REMOTE_SERVER_UP", *(None,) * 5),
            ],
        )

    def test_appended_later(self) -> None:
        """Blank lines count, and lines that were appended after listing are ignored."""
        path = self.write("a.jsonl", entry("PING 1"), b"\n", entry("PING 3")[:-9])
        scan = scan_recordings([path])
        with path.open("ab") as file:
            file.write(entry("PING 3")[-9:] + entry("PING 4"))

        (batch,) = read_here(scan)

        found = [(row["line_number"], row["line"]) for row in batch.to_pylist()]
        self.assertEqual(found, [(1, "PING 1"), (3, "PING 3")])

    def test_nothing_of_user_ip_is_read(self) -> None:
        """Only the name of USER_IP is read, whatever form its line has."""
        printed = io.StringIO()
        print_as_json(printed, parse_line(1.0, "hs.test", USER_IP.encode()))
        path = self.write(
            "a.jsonl",
            entry(USER_IP),
            entry(USER_IP[:60], channel="hs.test/USER_IP"),
            entry(f" {USER_IP}"),
            entry(f"@a:b {SECRET} 10.1.2.3", channel="hs.test/USER_IP"),
            printed.getvalue().encode(),
            entry(USER_IP)[:70],
        )

        rows = self.read(path)

        self.assertEqual([row.line for row in rows], ["USER_IP"] * 5 + [""])
        self.assertNotIn(SECRET, str(rows))
        self.assertNotIn("10.1.2.3", str(rows))

    def test_invalid_line_is_a_row_in_place(self) -> None:
        """An incomplete or invalid line results in a row without a command."""
        path = self.write(
            "a.jsonl",
            entry("PING 1"),
            b"nonsense\n",
            b'{"t": 1, "line": "\xff"}\n',
            entry("PING 4").rstrip() + entry("PING 4"),
            entry("PING 5", time_ms=10**18),
            entry("PING 6"),
            entry("PING 7")[:-9],
        )

        rows = self.read(path)

        self.assertEqual(
            [(row.line_number, row.command, row.line) for row in rows],
            [
                (1, "PING", "PING 1"),
                *((number, None, "") for number in (2, 3, 4, 5)),
                (6, "PING", "PING 6"),
                (7, None, ""),
            ],
        )

    def test_a_command_that_does_not_parse(self) -> None:
        """
        A command that cannot be parsed results in a row with the line, but without a
        command.
        """
        path = self.write(
            "a.jsonl", entry("FROM_LATER 1"), entry("POSITION events w1 x"), entry("")
        )

        self.assertEqual(
            [(row.command, row.line, row.stream) for row in self.read(path)],
            [
                (None, "FROM_LATER 1", None),
                (None, "POSITION events w1 x", None),
                (None, "", None),
            ],
        )

    def test_a_compressed_file_that_was_cut_off(self) -> None:
        """
        A truncated file is read as far as possible, and the last row marks the damage.
        """
        whole = gzip.compress(b"".join(entry(f"PING {n}") for n in range(5000)))
        path = self.write("a.jsonl", whole[: len(whole) // 2])

        rows = self.read(path)

        self.assertGreater(len(rows), 100)
        self.assertEqual([row.line_number for row in rows], [*range(1, len(rows) + 1)])
        self.assertEqual(rows[-2].command, "PING")
        self.assertEqual([*vars(rows[-1]).values()][5:], [None] * 6 + [""])

    def test_folders(self) -> None:
        """
        All recordings below a folder are read; other files, and recordings that are
        still being written, are skipped.
        """
        self.write("b.jsonl", entry("PING b"))
        self.write("more/a.jsonl.gz", entry("PING a"))
        self.write("notes.txt", b"nonsense")
        self.write("c.jsonl.open", entry("PING c"))

        rows = self.read(self.folder)

        self.assertEqual(
            [(row.recording, row.line) for row in rows],
            [("a.jsonl.gz", "PING a"), ("b.jsonl", "PING b")],
        )

    def test_not_completed(self) -> None:
        """A file that a recorder has not completed is named, and can be passed."""
        folder = Path(self.mktemp())
        folder.mkdir()
        for name in ("a.jsonl", "b.jsonl.gz.partial"):
            (folder / name).touch()
        with self.assertLogs("synapse_replication.pipeline.wire_lines") as logged:
            scan_recordings([folder])
        self.assertIn("b.jsonl.gz.partial is not read", logged.output[0])
        # A job finds the files again, and names it once.
        with self.assertNoLogs("synapse_replication.pipeline.wire_lines"):
            found = find_recordings([folder])
        self.assertEqual([path.name for path in found], ["a.jsonl"])
        partial = folder / "b.jsonl.gz.partial"
        self.assertEqual(find_recordings([partial]), [partial.absolute()])

    def test_files_of_the_same_name(self) -> None:
        """
        Files with the same name get distinct names; a file that is passed twice is read
        once.
        """
        one = self.write("x/w1/a.jsonl", entry("PING 1"))
        two = self.write("x/w2/a.jsonl", entry("PING 2"))
        other = self.write("x/b.jsonl", entry("PING 3"))

        rows = self.read(one, two, other, self.folder, one)

        self.assertEqual(
            [row.recording for row in rows], ["b.jsonl", "w1/a.jsonl", "w2/a.jsonl"]
        )

    def test_nothing_to_read(self) -> None:
        """
        The error names a path that does not exist, or a folder without recordings.
        """
        for path in (self.folder, self.folder / "missing.jsonl"):
            error = self.assertRaises(PipelineError, scan_recordings, [path])
            self.assertIn(str(path.absolute()), str(error))

    def test_empty(self) -> None:
        """An empty file, or no file at all, has no lines."""
        self.assertEqual(self.read(self.write("a.jsonl")), [])
        self.assertEqual(self.read(), [])

    def test_frame(self) -> None:
        """A frame of Spark has the same lines."""
        path = self.write("a.jsonl", entry("PING 1"), entry("POSITION events w1 4 6"))
        frame = scan_recordings([path]).frame(shared_session())
        self.assertEqual(
            sorted(row.line for row in frame.collect()),
            [row.line for row in self.read(path)],
        )
        self.assertEqual(scan_recordings([]).frame(shared_session()).collect(), [])
