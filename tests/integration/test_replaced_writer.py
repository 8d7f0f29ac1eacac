"""Tests of a writer that is suspended and replaced, with real processes."""

from __future__ import annotations

import contextlib
import copy
import json
import signal
from collections.abc import Callable, Mapping
from typing import Any

import psycopg2

from synapse_replication.storage.schema import prepare_database
from synapse_replication.testing.private_process import free_port
from synapse_replication.testing.servers import shared_redis
from tests.integration.deployment import PATIENCE, DeploymentTestCase
from tests.support.forks import ForkedProcess
from tests.support.link_proxy import LinkProxy


class ReplacingTestCase(DeploymentTestCase):
    """Tests that suspend and replace a process."""

    def suspend(self, process: ForkedProcess) -> None:
        """Suspend a process, and end what a machine that vanished would have left."""
        process.send_signal(signal.SIGSTOP)
        self.end_sessions()
        # The successor takes the address, too.
        self.socket.rename(self.folder / "replaced.sock")

    def end_sessions(self) -> None:
        """End all sessions of the database, as if a machine had vanished."""
        with contextlib.closing(psycopg2.connect(self.dsn)) as connection:
            connection.autocommit = True
            connection.cursor().execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )

    def resume(self, process: ForkedProcess) -> None:
        """Resume a process, which ends because it finds that it was replaced."""
        process.send_signal(signal.SIGCONT)
        self.assertEqual(process.wait(PATIENCE), 1)
        self.assertTrue(self.socket.is_socket(), "of the successor")


class ReplacedWriterTests(ReplacingTestCase):
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
        self.suspend(replaced)
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
        self.write("second", 1020)
        self.resume(replaced)
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


class CallAfterTests(ReplacingTestCase):
    """The code of a server writes rows in memory after its transactions."""

    def start_server(self, mark: str) -> ForkedProcess:
        redis = shared_redis()
        options = {
            "server_name": self.shared["server_name"],
            "dsn": self.dsn,
            "redis": [redis.host, redis.port],
            "socket": str(self.socket),
            "refused": str(self.folder / f"refused {mark}"),
            "mark": mark,
        }
        return self.start_module(
            mark, "tests.integration.endless_writer", json.dumps(options)
        )

    def texts(self, stream: str, mark: str) -> list[str]:
        """Return the delivered texts of a server."""
        texts = [entry["rows"][0][0].strip("!:x") for entry in self.journal(stream)]
        return [text for text in texts if mark in text]

    def committed(self) -> list[tuple[int, str]]:
        with contextlib.closing(psycopg2.connect(self.dsn)) as connection:
            cursor = connection.cursor()
            cursor.execute("SELECT stream_id, note FROM notes ORDER BY stream_id")
            return cursor.fetchall()

    def test_replaced(self) -> None:
        """
        A row in memory is published, once, if its transaction is committed: by the
        successor, and by the process that it has replaced.
        """
        with contextlib.closing(psycopg2.connect(self.dsn)) as connection:
            prepare_database(connection.cursor())
            connection.commit()
        self.start("worker", self.worker)
        self.wait_until_up("worker")
        replaced = self.start_server("first")
        self.wait_until("rows", lambda: len(self.texts("typing", "first")) > 20)
        self.suspend(replaced)
        successor = self.start_server("second")
        self.wait_until("its rows", lambda: len(self.texts("typing", "second")) > 5)
        self.resume(replaced)
        before = len(self.texts("typing", "second"))
        self.wait_until(
            "more rows", lambda: len(self.texts("typing", "second")) > before + 20
        )
        self.assertEqual(self.stop(successor), 0, self.log_of("second"))
        committed = self.committed()
        self.wait_until(
            "the last row", lambda: len(self.journal("notes")) >= len(committed)
        )
        delivered = [(e["token"], e["rows"][0][0]) for e in self.journal("notes")]
        self.assertEqual(delivered, committed)
        notes = [note for _, note in committed]
        in_memory = [note for note in notes if "second" in note]
        self.wait_until(
            "the last row in memory",
            lambda: len(self.texts("typing", "second")) >= len(in_memory),
        )
        self.assertEqual(sorted(self.texts("typing", "second")), sorted(in_memory))
        earlier = self.texts("typing", "first")
        self.assertEqual(len(earlier), len(set(earlier)))
        self.assertLessEqual(set(earlier), set(notes))
        refused = json.loads((self.folder / "refused first").read_text())
        self.assertIn("NameLostError", refused)
