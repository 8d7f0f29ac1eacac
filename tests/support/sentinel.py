"""A private Sentinel, and a replica that it can promote, for tests.

All methods are blocking; see :mod:`synapse_replication.testing.servers`.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from synapse_replication.testing.private_process import (
    STOP_TIMEOUT,
    PrivateServer,
    free_port,
)
from synapse_replication.testing.server_binaries import find_redis
from synapse_replication.testing.servers import (
    PrivateRedis,
    RedisTls,
    call_redis,
    tls_lines,
)


def private_replica(
    master: PrivateRedis, *, tls: RedisTls | None = None
) -> PrivateRedis:
    """Return a Redis server, not yet started, that replicates ``master``.

    :param tls: if set, replicate over TLS; both servers use these files.
    """
    settings = {
        "replicaof": f"{master.host} {master.tls_port if tls else master.port}",
        # Load the master's data from the connection, without an intermediate file. This
        # is safe, because the replica has no data that a failed transfer could lose.
        "repl-diskless-load": "on-empty-db",
    }
    if tls is not None:
        settings["tls-replication"] = "yes"
    if master.password is not None:
        settings["masterauth"] = master.password
    return PrivateRedis(password=master.password, settings=settings, tls=tls)


class PrivateSentinel(PrivateServer):
    """A single Sentinel that fails over one master quickly.

    :param master: the monitored server, which must be running.
    :param name: the name of the master in queries to the Sentinel.
    :param password: the password that clients of the Sentinel need.
    :param down_after: the time without a reply after which the master counts as down,
        in s.
    :param tls: if set, also listen with TLS on :attr:`tls_port`, and monitor over TLS.
    :ivar tls_port: the port for TLS.
    """

    kind = "sentinel"

    def __init__(
        self,
        master: PrivateRedis,
        name: str = "mymaster",
        *,
        password: str | None = None,
        down_after: float = 0.5,
        tls: RedisTls | None = None,
    ) -> None:
        super().__init__()
        self.host = "127.0.0.1"
        self.port = 0
        self.tls_port = 0
        self.password = password
        self._master = master
        self._name = name
        self._down_after = down_after
        self._tls = tls
        self._binary = Path()

    def command(self, *arguments: str | int) -> Any:
        """Send one command on a new connection, and return the reply."""
        with socket.create_connection((self.host, self.port), STOP_TIMEOUT) as link:
            if self.password is not None:
                call_redis(link, "AUTH", self.password)
            return call_redis(link, *arguments)

    def knows_replica(self) -> bool:
        """Return whether Sentinel has found a replica that it could promote."""
        replicas = self.command("SENTINEL", "REPLICAS", self._name)
        return any(
            dict(zip(fields[::2], fields[1::2], strict=True)).get("master-link-status")
            == "ok"
            for fields in replicas
        )

    def _prepare(self) -> None:
        self._binary = find_redis()
        self.port = free_port()
        name, master = self._name, self._master
        port = master.port if self._tls is None else master.tls_port
        lines = [
            f"bind {self.host}",
            f"port {self.port}",
            f'dir "{self.directory}"',
            f"sentinel monitor {name} {master.host} {port} 1",
            f"sentinel down-after-milliseconds {name} {int(self._down_after * 1000)}",
            f"sentinel failover-timeout {name} 5000",
        ]
        if self.password is not None:
            lines.append(f'requirepass "{self.password}"')
        if master.password is not None:
            lines.append(f"sentinel auth-pass {name} {master.password}")
        if self._tls is not None:
            self.tls_port = free_port()
            lines += ["tls-replication yes", *tls_lines(self.tls_port, self._tls)]
        # Sentinel saves its state in this file, which must therefore be writable.
        (self.directory / "sentinel.conf").write_text("\n".join(lines) + "\n")

    def _command(self) -> list[str]:
        config = str(self.directory / "sentinel.conf")
        return [str(self._binary), config, "--sentinel"]

    def _is_ready(self, pid: int) -> bool:
        try:
            return bool(self.command("PING") == "PONG")
        except OSError:
            return False
