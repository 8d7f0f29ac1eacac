"""A private server's process: found, started, killed, started again.

Blocking; see :mod:`synapse_replication.testing.servers`.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from synapse_replication.errors import ServerStartError

__all__ = ["PrivateServer", "die_with_parent", "free_port", "is_binary", "wheel_folder"]

#: How long a server may take to start, and to stop, in s.
START_TIMEOUT = 30.0
STOP_TIMEOUT = 15.0

_PR_SET_PDEATHSIG = 1

ServerT = TypeVar("ServerT", bound="PrivateServer")


def free_port() -> int:
    """Return a TCP port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wheel_folder(package: str) -> Path | None:
    """Find an installed package's folder without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0])


def is_binary(path: Path) -> bool:
    """Return whether it can be run, and is no wrapper whose pid would mislead us."""
    try:
        with path.open("rb") as file:
            return os.access(path, os.X_OK) and file.read(2) not in (b"#!", b"")
    except OSError:
        return False


def die_with_parent(signal_number: int) -> Callable[[], None] | None:
    """Make what a child calls to be ended with the thread that started it."""
    if not sys.platform.startswith("linux"):
        return None
    # Loaded here, since between fork and exec nothing may be.
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0)


class PrivateServer:
    """A server process in a folder of its own.

    :param parent: where to make that folder; the temporary folder by default.
    :ivar directory: its folder; removed by :meth:`stop`.
    """

    #: For messages and the names of folders.
    kind = ""
    #: Sent to stop it, and if its parent dies.
    stop_signal = signal.SIGTERM
    orphan_signal = signal.SIGKILL

    def __init__(self, parent: Path | None = None) -> None:
        self.directory = Path()
        self._parent = parent
        self._process: subprocess.Popen[bytes] | None = None
        self._prepared = False

    # -- what each kind does ------------------------------------------------------

    def _prepare(self) -> None:
        raise NotImplementedError

    def _command(self) -> list[str]:
        raise NotImplementedError

    def _is_ready(self, pid: int) -> bool:
        raise NotImplementedError

    def _popen_options(self) -> dict[str, Any]:
        return {}

    # -- the same for all ---------------------------------------------------------

    @property
    def pid(self) -> int:
        """The process id of the running server."""
        if self._process is None:
            raise ServerStartError(f"the private {self.kind} is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it was started, and not stopped or killed since."""
        return self._process is not None

    def start(self: ServerT, timeout: float = START_TIMEOUT) -> ServerT:
        """Start it, or start it again on the same data, and wait until it answers.

        :param timeout: how long it may take, in s.
        :raises ServerStartError: if there is no binary, or it did not come up.
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
        # Right after kill -9 PostgreSQL may find its shared memory still in use,
        # and give up at once.
        while not self._start_once(deadline):
            if time.monotonic() > deadline:
                raise ServerStartError(
                    f"the private {self.kind} did not start: {self._log_tail()}"
                )
            time.sleep(0.1)
        return self

    def _start_once(self, deadline: float) -> bool:
        with self._log_path.open("ab") as log:
            process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C is for the launcher, which stops the server in order.
                start_new_session=True,
                preexec_fn=die_with_parent(self.orphan_signal),
                **self._popen_options(),
            )
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

    def _end(self, signal_number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        # One that was frozen hears nothing else.
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal_number)
        try:
            process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def halt(self) -> None:
        """Stop it in order, and keep its data and address for :meth:`start`."""
        self._end(self.stop_signal)

    def kill(self) -> None:
        """End it with SIGKILL, and keep its data and address for :meth:`start`."""
        self._end(signal.SIGKILL)

    def restart(self: ServerT) -> ServerT:
        """Stop it in order and start it again on the same data and address."""
        self.halt()
        return self.start()

    def freeze(self) -> None:
        """Send SIGSTOP: its connections stay open, and it says nothing more."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Send SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        """Stop it for good, and remove its folder. May be called twice."""
        self.halt()
        if self._prepared:
            self._prepared = False
            shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self: ServerT) -> ServerT:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
