"""Tests of a writer that is suspended and replaced, with real processes."""

from __future__ import annotations

import contextlib
import copy
import signal
from collections.abc import Callable, Mapping
from typing import Any

import psycopg2

from synapse_replication.testing.private_process import free_port
from tests.integration.deployment import PATIENCE, DeploymentTestCase
from tests.support.link_proxy import LinkProxy


class ReplacedWriterTests(DeploymentTestCase):
    """Main is suspended, its successor starts, and it resumes."""

    def writer(self, file: str, after: int = 0) -> dict[str, Any]:
        """Return the configuration of a main process, which writes as a file says.

        :param after: the number of the row before its first.
        """
        main = copy.deepcopy(self.main)
        main["synapse_replication"]["modules"][0]["config"] = {
            "file": str(self.folder / file),
            "after": after,
            # The stream in memory needs no database, so its rows come first.
            "streams": ["typing", "notes"],
        }
        return main

    def write(self, file: str, upto: int) -> None:
        """Let a main process write up to a number."""
        (self.folder / "new").write_text(str(upto))
        (self.folder / "new").rename(self.folder / file)

    def rooms(self) -> list[int]:
        """Return the numbers of the rows of the stream in memory, as delivered."""
        return [
            int(entry["rows"][0][0].strip("!:x")) for entry in self.journal("typing")
        ]

    def end_sessions(self) -> None:
        """End all sessions of the database, as if a machine had vanished."""
        with contextlib.closing(psycopg2.connect(self.dsn)) as connection:
            connection.autocommit = True
            connection.cursor().execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )

    def replace_main(
        self, own: Mapping[str, Any], redirect: Callable[[], object] | None = None
    ) -> None:
        """Suspend main, let its successor write 5 rows, and resume main.

        :param own: what is added to the configuration of each process.
        :param redirect: directs new connections to the successor, if the reader does
            not notice it as long as the suspended process has a connection.
        """
        self.shared["synapse_replication"] |= own
        replaced = self.start("main", self.writer("first"))
        self.start("worker", self.worker)
        for name in ("main", "worker"):
            self.wait_until_up(name)
        self.write("first", 30)
        self.wait_until("30 rows", lambda: len(self.rooms()) == 30)
        replaced.send_signal(signal.SIGSTOP)
        self.end_sessions()
        # The successor takes the address, too.
        self.socket.rename(self.folder / "replaced.sock")
        if redirect is not None:
            redirect()
        self.start("main", self.writer("second", 1000), name="successor")
        if redirect is None:
            # Rows that it wrote before its first POSITION would be below that position.
            for connection in ("redis\n", "redis_out\n"):
                self.wait_until(
                    "the successor has a link",
                    lambda connection=connection: (  # type: ignore[misc]
                        f"Connected: {connection}" in self.log_of("successor")
                    ),
                )
        else:
            self.wait_until_up("successor")
        self.write("second", 1005)
        if redirect is None:
            self.wait_until("5 rows", lambda: 1005 in self.rooms())
        # It writes at once when it resumes.
        self.write("first", 99)
        replaced.send_signal(signal.SIGCONT)
        self.write("second", 1020)
        self.assertEqual(replaced.wait(PATIENCE), 1)
        self.assertTrue(self.socket.is_socket(), "of the successor")
        self.write("second", 1060)
        self.wait_until("the last row", lambda: 1060 in self.rooms())
        delivered = [room for room in self.rooms() if room > 1000]
        self.assertEqual(delivered, list(range(1001, 1061)))

    def test_with_extension(self) -> None:
        """Each row of the successor is delivered, once."""
        self.replace_main({})

    def test_without_extension(self) -> None:
        """So it is if no process states its epoch."""
        self.replace_main({"extension": {"enabled": False}})

    def test_direct_tcp(self) -> None:
        """So it is over direct TCP, where the reader hears the suspended one first."""
        first, second = free_port(), free_port()
        proxy = LinkProxy(("127.0.0.1", first))
        self.addCleanup(proxy.close)
        del self.shared["redis"]
        listener: dict[str, Any] = {"type": "replication", "port": first}
        listener["bind_addresses"] = ["127.0.0.1"]
        self.main["listeners"].append(listener)
        section = self.worker["synapse_replication"]
        section["direct_tcp"] = {"connect": f"tcp:127.0.0.1:{proxy.port}"}

        def redirect() -> None:
            listener["port"] = second
            proxy.retarget(("127.0.0.1", second))

        self.replace_main({}, redirect)
