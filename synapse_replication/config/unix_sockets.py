"""Unix sockets of listeners, which outlive a process that is killed.

Theory of operation: a killed process leaves its socket behind, so that the next one
cannot bind it. Twisted tells whether the owner lives by a lock that contains a process
id; but in a container, the new process often has the id of the killed one, and on a
host, ids are reused. Here, a socket is in use if something accepts a connection to it.
While a process looks and binds, it holds a lock (``flock``) on the folder, which the
kernel releases when the process ends, so that two processes that start at the same time
cannot both take the place.

A process that ends removes its socket, but not that of a successor at the same path.
While a socket is open, the number of its file is not used again, even if the file was
removed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import attrs
from twisted.internet import tcp, unix
from twisted.internet.defer import Deferred, execute
from twisted.internet.error import CannotListenError
from twisted.internet.interfaces import IStreamServerEndpoint
from twisted.python.failure import Failure
from typing_extensions import override
from zope.interface import implementer

from synapse_replication.transport.reactor import IReactor

#: How long to wait for the answer of a listening process, in s. It is immediate, except
#: that a full queue of connections delays it.
_CONNECT_TIMEOUT = 0.5


@implementer(IStreamServerEndpoint)
@attrs.frozen
class UnixSocketEndpoint:
    """An endpoint that listens on a Unix socket, in place of a killed process.

    :ivar mode: the permissions of the socket.
    :ivar backlog: the most connections that wait to be accepted.
    """

    _reactor: IReactor
    path: str
    mode: int
    backlog: int = 50

    def listen(self, protocolFactory: Any) -> Deferred[Any]:
        """Listen; the Deferred fails with ``CannotListenError``."""
        return execute(self._listen, protocolFactory)

    def _listen(self, factory: Any) -> Any:
        with _locked_folder(os.path.dirname(self.path) or "."):
            try:
                _remove_stale(self.path)
            except OSError as error:
                raise CannotListenError(  # type: ignore[no-untyped-call]
                    "unix", self.path, error
                ) from error
            path = os.fsencode(self.path)
            port = _Port(path, factory, self.backlog, self.mode, self._reactor)
            port.startListening()
            return port


class _Port(unix.Port):
    """A port that removes its socket only as long as it is its own."""

    def __init__(self, path: bytes, *args: Any) -> None:
        super().__init__(path, *args)
        self._path = path

    @override
    def startListening(self) -> None:
        super().startListening()  # type: ignore[no-untyped-call]
        self._file = _file_number(self._path)

    @override
    def connectionLost(self, reason: Failure) -> None:
        with _locked_folder(os.path.dirname(self._path) or b"."):
            if _file_number(self._path) == self._file:
                os.unlink(self._path)
        # Not that of unix.Port, which removes whatever has the path.
        tcp.Port.connectionLost(self, reason)  # type: ignore[no-untyped-call]


def _file_number(path: bytes) -> tuple[int, int] | None:
    """Return the device and the inode of a file; ``None`` if there is none."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


@contextmanager
def _locked_folder(folder: str | bytes) -> Iterator[None]:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        # It is missing, which the attempt to listen reports; or it cannot be read.
        yield
        return
    try:
        with suppress(OSError):
            # Some file systems have no locks.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_stale(path: str) -> None:
    """Remove a socket, and a lock of Twisted beside it, that no process uses.

    :raises OSError: if a process uses the socket, or the file is no socket.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        mode = None
    if mode is not None:
        if not stat.S_ISSOCK(mode):
            raise OSError(errno.EADDRINUSE, "the file exists and is not a socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_CONNECT_TIMEOUT)
            try:
                probe.connect(path)
            except (ConnectionRefusedError, FileNotFoundError):
                pass
            except OSError as error:
                # It has a full queue, or belongs to another user.
                raise OSError(errno.EADDRINUSE, f"it is in use: {error}") from error
            else:
                raise OSError(errno.EADDRINUSE, "another process listens on it")
        os.unlink(path)
    lock = f"{path}.lock"
    if os.path.islink(lock):
        os.unlink(lock)
