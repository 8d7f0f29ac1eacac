"""Five real processes, their servers, and a proxy between each process and Redis.

There are proxies between two of the writers and PostgreSQL as well, and in front of the
listeners at which the other processes reach these writers, so that they can be
replaced.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psycopg2
import psycopg2.extensions

from scripts.tools.faults.stalls import LoggedStall, shown_stalls
from scripts.tools.faults.synapse.deployments import (
    JUDGED,
    PROCESSES,
    REPLACEABLE,
    WORKERS,
    WRITER,
    Mixture,
)
from scripts.tools.faults.synapse.meter import Meter
from synapse_replication.errors import ReplicationError
from synapse_replication.testing.servers import PrivatePostgres, PrivateRedis
from tests.support.client_api import ClientApi
from tests.support.commit_proxy import CommitProxy
from tests.support.link_proxy import LinkProxy
from tests.support.synapse_peer import SynapseDeployment
from tests.support.synapse_process import MAIN, SynapseProcess, WorkerSpec, ours, stock

#: The time within which a process must write, in s.
WRITE_TIMEOUT = 60.0

_ROOT = Path(__file__).resolve().parents[4]


class Cluster:
    """A deployment of five processes.

    :param mixture: the processes that run with this package's replication.
    :param bug: the dotted name of a deliberate bug in these processes; empty for none.
    :ivar proxies: the proxies between each process and Redis, by process name.
    :ivar commit_proxies: those between some writers and PostgreSQL, by process name.
    :ivar witness_folder: the folder to which each process logs its deliveries.
    :ivar starts_of_writer: the times of restarts of the writer of typing, in s since
        the Unix epoch.
    """

    def __init__(self, mixture: Mixture, bug: str = "") -> None:
        self.mixture = mixture
        self._bug = bug
        self.postgres = PrivatePostgres()
        self.redis = PrivateRedis()
        self.proxies: dict[str, LinkProxy] = {}
        self.commit_proxies: dict[str, CommitProxy] = {}
        self.starts_of_writer: list[float] = []
        self.witness_folder = Path(tempfile.mkdtemp(prefix="synapse-replication-seen-"))
        self._log_offsets: dict[str, int] = {}
        self._stack = contextlib.ExitStack()
        self._stack.callback(shutil.rmtree, self.witness_folder, ignore_errors=True)

    def start(self) -> None:
        """Start the servers, then the processes, and wait until all respond."""
        stack = self._stack
        stack.callback(self.postgres.stop)
        self.postgres.start()
        stack.callback(self.redis.stop)
        self.redis.start()
        for name in PROCESSES:
            proxy = LinkProxy((self.redis.host, self.redis.port))
            stack.callback(proxy.close)
            self.proxies[name] = proxy
        relays: dict[str, LinkProxy] = {}
        for name in REPLACEABLE:
            self.commit_proxies[name] = CommitProxy(self.postgres)
            stack.callback(self.commit_proxies[name].close)
            # It leads to the listener, as soon as that has a port.
            relays[name] = LinkProxy(("127.0.0.1", 0))
            stack.callback(relays[name].close)
        self.deployment = self._deployment(relays)
        stack.callback(self.deployment.stop)
        self.deployment.start()

    def start_meter(self) -> Meter:
        """Start a loss meter, which is connected to Redis directly."""
        redis = {"enabled": True, "host": self.redis.host, "port": self.redis.port}
        meter = Meter(self.deployment.config_file, {"redis": redis})
        self._stack.callback(meter.kill)
        return meter

    def close(self) -> None:
        """Stop all processes and servers, and remove their files."""
        self._stack.close()

    def is_ours(self, name: str) -> bool:
        """Return whether a process runs with this package's replication."""
        return name in self.mixture.on_ours

    def process(self, name: str) -> SynapseProcess:
        """Return a process by its instance name."""
        return self.deployment.processes[name]

    def api(self, name: str) -> ClientApi:
        """Return the client API of a process."""
        return self.process(name).api

    def shown_stalls(self) -> list[LoggedStall]:
        """Return the stalls that the status of processes with this package shows."""
        if not self.mixture.on_ours:
            return []
        done = subprocess.run(
            [
                *(sys.executable, "-m", "synapse_replication.cli.main", "status"),
                *("--json", "-c", str(self.deployment.config_file)),
            ],
            capture_output=True,
            timeout=60,
            check=False,
        )
        return [
            stall
            for name, status in json.loads(done.stdout)["processes"].items()
            for stall in shown_stalls(name, status)
        ]

    def new_log_lines(self, name: str) -> list[str]:
        """Return the lines that a process logged since the last call."""
        with self.process(name).log.open("rb") as file:
            file.seek(self._log_offsets.get(name, 0))
            data = file.read()
        end = data.rfind(b"\n") + 1
        self._log_offsets[name] = self._log_offsets.get(name, 0) + end
        return data[:end].decode("utf-8", "replace").splitlines()

    def start_process(self, name: str) -> None:
        """Restart a process that was killed, and wait until it responds."""
        if name == WRITER:
            self.starts_of_writer.append(time.time())
        self.process(name).start()

    def replace_process(self, name: str) -> None:
        """Start a successor of a process, which goes on, and wait until it responds."""
        self.deployment.replace(name)
        self.start_process(name)

    def fetch_typing(self) -> list[int]:
        """Return the token of each room's newest row, from the writer of typing.

        :raises OSError: if the writer does not respond.
        :raises ApiError: if the response is an error.
        """
        port = self.deployment.replication_ports[WRITER]
        # Responses are cached by transaction id, so each request needs a new id.
        answer = ClientApi("127.0.0.1", port).request(
            "GET",
            "/_synapse/replication/get_repl_stream_updates/typing/"
            + secrets.token_hex(8),
            token=self.deployment.secret,
            query={"from_token": "0", "upto_token": "1000000"},
        )
        return [token for token, _ in answer["updates"]]

    def query(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Run a statement in the deployment's database.

        :raises psycopg2.Error: if the database is down.
        """
        connection = psycopg2.connect(**self.deployment.database)
        try:
            with connection, connection.cursor() as cursor:
                cursor.execute(sql, values or None)
                return list(cursor.fetchall()) if cursor.description else []
        finally:
            connection.close()

    def end_sessions(self, name: str) -> None:
        """End the database sessions of a process."""
        self.query(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name = %s",
            name,
        )

    @contextlib.contextmanager
    def held_write(self, name: str, table: str) -> Iterator[None]:
        """Within the context, a process waits in a transaction that writes to a table.

        :raises ReplicationError: if the process writes nothing.
        """
        connection = psycopg2.connect(**self.deployment.database)
        try:
            cursor = connection.cursor()
            cursor.execute(f"LOCK TABLE {table} IN SHARE ROW EXCLUSIVE MODE")
            deadline = time.monotonic() + WRITE_TIMEOUT
            waiting = (
                "SELECT FROM pg_stat_activity WHERE application_name = %s "
                "AND pg_backend_pid() = ANY(pg_blocking_pids(pid))"
            )
            cursor.execute(waiting, (name,))
            while not cursor.fetchall():
                if time.monotonic() > deadline:
                    raise ReplicationError(f"{name} did not write to {table}")
                time.sleep(0.01)
                cursor.execute(waiting, (name,))
            yield
        finally:
            connection.close()

    def _deployment(self, relays: Mapping[str, LinkProxy]) -> SynapseDeployment:
        witness: dict[str, Any] = {
            "folder": str(self.witness_folder),
            "writers": list(PROCESSES),
            "streams": list(JUDGED),
            "bug": self._bug,
        }
        return make_deployment(
            self.postgres.new_database(),
            {name: proxy.port for name, proxy in self.proxies.items()},
            self.mixture,
            {name: proxy.directory for name, proxy in self.commit_proxies.items()},
            relays,
            settings={
                "modules": [
                    {
                        "module": "scripts.tools.faults.synapse.witness.Witness",
                        "config": witness,
                    }
                ]
            },
        )


def make_deployment(
    dsn: str,
    redis_ports: Mapping[str, int],
    mixture: Mixture,
    database_hosts: Mapping[str, Path] | None = None,
    relays: Mapping[str, LinkProxy] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> SynapseDeployment:
    """Return a deployment of the five processes.

    :param dsn: the connection string of an empty database.
    :param redis_ports: the Redis port of each process, on the loopback interface.
    :param database_hosts: the folders of the database's sockets for some workers, by
        name.
    :param relays: see :class:`SynapseDeployment`.
    :param settings: further settings of ``homeserver.yaml``.
    """
    database = psycopg2.extensions.parse_dsn(dsn)

    def redis_of(name: str) -> dict[str, Any]:
        return {"host": "127.0.0.1", "port": redis_ports[name]}

    def settings_of(name: str) -> dict[str, Any]:
        own: dict[str, Any] = {"redis": {"enabled": True, **redis_of(name)}}
        if database_hosts and name in database_hosts:
            args = {
                **database,
                "host": str(database_hosts[name]),
                "application_name": name,
                "cp_min": 1,
                "cp_max": 5,
            }
            own["database"] = {"name": "psycopg2", "args": args}
        return own

    return SynapseDeployment(
        database=database,
        redis=redis_of(MAIN),
        workers=[WorkerSpec(name, ("client",), settings_of(name)) for name in WORKERS],
        stream_writers={
            "events": ["persister1", "persister2"],
            "typing": [WRITER],
            "receipts": [WRITER],
            "to_device": [WRITER],
        },
        launchers={
            name: ours(*mixture.options) if name in mixture.on_ours else stock
            for name in PROCESSES
        },
        settings=settings,
        environ={"PYTHONPATH": _python_path()},
        relays=relays,
    )


def _python_path() -> str:
    # Stock processes load the witness, too.
    return os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
