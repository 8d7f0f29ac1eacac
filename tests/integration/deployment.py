"""A main process and a worker as real processes with private servers, for tests."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psycopg2
from prometheus_client.parser import text_string_to_metric_families
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.testing.servers import shared_postgres, shared_redis
from tests.support.forks import ForkedProcess, fork

#: Timeout in s for events that normally happen within a moment.
PATIENCE = 60.0

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
    """Return the rows of ``notes`` after ``upto`` tokens were written, in order."""
    return [
        [f"note {n}", part] for n in range(1, upto + 1) for part in range(n % 3 + 1)
    ]


def get_over_socket(path: Path, url: str) -> str:
    """Return the body of a GET request over a Unix socket."""
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.closing(connection):
        connection.sock.connect(str(path))
        connection.request("GET", url)
        return connection.getresponse().read().decode()


def read_resyncs(metrics: str) -> Counter[tuple[str, str]]:
    """Return the resyncs in a reader's metrics, by stream and kind."""
    return Counter(
        {
            (sample.labels["stream_name"], sample.labels["kind"]): int(sample.value)
            for family in text_string_to_metric_families(metrics)
            if family.name == "synapse_replication_resyncs"
            for sample in family.samples
            if sample.name.endswith("_total")
        }
    )


class DeploymentTestCase(SynchronousTestCase):
    """Writes configurations, starts processes, and waits for their effects."""

    def setUp(self) -> None:
        # The path of a Unix socket must be short.
        self.folder = Path(tempfile.mkdtemp(prefix="replication-"))
        self.addCleanup(shutil.rmtree, self.folder)
        self.socket = self.folder / "main.sock"
        self._journal: list[dict[str, Any]] = []
        self._journal_bytes = 0
        self.dsn = dsn = shared_postgres().new_database()
        with contextlib.closing(psycopg2.connect(dsn)) as connection:
            connection.cursor().execute(_SCHEMA)
            connection.commit()
        redis = shared_redis()
        self.shared: dict[str, Any] = {
            # Each test has its own channel on the shared Redis.
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
        self.running: list[ForkedProcess | subprocess.Popen[bytes]] = []
        self.addCleanup(self.kill_all)

    def kill_all(self) -> None:
        for process in self.running:
            process.kill()
            process.wait()

    def environment(self, command: str) -> Mapping[str, str]:
        """Return the environment of a process."""
        return os.environ

    def start(
        self,
        command: str,
        *own: dict[str, Any],
        options: tuple[str, ...] = (),
        name: str = "",
    ) -> ForkedProcess:
        """Start a process; its files are named after ``name``, or after its command."""
        name = name or command
        arguments = [command, *options]
        for index, config in enumerate((self.shared, *own)):
            path = self.folder / f"{name}.{index}.yaml"
            path.write_text(json.dumps(config))
            arguments += ["-c", str(path)]
        return self.start_module(
            name,
            "synapse_replication",
            *arguments,
            environment=self.environment(command),
        )

    def start_module(
        self,
        name: str,
        module: str,
        *arguments: str,
        environment: Mapping[str, str] = os.environ,
    ) -> ForkedProcess:
        """Start a module as a process; its files are named after ``name``."""
        with (
            (self.folder / f"{name}.out").open("ab") as out,
            (self.folder / f"{name}.log").open("ab") as log,
        ):
            process = fork(module, arguments, out.fileno(), log.fileno(), environment)
        self.running.append(process)
        return process

    def call(self, command: str, *arguments: str) -> tuple[int, str]:
        """Run a command with main's configuration; return its exit status and output.

        :param command: the words of the command.
        """
        files = [str(self.folder / f"main.{number}.yaml") for number in (0, 1)]
        with tempfile.TemporaryFile() as output:
            process = fork(
                "synapse_replication",
                [*command.split(), "-c", files[0], "-c", files[1], *arguments],
                output.fileno(),
                output.fileno(),
            )
            self.addCleanup(process.kill)
            status = process.wait(PATIENCE)
            output.seek(0)
            return status, " ".join(output.read().decode().split())

    def log_of(self, command: str) -> str:
        return (self.folder / f"{command}.log").read_text()

    def start_both(self) -> ForkedProcess:
        """Start the main process and the worker, and return the latter."""
        self.start("main", self.main)
        worker = self.start("worker", self.worker)
        for name in ("main", "worker"):
            self.wait_until_up(name)
        return worker

    def wait_until(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > deadline:
                logs = "\n".join(
                    f"-- {file.name}\n{file.read_text()}"
                    for file in sorted(self.folder.glob("*.log"))
                )
                self.fail(f"timed out waiting for: {what}\n{logs}")
            time.sleep(0.05)

    def wait_until_up(self, command: str, times: int = 1) -> None:
        self.wait_until(
            f"{command} is up", lambda: self.log_of(command).count(" is up") == times
        )

    def wait_until_linked(self, command: str) -> None:
        """Wait until a process can publish on Redis.

        A row that it writes earlier is not published, but claimed by its POSITION.
        """
        self.wait_until(
            f"{command} can publish",
            lambda: "Connected: redis_out" in self.log_of(command),
        )

    def stop(self, process: ForkedProcess | subprocess.Popen[bytes]) -> int:
        process.send_signal(signal.SIGTERM)
        return process.wait(PATIENCE)

    def write_upto(self, number: int) -> None:
        (self.folder / "new").write_text(str(number))
        (self.folder / "new").rename(self.folder / "upto")

    def journal(self, stream: str) -> list[dict[str, Any]]:
        path = self.folder / "journal.jsonl"
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._journal_bytes)
            for line in file:
                if line.endswith(b"\n"):
                    self._journal_bytes += len(line)
                    self._journal.append(json.loads(line))
        return [e for e in self._journal if e["stream"] == stream and e["rows"]]

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

    def wait_until_main_wrote(self, upto: int) -> None:
        """Wait until main has written ``upto`` tokens of ``notes``."""
        with contextlib.closing(psycopg2.connect(self.dsn)) as connection:
            connection.autocommit = True
            cursor = connection.cursor()

            def count() -> int:
                cursor.execute("SELECT count(DISTINCT stream_id) FROM notes")
                row = cursor.fetchone()
                assert row is not None
                return int(row[0])

            self.wait_until(f"main wrote {upto}", lambda: count() >= upto)
