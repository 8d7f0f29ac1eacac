"""Tests for :mod:`synapse_replication.instrumentation.log_file`."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import threading
from pathlib import Path
from typing import Any

from twisted.logger import FileLogObserver, Logger, LogPublisher
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import CatchUpError
from synapse_replication.handlers.events import (
    CatchUpEvent,
    CatchUpFailed,
    GapFound,
    StreamConnected,
)
from synapse_replication.instrumentation import log_file
from synapse_replication.instrumentation.log_file import (
    MAX_LOG_LINE,
    LogFile,
    clean_lines,
    json_line,
)
from synapse_replication.instrumentation.logs import LoggingObserver


class CleanLinesTests(SynchronousTestCase):
    """Tests for :func:`clean_lines`."""

    def test_short(self) -> None:
        """Short lines stay unchanged."""
        for text in (None, "", "a\n", "a" * (MAX_LOG_LINE - 1), "a\n" * MAX_LOG_LINE):
            self.assertEqual(clean_lines(text), text)

    def test_long(self) -> None:
        """
        A line that is too long is truncated and marked; other lines stay unchanged.
        """
        text = clean_lines("first\n" + "x" * 4_000_000 + "\nlast\n")
        assert text is not None
        first, cut, last, end = text.split("\n")
        self.assertEqual((first, last, end), ("first", "last", ""))
        self.assertLess(len(cut), MAX_LOG_LINE)
        wide = clean_lines("\U0001f600" * 3000)
        assert wide is not None
        self.assertLess(len(wide.encode()), MAX_LOG_LINE)
        self.assertTrue(cut.endswith("more characters)"))

    def test_control_characters(self) -> None:
        """No text can control a terminal, or reorder what it shows."""
        self.assertEqual(
            clean_lines("\x1b[2J \u202e\n\t\tin\x00\ud800\tdent\n"),
            "\\x1b[2J \\u202e\n\t\tin\\x00\\ud800\\tdent\n",
        )


class ToJsonTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.out = io.StringIO()
        observer = FileLogObserver(self.out, json_line)
        self.logger = Logger("replication", observer=LogPublisher(observer))

    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.getvalue().splitlines()]

    def test_long_texts(self) -> None:
        """A line stays below 8 KB and valid JSON, however long its texts are."""
        text = "\x1b" * 100_000
        try:
            raise CatchUpError(text)
        except CatchUpError:
            self.logger.failure("{a}", a=text, b=text, token=7)
        (line,) = self.lines()
        self.assertEqual(line["token"], 7)
        self.assertLess(len(self.out.getvalue()), 8001)

    def test_fields(self) -> None:
        """The fields of an event are fields of the JSON object, next to the message."""
        self.logger.warn("{stream} is at {token}", stream="events", token=7)
        (line,) = self.lines()
        time = line.pop("time")
        self.assertRegex(time, r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00$")
        self.assertEqual(
            line,
            {
                "level": "warn",
                "logger": "replication",
                "message": "events is at 7",
                "stream": "events",
                "token": 7,
            },
        )

    def test_one_line_each(self) -> None:
        """An event is one line, even if its texts contain newlines."""
        self.logger.info("{text}\nand more", text='a "quoted"\nline\x00')
        (line,) = self.lines()
        self.assertEqual(line["text"], 'a "quoted"\nline\x00')

    def test_other_values(self) -> None:
        """
        A value of another type is only in the message, and no field overrides a
        standard one.
        """
        self.logger.info("{thing} {message}", thing=[1], message="mine", error="x")
        (line,) = self.lines()
        self.assertEqual(line["message"], "[1] mine")
        self.assertNotIn("error", line)
        self.assertNotIn("thing", line)

    def test_odd_values(self) -> None:
        """Lone surrogates and NaN do not break a line."""
        self.logger.info("odd", text="\ud800", number=float("nan"))
        (line,) = self.lines()
        self.assertEqual(line["text"], "\ud800")
        self.assertNotIn("number", line)

    def test_failures(self) -> None:
        """A failure is logged with its traceback."""
        failure = Failure(ValueError("bad"))
        self.logger.failure("it failed", failure)
        (line,) = self.lines()
        self.assertEqual(line["level"], "critical")
        self.assertIn("ValueError: bad", line["error"])

    def test_fields_of_writer_lines(self) -> None:
        """Log lines about a writer have stream, writer and tokens as fields."""
        observer = LoggingObserver(self.logger)
        event = CatchUpEvent("events", "w1", 3, 9)
        observer.observe(CatchUpFailed(event, CatchUpError("no"), 2, 1.5))
        observer.observe(GapFound("events", "w1", 3, 9))
        observer.observe(StreamConnected("redis", "events", "w1"))
        for line in self.lines():
            self.assertEqual((line["stream"], line["writer"]), ("events", "w1"))
        failed, gap, _ = self.lines()
        for line in (failed, gap):
            self.assertEqual((line["from_token"], line["upto_token"]), (3, 9))
        self.assertEqual((failed["attempt"], failed["retry_in"]), (2, 1.5))


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

    def test_two_threads(self) -> None:
        """Lines of two threads at the same time are both written, one after another."""
        self.patch(log_file, "_PATIENCE", 60.0)
        read, write = os.pipe()
        self.addCleanup(os.close, read)
        with open(write, "w") as stream:
            log = LogFile(stream)
            os.set_blocking(write, False)
            filled = 0
            with contextlib.suppress(BlockingIOError):
                while True:
                    filled += os.write(write, b"x" * 4096)
            os.set_blocking(write, True)
            errors: list[BaseException] = []

            def work(text: str) -> None:
                try:
                    log.write(text)
                except BaseException as error:  # noqa: BLE001 -- the test's result
                    errors.append(error)

            threads = [
                threading.Thread(target=work, args=(f"line {number}\n",))
                for number in range(8)
            ]
            for thread in threads:
                thread.start()
            while filled:
                filled -= len(os.read(read, filled))
            for thread in threads:
                thread.join()
            self.assertEqual(errors, [])
            lines = os.read(read, 4096).decode().splitlines()
        self.assertEqual(sorted(lines), [f"line {number}" for number in range(8)])
