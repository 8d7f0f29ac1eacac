"""Tests for the private servers that most tests of adapters use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psycopg2
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import ServerStartError
from synapse_replication.testing.server_binaries import (
    find_postgres,
    find_redis,
    has_tls,
    is_binary,
    wheel_folder,
)
from synapse_replication.testing.servers import (
    PrivatePostgres,
    PrivateRedis,
    RedisTls,
    shared_postgres,
    shared_redis,
)


def query(dsn: str, sql: str) -> list[tuple[object, ...]]:
    """Run one statement and return its rows."""
    connection = psycopg2.connect(dsn)
    try:
        with connection, connection.cursor() as cursor:
            cursor.execute(sql)
            return [] if cursor.description is None else list(cursor.fetchall())
    finally:
        connection.close()


def is_alive(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


def wait_until(condition: Callable[[], bool]) -> None:
    """Check the condition every 10 ms, for at most 20 s."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class PrivatePostgresTests(SynchronousTestCase):
    """Tests for :class:`PrivatePostgres`."""

    def start(self, **options: bool) -> PrivatePostgres:
        """Start a server that is stopped after the test."""
        server = PrivatePostgres(**options)  # type: ignore[arg-type]
        self.addCleanup(server.stop)
        return server.start()

    def test_rows_survive_kill(self) -> None:
        """Committed rows survive kill -9 and a restart."""
        server = self.start()
        dsn = server.new_database()
        query(dsn, "CREATE TABLE notes (id int)")
        for count in (1, 2):
            query(dsn, "INSERT INTO notes VALUES (1)")
            if count == 1:
                server.kill()
                self.assertFalse(server.running)
                server.start()
            else:
                server.restart()
            self.assertEqual(query(dsn, "SELECT count(*) FROM notes"), [(count,)])

    def test_restart_in_use(self) -> None:
        """
        After kill -9, a server can be started even if its child processes are still
        busy.
        """
        server = self.start()
        busy = psycopg2.connect(server.dsn())
        self.addCleanup(busy.close)
        busy.cursor().execute("SELECT 1")
        server.kill()
        server.start()
        self.assertEqual(query(server.dsn(), "SELECT 1"), [(1,)])

    def test_settings(self) -> None:
        """A server waits for the disk only with ``durable``."""
        dsn = shared_postgres().dsn()
        for name, value in (
            ("fsync", "off"),
            ("full_page_writes", "off"),
            ("synchronous_commit", "on"),
            ("server_encoding", "UTF8"),
        ):
            self.assertEqual(query(dsn, f"SHOW {name}"), [(value,)])
        durable = self.start(durable=True, tcp=True)
        self.assertEqual(query(durable.dsn(tcp=True), "SHOW fsync"), [("on",)])
        with self.assertRaises(psycopg2.OperationalError):
            psycopg2.connect(
                durable.dsn(tcp=True).replace(durable.password, "wrong")
            ).close()

    def test_databases(self) -> None:
        """Each database is new, and can be given a name."""
        server = shared_postgres()
        self.assertIs(server, shared_postgres())
        self.assertNotEqual(server.new_database(), server.new_database())
        dsn = server.new_database(f"named_{os.getpid()}")
        self.assertEqual(
            query(dsn, "SELECT current_database()"), [(f"named_{os.getpid()}",)]
        )
        self.assertEqual(
            query(
                dsn, "SELECT datcollate FROM pg_database WHERE datname LIKE 'named%'"
            ),
            [("C",)],
        )

    def test_stopped(self) -> None:
        """
        After a stop, process and folder do not exist any more; stopping twice is no
        error.
        """
        with PrivatePostgres() as server:
            pid, folder = server.pid, server.directory
            server.freeze()
        server.stop()
        self.assertFalse(is_alive(pid))
        self.assertFalse(folder.exists())
        with self.assertRaises(ServerStartError):
            _ = server.pid

    def test_bad_settings(self) -> None:
        """A server that does not start reports the reason."""
        server = PrivatePostgres(settings={"no_such_setting": "1"})
        self.addCleanup(server.stop)
        with self.assertRaisesRegex(ServerStartError, "no_such_setting"):
            server.start(timeout=1)


class PrivateRedisTests(SynchronousTestCase):
    """Tests for :class:`PrivateRedis`."""

    def test_restarted(self) -> None:
        """After a kill or a restart, a server has the same port and no data."""
        with PrivateRedis(password="hush") as server:
            port = server.port
            self.assertEqual(server.command("SET", "a", 1), "OK")
            server.kill()
            server.start()
            self.assertIsNone(server.command("GET", "a"))
            server.restart()
            self.assertEqual(
                server.command("CONFIG", "GET", "port"), ["port", str(port)]
            )
            self.assertEqual(server.command("INCR", "b"), 1)
            self.assertTrue(server.command("NONSENSE").startswith("-ERR"))
            folder, pid = server.directory, server.pid
        self.assertFalse(folder.exists())
        self.assertFalse(is_alive(pid))

    def test_options(self) -> None:
        """Users, limits and other settings are passed to ``redis.conf``."""
        with PrivateRedis(
            acl=["user bob on >secret ~* &* +@all"],
            settings={"maxclients": "7"},
        ) as server:
            self.assertEqual(server.command("CONFIG", "GET", "maxclients")[1], "7")
            self.assertIn("bob", server.command("ACL", "USERS"))

    def test_frozen(self) -> None:
        """A frozen server does not run; a thawed one responds."""
        with PrivateRedis() as server:
            server.freeze()
            wait_until(
                lambda: Path(f"/proc/{server.pid}/stat").read_text().split()[2] == "T"
            )
            server.thaw()
            self.assertEqual(server.command("PING"), "PONG")

    def test_shared(self) -> None:
        """The tests of a process share one server."""
        self.assertIs(shared_redis(), shared_redis())

    def test_tls_missing(self) -> None:
        """A binary without TLS is rejected with the name of a package that has TLS."""
        if has_tls(find_redis()):
            self.skipTest("this Redis speaks TLS")
        nothing = Path(os.devnull)
        with self.assertRaisesRegex(ServerStartError, "redis-server"):
            PrivateRedis(tls=RedisTls(nothing, nothing, nothing)).start()

    def test_orphaned(self) -> None:
        """When the launcher of a server is killed, the server ends as well."""
        script = (
            "import time\n"
            "from synapse_replication.testing.servers import PrivateRedis\n"
            "print(PrivateRedis().start().pid, flush=True)\n"
            "time.sleep(60)\n"
        )
        with tempfile.TemporaryDirectory() as folder:
            launcher = subprocess.Popen(
                [sys.executable, "-c", script],
                stdout=subprocess.PIPE,
                env={
                    **os.environ,
                    "TMPDIR": folder,
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                },
            )
            assert launcher.stdout is not None
            with launcher.stdout as output:
                pid = int(output.readline())
            self.assertTrue(is_alive(pid))
            launcher.send_signal(signal.SIGKILL)
            launcher.wait()
            wait_until(lambda: not is_alive(pid))


class FindTests(SynchronousTestCase):
    """Tests for finding the binaries of servers."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def make(self, name: str, content: bytes) -> Path:
        """Create an executable file."""
        path = self.folder / name
        path.write_bytes(content)
        path.chmod(0o755)
        return path

    def test_named(self) -> None:
        """
        The program in the environment variable is used, or the error names the
        variable.
        """
        variable = "SYNAPSE_REPLICATION_POSTGRES_BIN"
        with self.assertRaisesRegex(ServerStartError, variable):
            find_postgres({variable: str(self.folder)})
        for name in ("postgres", "initdb"):
            self.make(name, b"\x7fELF")
        self.assertEqual(find_postgres({variable: str(self.folder)}), self.folder)
        variable = "SYNAPSE_REPLICATION_REDIS_SERVER"
        with self.assertRaisesRegex(ServerStartError, variable):
            find_redis({variable: str(self.folder / "redis")})
        redis = self.make("redis", b"\x7fELF")
        self.assertEqual(find_redis({variable: str(redis)}), redis)

    def test_without_pg_basebackup(self) -> None:
        """Where ``pg_basebackup`` is not installed, no standby starts."""
        for name in ("postgres", "initdb"):
            self.make(name, Path("/bin/true").read_bytes())
        self.folder.chmod(0o755)
        standby = PrivatePostgres(
            primary=PrivatePostgres(),
            environ={"SYNAPSE_REPLICATION_POSTGRES_BIN": str(self.folder)},
        )
        self.addCleanup(standby.stop)
        with self.assertRaisesRegex(ServerStartError, "has no pg_basebackup"):
            standby.start()

    def test_path(self) -> None:
        """A binary on ``PATH`` is used, even behind a symbolic link."""
        for name in ("postgres", "initdb", "redis-server"):
            self.make(name, b"\x7fELF")
        linked = self.folder / "linked"
        linked.mkdir()
        (linked / "postgres").symlink_to(self.folder / "postgres")
        self.assertEqual(find_postgres({"PATH": str(linked)}), self.folder.resolve())
        self.assertEqual(
            find_redis({"PATH": str(self.folder)}), self.folder / "redis-server"
        )

    def test_wrapper(self) -> None:
        """A script on ``PATH`` is skipped: its pid is not the server's."""
        for name in ("postgres", "initdb", "redis-server"):
            self.make(name, b"#!/bin/sh\n")
        environ = {"PATH": str(self.folder)}
        self.assertNotEqual(find_postgres(environ), self.folder)
        self.assertNotEqual(find_redis(environ).parent, self.folder)

    def test_binaries(self) -> None:
        """
        An executable binary is recognised, but not a script, a text or a missing file.
        """
        self.assertTrue(is_binary(Path(sys.executable)))
        path = self.folder / "program"
        self.assertFalse(is_binary(path))
        path.write_bytes(b"\x7fELF")
        self.assertFalse(is_binary(path))
        path.chmod(0o755)
        self.assertTrue(is_binary(path))
        path.write_bytes(b"#!/bin/sh")
        self.assertFalse(is_binary(path))

    def test_wheels(self) -> None:
        """The folder of an installed package is found without importing it."""
        self.assertIsNone(wheel_folder("no_such_package"))
        found = wheel_folder("twisted")
        assert found is not None
        self.assertTrue((found / "__init__.py").exists())
