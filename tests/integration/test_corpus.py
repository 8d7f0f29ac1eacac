"""``main`` and ``worker`` on the configurations of :mod:`tests.config.test_corpus`.

Each process really runs: only the addresses of servers, ports and sockets are replaced
by those of the test. One process imports the program and forks for each configuration,
because importing takes longer than everything else.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import psycopg2
import psycopg2.extensions
import yaml
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.streams.standard.registry import STANDARD_STREAMS
from synapse_replication.testing.private_process import free_port
from synapse_replication.testing.servers import shared_postgres, shared_redis
from tests.config.test_corpus import CORPUS
from tests.storage.synapse_extract import SCHEMA

#: Runs the commands of each deployment of standard input together until all are up;
#: prints the status and the log of each command.
_RUN_ALL = """
import json, os, signal, sys, time
from synapse_replication.cli.main import cli
import synapse_replication.app.service, synapse_replication.app.supervision
import synapse_replication.cli.common, synapse_replication.storage.database

def start(arguments, log):
    pid = os.fork()
    if pid:
        return pid
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        cli(arguments, standalone_mode=True)
    except SystemExit as end:
        os._exit(end.code or 0)
    finally:
        os._exit(70)

def text_of(log):
    return open(log).read() if os.path.exists(log) else ""

def run(commands):
    running = {log: start(arguments, log) for arguments, log in commands}
    ended = {}
    deadline = time.monotonic() + 100
    while len(ended) < len(running) and time.monotonic() < deadline:
        time.sleep(0.02)
        for log, pid in running.items():
            if log not in ended and os.waitpid(pid, os.WNOHANG)[0]:
                ended[log] = 71
        if all(log in ended or " is up" in text_of(log) for log in running):
            break
    for log, pid in running.items():
        if log not in ended:
            os.kill(pid, signal.SIGTERM)
    for log, pid in running.items():
        if log not in ended:
            ended[log] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return [[ended[log], text_of(log)] for log in running]

print(json.dumps([run(commands) for commands in json.load(sys.stdin)]))
"""


class CorpusProcessesTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.folder = Path(self.mktemp())
        self.folder.mkdir()

    def test_main_and_worker(self) -> None:
        """Each main process and each worker starts, and stops with status 0."""
        deployments, logs = [], count()
        for name, deployment in CORPUS.items():
            database = self.new_database()
            shared = self.write(self.folder / name, deployment.shared, database)
            roles = {"main": shared}
            for file, text in deployment.workers.items():
                own = self.write(self.folder / name / file, {file: text}, database)
                roles[f"worker {file}"] = [*shared, *own]
            deployments.append(
                [
                    (
                        [role.split()[0], *(w for path in paths for w in ("-c", path))],
                        str(self.folder / f"{next(logs)}.log"),
                    )
                    for role, paths in roles.items()
                ]
            )
        done = subprocess.run(
            [sys.executable, "-c", _RUN_ALL],
            input=json.dumps(deployments).encode(),
            stdout=subprocess.PIPE,
            check=True,
        )
        found = json.loads(done.stdout)
        for name, results in zip(CORPUS, found, strict=True):
            self.assertEqual(len(results), 1 + len(CORPUS[name].workers))
            for status, log in results:
                self.assertIn(" is up", log, f"{name}: {log}")
                self.assertEqual(status, 0, f"{name}: {log}")

    def new_database(self) -> str:
        """Return the DSN of a new database with tables of a homeserver."""
        dsn = shared_postgres().new_database()
        with contextlib.closing(psycopg2.connect(dsn)) as connection, connection:
            connection.cursor().execute(
                SCHEMA
                + "".join(
                    f"CREATE SEQUENCE IF NOT EXISTS {stream.sequence};"
                    for stream in STANDARD_STREAMS.values()
                    if stream.sequence is not None
                )
            )
        return dsn

    def write(self, folder: Path, files: Mapping[str, str], database: str) -> list[str]:
        """Write files; return the paths that name them, folders as such."""
        paths: dict[str, None] = {}
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            text = text.replace("%(folder)s", str(folder))
            is_config = name.endswith(".yaml") or "/" in name
            if is_config:
                text = yaml.safe_dump(self.moved(yaml.safe_load(text), database))
            path.write_text(text)
            if name.endswith((".yaml", ".keep")):
                paths[str(path.parent if "/" in name else path)] = None
        return list(paths)

    def moved(self, content: Any, database: str) -> Any:
        """Return a file's content with the addresses of this test."""
        if not isinstance(content, dict):
            return content
        redis = shared_redis()
        for key, value in content.items():
            if key == "redis" and value:
                content[key] = {
                    "enabled": True, "host": redis.host, "port": redis.port,
                }  # fmt: skip
            elif key == "database":
                self.move_database(value, database)
            elif key == "databases":
                for each in value.values():
                    self.move_database(each, database)
            elif key in ("listeners", "worker_listeners"):
                for listener in value:
                    self.move_listener(listener)
            elif key == "synapse_replication":
                # The line that says that the process is up has the level info.
                value.pop("log_level", None)
            elif key == "instance_map":
                for each in value.values():
                    self.move_listener(each)
        return content

    def move_database(self, section: dict[str, Any], database: str) -> None:
        own = psycopg2.extensions.parse_dsn(database)
        pool = {
            name: value
            for name, value in section["args"].items()
            if name.startswith("cp_")
        }
        section["args"] = {**pool, **own}

    def move_listener(self, listener: dict[str, Any]) -> None:
        if "port" in listener:
            listener["port"] = free_port()
        if "path" in listener:
            listener["path"] = str(self.folder / Path(listener["path"]).name)
