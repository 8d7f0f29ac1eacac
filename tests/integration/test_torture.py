"""Tests for ids and positions with real processes that are killed at random.

Duration and seed are set in the environment::

    TORTURE_SECONDS=300 TORTURE_SEED=7 python -m twisted.trial \
        tests.integration.test_torture
"""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.storage.transactions import connect
from synapse_replication.testing.servers import PrivatePostgres, shared_redis
from tests.support.forks import ForkedProcess, fork

_SECONDS = float(os.environ.get("TORTURE_SECONDS", "6"))
_SEED = int(os.environ.get("TORTURE_SEED", "1"))

#: Number of blocks in which a writer allocates ids concurrently.
_CONCURRENCY = 50

#: Time in s for all positions to agree after the last fault.
_AGREE_SECONDS = 5.0

_PATIENCE = 60.0
_WRITERS = ("writer1", "writer2", "writer3", "writer4")
_READERS = ("reader1", "reader2")

_SCHEMA = """
    CREATE TABLE stream_positions (
        stream_name text NOT NULL, instance_name text NOT NULL,
        stream_id bigint NOT NULL
    );
    CREATE UNIQUE INDEX stream_positions_idx
        ON stream_positions (stream_name, instance_name);
    CREATE SEQUENCE notes_seq START 2;
    CREATE TABLE notes (
        stream_id bigint NOT NULL, instance_name text NOT NULL,
        note text NOT NULL, part bigint NOT NULL
    );
    CREATE INDEX notes_index ON notes (instance_name, stream_id);
    CREATE INDEX notes_id ON notes (stream_id)
"""


class TortureTests(SynchronousTestCase):
    """Tests with four writers, two readers and faults."""

    def setUp(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="torture-"))
        if "TORTURE_KEEP" not in os.environ:
            self.addCleanup(shutil.rmtree, self.folder)
        self.running: dict[str, ForkedProcess] = {}
        self.postgres = PrivatePostgres()
        self.postgres.start()
        self.addCleanup(self.postgres.stop)
        self.addCleanup(self.kill_all)
        self.dsn = self.postgres.new_database()
        with connect(self.dsn) as connection:
            connection.cursor().execute(_SCHEMA)
        connection.close()
        self.random = random.Random(_SEED)

    def kill_all(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()

    def start(self, name: str) -> None:
        redis = shared_redis()
        own = self.own_config(name)
        shared: dict[str, Any] = {
            "server_name": f"{self.folder.name}.test",
            "worker_name": name,
            "database": {"name": "psycopg2", "args": {"dsn": self.dsn, "cp_max": 4}},
            "redis": {"enabled": True, "host": redis.host, "port": redis.port},
            "instance_map": {
                instance: {"host": "127.0.0.1", "port": port}
                for port, instance in enumerate(("main", *_WRITERS), 1)
            },
            "synapse_replication": {
                "streams": [
                    {
                        "name": "notes",
                        "table": "notes",
                        "id_column": "stream_id",
                        "writer_column": "instance_name",
                        "columns": {"note": "text", "part": "integer"},
                        "sequence": "notes_seq",
                        "writers": list(_WRITERS),
                    }
                ],
                **own,
            },
        }
        path = self.folder / f"{name}.yaml"
        path.write_text(json.dumps(shared))
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = fork(
                "synapse_replication",
                ["worker", "-c", str(path)],
                log.fileno(),
                log.fileno(),
            )

    def own_config(self, name: str) -> dict[str, Any]:
        module = "tests.integration.torture_module"
        status = str(self.folder / f"{name}.status")
        if name in _READERS:
            sink = {
                "path": str(self.folder / f"{name}.journal"),
                "counts": str(self.folder / f"{name}.counts"),
                "dsn": self.dsn,
            }
            return {
                "row_sink": {"module": f"{module}.make_sink", "config": sink},
                "modules": [
                    {
                        "module": f"{module}.make_reader_status",
                        "config": {"status": status},
                    }
                ],
            }
        writer = {
            "dsn": self.dsn,
            "concurrency": _CONCURRENCY,
            "seed": self.random.randrange(2**32),
            "stop": str(self.folder / "stop"),
            "allocated": str(self.folder / f"{name}.allocated"),
            "status": status,
        }
        return {"modules": [{"module": f"{module}.make_writer", "config": writer}]}

    def kill(self, name: str) -> None:
        process = self.running[name]
        process.kill()
        process.wait()
        (self.folder / f"{name}.status").unlink(missing_ok=True)

    def status(self, name: str) -> dict[str, int]:
        try:
            status: dict[str, int] = json.loads(
                (self.folder / f"{name}.status").read_text()
            )
        except FileNotFoundError:
            return {}
        return status

    def wait_until(
        self, what: str, condition: Callable[[], bool], patience: float = _PATIENCE
    ) -> None:
        deadline = time.monotonic() + patience
        while not condition():
            for name, process in self.running.items():
                if process.poll() is not None:
                    self.fail(f"{name} exited unexpectedly\n{self.logs()}")
            if time.monotonic() > deadline:
                self.fail(
                    f"timed out waiting for: {what} (seed {_SEED})\n{self.logs()}"
                )
            time.sleep(0.05)

    def logs(self) -> str:
        lines = []
        for name in (*_WRITERS, *_READERS):
            log = self.folder / f"{name}.log"
            # A process that has not been started has no log.
            text = log.read_text()[-1500:] if log.exists() else ""
            lines.append(f"-- {name} {self.status(name)}\n{text}")
        return "\n".join(lines)

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        connection = connect(self.dsn)
        try:
            with connection.cursor() as cursor:
                cursor.execute(statement)
                return cursor.fetchall()
        finally:
            connection.close()

    def stored(self) -> dict[str, int]:
        rows = self.sql("SELECT instance_name, stream_id FROM stream_positions")
        return {str(writer): int(position) for writer, position in rows}

    def agree(self) -> bool:
        """
        Return whether all processes report the same position and no block is running.
        """
        status = {name: self.status(name) for name in (*_WRITERS, *_READERS)}
        if not all(status.values()):
            return False
        if any(status[writer]["running"] for writer in _WRITERS):
            return False
        ends = {one["persisted_upto"] for one in status.values()}
        ends |= {status[writer]["announced"] for writer in _WRITERS}
        greatest = self.sql("SELECT max(stream_id) FROM notes")[0][0]
        stored = self.stored()
        return (
            len(ends) == 1
            and ends.pop() >= greatest
            and all(stored[w] >= status[w]["local"] for w in _WRITERS)
        )

    def log_time(self, message: str) -> None:
        with (self.folder / "times").open("a") as file:
            file.write(f"{time.monotonic():.3f} {message}\n")

    def run_faults(self) -> None:
        """Kill writers, and PostgreSQL once, and restart them."""
        faults = [
            "postgres",
            *self.random.choices(_WRITERS, k=max(int(_SECONDS / 3), 3)),
        ]
        self.random.shuffle(faults)
        end = time.monotonic() + _SECONDS
        pause = _SECONDS / (len(faults) + 1)
        for fault in faults:
            time.sleep(pause * (0.5 + self.random.random() / 2))
            self.log_time(f"kill {fault} {time.time()}")
            if fault == "postgres":
                self.postgres.kill()
                time.sleep(self.random.random())
                self.postgres.start()
            else:
                self.kill(fault)
                self.start(fault)
        time.sleep(max(end - time.monotonic(), 0))

    def test_torture(self) -> None:
        """
        No id is used twice, no open block counts as complete, every committed row
        reaches each reader once, and in the end all positions agree.
        """
        # Start the readers first, because a new reader starts at the writers'
        # positions.
        for name in _READERS:
            self.start(name)
        self.wait_until("all read", lambda: all(map(self.status, _READERS)))
        for name in _WRITERS:
            self.start(name)
        self.wait_until(
            "all write",
            lambda: all(self.status(w).get("local", 0) > 1 for w in _WRITERS),
        )
        self.run_faults()
        self.wait_until("all run again", lambda: all(map(self.status, _WRITERS)))
        self.wait_until("there is enough to compare", self.has_enough)
        (self.folder / "stop").touch()
        self.wait_until(
            "all blocks end",
            lambda: all(self.status(w).get("running") == 0 for w in _WRITERS),
        )
        self.wait_until("all positions agree", self.agree, _AGREE_SECONDS)
        self.check()

    def has_enough(self) -> bool:
        ((rows,),) = self.sql("SELECT count(*) FROM notes")
        return rows > 20 * _SECONDS and all(
            len(self.counts(reader)) > _SECONDS for reader in _READERS
        )

    def counts(self, reader: str) -> list[str]:
        path = self.folder / f"{reader}.counts"
        return path.read_text().splitlines() if path.exists() else []

    def check(self) -> None:
        rows = self.sql("SELECT stream_id, instance_name, part FROM notes")
        self.check_ids(rows)
        for reader in _READERS:
            self.check_reader(reader, rows)

    def check_ids(self, rows: list[tuple[Any, ...]]) -> None:
        allocated = Counter(
            int(line)
            for writer in _WRITERS
            for line in (self.folder / f"{writer}.allocated").read_text().split()
        )
        twice = [id_ for id_, count in allocated.items() if count > 1]
        self.assertEqual(twice, [], f"ids allocated twice (seed {_SEED})")
        parts = Counter((id_, part) for id_, _, part in rows)
        self.assertEqual([row for row, count in parts.items() if count > 1], [])

    def check_reader(self, reader: str, rows: list[tuple[Any, ...]]) -> None:
        received: Counter[tuple[int, str, int]] = Counter()
        tokens: dict[str, int] = {}
        for line in (self.folder / f"{reader}.journal").read_text().splitlines():
            entry = json.loads(line)
            if entry["rows"]:
                self.assertGreater(entry["token"], tokens.get(entry["writer"], 0))
                tokens[entry["writer"]] = entry["token"]
            for _, part in entry["rows"]:
                received[entry["token"], entry["writer"], part] += 1
        missing = set(rows) - set(received)
        self.assertEqual(missing, set(), f"{reader} missed rows (seed {_SEED})")
        self.assertEqual(set(received) - set(rows), set(), reader)
        doubled = [row for row, count in received.items() if count > 1]
        self.assertEqual(doubled, [], f"{reader} got rows twice (seed {_SEED})")

        ids = sorted(id_ for id_, _, _ in rows)
        for line in self.counts(reader):
            low, upto, seen = json.loads(line)
            there = sum(1 for id_ in ids if low < id_ <= upto)
            self.assertEqual(
                seen,
                there,
                f"{reader} took {upto} for complete when {there - seen} rows above "
                f"{low} were still open (seed {_SEED})",
            )
