"""Tests for synapse_replication.app.journal."""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import os
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from twisted.logger import formatEvent, globalLogPublisher
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.app.journal import JournalSink, make_journal
from synapse_replication.errors import StorageError, StreamConfigurationError
from tests.support.crashes import kill_at_each_call, with_file_size


class FakeHost:
    """The part of a host that a journal uses."""

    def row_to_json(self, stream_name: str, row: Any) -> Any:
        return [stream_name, row]


def write_more(journal: JournalSink, done: mmap.mmap) -> None:
    """Write three more lines, and count them in ``done``."""
    journal.on_rdata("events", "w1", 6, ["b"])
    done[0] += 1
    journal.on_epoch("typing", "w", "a")
    done[0] += 1
    journal.on_rdata("typing", "w", 9, ["c"])
    done[0] += 1
    journal.close()


#: The positions after each number of lines, with the lines of :func:`write_more`.
AT: list[dict[tuple[str, str], int]] = [
    {},
    {("events", "w1"): 5},
    {("events", "w1"): 6},
    {("events", "w1"): 6, ("typing", "w"): 0},
    {("events", "w1"): 6, ("typing", "w"): 9},
]


class JournalTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.path = Path(self.mktemp())
        self.journal: JournalSink | None = None

    def open(self) -> JournalSink:
        """Open the journal, after it was closed if it was open."""
        if self.journal is not None:
            self.journal.close()
        self.journal = JournalSink(self.path, FakeHost().row_to_json)
        self.addCleanup(self.journal.close)
        return self.journal

    def entries(self) -> list[dict[str, Any]]:
        """Return the lines, without their checksums."""
        entries = [json.loads(line) for line in self.path.read_text().splitlines()]
        for entry in entries:
            self.assertRegex(entry.pop("crc"), "[0-9a-f]{8}")
        return entries

    def test_one_line_for_each_token(self) -> None:
        """The rows of a token are written on one line, in order."""
        journal = self.open()
        journal.on_rdata("events", "w1", 5, ["a", "b"])
        journal.on_rdata("events", "w2", 4, ["c"])
        self.assertEqual(
            self.entries(),
            [
                {
                    "stream": "events",
                    "writer": "w1",
                    "token": 5,
                    "rows": [["events", "a"], ["events", "b"]],
                },
                {
                    "stream": "events",
                    "writer": "w2",
                    "token": 4,
                    "rows": [["events", "c"]],
                },
            ],
        )

    def test_mode(self) -> None:
        """Only the owner can read a new journal."""
        self.open()
        self.assertEqual(self.path.stat().st_mode & 0o777, 0o600)

    def test_resumes(self) -> None:
        """A new journal on the same file resumes from its positions and appends."""
        journal = self.open()
        journal.on_rdata("events", "w1", 5, ["a"])
        journal.on_rdata("events", "w1", 7, ["b"])
        journal.on_position("typing", "w2", 3)
        again = self.open()
        self.assertEqual(
            again.saved_positions(), {("events", "w1"): 7, ("typing", "w2"): 3}
        )
        again.on_rdata("events", "w1", 8, ["c"])
        self.assertEqual([entry["token"] for entry in self.entries()], [5, 7, 3, 8])

    def test_resumes_after_reset(self) -> None:
        """After a reset, the lower position of the stream is resumed from."""
        journal = self.open()
        journal.on_rdata("typing", "w", 9, ["a"])
        journal.on_position("typing", "w", 0)
        self.assertEqual(self.open().saved_positions(), {("typing", "w"): 0})

    def test_epochs(self) -> None:
        """The epoch is saved with the token, which a new epoch resets to 0."""
        journal = self.open()
        self.assertEqual(journal.saved_epochs(), {})
        journal.on_position("typing", "w", 0)
        journal.on_epoch("typing", "w", "a")
        journal.on_rdata("typing", "w", 9, ["x"])
        again = self.open()
        self.assertEqual(again.saved_epochs(), {("typing", "w"): "a"})
        self.assertEqual(again.saved_positions(), {("typing", "w"): 9})
        # A new epoch resets the token even if no position was set back before.
        again.on_epoch("typing", "w", "b")
        for opened in (again, self.open()):
            self.assertEqual(opened.saved_epochs(), {("typing", "w"): "b"})
            self.assertEqual(opened.saved_positions(), {("typing", "w"): 0})
        line = {"stream": "typing", "writer": "w", "token": 0, "rows": []}
        self.assertEqual(self.entries()[1], {**line, "epoch": "a"})

    def test_journal_without_epochs(self) -> None:
        """A journal of an earlier version has tokens but no epochs."""
        self.path.write_text('{"stream":"s","writer":"w","token":7,"rows":[]}\n')
        journal = self.open()
        self.assertEqual(journal.saved_positions(), {("s", "w"): 7})
        self.assertEqual(journal.saved_epochs(), {})

    def test_unchanged_position(self) -> None:
        """An unchanged position is not written again."""
        journal = self.open()
        journal.on_rdata("events", "w1", 5, ["a"])
        journal.on_position("events", "w1", 5)
        journal.on_position("events", "w1", 6)
        journal.on_position("events", "w1", 6)
        self.assertEqual([entry["token"] for entry in self.entries()], [5, 6])

    def test_torn_epoch(self) -> None:
        """
        If the line of an epoch is torn anywhere, the previous token and epoch are used.
        """
        journal = self.open()
        journal.on_epoch("typing", "w", "a")
        journal.on_rdata("typing", "w", 9, ["x"])
        first = self.path.stat().st_size
        journal.on_epoch("typing", "w", "b")
        whole = self.path.read_bytes()
        for end in range(first, len(whole)):
            self.path.write_bytes(whole[:end])
            again = self.open()
            self.assertEqual(again.saved_positions(), {("typing", "w"): 9})
            self.assertEqual(again.saved_epochs(), {("typing", "w"): "a"})

    def test_torn_last_line_is_cut_off(self) -> None:
        """
        If the last line is torn anywhere, it is truncated, and the file stays usable.
        """
        journal = self.open()
        journal.on_rdata("events", "w1", 5, ["a"])
        first = self.path.stat().st_size
        journal.on_rdata("events", "w1", 6, ["b"])
        whole = self.path.read_bytes()
        for end in range(first, len(whole)):
            self.path.write_bytes(whole[:end])
            again = self.open()
            self.assertEqual(again.saved_positions(), {("events", "w1"): 5})
            again.on_rdata("events", "w1", 6, ["b"])
            self.assertEqual(self.path.read_bytes(), whole)

    def test_damaged_lines(self) -> None:
        """
        Damaged lines are skipped and logged at each start until they are removed, and
        the lines around them count.
        """
        events: list[Any] = []
        observer: Any = events.append
        globalLogPublisher.addObserver(observer)
        self.addCleanup(globalLogPublisher.removeObserver, observer)
        good = '{"stream":"s","writer":"w","token":%d,"rows":[]}\n'
        text = good % 1 + "x\n[]\n" + good % 2 + '{"stream":"s"}\n'
        self.path.write_text(text)
        for _ in range(2):
            journal = self.open()
            self.assertEqual(journal.saved_positions(), {("s", "w"): 2})
            journal.on_position("s", "w", 2)
            self.assertIn("2, 3, 5; stop the process and remove", journal.damage)
        lines = [formatEvent(event) for event in events if "damage" in event]
        self.assertEqual(len(lines), 2)
        self.assertIn(f"{self.path} has 3 damaged line(s), which are", lines[0])
        self.assertIn("skipped: 2, 3, 5", lines[0])
        self.assertEqual(self.path.read_text(), text)

    def test_each_bit(self) -> None:
        """Whichever bit of a journal flips, no other position is resumed from."""
        journal = self.open()
        journal.on_rdata("events", "w1", 5, ["a"])
        journal.on_position("typing", "w2", 2**62)
        journal.on_rdata("events", "w1", 2**63 - 1, ["b", "\u2615"])
        whole = self.path.read_bytes()
        ends = [0]
        for line in whole.splitlines(keepends=True):
            ends.append(ends[-1] + len(line))
        known = [
            {},
            {("events", "w1"): 5},
            {("events", "w1"): 5, ("typing", "w2"): 2**62},
            {("events", "w1"): 2**63 - 1, ("typing", "w2"): 2**62},
        ]
        counts = Counter[str]()
        for bit in range(8 * len(whole)):
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            self.path.write_bytes(damaged)
            try:
                again = self.open()
            except StorageError as error:
                self.assertIn(f"{self.path}:1 is not a line", str(error))
                counts["refused"] += 1
                continue
            found = again.saved_positions()
            if again.damage:
                counts["red"] += 1
                left_out = {("typing", "w2"): 2**62, ("events", "w1"): 5}
                self.assertIn(found, [*known, left_out, {("events", "w1"): 2**63 - 1}])
            else:
                # A name of the checksum's key, or the end of the last line.
                counts["right"] += 1
                self.assertIn(found, known[2:])
        self.assertEqual(counts.total(), 8 * len(whole))
        self.assertLess(counts["right"], counts["red"] / 5, counts)

    def test_truncated_anywhere(self) -> None:
        """A journal that was cut off at any byte resumes from its complete lines."""
        journal = self.open()
        for token in (5, 7, 9):
            journal.on_rdata("events", "w1", token, ["a"])
        whole = self.path.read_bytes()
        for end in range(len(whole)):
            self.path.write_bytes(whole[:end])
            count = whole[:end].count(b"\n")
            expected = {("events", "w1"): 3 + 2 * count} if count else {}
            self.assertEqual(self.open().saved_positions(), expected)

    def test_killed_at_each_call(self) -> None:
        """
        Whichever system call a process is killed at, each line whose write has returned
        is there, and the next process continues after the last complete one.
        """
        first = self.open()
        first.on_rdata("events", "w1", 5, ["a"])
        first.close()
        before = self.path.read_bytes()
        with mmap.mmap(-1, 1) as done:

            def work() -> None:
                done[0] = 0
                write_more(JournalSink(self.path, FakeHost().row_to_json), done)

            for number in kill_at_each_call(work):
                left = self.path.read_bytes()
                self.assertTrue(left.startswith(before))
                lines = left.count(b"\n")
                self.assertGreaterEqual(lines, 1 + done[0], number)
                again = self.open()
                self.assertEqual(
                    (again.damage, again.saved_positions()), ("", AT[lines])
                )
                again.close()
                self.path.write_bytes(before)
            self.assertEqual(done[0], 3)
        self.assertGreater(number, 10)

    def test_full_at_each_byte(self) -> None:
        """
        Wherever the disk becomes full, the write fails, and leaves complete lines; the
        process continues there.
        """
        with mmap.mmap(-1, 1) as done:

            def work() -> None:
                done[0] = 0
                journal = JournalSink(self.path, FakeHost().row_to_json)
                with contextlib.suppress(OSError):
                    journal.on_rdata("events", "w1", 5, ["a"])
                    done[0] = 1
                    write_more(journal, done)
                    return
                assert journal.saved_positions() == AT[done[0]], done[0]

            for limit in range(0, 400, 11):
                with_file_size(limit, work)
                again = self.open()
                self.assertEqual(again.damage, "")
                self.assertEqual(
                    again.saved_positions(), AT[len(self.entries())], limit
                )
                self.path.unlink()

    def test_two_processes(self) -> None:
        """A journal that another process has open is refused."""
        program = (
            "import sys; from synapse_replication.app.journal import JournalSink\n"
            "kept = JournalSink(sys.argv[1], print); print('open', flush=True); input()"
        )
        command = [sys.executable, "-c", program, str(self.path)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as other:
            assert other.stdout is not None
            self.assertEqual(other.stdout.readline(), b"open\n")
            with self.assertRaisesRegex(StorageError, "the journal of another process"):
                self.open()
            other.kill()
        # The lock ends with its process.
        self.open()

    def test_tokens_beyond_64_bits(self) -> None:
        """A token that no database can store is damage."""
        good = '{"stream":"s","writer":"w","token":7,"rows":[]}\n'
        for token in (2**63, -(2**63) - 1, 10**30):
            self.path.write_text(good + good.replace("7", str(token)))
            journal = self.open()
            self.assertEqual(journal.saved_positions(), {("s", "w"): 7})
            self.assertIn("skipped: 2", journal.damage.replace("which are ", ""))

    def test_other_file_is_refused(self) -> None:
        """A file whose first line is not of a journal is refused, and closed."""
        self.path.write_text("x\n{}\n")
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", ResourceWarning)
            with self.assertRaises(StorageError) as caught:
                self.open()
            text = str(caught.exception)
            del caught
            gc.collect()
        unclosed = [str(each.message) for each in warned]
        self.assertFalse([each for each in unclosed if str(self.path) in each])
        self.assertIn(f"{self.path}:1 is not a line of a journal", text)

    def test_wrong_types(self) -> None:
        """A line whose fields have wrong types is an error that names the line."""
        for line in (
            '{"stream":[],"writer":"w","token":1}',
            '{"stream":"s","writer":"w","token":"x"}',
            '{"stream":"s","writer":"w","token":0,"epoch":5}',
        ):
            self.path.write_text(f"{line}\n")
            with self.assertRaises(StorageError) as caught:
                self.open()
            self.assertIn(f"{self.path}:1 is not a line", str(caught.exception), line)

    def test_full_disk_leaves_no_half_line(self) -> None:
        """If a write fails, the error is raised, and the file is restored."""
        journal = self.open()
        journal.on_rdata("events", "w1", 5, ["a"])
        before = self.path.read_bytes()

        class FullDisk:
            def __init__(self, file: Any) -> None:
                self.file = file
                self.writes = 0

            def write(self, data: bytes) -> int:
                self.writes += 1
                if self.writes == 1:
                    return int(self.file.write(data[:10]))
                raise OSError(28, os.strerror(28))

            def truncate(self, size: int) -> None:
                self.file.truncate(size)

            def close(self) -> None:
                self.file.close()

        journal._file = FullDisk(journal._file)  # type: ignore[assignment]
        self.assertRaises(OSError, journal.on_rdata, "events", "w1", 6, ["b"])
        self.assertEqual(self.path.read_bytes(), before)
        self.assertEqual(journal.saved_positions(), {("events", "w1"): 5})


class MakeJournalTests(SynchronousTestCase):
    def test_path(self) -> None:
        """The configuration names the file."""
        path = self.mktemp()
        journal = make_journal(FakeHost(), {"path": path})
        journal.on_position("s", "w", 1)
        journal.close()
        self.assertTrue(Path(path).exists())

    def test_invalid_path(self) -> None:
        """A missing path, or one that cannot be opened, is named in the error."""
        with self.assertRaises(StreamConfigurationError) as caught:
            make_journal(FakeHost(), {})
        self.assertIn("path is missing", str(caught.exception))
        with self.assertRaises(StreamConfigurationError) as caught:
            make_journal(FakeHost(), {"path": "/nowhere/at/all"})
        self.assertIn("/nowhere/at/all cannot be opened", str(caught.exception))
