"""``main``, ``worker`` and ``status`` on the configurations of the corpus.

The configurations are those of :mod:`tests.config.test_corpus`. Each process really
runs: only the addresses of servers, ports and sockets are replaced by those of the
test.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar

import psycopg2
import psycopg2.extensions
import yaml
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.streams.standard.registry import STANDARD_STREAMS
from synapse_replication.testing.private_process import free_port
from synapse_replication.testing.servers import shared_postgres, shared_redis
from tests.config.test_corpus import CORPUS
from tests.storage.synapse_extract import SCHEMA
from tests.support.forks import ForkedProcess, fork

#: The time within which a process must start, or stop, in s.
_PATIENCE = 100.0

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
    """Tests with one configuration for each way to declare instances.

    :mod:`tests.external.long.test_corpus` starts those of the whole corpus.
    """

    names: ClassVar[Collection[str]] = (
        "docker-single",
        "workers-image-sockets",
        "conf-d",
        "ansible-writers",
        "replication-tls",
        "shared-folder",
    )

    def setUp(self) -> None:
        # Short, because of the sockets in it.
        self.folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)

    def test_main_worker_and_status(self) -> None:
        """Each process starts, is shown by status, and stops with status 0."""
        for name in self.names:
            deployment = CORPUS[name]
            database = self.new_database()
            ports: dict[tuple[str, int, bool], int] = {}
            shared = self.write(self.folder / name, deployment.shared, database, ports)
            commands = [("main", shared)]
            for file, text in deployment.workers.items():
                folder = self.folder / name / file
                own = self.write(folder, {file: text}, database, ports)
                commands.append(("worker", [*shared, *own]))
            running = {
                self.folder / f"{name}.{number}.log": self.start(
                    command, paths, self.folder / f"{name}.{number}.log"
                )
                for number, (command, paths) in enumerate(commands)
            }
            for log, process in running.items():
                self.wait_until_up(log, process, name)
            shown = self.folder / f"{name}.status.log"
            status = self.start("status", shared, shown).wait(_PATIENCE)
            self.check_status(name, status, shown.read_text())
            for process in running.values():
                process.send_signal(signal.SIGTERM)
            for log, process in running.items():
                ended = process.wait(_PATIENCE)
                self.assertEqual(ended, 0, f"{name}: {log.read_text()}")

    def start(self, command: str, paths: list[str], log: Path) -> ForkedProcess:
        """Run a command with configuration files, and write its output to a file."""
        with log.open("wb") as file:
            output = file.fileno()
            options = [word for path in paths for word in ("-c", path)]
            process = fork("synapse_replication", [command, *options], output, output)
        self.addCleanup(process.kill)
        return process

    def wait_until_up(self, log: Path, process: ForkedProcess, name: str) -> None:
        deadline = time.monotonic() + _PATIENCE
        while " is up" not in log.read_text():
            if process.poll() is not None or time.monotonic() > deadline:
                self.fail(f"{name} did not start: {log.read_text()}")
            time.sleep(0.02)

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
