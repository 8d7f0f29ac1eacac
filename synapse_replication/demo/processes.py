"""Runs a main process and workers as processes of the operating system.

Some of the functions block. Call all of them in the main thread of the launcher: on
Linux, each process is started with PR_SET_PDEATHSIG, so the kernel kills it when the
thread that started it ends.
"""

from __future__ import annotations

import signal
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import attrs

from synapse_replication.errors import ServerStartError
from synapse_replication.testing.private_process import ChildProcess

#: The time within which all processes must be up, in s.
START_TIMEOUT = 60.0

#: The maximum number of log lines that are shown when a process has failed.
TAIL_LINES = 25

#: The signals that raise ``KeyboardInterrupt`` in the launcher.
_INTERRUPTING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@attrs.define(eq=False, repr=False, slots=False)
class ReplicationProcess(ChildProcess):
    """A process of the demonstration: the main process or a worker.

    :param name: the instance name.
    :param arguments: the arguments of ``synapse-replication``.
    :param health_socket: the Unix socket on which the process serves ``/health`` once
        it is up.
    :param log_file: the file to which the output of the process is appended.
    :ivar program: the command line of ``synapse-replication``.
    """

    name: str
    _arguments: Sequence[str]
    _health_socket: Path
    _log_file: Path
    program: Sequence[str] = attrs.field(
        default=(sys.executable, "-m", "synapse_replication"), init=False
    )

    stop_timeout = 20.0

    def start(self) -> None:
        """Start the process, without waiting until it is up.

        Call it again only after :meth:`wait` or :meth:`kill`.
        """
        command = [*self.program, *self._arguments]
        self._process = self._launch(command, self._log_file)

    def check(self) -> None:
        """Check that the process has not ended unexpectedly.

        :raises ServerStartError: if the process was started and has ended, and
            :meth:`wait` was not called; the message contains the end of its log.
        """
        if self._process is None:
            return
        # An interruption in ``poll`` would leave its lock locked, for which
        # :meth:`wait` would wait for ever.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTING)
        try:
            status = self._process.poll()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if status is not None:
            raise ServerStartError(
                f"{self.name} ended with status {status}; "
                f"the end of its log:\n{self.log_tail()}"
            )

    def is_ready(self) -> bool:
        """Return whether the process is up, according to ``/health``."""
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(1.0)
                connection.connect(str(self._health_socket))
                connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
                return b" 200 " in connection.recv(100)
        except OSError:
            return False

    def request_stop(self) -> None:
        """Send SIGTERM. A second SIGTERM would end the process without a clean stop."""
        self.send_signal(signal.SIGTERM)

    def log_text(self) -> str:
        """Return the process's log."""
        return self._log_file.read_text("utf-8", "replace")

    def log_tail(self) -> str:
        """Return the last lines of the process's log."""
        lines = self.log_text().splitlines()
        return "\n".join(f"  {line}" for line in lines[-TAIL_LINES:])


def interrupt_on_termination() -> None:
    """Install handlers of SIGTERM and SIGHUP that raise ``KeyboardInterrupt``.

    The process then cleans up as it does on Ctrl-C.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)


def wait_until_ready(processes: Iterable[ReplicationProcess]) -> None:
    """Wait until all processes are up.

    :raises ServerStartError: if a process ended before it was up, or was not up in
        time.
    """
    deadline = time.monotonic() + START_TIMEOUT
    for process in processes:
        while not process.is_ready():
            process.check()
            if time.monotonic() > deadline:
                raise ServerStartError(
                    f"{process.name} did not come up within {START_TIMEOUT:.0f} s; "
                    f"the end of its log:\n{process.log_tail()}"
                )
            time.sleep(0.05)
