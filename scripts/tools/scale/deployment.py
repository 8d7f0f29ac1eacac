"""A deployment of many processes with three streams, and what it has received."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg2

from scripts.tools.proc import processor_seconds, resident_mebibytes
from synapse_replication.demo.deployment import ReplicationProcess
from synapse_replication.testing.servers import PrivatePostgres, PrivateRedis

#: The streams in tables, which all writers write. The third stream is ``typing``, which
#: the main process holds in memory.
TABLES = ("first", "second")
SERVER_NAME = "scale.example"
#: The end of a log line about a stalled writer: the reason.
_STALLED = re.compile(rb"ReplicationStalled, (\w+)\)")
#: The interval at which the launcher looks whether something is done, in s.
POLL = 0.1


class _Tail:
    """Reads the lines that are added to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def lines(self) -> Iterator[bytes]:
        """Return the lines that were added since the last call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                yield line


class Journal:
    """The tokens that a process's journal has, read as the journal grows.

    :ivar rows: the number of rows of each (stream, token) in a table.
    """

    def __init__(self, path: Path) -> None:
        self._tail = _Tail(path)
        self.rows: Counter[tuple[str, int]] = Counter()

    def read(self) -> None:
        """Read the lines that were added."""
        for line in self._tail.lines():
            entry = json.loads(line)
            if entry["stream"] in TABLES and entry.get("rows"):
                self.rows[entry["stream"], entry["token"]] += len(entry["rows"])


class Deployment:
    """The servers and processes. A fifth of them write.

    :param count: the number of processes.
    :param rate: the rows that all of them write in 1 s together.
    :param batch: the rows of one write, which have one token.
    """

    def __init__(self, count: int, rate: float, batch: int) -> None:
        folder = tempfile.mkdtemp(prefix="synapse-replication-scale-")
        self.directory = Path(folder)
        self.postgres = PrivatePostgres(settings={"max_connections": "1500"})
        self.redis = PrivateRedis()
        names = ["master", *(f"worker{number}" for number in range(1, count))]
        self.writers = names[: max(1, count // 5)]
        self._every = len(self.writers) * batch / rate
        self._batch = batch
        self._go = self.directory / "go"
        self._dsn = ""
        self._secret = secrets.token_hex(16)
        self.processes: dict[str, ReplicationProcess] = {}
        self.journals: dict[str, Journal] = {}
        self._logs: dict[str, _Tail] = {}
        self._meter = _Tail(self.directory / "meter")
        self._names = names

    def start_servers(self) -> None:
        """Start PostgreSQL and Redis, create the tables, and write the files."""
        self.postgres.start()
        self.redis.start()
        self._dsn = self.postgres.new_database("scale")
        with contextlib.closing(psycopg2.connect(self._dsn)) as connection:
            connection.autocommit = True
            with connection.cursor() as cursor:
                for name in TABLES:
                    cursor.execute(
                        f"CREATE SEQUENCE {name}_seq START 2; CREATE TABLE {name} "
                        "(id bigint NOT NULL, writer text NOT NULL, body text NOT NULL)"
                        f"; CREATE INDEX ON {name} (writer, id)"
                    )
        self._write("shared", self._shared())
        for name in self._names:
            self.add(name)

    def add(self, name: str) -> ReplicationProcess:
        """Add a process, which is not started."""
        self._write(name, self._own(name))
        kind = "main" if name == "master" else "worker"
        files = ["-c", str(self._file("shared")), "-c", str(self._file(name))]
        log = self.directory / f"{name}.log"
        process = self.processes[name] = ReplicationProcess(
            name, [kind, *files], self._socket(name), log
        )
        self._logs[name] = _Tail(log)
        self.journals[name] = Journal(self.directory / f"{name}.journal")
        return process

    def write_rows(self, on: bool) -> None:
        """Let the writers write, or not."""
        if on:
            self._go.touch()
        else:
            self._go.unlink(missing_ok=True)

    def subscribed(self) -> int:
        """Return the number of processes that are subscribed to the main channel."""
        try:
            return int(self.redis.command("PUBSUB", "NUMSUB", SERVER_NAME)[1])
        except OSError:
            return 0

    def wait(self, is_done: Callable[[], bool], limit: float) -> float:
        """Wait until something is done; return after how many s, or infinity."""
        began = time.monotonic()
        while not is_done():
            for process in self.processes.values():
                process.check()
            if time.monotonic() - began > limit:
                return float("inf")
            time.sleep(POLL)
        return time.monotonic() - began

    def missing(self) -> tuple[int, int]:
        """Return how many rows the journals lack, and how many they have too many."""
        written: dict[tuple[str, int], tuple[str, int]] = {}
        with (
            contextlib.closing(psycopg2.connect(self._dsn)) as connection,
            connection.cursor() as cursor,
        ):
            for table in TABLES:
                cursor.execute(
                    f"SELECT id, writer, count(*) FROM {table} GROUP BY id, writer"
                )
                written |= {
                    (table, id_): (writer, rows)
                    for id_, writer, rows in cursor.fetchall()
                }
        lost = doubled = 0
        for name, journal in self.journals.items():
            journal.read()
            # A process does not receive its own rows.
            expected = Counter(
                {key: rows for key, (writer, rows) in written.items() if writer != name}
            )
            lost += (expected - journal.rows).total()
            doubled += (journal.rows - expected).total()
        return lost, doubled

    def count_rows(self) -> int:
        """Return how many rows one process that writes none has received."""
        return self.journals[self._names[-1]].rows.total()

    def processor_seconds(self) -> dict[str, float]:
        """Return the CPU time of each running process, in s."""
        return {
            name: processor_seconds(Path(f"/proc/{process.pid}/stat").read_text())
            for name, process in self.processes.items()
            if process.running and os.path.exists(f"/proc/{process.pid}")
        }

    def take_main(self) -> tuple[int, float]:
        """Return what main has recorded since the last call.

        :return: the number of requests for rows, and the duration of the longest turn
            of its reactor, in s.
        """
        requests, longest = 0, 0.0
        for line in self._meter.lines():
            what, value = line.split()
            if what == b"request":
                requests += 1
            else:
                longest = max(longest, float(value))
        return requests, longest

    def take_stalls(self) -> Counter[str]:
        """Return how many lines about stalled writers were logged, by reason."""
        return Counter(
            match[1].decode()
            for log in self._logs.values()
            for line in log.lines()
            if (match := _STALLED.search(line))
        )

    def mebibytes(self) -> list[float]:
        """Return the resident memory of each process, in MiB."""
        return [resident_mebibytes(each.pid) for each in self.processes.values()]

    def close(self) -> None:
        """Kill all processes, and stop the servers."""
        for process in self.processes.values():
            process.kill()
        self.redis.stop()
        self.postgres.stop()
        shutil.rmtree(self.directory)

    # -- files ------------------------------------------------------------------------

    def _file(self, name: str) -> Path:
        return self.directory / f"{name}.yaml"

    def _socket(self, name: str) -> Path:
        return self.directory / f"{name}.sock"

    def _write(self, name: str, value: Any) -> None:
        # JSON is YAML.
        self._file(name).write_text(json.dumps(value, indent=1))

    def _shared(self) -> dict[str, Any]:
        instance_map = {
            "main" if name == "master" else name: {"path": str(self._socket(name))}
            for name in self.writers
        }
        return {
            "server_name": SERVER_NAME,
            # All processes together need fewer connections than the server has.
            "database": {"name": "psycopg2", "args": {"dsn": self._dsn, "cp_max": 5}},
            "instance_map": instance_map,
            "worker_replication_secret": self._secret,
            "redis": {
                "enabled": True,
                "host": self.redis.host,
                "port": self.redis.port,
            },
        }

    def _own(self, name: str) -> dict[str, Any]:
        tables = [
            {
                "name": each,
                "table": each,
                "id_column": "id",
                "writer_column": "writer",
                "columns": {"body": "text"},
                "sequence": f"{each}_seq",
                "writers": self.writers,
            }
            for each in TABLES
        ]
        own: dict[str, Any] = {
            "streams": ["typing", *tables],
            "row_sink": {
                "module": "synapse_replication.app.journal.make_journal",
                "config": {"path": str(self.directory / f"{name}.journal")},
            },
        }
        if name in self.writers:
            streams = [*TABLES, "typing"] if name == "master" else list(TABLES)
            own["modules"] = [
                {
                    "module": "scripts.tools.scale.writer.make_writer",
                    "config": {
                        "streams": streams,
                        "every": self._every,
                        "batch": self._batch,
                        "go": str(self._go),
                    },
                }
            ]
        if name == "master":
            own["modules"].append(
                {
                    "module": "scripts.tools.scale.meter.make_meter",
                    "config": {"path": str(self.directory / "meter")},
                }
            )
        names = {"listeners": _listeners(self._socket(name))}
        if name != "master":
            names = {"worker_listeners": names["listeners"]}
        worker = {} if name == "master" else {"worker_name": name}
        return {**worker, **names, "synapse_replication": own}


def _listeners(path: Path) -> list[dict[str, Any]]:
    resources = [{"names": ["replication", "health"]}]
    return [{"type": "http", "path": str(path), "resources": resources}]
