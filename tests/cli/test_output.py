"""Tests for :mod:`synapse_replication.cli.output`."""

from __future__ import annotations

import errno
import io
import tempfile
from typing import Any

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.cli.output import Output
from synapse_replication.errors import ReplicationError


class _File(io.StringIO):
    """A text stream with a descriptor, which a failed output redirects."""

    def __init__(self) -> None:
        super().__init__()
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 -- open as long as this

    def fileno(self) -> int:
        return self._file.fileno()


class OutputTests(SynchronousTestCase):
    def test_flushed_once_a_turn(self) -> None:
        """Writes within one reactor turn are flushed together."""
        flushes: list[str] = []

        class RecordingStream(io.StringIO):
            def flush(self) -> None:
                flushes.append(self.getvalue())

        clock: Any = Clock()
        output = Output(RecordingStream(), clock, lambda error: None)
        output.write("a")
        output.write("b")
        self.assertEqual(flushes, [])
        clock.advance(0)
        self.assertEqual(flushes, ["ab"])

    def test_reader_closes_pipe(self) -> None:
        """If the reader closes the pipe, the output ends once, without an error."""

        class Closed(_File):
            def flush(self) -> None:
                raise BrokenPipeError

        ends: list[object] = []
        clock: Any = Clock()
        clock.stop = lambda: ends.append("stopped")
        output = Output(Closed(), clock, ends.append)
        output.write("a")
        clock.advance(0)
        output.write("b")
        clock.advance(0)
        self.assertEqual(ends, ["stopped"])

    def test_disk_is_full(self) -> None:
        """If writing fails, the output ends once, with the error."""
        full = OSError(errno.ENOSPC, "No space left on device")

        class Full(_File):
            def write(self, text: str) -> int:
                raise full

        ends: list[ReplicationError] = []
        clock: Any = Clock()
        output = Output(Full(), clock, ends.append)
        output.write("a")
        output.write("b")
        self.assertEqual(
            [str(error) for error in ends], ["cannot write: No space left on device"]
        )
