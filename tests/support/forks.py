"""Processes of the program that are forked from one that has imported most of it.

In a test, a process takes less time for everything else than for its imports. Therefore
one process imports, and forks for each module that is to be run. It does not import the
reactor, nor txredisapi, which imports the reactor: processes that shared the reactor's
descriptors would miss events.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from synapse_replication.testing.private_process import die_with_parent

_ROOT = Path(__file__).parent.parent.parent

#: Imports what a forked process need not import, forks, and runs the module.
_FORK = """
import OpenSSL.SSL, prometheus_client, treq
import twisted.application.service, twisted.internet.endpoints
import twisted.internet.posixbase, twisted.web.client, twisted.web.server
import synapse_replication.app.database_start, synapse_replication.app.journal
import synapse_replication.app.listening, synapse_replication.app.observers
import synapse_replication.app.service_runner, synapse_replication.app.supervision
import synapse_replication.app.wiring, synapse_replication.cli.main
import synapse_replication.cli.status, synapse_replication.config.process
import synapse_replication.handlers.extension.extension, synapse_replication.http.agent
import synapse_replication.handlers.sending.streamer, synapse_replication.tcp.factory
import synapse_replication.instrumentation.status.stalls
import synapse_replication.storage.postgres_stream
import runpy, sys
from tests.support.forks import serve
assert "twisted.internet.reactor" not in sys.modules
runpy.run_module(serve(int(sys.argv[1])), run_name="__main__", alter_sys=True)
"""


@attrs.define(eq=False)
class ForkedProcess:
    """A process, with those of the methods of ``subprocess.Popen`` that tests need.

    :ivar pid: its process id.
    :ivar returncode: its exit status, negative if a signal ended it; ``None`` if it was
        not known to have ended when :meth:`poll` or :meth:`wait` was called last.
    """

    pid: int
    _ended: socket.socket
    returncode: int | None = attrs.field(default=None, init=False)

    def poll(self) -> int | None:
        """Return the exit status; ``None`` while the process runs."""
        if self.returncode is None and select.select([self._ended], [], [], 0)[0]:
            self.returncode = _receive(self._ended)
            self._ended.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended.

        :param timeout: the maximum time to wait, in s.
        :raises subprocess.TimeoutExpired: if it takes longer.
        """
        if self.returncode is None:
            select.select([self._ended], [], [], timeout)
        status = self.poll()
        if status is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return status

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, unless the process has ended."""
        self.send_signal(signal.SIGKILL)


def fork(
    module: str,
    arguments: Sequence[str],
    out: int,
    log: int,
    environment: Mapping[str, str] = os.environ,
) -> ForkedProcess:
    """Run a module with arguments, as ``python -m`` does.

    :param out: the descriptor of its standard output.
    :param log: the descriptor of its standard error.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(_server())
    socket.send_fds(connection, [b"."], [out, log])
    connection.sendall(
        json.dumps([module, list(arguments), dict(environment)]).encode()
    )
    connection.shutdown(socket.SHUT_WR)
    return ForkedProcess(_receive(connection), connection)


@functools.cache
def _server() -> str:
    """Start the process that forks, which ends with this one; return its address."""
    folder = tempfile.TemporaryDirectory(prefix="forks-")
    address = f"{folder.name}/socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        server = subprocess.Popen(
            [sys.executable, "-c", _FORK, str(listener.fileno())],
            cwd=_ROOT,
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            preexec_fn=die_with_parent(signal.SIGKILL),
        )

    def stop() -> None:
        server.kill()
        server.wait()
        folder.cleanup()

    atexit.register(stop)
    return address


def serve(descriptor: int) -> str:
    """Fork for each connection; return in the new process.

    :param descriptor: the descriptor of the listening socket.
    :return: the module to run.
    """
    listener = socket.socket(fileno=descriptor)
    woken, waker = socket.socketpair()
    waker.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker.fileno())
    running: dict[int, socket.socket] = {}
    # The tests' process ends this one in the same way.
    end_with_this = die_with_parent(signal.SIGKILL)
    while True:
        ready, _, _ = select.select([listener, woken], [], [])
        if woken in ready:
            woken.recv(4096)
            _report_ended(running)
        if listener in ready:
            connection, _ = listener.accept()
            _, outputs, _, _ = socket.recv_fds(connection, 1, 2)
            with connection.makefile("rb") as request:
                module, arguments, environment = json.load(request)
            pid = os.fork()
            if not pid:
                break
            for output in outputs:
                os.close(output)
            _send(connection, pid)
            running[pid] = connection
    if end_with_this is not None:
        end_with_this()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for opened in (listener, woken, waker, connection, *running.values()):
        opened.close()
    for number, output in enumerate(outputs, 1):
        os.dup2(output, number)
        os.close(output)
    os.environ.clear()
    os.environ.update(environment)
    folders = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [each for each in folders if each and each not in sys.path]
    sys.argv[1:] = arguments
    return str(module)


def _report_ended(running: dict[int, socket.socket]) -> None:
    """Report the exit statuses of processes that have ended, and forget these."""
    for pid in list(running):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with running.pop(pid) as connection:
                _send(connection, os.waitstatus_to_exitcode(status))


#: The length of a number between this process and the one that forks, in bytes.
_WIDTH = 16


def _send(connection: socket.socket, number: int) -> None:
    # A test need not wait for its processes.
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(b"%*d" % (_WIDTH, number))


def _receive(connection: socket.socket) -> int:
    number = connection.recv(_WIDTH, socket.MSG_WAITALL)
    assert number, "the process that forks has ended"
    return int(number)
