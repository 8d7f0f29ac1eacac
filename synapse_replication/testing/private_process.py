"""The process of a private server: start, kill, freeze and restart.

Most methods are blocking; see :mod:`synapse_replication.testing.servers`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs
from typing_extensions import Self

from synapse_replication.errors import ServerStartError

#: The timeouts for the start and the stop of a server, in s.
START_TIMEOUT = 30.0
STOP_TIMEOUT = 15.0

#: The lowest port that is chosen at random for a private server, and the maximum number
#: of such ports that are tried.
LOWEST_PORT = 10_000
MAX_PORT_ATTEMPTS = 100

#: The last ports that were returned, on which nothing may listen yet.
_recent_ports: deque[int] = deque(maxlen=1000)

_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_PR_SET_PDEATHSIG = 1


def free_port() -> int:
    """Return a TCP port of the loopback interface that is currently unused.

    If possible, return a port that the kernel does not assign to outgoing connections,
    so that no such connection takes it before the caller's server listens on it. A port
    is not returned again soon.

    :raises ServerStartError: if no attempt finds a free port.
    """
    first, last = _outgoing_ports()
    below, above = range(LOWEST_PORT, first), range(last + 1, 65536)
    ports = below or above
    chosen = random.SystemRandom().sample(ports, min(MAX_PORT_ATTEMPTS, len(ports)))
    for port in (*chosen, 0):
        if port in _recent_ports:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found = int(probe.getsockname()[1])
            _recent_ports.append(found)
            return found
    raise ServerStartError("no free TCP port found on 127.0.0.1; stop some servers")


def _outgoing_ports() -> tuple[int, int]:
    """Return the first and the last port for outgoing connections."""
    try:
        first, last = _PORT_RANGE.read_text().split()
    except OSError:
        # Not Linux, or /proc is not readable: assume the range that IANA assigned.
        return 49152, 65535
    return int(first), int(last)


def die_with_parent(signal_number: int) -> Callable[[], None] | None:
    """Return a function that a child process calls before ``exec``.

    The kernel then sends the child the signal when the thread that started the child
    ends.

    :return: the function; ``None`` on systems other than Linux.
    """
    if not sys.platform.startswith("linux"):
        return None
    # Load the library here: loading it between fork and exec would not be safe.
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0)


class ChildProcess:
    """A process that a test or a demonstration has started.

    :ivar name: the name of the process in messages.
    """

    name: str

    #: The signal that the kernel sends to the process when the thread that started it
    #: ends.
    orphan_signal = signal.SIGKILL
    #: The time after which a process that does not end is killed, in s.
    stop_timeout = STOP_TIMEOUT

    _process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process id of the running process."""
        if self._process is None:
            raise ServerStartError(f"{self.name} is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it was started, and has not been stopped or killed since."""
        return self._process is not None

    def _launch(
        self, command: Sequence[str], log_file: Path, **options: Any
    ) -> subprocess.Popen[bytes]:
        """Start the process; its output is appended to a file."""
        with log_file.open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C must reach only this process, which stops its children cleanly.
                start_new_session=True,
                preexec_fn=die_with_parent(self.orphan_signal),
                **options,
            )

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process if it was started."""
        if self._process is not None:
            self._process.send_signal(number)

    def wait(self) -> int | None:
        """Wait until the process has ended; kill it after :attr:`stop_timeout`.

        :return: the exit status, negative if a signal ended the process; ``None`` if
            the process has not been started since the last call of this method.
        """
        process, self._process = self._process, None
        if process is None:
            return None
        try:
            return process.wait(self.stop_timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def end(self, number: signal.Signals) -> int | None:
        """Send a signal, and wait until the process has ended, as :meth:`wait` does."""
        # While it is frozen, a process handles only SIGCONT and SIGKILL.
        self.send_signal(signal.SIGCONT)
        self.send_signal(number)
        return self.wait()

    def kill(self) -> None:
        """Send SIGKILL, and wait. The process may then be started again."""
        self.end(signal.SIGKILL)

    def freeze(self) -> None:
        """Send SIGSTOP to the process, but not to its child processes.

        The process keeps its connections open, but sends nothing.
        """
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Send SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)


@attrs.define(eq=False, repr=False, slots=False)
class PrivateServer(ChildProcess):
    """A server process in a folder of its own.

    :param parent: the folder in which to create the server's folder; by default the
        temporary folder.
    :ivar directory: the server's folder, which :meth:`stop` removes.
    """

    #: The kind of server, for messages and the names of folders.
    kind: ClassVar[str] = ""
    #: The signal that stops the server cleanly.
    stop_signal: ClassVar = signal.SIGTERM

    directory: Path = attrs.field(factory=Path, init=False)
    name: str = attrs.field(init=False)
    _parent: Path | None = attrs.field(default=None, kw_only=True)
    _prepared: bool = attrs.field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self.name = f"the private {self.kind}"

    # -- to be implemented by each kind -------------------------------------------

    def _prepare(self) -> None:
        raise NotImplementedError

    def _command(self) -> list[str]:
        raise NotImplementedError

    def _is_ready(self, pid: int) -> bool:
        raise NotImplementedError

    def _popen_options(self) -> dict[str, Any]:
        return {}

    # -- common to all kinds ------------------------------------------------------

    def start(self, timeout: float = START_TIMEOUT) -> Self:
        """Start or restart the server in its folder, and wait until it is ready.

        :param timeout: the time within which the server must be ready, in s.
        :raises ServerStartError: if no binary is found, or the server did not start.
        """
        if self._process is not None:
            return self
        if not self._prepared:
            self.directory = Path(
                tempfile.mkdtemp(
                    prefix=f"synapse-replication-{self.kind}-", dir=self._parent
                )
            )
            try:
                self._prepare()
            except BaseException:
                shutil.rmtree(self.directory, ignore_errors=True)
                raise
            self._prepared = True
        deadline = time.monotonic() + timeout
        # Right after kill -9, PostgreSQL may find its shared memory still in use and
        # exit immediately: retry.
        while not self._start_once(deadline):
            if time.monotonic() > deadline:
                raise ServerStartError(f"{self.name} did not start: {self._log_tail()}")
            time.sleep(0.1)
        return self

    def _start_once(self, deadline: float) -> bool:
        process = self._launch(self._command(), self._log_path, **self._popen_options())
        while process.poll() is None:
            if self._is_ready(process.pid):
                self._process = process
                return True
            if time.monotonic() > deadline:
                process.kill()
                process.wait()
                return False
            time.sleep(0.01)
        return False

    @property
    def _log_path(self) -> Path:
        return self.directory / "server.log"

    def _log_tail(self) -> str:
        return self._log_path.read_text("utf-8", "replace")[-2000:].strip()

    def halt(self) -> None:
        """Stop the server, and retain its folder and address for :meth:`start`."""
        self.end(self.stop_signal)

    def restart(self) -> Self:
        """Stop the server, and restart it with the same folder and address."""
        self.halt()
        return self.start()

    def stop(self) -> None:
        """Stop the server, and remove its folder. May be called more than once."""
        self.halt()
        if self._prepared:
            self._prepared = False
            shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
