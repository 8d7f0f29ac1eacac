"""A private PgBouncer, for tests; they are skipped where it is not installed."""

from __future__ import annotations

import shutil
import socket
from typing import Any

import attrs

from synapse_replication.testing.private_process import PrivateServer, free_port
from synapse_replication.testing.servers import PrivatePostgres

PGBOUNCER = shutil.which("pgbouncer", path="/usr/sbin:/usr/bin:/usr/local/bin")


@attrs.define(eq=False, repr=False, slots=False)
class PgBouncer(PrivateServer):
    """A pooler in front of a PostgreSQL server, on a Unix socket.

    :param postgres: the server.
    :param mode: ``transaction`` or ``session``.
    :param pool_size: the most sessions with the server.
    :ivar port: the number in the name of the socket.
    """

    kind = "pgbouncer"

    _postgres: PrivatePostgres = attrs.field(kw_only=True)
    _mode: str = attrs.field(default="transaction", kw_only=True)
    _pool_size: int = attrs.field(default=4, kw_only=True)
    port: int = attrs.field(factory=free_port, init=False)

    def dsn(self, database: str) -> str:
        """Return the connection string of a database behind the pooler."""
        return f"host={self.directory} port={self.port} user=postgres dbname={database}"

    def _prepare(self) -> None:
        options = self._popen_options()
        if "user" in options:
            shutil.chown(self.directory, options["user"])
        settings = {
            "auth_type": "any",
            "pool_mode": self._mode,
            "default_pool_size": self._pool_size,
            "max_client_conn": 200,
            "listen_port": self.port,
            "unix_socket_dir": self.directory,
            "ignore_startup_parameters": "extra_float_digits,options",
        }
        (self.directory / "pgbouncer.ini").write_text(
            "[databases]\n"
            f"* = host={self._postgres.directory} port={self._postgres.port} "
            "user=postgres\n[pgbouncer]\n"
            + "".join(f"{name} = {value}\n" for name, value in settings.items())
        )

    def _popen_options(self) -> dict[str, Any]:
        return self._postgres._popen_options()

    def _command(self) -> list[str]:
        assert PGBOUNCER is not None
        return [PGBOUNCER, str(self.directory / "pgbouncer.ini")]

    def _is_ready(self, pid: int) -> bool:
        with socket.socket(socket.AF_UNIX) as connection:
            path = self.directory / f".s.PGSQL.{self.port}"
            return connection.connect_ex(str(path)) == 0
