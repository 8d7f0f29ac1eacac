"""A process of a real Synapse, and the command lines that start one."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import attrs

from synapse_replication.errors import ServerStartError
from synapse_replication.testing.private_process import ChildProcess
from tests.support.client_api import ClientApi

#: Timeouts in s for a process to start (it may share two cores with others, and has an
#: empty database to fill) and to stop.
START_TIMEOUT = 120.0
STOP_TIMEOUT = 30.0

#: The name of the main process in ``stream_writers`` and on the wire.
MAIN = "master"

#: The environment variable that names the Python interpreter of the processes.
PEER_PYTHON = "SYNAPSE_REPLICATION_SYNAPSE_PYTHON"

_LOG_MARKS = (" - ERROR - ", " - CRITICAL - ", "Traceback (most recent call last)")

Launcher: TypeAlias = Callable[[str, Sequence[str]], list[str]]
"""``(module, arguments) -> command line``."""


def interpreter() -> str:
    """Return the Python interpreter that has matrix-synapse installed.

    This is the running one, unless SYNAPSE_REPLICATION_SYNAPSE_PYTHON names another.
    """
    return os.environ.get(PEER_PYTHON, sys.executable)


def stock(module: str, arguments: Sequence[str]) -> list[str]:
    """Start an unchanged module: a :data:`Launcher`."""
    return [interpreter(), "-m", module, *arguments]


def ours(*options: str) -> Launcher:
    """Return a launcher that starts modules of Synapse on our replication.

    :param options: of ``synapse-replication exec``.
    """
    return lambda module, arguments: [
        interpreter(),
        *("-m", "synapse_replication", "exec", *options),
        *("-m", module, *arguments),
    ]


@attrs.frozen
class WorkerSpec:
    """A worker.

    :ivar name: its instance name.
    :ivar resources: of its client listener, if it has one: ``client``,
        ``federation``.
    :ivar settings: further settings, which override the shared ones.
    """

    name: str
    resources: tuple[str, ...] = ()
    settings: Mapping[str, Any] = MappingProxyType({})


class SynapseProcess(ChildProcess):
    """One process of the deployment.

    :ivar name: its instance name, ``master`` for the main process.
    :ivar log: the path of its log.
    :ivar api: the listener of the client API; only ``/health`` if its specification
        has no resources.
    :ivar launcher: starts the process the next time.
    """

    stop_timeout = STOP_TIMEOUT

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        log: Path,
        api: ClientApi,
        launcher: Launcher,
        environ: Mapping[str, str],
    ) -> None:
        self.name = name
        self.log = log
        self.api = api
        self.launcher = launcher
        self._module = module
        self._arguments = tuple(arguments)
        self._environ = dict(environ)

    @property
    def is_running(self) -> bool:
        """Whether the process was started and has not exited."""
        return self._process is not None and self._process.poll() is None

    def launch(self) -> None:
        """Start the process without waiting until it responds."""
        if self._process is not None:
            return
        self._process = self._launch(
            self.launcher(self._module, self._arguments),
            self.log,
            cwd=self.log.parent,
            env={**os.environ, **self._environ},
        )

    def wait_until_ready(self) -> None:
        """Wait until the process responds.

        :raises ServerStartError: if it exited, or took too long.
        """
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT
        while not self.api.is_healthy():
            status = self._process.poll()
            if status is not None or time.monotonic() > deadline:
                self.kill()
                how = "took too long" if status is None else f"ended with {status}"
                raise ServerStartError(f"{self.name} {how}: {self.log_tail()}")
            time.sleep(0.1)

    def start(self) -> None:
        """Start the process and wait until it responds."""
        self.launch()
        self.wait_until_ready()

    def stop(self) -> int | None:
        """Stop the process with SIGTERM.

        :return: its exit status; ``None`` if it did not run.
        """
        return self.end(signal.SIGTERM)

    def restart(self, launcher: Launcher | None = None) -> None:
        """Restart the process, optionally with another launcher."""
        self.stop()
        if launcher is not None:
            self.launcher = launcher
        self.start()

    def log_tail(self, length: int = 3000) -> str:
        """Return the end of the process's log."""
        return self._log_text()[-length:].strip()

    def problems(self) -> list[str]:
        """
        Return the lines of the process's log that report an error, each with its
        context.
        """
        return log_problems(self._log_text().splitlines())

    def _log_text(self) -> str:
        # A process that was never started has no log.
        return self.log.read_text("utf-8", "replace") if self.log.exists() else ""


def log_problems(lines: Iterable[str], context: int = 25) -> list[str]:
    """Return the errors and tracebacks in the lines of a log.

    :param context: the greatest number of lines per error.
    """
    found: list[list[str]] = []
    left = 0
    for line in lines:
        if any(mark in line for mark in _LOG_MARKS) and not left:
            found.append([])
            left = context
        if left:
            found[-1].append(line)
            left -= 1
    return ["\n".join(problem) for problem in found]
