"""The output of a command that prints while the reactor runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TextIO

import attrs

from synapse_replication.errors import ReplicationError
from synapse_replication.transport.reactor import IReactor


@attrs.define(eq=False, repr=False)
class Output:
    """A text stream that is flushed at most once per reactor iteration.

    If writing fails, nothing more is written. The reactor is stopped if the reader of a
    pipe has closed the pipe (``| head``).

    :param out: the stream to write to.
    :param fail: called with any other error, once.
    """

    _out: TextIO
    _reactor: IReactor
    _fail: Callable[[ReplicationError], object]
    _flushing: bool = attrs.field(default=False, init=False)
    _has_failed: bool = attrs.field(default=False, init=False)

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return self._out.isatty()

    def fileno(self) -> int:
        """Return the file descriptor, which callers need for the terminal's width."""
        return self._out.fileno()

    def write(self, text: str) -> int:
        """Write a text, and schedule a flush. It never raises ``OSError``."""
        if not (self._flushing or self._has_failed):
            self._flushing = True
            self._reactor.callLater(0, self._flush)
        self._guard(lambda: self._out.write(text))
        return len(text)

    def flush(self) -> None:
        """Do nothing: :meth:`write` has scheduled a flush."""

    def finish(self) -> None:
        """Flush the stream now."""
        self._guard(self._out.flush)

    def _flush(self) -> None:
        self._flushing = False
        self._guard(self._out.flush)

    def _guard(self, action: Callable[[], object]) -> None:
        if self._has_failed:
            return
        try:
            action()
        except OSError as error:
            self._has_failed = True
            # Python flushes standard output at exit. Redirect it, so that this flush
            # does not fail as well.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._out.fileno())
            if isinstance(error, BrokenPipeError):
                self._reactor.stop()
            else:
                self._fail(ReplicationError(f"cannot write: {error.strerror}"))
