"""Main and workers as real processes, with private servers."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg2
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.testing.private_process import free_port
from synapse_replication.testing.servers import shared_postgres, shared_redis

#: For what takes a moment, in s; never waited for in full if all is well.
_PATIENCE = 60.0

_ROOT = Path(__file__).parent.parent.parent

_SCHEMA = """
    CREATE SEQUENCE notes_seq START 2;
    CREATE TABLE notes (
        stream_id bigint NOT NULL, instance_name text NOT NULL,
        note text NOT NULL, part bigint NOT NULL
    );
    CREATE INDEX notes_index ON notes (instance_name, stream_id)
"""

_STREAMS = [
    "typing",
    {
        "name": "notes",
        "table": "notes",
        "id_column": "stream_id",
        "writer_column": "instance_name",
        "columns": {"note": "text", "part": "integer"},
        "sequence": "notes_seq",
        "writers": "master",
    },
]


def expected_rows(upto: int) -> list[list[Any]]:
    """Give the rows of ``notes``, in order, when so many tokens were written."""
    return [
        [f"note {n}", part] for n in range(1, upto + 1) for part in range(n % 3 + 1)
    ]


def get_over_socket(path: Path, url: str) -> str:
    """Ask a process for something over a Unix socket."""
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.closing(connection):
        connection.sock.connect(str(path))
        connection.request("GET", url)
        return connection.getresponse().read().decode()


class ProcessTests(SynchronousTestCase):
    def setUp(self) -> None:
        # The path of a socket has to be short.
        self.folder = Path(tempfile.mkdtemp(prefix="replication-"))
        self.addCleanup(shutil.rmtree, self.folder)
        self.socket = self.folder / "main.sock"
        dsn = shared_postgres().new_database()
        with contextlib.closing(psycopg2.connect(dsn)) as connection:
            connection.cursor().execute(_SCHEMA)
            connection.commit()
        redis = shared_redis()
        self.shared: dict[str, Any] = {
            # A channel of its own, on a Redis that others use, too.
            "server_name": f"{self.folder.name}.test",
            "database": {"name": "psycopg2", "args": {"dsn": dsn, "cp_max": 3}},
            "redis": {"enabled": True, "host": redis.host, "port": redis.port},
            "instance_map": {"main": {"path": str(self.socket)}},
            "worker_replication_secret": "knock",
            "synapse_replication": {"streams": _STREAMS},
        }
        self.main: dict[str, Any] = {
            "listeners": [
                {
                    "type": "http",
                    "path": str(self.socket),
                    "resources": [{"names": ["replication", "health"]}],
                }
            ],
            "synapse_replication": {
                "modules": [
                    {
                        "module": "tests.integration.writer_module.make_writer",
                        "config": {"file": str(self.folder / "upto")},
                    }
                ]
            },
        }
        self.worker: dict[str, Any] = {
            "worker_name": "reader1",
            "synapse_replication": {
                "row_sink": {
                    "module": "synapse_replication.app.journal.make_journal",
                    "config": {"path": str(self.folder / "journal.jsonl")},
                }
            },
        }
        self.running: list[subprocess.Popen[bytes]] = []
        self.addCleanup(self.kill_all)

    def kill_all(self) -> None:
        for process in self.running:
            process.kill()
            process.wait()

    def start(
        self, command: str, *own: dict[str, Any], options: tuple[str, ...] = ()
    ) -> subprocess.Popen[bytes]:
        arguments = [command, *options]
        for index, config in enumerate((self.shared, *own)):
            path = self.folder / f"{command}.{index}.yaml"
            path.write_text(json.dumps(config))
            arguments += ["-c", str(path)]
        with (
            (self.folder / f"{command}.out").open("ab") as out,
            (self.folder / f"{command}.log").open("ab") as log,
        ):
            process = subprocess.Popen(
                [sys.executable, "-m", "synapse_replication.app.cli", *arguments],
                cwd=_ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
            )
        self.running.append(process)
        return process

    def log_of(self, command: str) -> str:
        return (self.folder / f"{command}.log").read_text()

    def wait_until(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not condition():
            if time.monotonic() > deadline:
                logs = "\n".join(
                    f"-- {file.name}\n{file.read_text()}"
                    for file in sorted(self.folder.glob("*.log"))
                )
                self.fail(f"{what} did not come about\n{logs}")
            time.sleep(0.05)

    def wait_until_up(self, command: str, times: int = 1) -> None:
        self.wait_until(
            f"{command} is up", lambda: self.log_of(command).count(" is up") == times
        )

    def stop(self, process: subprocess.Popen[bytes]) -> int:
        process.send_signal(signal.SIGTERM)
        return process.wait(_PATIENCE)

    def write_upto(self, number: int) -> None:
        (self.folder / "new").write_text(str(number))
        (self.folder / "new").rename(self.folder / "upto")

    def journal(self, stream: str) -> list[dict[str, Any]]:
        path = self.folder / "journal.jsonl"
        if not path.exists():
            return []
        lines = path.read_bytes().splitlines(keepends=True)
        entries = [json.loads(line) for line in lines if line.endswith(b"\n")]
        return [e for e in entries if e["stream"] == stream and e["rows"]]

    def wait_for_rows(self, upto: int) -> None:
        for stream in ("notes", "typing"):
            self.wait_until(
                f"{upto} tokens of {stream} in the journal",
                lambda stream=stream: len(self.journal(stream)) >= upto,  # type: ignore[misc]
            )
        entries = self.journal("notes")
        self.assertEqual(
            [row for entry in entries for row in entry["rows"]], expected_rows(upto)
        )
        tokens = [entry["token"] for entry in entries]
        self.assertEqual(tokens, sorted(set(tokens)))
        self.assertEqual(
            [entry["token"] for entry in self.journal("typing")],
            list(range(1, upto + 1)),
        )

    def test_rows_and_an_orderly_stop(self) -> None:
        """Rows arrive in order; a worker that stops says so before it goes."""
        follow = self.start("follow", options=("--json",))
        self.wait_until("follow connects", lambda: "Connected" in self.log_of("follow"))
        worker = self.start("worker", self.worker)
        main = self.start("main", self.main)
        self.wait_until_up("worker")
        self.write_upto(20)
        self.wait_for_rows(20)
        self.assertEqual(self.stop(worker), 0, self.log_of("worker"))

        def seen() -> list[dict[str, Any]]:
            text = (self.folder / "follow.out").read_bytes()
            return [
                json.loads(line)
                for line in text.splitlines(keepends=True)
                if line.endswith(b"\n")
            ]

        self.wait_until(
            "CLEAR_USER_SYNC is seen",
            lambda: any(entry["command"] == "CLEAR_USER_SYNC" for entry in seen()),
        )
        self.assertEqual(self.stop(main), 0, self.log_of("main"))
        self.assertEqual(self.stop(follow), 0, self.log_of("follow"))
        rows = [
            entry["row"]
            for entry in seen()
            if (entry["command"], entry.get("stream_name")) == ("RDATA", "notes")
        ]
        self.assertEqual(rows, expected_rows(20))

    def test_killed_worker_resumes(self) -> None:
        """A worker that was killed gets what it missed, and nothing twice."""
        main = self.start("main", self.main)
        worker = self.start("worker", self.worker)
        self.wait_until_up("worker")
        self.write_upto(10)
        self.wait_for_rows(10)
        worker.kill()
        worker.wait()
        self.write_upto(30)
        self.start("worker", self.worker)
        self.wait_until_up("worker", 2)
        self.wait_for_rows(30)
        self.assertEqual(self.stop(main), 0, self.log_of("main"))

    def test_resumes_from_the_memory_of_the_writer(self) -> None:
        """What a killed worker missed comes from what main sent last, once each."""
        metrics = self.folder / "metrics.sock"
        self.worker["worker_listeners"] = [{"type": "metrics", "path": str(metrics)}]
        main = self.start("main", self.main)
        worker = self.start("worker", self.worker)
        self.wait_until_up("worker")
        self.write_upto(10)
        self.wait_for_rows(10)
        worker.kill()
        worker.wait()
        metrics.unlink(missing_ok=True)
        self.write_upto(30)
        self.start("worker", self.worker)
        self.wait_until_up("worker", 2)
        self.wait_for_rows(30)
        resyncs = [
            line
            for line in get_over_socket(metrics, "/metrics").splitlines()
            if line.startswith("synapse_replication_resyncs_total")
            and 'stream_name="notes"' in line
        ]
        self.assertEqual(len(resyncs), 1, resyncs)
        self.assertIn('kind="partial"', resyncs[0])
        self.assertEqual(self.stop(main), 0, self.log_of("main"))

    def test_second_worker_of_a_name(self) -> None:
        """C63: two workers of one name are reported by name within seconds."""
        self.start("main", self.main)
        self.start("worker", self.worker)
        self.wait_until_up("worker")
        del self.worker["synapse_replication"]
        self.start("worker", self.worker)
        started = time.monotonic()
        self.wait_until(
            "the report",
            lambda: (
                "Two processes are called reader1" in self.log_of("worker")
                and "Two processes are called reader1" in self.log_of("main")
            ),
        )
        self.assertLess(time.monotonic() - started, 30)

    def test_direct_tcp(self) -> None:
        """Without Redis a worker gets its rows from main directly."""
        port = free_port()
        del self.shared["redis"]
        self.shared["worker_replication_port"] = port
        self.main["listeners"].append(
            {"type": "replication", "port": port, "bind_addresses": ["127.0.0.1"]}
        )
        main = self.start("main", self.main)
        worker = self.start("worker", self.worker)
        self.wait_until_up("main")
        self.wait_until_up("worker")
        self.write_upto(10)
        self.wait_for_rows(10)
        self.assertEqual(self.stop(worker), 0, self.log_of("worker"))
        self.assertEqual(self.stop(main), 0, self.log_of("main"))

    def test_port_in_use(self) -> None:
        """A process that cannot listen says where and what to do, and ends with 1."""
        port = shared_redis().port
        self.main["listeners"].append(
            {
                "type": "metrics",
                "port": port,
                "bind_addresses": [shared_redis().host],
            }
        )
        main = self.start("main", self.main)
        self.assertEqual(main.wait(_PATIENCE), 1)
        self.assertIn("Address already in use", self.log_of("main"))
        self.assertIn("choose a free port", self.log_of("main"))
        self.assertNotIn("Traceback", self.log_of("main"))
