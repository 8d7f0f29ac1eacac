"""``main``, ``worker`` and ``status`` on the configurations of the corpus.

The configurations are those of :mod:`tests.config.test_corpus`. Each process really
runs: only the addresses of servers, ports and sockets are replaced by those of the
test. One process imports most of the program and forks for each configuration, because
importing takes longer than everything else. It does not import the reactor: the
processes would share its descriptors, and miss events.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
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

#: Runs the commands of each deployment of standard input together until all are up,
#: then its last command; prints the exit status and the log of each command.
_RUN_ALL = """
import json, os, signal, sys, time
from synapse_replication.cli.main import cli
import OpenSSL.SSL, twisted.web.server
import synapse_replication.app.supervision, synapse_replication.cli.common
import synapse_replication.handlers.extension.extension
import synapse_replication.storage.database, synapse_replication.tcp.factory
assert "twisted.internet.reactor" not in sys.modules

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
    *processes, status = commands
    running = {log: start(arguments, log) for arguments, log in processes}
    ended = {}
    deadline = time.monotonic() + 100
    while len(ended) < len(running) and time.monotonic() < deadline:
        time.sleep(0.02)
        for log, pid in running.items():
            if log not in ended and os.waitpid(pid, os.WNOHANG)[0]:
                ended[log] = 71
        if all(log in ended or " is up" in text_of(log) for log in running):
            break
    pid = start(*status)
    ended[status[1]] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    for log, pid in running.items():
        if log not in ended:
            os.kill(pid, signal.SIGTERM)
    for log, pid in running.items():
        if log not in ended:
            ended[log] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return [[ended[log], text_of(log)] for _, log in commands]

print(json.dumps([run(commands) for commands in json.load(sys.stdin)]))
"""


#: The configurations with an ``instance_map``: the number of its instances, and those
#: whose status cannot be read.
_INSTANCES: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "compose-underscores": (2, ()),
    "workers-image": (3, ()),
    "workers-image-sockets": (2, ()),
    "main-worker-app": (1, ()),
    "ansible-quoted": (2, ()),
    "ansible-writers": (3, ()),
    "kubernetes": (2, ()),
    "helm": (1, ()),
    "ipv6": (2, ()),
    # The template leaves TLS to a proxy, which does not run here.
    "replication-tls": (2, ("master", "w1")),
    # It has an address, but no listener.
    "shared-folder": (2, ("pusher1",)),
    "with-own-section": (1, ()),
}
_SUMMARY = re.compile(r"^(\d+) instances?: (.*)$", re.MULTILINE)


class CorpusProcessesTests(SynchronousTestCase):
    def setUp(self) -> None:
        # Short, because of the sockets in it.
        self.folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)

    def test_main_worker_and_status(self) -> None:
        """Each process starts, is shown by status, and stops with status 0."""
        deployments, logs = [], count()
        for name, deployment in CORPUS.items():
            database = self.new_database()
            ports: dict[tuple[str, int, bool], int] = {}
            shared = self.write(self.folder / name, deployment.shared, database, ports)
            roles = {"main": shared}
            for file, text in deployment.workers.items():
                folder = self.folder / name / file
                own = self.write(folder, {file: text}, database, ports)
                roles[f"worker {file}"] = [*shared, *own]
            roles["status"] = shared
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
        for name, (*results, shown) in zip(CORPUS, found, strict=True):
            self.assertEqual(len(results), 1 + len(CORPUS[name].workers))
            for status, log in results:
                self.assertIn(" is up", log, f"{name}: {log}")
                self.assertEqual(status, 0, f"{name}: {log}")
            self.check_status(name, *shown)

    def check_status(self, name: str, status: int, output: str) -> None:
        """Check what ``status`` shows while all processes run."""
        self.assertNotIn("Traceback", output, name)
        if name not in _INSTANCES:
            self.assertEqual(status, 2, f"{name}: {output}")
            self.assertIn("instance_map is empty", output, name)
            return
        instances, failed = _INSTANCES[name]
        self.assertEqual(status, 1 if failed else 0, f"{name}: {output}")
        ((number, counts),) = _SUMMARY.findall(output)
        self.assertEqual(int(number), instances, name)
        self.assertEqual(
            f"{len(failed)} not answering" in counts, bool(failed), f"{name}: {output}"
        )
        for instance in failed:
            self.assertIn(f"{instance}: no valid status: ", output, name)

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

    def write(
        self,
        folder: Path,
        files: Mapping[str, str],
        database: str,
        ports: dict[tuple[str, int, bool], int],
    ) -> list[str]:
        """Write files; return the paths that name them, folders as such.

        :param ports: the new port of each instance and port; updated.
        """
        paths: dict[str, None] = {}
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            text = text.replace("%(folder)s", str(folder))
            is_config = name.endswith(".yaml") or "/" in name
            if is_config:
                text = yaml.safe_dump(self.moved(yaml.safe_load(text), database, ports))
            path.write_text(text)
            if name.endswith((".yaml", ".keep")):
                paths[str(path.parent if "/" in name else path)] = None
        return list(paths)

    def moved(
        self, content: Any, database: str, ports: dict[tuple[str, int, bool], int]
    ) -> Any:
        """Return a file's content with the addresses of this test."""
        if not isinstance(content, dict):
            return content
        redis = shared_redis()
        own = content.get("worker_name", "main")
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
                    self.move_address(listener, own, ports)
            elif key == "synapse_replication":
                # The line that says that the process is up has the level info.
                value.pop("log_level", None)
            elif key == "instance_map":
                for name, address in value.items():
                    self.move_address(address, name, ports)
        return content

    def move_database(self, section: dict[str, Any], database: str) -> None:
        own = psycopg2.extensions.parse_dsn(database)
        pool = {
            name: value
            for name, value in section["args"].items()
            if name.startswith("cp_")
        }
        section["args"] = {**pool, **own}

    def move_address(
        self,
        address: dict[str, Any],
        instance: str,
        ports: dict[tuple[str, int, bool], int],
    ) -> None:
        """Move a listener of an instance, or its address in ``instance_map``."""
        if "port" in address:
            # Nothing answers where TLS is left to a proxy.
            key = instance, int(address["port"]), bool(address.get("tls"))
            if key not in ports:
                ports[key] = free_port()
            address["port"] = ports[key]
        if "path" in address:
            address["path"] = str(self.folder / Path(address["path"]).name)
        if ":" not in address.get("host", ":"):
            address["host"] = "localhost"
