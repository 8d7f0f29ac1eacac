"""The demonstration's deployment, with proxies and a small disk for faults."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import psycopg2
from typing_extensions import override

from scripts.tools.faults.writer import REFUSED, delayed_calls_file, writers_of
from synapse_replication.demo.deployment import (
    DATABASE,
    READERS,
    WRITERS,
    DemoPlan,
    Deployment,
    ReplicationProcess,
    wait_until_ready,
)
from synapse_replication.demo.script import STREAMS, DemoStream
from synapse_replication.errors import ServerStartError
from synapse_replication.streams.standard.registry import MAIN_INSTANCE
from synapse_replication.testing.servers import PrivatePostgres
from tests.support.commit_proxy import CommitProxy
from tests.support.link_proxy import LinkProxy
from tests.support.pooler import PgBouncer

#: The size of the disk that is filled, in MB; a new database takes about 50.
DISK_SIZE = 160

#: The writer whose direct TCP link to the proxied process goes through the proxy.
PROXIED_WRITER = "event_writer1"

#: The counts of a process.
CONNECTIONS, DESCRIPTORS = "pooled connections", "other descriptors"
THREADS, DELAYED_CALLS = "threads", "delayed calls"

_CATCH_UPS = re.compile(
    r"^synapse_replication_catch_up_seconds_count(?:{[^}]*})? ([0-9.e+]+)$",
    re.MULTILINE,
)


@attrs.frozen
class Needs:
    """The requirements of a scenario for its deployment.

    :ivar proxied: the process whose link may be cut: its link to Redis or, over direct
        TCP, to the first writer of events. Empty for none.
    :ivar direct_tcp: whether processes connect to one another instead of to Redis.
    :ivar extension: whether processes use the extension.
    :ivar small_disk: whether PostgreSQL has a small disk of its own.
    :ivar programs: the command lines of processes that run another release.
    :ivar commits_proxied: the process whose answers to COMMIT may be lost; empty for
        none.
    :ivar pooler: the mode of a PgBouncer between the processes and PostgreSQL; empty
        for none.
    :ivar read_standby: the process whose database is a hot standby; empty for none.
    :ivar failover: ``synchronous`` or ``asynchronous`` replication to a standby that
        may be promoted; empty for none.
    """

    proxied: str = ""
    direct_tcp: bool = False
    extension: bool = True
    small_disk: bool = False
    programs: Mapping[str, list[str]] = MappingProxyType({})
    commits_proxied: str = ""
    pooler: str = ""
    read_standby: str = ""
    failover: str = ""


class SmallDiskPostgres(PrivatePostgres):
    """A PostgreSQL server with its data on a small disk, which only root can mount.

    :meth:`start` raises :exc:`ServerStartError` if the disk cannot be mounted.
    """

    @property
    def _data(self) -> Path:
        return self.directory / "data"

    @property
    def _ballast(self) -> Path:
        return self._data / "ballast"

    def _initdb(self) -> None:
        self._data.mkdir()
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK_SIZE}m", "tmpfs", self._data],
            capture_output=True,
            check=False,
        )
        if mounted.returncode:
            reason = mounted.stderr.decode("utf-8", "replace").strip()
            raise ServerStartError(f"a small disk cannot be mounted here: {reason}")
        self._data.chmod(0o700)
        if self._run_as is not None:
            os.chown(self._data, self._run_as.pw_uid, self._run_as.pw_gid)
        super()._initdb()

    def fill_disk(self) -> None:
        """Fill the disk completely."""
        with (
            self._ballast.open("ab", buffering=0) as file,
            contextlib.suppress(OSError),
        ):
            for size in (1 << 20, 1 << 12):
                with contextlib.suppress(OSError):
                    while file.write(b"\0" * size):
                        pass

    def free_disk(self) -> None:
        """Free the disk, and restart the server if it has stopped."""
        self._ballast.unlink()
        if self._process is not None and self._process.poll() is not None:
            self.kill()
            self.start()

    @override
    def stop(self) -> None:
        self.halt()
        if self._prepared and self._data.is_mount():
            subprocess.run(["umount", self._data], check=True)
        super().stop()


class FaultDeployment(Deployment):
    """A deployment under a steady load.

    :param plan: the plan; its number of rows is ignored.
    :param needs: the requirements of the scenario.
    :param skip: the number of writes of the script to skip.
    """

    def __init__(self, plan: DemoPlan, needs: Needs, skip: int) -> None:
        super().__init__(plan)
        self._needs = needs
        self._skip = skip
        self.proxy: LinkProxy | None = None
        self._catch_ups_of_killed = 0
        #: By original writer: the writers to which its tables were moved.
        self._moved: dict[str, tuple[str, ...]] = {}
        #: By original writer: all writers that its tables have had.
        self._all_writers: dict[str, set[str]] = {name: {name} for name in WRITERS}
        if needs.small_disk:
            self.postgres = SmallDiskPostgres()
        self.standby: PrivatePostgres | None = None
        self.commit_proxy: CommitProxy | None = None
        self._pooler: PgBouncer | None = None
        #: By name: the socket of a process that has replaced another.
        self._sockets: dict[str, Path] = {}

    @override
    def start_servers(self) -> None:
        self.postgres.start()
        if self._needs.commits_proxied:
            self.commit_proxy = CommitProxy(self.postgres)
        if self._needs.pooler:
            # In session mode, each of the 10 connections of six processes may need a
            # session, and so does the lock of each name.
            self._pooler = PgBouncer(
                postgres=self.postgres, mode=self._needs.pooler, pool_size=80
            ).start()
        if self._needs.read_standby or self._needs.failover:
            self.standby = PrivatePostgres(primary=self.postgres).start()
        if self._needs.failover == "synchronous":
            self._execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            self._execute("SELECT pg_reload_conf()")
        super().start_servers()
        for name, program in self._needs.programs.items():
            self.processes[name].program = program

    @property
    def end_file(self) -> Path:
        """The file whose existence makes the writers end."""
        return self.directory / "end"

    def end_writers(self) -> None:
        """Signal the writers to end."""
        self.end_file.touch()

    def kill(self, name: str) -> None:
        """End a process with SIGKILL."""
        if name in READERS:
            self._catch_ups_of_killed += count_catch_ups(self.get_metrics(name))
        self.processes[name].kill()

    def restart(self, name: str) -> None:
        """Restart a process that was killed, and wait until it is up."""
        self.processes[name].start()
        wait_until_ready([self.processes[name]])

    def move(self, writer: str, *to: str) -> None:
        """Change the configured writers of a writer's tables.

        A process must be restarted to use the new configuration.

        :param to: the new writers, among which the rows are divided.
        """
        self._moved[writer] = to
        self._all_writers[writer].update(to)
        for name in (*WRITERS, *READERS):
            own = self.directory / f"{name}.yaml"
            own.write_text(json.dumps(self._own_config(name), indent=2))

    def stop(self, name: str) -> None:
        """Stop a process cleanly."""
        self.processes[name].request_stop()
        self.processes[name].wait()

    def end_sessions(self, name: str) -> None:
        """End all sessions of a process, but not those of its successor."""
        self._execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name = %s",
            name,
        )

    def start_successor(self, name: str) -> ReplicationProcess:
        """Start another process of the same name, without waiting until it is up."""
        successor = f"{name}.successor"
        config = self._own_config(name)
        path = self.directory / f"{successor}.sock"
        for listener in config.get("worker_listeners") or config["listeners"]:
            if listener["type"] == "http":
                listener["path"] = str(path)
        config["database"]["args"]["application_name"] = successor
        own = self.directory / f"{successor}.yaml"
        own.write_text(json.dumps(config, indent=2))
        process = ReplicationProcess(
            name,
            [
                "main" if name == MAIN_INSTANCE else "worker",
                *("-c", str(self.directory / "homeserver.yaml"), "-c", str(own)),
            ],
            path,
            self.directory / f"{name}.log",
        )
        process.start()
        return process

    def has_locked_name(self, name: str) -> bool:
        """Return whether the successor of a process has the lock of their name."""
        with contextlib.closing(psycopg2.connect(self.postgres.dsn())) as connection:
            cursor = connection.cursor()
            cursor.execute(
                "SELECT FROM pg_locks JOIN pg_stat_activity USING (pid) "
                "WHERE application_name = %s AND locktype = 'advisory' AND granted",
                (f"{name}.successor",),
            )
            return cursor.rowcount > 0

    def replace(self, name: str, successor: ReplicationProcess) -> None:
        """Let a successor take the place of a process, which must end with status 1.

        :raises ServerStartError: if the process ends with another status.
        """
        replaced, self.processes[name] = self.processes[name], successor
        self._sockets[name] = self.directory / f"{name}.successor.sock"
        if (status := replaced.wait()) != 1:
            raise ServerStartError(f"the replaced {name} ended with status {status}")

    def pause_standby(self) -> None:
        """Stop the replay of the standby."""
        self._query_standby("SELECT pg_wal_replay_pause()")

    def resume_standby(self) -> None:
        """Go on with the replay of the standby."""
        self._query_standby("SELECT pg_wal_replay_resume()")

    def promote_standby(self) -> None:
        """Kill the primary, and promote the standby."""
        assert self.standby is not None
        self.postgres.kill()
        self.standby.promote()
        self._dsn = self.standby.dsn(DATABASE)

    def stored_positions(self) -> dict[tuple[str, str], int]:
        """Read the stored position of each writer of a stream."""
        with (
            contextlib.closing(psycopg2.connect(self._dsn)) as connection,
            connection.cursor() as cursor,
        ):
            cursor.execute(
                "SELECT stream_name, instance_name, stream_id FROM stream_positions"
            )
            return {(stream, writer): id_ for stream, writer, id_ in cursor.fetchall()}

    def forgotten_rows(
        self, stream: DemoStream, writer: str
    ) -> Counter[tuple[int, str]]:
        """Count the rows that the failover has lost, after all processes have ended."""
        if stream.in_memory or self.standby is None or self.postgres.running:
            return Counter()
        kept = Counter(row_keys(self.written_rows(stream, writer)))
        dsn, self._dsn = self._dsn, self.postgres.start().dsn(DATABASE)
        try:
            return Counter(row_keys(self.written_rows(stream, writer))) - kept
        finally:
            self._dsn = dsn
            self.postgres.kill()

    def _query_standby(self, sql: str) -> None:
        assert self.standby is not None
        with contextlib.closing(psycopg2.connect(self.standby.dsn())) as connection:
            connection.autocommit = True
            connection.cursor().execute(sql)

    def _execute(self, sql: str, *values: str) -> None:
        with contextlib.closing(psycopg2.connect(self.postgres.dsn())) as connection:
            connection.autocommit = True
            connection.cursor().execute(sql, values or None)

    def _database_args(self, name: str) -> Mapping[str, Any]:
        """Return the arguments with which a process connects to the database."""
        args: dict[str, Any] = {
            "host": str(self.postgres.directory),
            "port": self.postgres.port,
            "user": self.postgres.user,
            "dbname": DATABASE,
            "application_name": name,
        }
        if name == self._needs.commits_proxied:
            assert self.commit_proxy is not None
            args["host"] = str(self.commit_proxy.directory)
        elif self._pooler is not None:
            args |= {"host": str(self._pooler.directory), "port": self._pooler.port}
        elif self.standby is not None and (
            self._needs.failover or name == self._needs.read_standby
        ):
            args["host"] = f"{self.standby.directory},{self.postgres.directory}"
        return args

    @override
    def socket_of(self, name: str) -> Path:
        return self._sockets.get(name) or super().socket_of(name)

    def writers_of(self, stream: DemoStream) -> list[str]:
        """Return the currently configured writers of a stream."""
        return sorted(
            {
                name
                for writer in stream.writers.values()
                for name in writers_of(stream, writer, self._moved)
            }
        )

    def all_writers_of(self, stream: DemoStream) -> list[str]:
        """Return all current and former writers of a stream."""
        if stream.in_memory:
            return sorted(stream.writers.values())
        return sorted(
            {
                name
                for writer in stream.writers.values()
                for name in self._all_writers[writer]
            }
        )

    def is_writing(self, name: str) -> bool:
        """Return whether a process is currently configured to write any stream."""
        return any(name in self.writers_of(stream) for stream in STREAMS.values())

    def catch_ups(self) -> int:
        """Count the catch-ups of all readers since their start."""
        return self._catch_ups_of_killed + sum(
            count_catch_ups(self.get_metrics(name)) for name in READERS
        )

    def wait_for_next_rows(self, timeout: float) -> float:
        """Return the time until a row of each writer of events reaches the last reader.

        :param timeout: the longest time to wait, in s, which is returned if it passed.
        """
        started = time.monotonic()
        missing = {"event_writer1", "event_writer2"}
        line = b""
        with self.journal_of(READERS[-1]).open("rb") as journal:
            size = journal.seek(0, os.SEEK_END)
            journal.seek(max(size - 1, 0))
            # The last line may be incomplete while it is written.
            is_whole = size == 0
            while missing and time.monotonic() - started < timeout:
                line += journal.readline()
                if not line.endswith(b"\n"):
                    time.sleep(0.02)
                    continue
                ended, line = line, b""
                if not is_whole:
                    is_whole = True
                    continue
                entry = json.loads(ended)
                if entry["stream"] == "events" and entry["rows"]:
                    missing.discard(entry["writer"])
        return time.monotonic() - started

    def memory_of(self, name: str, key: str = "VmRSS") -> float:
        """Return a value of an instance's ``/proc/PID/status``, in MiB."""
        status = Path(f"/proc/{self.processes[name].pid}/status").read_text()
        found = re.search(rf"{key}:\s+(\d+)", status)
        assert found is not None
        return int(found[1]) / 1024

    def counts_of(self, name: str) -> dict[str, int]:
        """Return what an instance holds, by the words of a soak.

        Its connected Unix sockets are counted apart from all other descriptors: here,
        they are the sessions of the database, HTTP connections, and the reactor's own
        pair. Only writers report delayed calls.
        """
        process = Path(f"/proc/{self.processes[name].pid}")
        connected = connected_sockets((process / "net/unix").read_text())
        targets = []
        for file in (process / "fd").iterdir():
            # It may have been closed meanwhile.
            with contextlib.suppress(FileNotFoundError):
                targets.append(os.readlink(file))
        pooled = sum(target in connected for target in targets)
        counts = {
            CONNECTIONS: pooled,
            DESCRIPTORS: len(targets) - pooled,
            THREADS: len(list((process / "task").iterdir())),
        }
        calls = delayed_calls_file(self.directory, name)
        # It is empty for a moment whenever it is written.
        if calls.exists() and (text := calls.read_text()):
            counts[DELAYED_CALLS] = int(text)
        return counts

    def refused_writes(self) -> int:
        """Count the writes that the database refused."""
        return sum(
            (self.directory / f"{name}.log")
            .read_text("utf-8", "replace")
            .count(REFUSED)
            for name in WRITERS
        )

    @override
    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(super().close)
            if self.proxy is not None:
                stack.callback(self.proxy.close)
            if self.commit_proxy is not None:
                stack.callback(self.commit_proxy.close)
            for server in (self._pooler, self.standby):
                if server is not None:
                    stack.callback(server.stop)

    def get_metrics(self, name: str) -> str:
        """Return the metrics of an instance, after the HTTP headers."""
        return self._get(name, "/metrics")

    def get_status(self, name: str) -> Any:
        """Return the status of an instance, as decoded JSON."""
        return json.loads(self._get(name, "/status.json").partition("\r\n\r\n")[2])

    def _get(self, name: str, path: str) -> str:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10.0)
            connection.connect(str(self.socket_of(name)))
            connection.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
            answer = connection.makefile("rb").read()
        return answer.decode("utf-8", "replace")

    def _own_config(self, name: str) -> dict[str, Any]:
        config: dict[str, Any] = super()._own_config(name)
        config["database"] = {"name": "psycopg2", "args": self._database_args(name)}
        for listener in config.get("worker_listeners") or config["listeners"]:
            if "resources" in listener:
                listener["resources"][0]["names"].append("metrics")
        for declaration in config["synapse_replication"]["streams"]:
            if isinstance(declaration, dict):
                stream = STREAMS[declaration["name"]]
                declaration["writers"] = self.writers_of(stream)
        if name in WRITERS:
            config["synapse_replication"]["modules"] = [self._writer_module(name)]
        if name == self._needs.proxied and self.tcp_ports:
            self._connect_through_proxy(config["synapse_replication"]["direct_tcp"])
        if not self._needs.extension:
            config["synapse_replication"]["extension"] = {"enabled": False}
        if name == self._needs.proxied and self.redis is not None:
            if self.proxy is None:
                self.proxy = LinkProxy((self.redis.host, self.redis.port))
            config["redis"] = {
                "enabled": True,
                "host": "127.0.0.1",
                "port": self.proxy.port,
            }
        return config

    def _connect_through_proxy(self, section: dict[str, Any]) -> None:
        """Replace the address of one writer by that of the proxy."""
        port = self.tcp_ports[PROXIED_WRITER]
        if self.proxy is None:
            self.proxy = LinkProxy(("127.0.0.1", port))
        section["connect"] = [
            address.replace(f":{port}", f":{self.proxy.port}")
            for address in section["connect"]
        ]

    def _writer_module(self, name: str) -> Mapping[str, Any]:
        return {
            "module": "scripts.tools.faults.writer.make_writer",
            "config": {
                "recording": str(self.plan.recording),
                "rate": self.plan.rate,
                "begin_file": str(self.begin_file),
                "end_file": str(self.end_file),
                "log_file": str(self.log_of(name)),
                "skip": self._skip,
                "moved": {writer: list(to) for writer, to in self._moved.items()},
            },
        }


def connected_sockets(table: str) -> set[str]:
    """Return the connected Unix sockets in ``/proc/PID/net/unix``, as in ``fd``."""
    rows = (line.split() for line in table.splitlines()[1:])
    return {f"socket:[{row[6]}]" for row in rows if row[5] == "03"}


def row_keys(rows: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, str]]:
    """Yield a hashable form of rows, with their tokens."""
    for token, row in rows:
        yield token, json.dumps(row, sort_keys=True)


def count_catch_ups(metrics: str) -> int:
    """Add up the catch-ups of all streams, in the text of a process's metrics."""
    return sum(int(float(count)) for count in _CATCH_UPS.findall(metrics))
