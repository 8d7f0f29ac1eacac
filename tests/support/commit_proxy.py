"""A proxy for PostgreSQL that loses answers to COMMIT.

Theory of operation: the proxy forwards everything between a process and PostgreSQL, on
Unix sockets. While answers are lost, some connections are closed towards the process as
soon as it has sent COMMIT. PostgreSQL gets that COMMIT at once or some time later, and
its answer is discarded.

Uses blocking sockets in its own threads; its methods may be called in any thread.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import socket
import tempfile
import threading
import time
from pathlib import Path

from synapse_replication.testing.servers import PrivatePostgres
from tests.support.socket_listener import SocketListener

#: Most bytes forwarded at a time.
CHUNK = 65536
#: The share of the commits whose answers are lost by default, and of those that are
#: delayed.
LOST, DELAYED = 0.1, 0.5
#: The longest delay of a COMMIT, in s.
MAX_DELAY = 2.0


class CommitProxy(SocketListener):
    """Forwards connections to a server.

    :param server: the server, which runs.
    :ivar directory: the folder of the socket, for ``host=``. The port is the server's.
    """

    def __init__(self, server: PrivatePostgres) -> None:
        name = f".s.PGSQL.{server.port}"
        self._target = str(server.directory / name)
        self.directory = Path(tempfile.mkdtemp(prefix="commit-proxy-"))
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.directory / name))
        listener.listen()
        self._lock = threading.Lock()
        self._chance: random.Random | None = None
        self._share = LOST
        self._table = b""
        #: The number of commits whose answers were lost.
        self.lost = 0
        super().__init__(listener)

    def lose(self, seed: int, share: float | None = None, table: str = "") -> None:
        """Lose answers to COMMIT from now on.

        :param share: of the commits; by default :data:`LOST`.
        :param table: only those of transactions that insert rows into this table.
        """
        with self._lock:
            self._chance = random.Random(seed)
            self._share = LOST if share is None else share
            self._table = f"INTO {table}".encode() if table else b""

    def heal(self) -> None:
        """Stop losing answers."""
        with self._lock:
            self._chance = None

    def close(self) -> None:
        """Close the listener. The connections end with their processes."""
        self.stop_listening()
        shutil.rmtree(self.directory, ignore_errors=True)

    def serve(self, connection: socket.socket) -> None:
        with connection as process, socket.socket(socket.AF_UNIX) as server:
            try:
                server.connect(self._target)
            except OSError:
                # Close the process's connection, as would happen without the proxy.
                return
            answers = threading.Thread(
                target=_forward, args=(server, process), daemon=True
            )
            answers.start()
            with contextlib.suppress(OSError):
                inserts = False
                while data := process.recv(CHUNK):
                    inserts = inserts or self._table in data
                    if b"COMMIT" in data:
                        delay = self._draw() if inserts else None
                        if delay is not None:
                            process.shutdown(socket.SHUT_RDWR)
                            time.sleep(delay)
                            server.sendall(data)
                            break
                        inserts = False
                    server.sendall(data)
            # PostgreSQL completes what it has got, answers, and then sees the end.
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_WR)
            answers.join()

    def _draw(self) -> float | None:
        """Return the delay in s of a COMMIT whose answer is lost; ``None`` for none."""
        with self._lock:
            chance = self._chance
            if chance is None or chance.random() >= self._share:
                return None
            self.lost += 1
            return chance.uniform(0, MAX_DELAY) if chance.random() < DELAYED else 0.0


def _forward(source: socket.socket, target: socket.socket) -> None:
    """Forward bytes until the source has ended, even if the target has."""
    with contextlib.suppress(OSError):
        while data := source.recv(CHUNK):
            with contextlib.suppress(OSError):
                target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)
