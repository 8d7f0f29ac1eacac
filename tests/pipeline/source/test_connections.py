"""Tests for :mod:`synapse_replication.pipeline.source.connections`.

Each way of naming a database that the driver accepts must work in tasks, whose library
has other defaults, and which may run on another machine.
"""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import SkipTest

from psycopg2.extensions import parse_dsn
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import PipelineError, ServerStartError
from synapse_replication.pipeline.settings import PipelineSettings
from synapse_replication.pipeline.source.connections import connect, resolved_conninfo
from synapse_replication.pipeline.source.reading import task_connection
from synapse_replication.testing.certificates import PrivateAuthority, PrivatePair
from synapse_replication.testing.servers import PrivatePostgres

#: The folder of sockets that psycopg2's libpq searches by default.
DEFAULT_FOLDER = Path("/var/run/postgresql")

#: A port without a server.
CLOSED = "1"


@functools.cache
def server() -> PrivatePostgres:
    """Start a server on TCP and on a socket, once for all tests."""
    postgres = PrivatePostgres(tcp=True)
    postgres.start()
    return postgres


def server_with_tls(folder: Path, pair: PrivatePair) -> PrivatePostgres:
    """Start a server with a certificate, which it can read as an ordinary user."""
    if os.geteuid() == 0:
        for path in (folder, pair.certificate, pair.private_key):
            path.chmod(0o755 if path.is_dir() else 0o600)
            shutil.chown(path, "postgres")
    settings = {
        "ssl": "on",
        "ssl_cert_file": str(pair.certificate),
        "ssl_key_file": str(pair.private_key),
    }
    postgres = PrivatePostgres(tcp=True, settings=settings)
    try:
        postgres.start()
    except ServerStartError as error:
        raise SkipTest(f"PostgreSQL without TLS: {error}") from error
    return postgres


class PinnedTests(SynchronousTestCase):
    """Tests for the parameters that tasks get, each with a real connection."""

    def setUp(self) -> None:
        self.server = server()
        self.folder = Path(self.mktemp()).absolute()
        self.folder.mkdir()
        for name in [each for each in os.environ if each.startswith("PG")]:
            self.patch_environ(name, None)

    def patch_environ(self, name: str, value: str | None) -> None:
        """Set or remove an environment variable for this test."""
        before = os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value

        def restore() -> None:
            os.environ.pop(name, None)
            if before is not None:
                os.environ[name] = before

        self.addCleanup(restore)

    def in_task(self, dsn: str) -> dict[str, Any]:
        """Connect as the driver does, and then as a task on another machine does.

        :return: the parameters of the task.
        """
        given = PipelineSettings.of_dsn(dsn).conninfo
        with closing(connect(given)) as opened:
            found = resolved_conninfo(given, opened)
        for name in [each for each in os.environ if each.startswith("PG")]:
            self.patch_environ(name, None)
        with task_connection(found) as task, task.cursor() as cursor:
            cursor.execute("SELECT current_database()")
            self.assertEqual(cursor.fetchone(), ("postgres",))
        return found

    @property
    def by_tcp(self) -> str:
        """The host, port and user, without the password."""
        return f"host=127.0.0.1 port={self.server.port} user=postgres dbname=postgres"

    def test_no_host(self) -> None:
        """Without a host, tasks use the folder of sockets that the driver found."""
        socket = f".s.PGSQL.{self.server.port}"
        try:
            (DEFAULT_FOLDER / socket).symlink_to(self.server.directory / socket)
        except OSError as error:
            raise SkipTest(f"{DEFAULT_FOLDER}: {error}") from error
        self.addCleanup((DEFAULT_FOLDER / socket).unlink)
        dsn = f"dbname=postgres user=postgres port={self.server.port}"
        found = self.in_task(dsn)
        self.assertEqual(found["host"], str(DEFAULT_FOLDER))

    def test_folder(self) -> None:
        """A host may be the folder of sockets."""
        found = self.in_task(self.server.dsn())
        self.assertEqual(found["host"], str(self.server.directory))

    def test_uri(self) -> None:
        """A URI has the same parameters."""
        password, port = self.server.password, self.server.port
        self.in_task(f"postgresql://postgres:{password}@localhost:{port}/postgres")

    def test_hostaddr(self) -> None:
        """An address replaces the resolution of the name, or the name itself."""
        rest = f"port={self.server.port} user=postgres dbname=postgres"
        rest += f" password={self.server.password} hostaddr=127.0.0.1"
        found = self.in_task(f"host=name.invalid {rest}")
        self.assertEqual(found["host"], "name.invalid")
        self.assertEqual(found["hostaddr"], "127.0.0.1")
        self.in_task(rest)

    def test_service(self) -> None:
        """A service file need not exist where tasks run."""
        lines = [f"{k}={v}" for k, v in parse_dsn(self.by_tcp).items()]
        file = self.folder / "services"
        file.write_text("\n".join(["[synapse]", *lines, "options=-c jit=off", ""]))
        self.patch_environ("PGSERVICEFILE", str(file))
        found = self.in_task(f"service=synapse password={self.server.password}")
        self.assertNotIn("service", found)
        self.assertEqual(found["options"], "-c jit=off")

    def test_environment(self) -> None:
        """The variables of libpq need not be set where tasks run."""
        self.patch_environ("PGHOST", str(self.server.directory))
        self.patch_environ("PGPORT", str(self.server.port))
        self.patch_environ("PGUSER", "postgres")
        self.patch_environ("PGSSLMODE", "disable")
        found = self.in_task("dbname=postgres")
        self.assertEqual(found["sslmode"], "disable")

    def test_password_file(self) -> None:
        """A password file need not exist where tasks run."""
        file = self.folder / "pgpass"
        file.write_text(f"127.0.0.1:*:*:postgres:{self.server.password}\n")
        file.chmod(0o600)
        self.patch_environ("PGPASSFILE", str(file))
        found = self.in_task(self.by_tcp)
        self.assertEqual(found["password"], self.server.password)

    def test_several_hosts(self) -> None:
        """Tasks use the host, port and address that the driver is connected to."""
        rest = f"user=postgres dbname=postgres password={self.server.password}"
        port = self.server.port
        found = self.in_task(f"host=127.0.0.1,localhost port={CLOSED},{port} {rest}")
        self.assertEqual((found["host"], found["port"]), ("localhost", str(port)))
        found = self.in_task(
            f"host=a.invalid,b.invalid hostaddr=127.0.0.2,127.0.0.1 "
            f"port={CLOSED},{port} {rest}"
        )
        self.assertEqual((found["host"], found["hostaddr"]), ("b.invalid", "127.0.0.1"))

    def test_tls(self) -> None:
        """With ``sslmode=verify-full``, tasks verify the server's certificate, too."""
        folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, folder)
        authority = PrivateAuthority(folder)
        server = server_with_tls(folder, authority.issue("server", "localhost"))
        self.addCleanup(server.stop)
        found = self.in_task(
            f"host=localhost hostaddr=127.0.0.1 port={server.port} user=postgres "
            f"dbname=postgres password={server.password} sslmode=verify-full "
            f"sslrootcert={authority.certificate}"
        )
        self.assertEqual(found["sslmode"], "verify-full")

    def test_error_without_password(self) -> None:
        """A message about a failed connection does not contain the password."""
        with self.assertRaises(PipelineError) as caught:
            self.in_task(f"host=127.0.0.1 port={CLOSED} password=hush dbname=x")
        self.assertNotIn("hush", str(caught.exception))
