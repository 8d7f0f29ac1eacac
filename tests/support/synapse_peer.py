"""A real Synapse deployment as real processes, used as a black box.

Theory of operation: :class:`SynapseDeployment` writes one shared ``homeserver.yaml``
and a ``worker.yaml`` for each worker into a folder, and starts a process for each with
an interpreter that has matrix-synapse installed. A *launcher* determines how a process
is started: a function from its module and its arguments to a command line, so that a
test can start it stock (:func:`stock`) or on our replication (:func:`ours`). All calls
block, as in :mod:`synapse_replication.testing.servers`, and processes end with the
thread that started them.
"""

from __future__ import annotations

import base64
import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from synapse_replication.testing.private_process import free_port
from tests.support.client_api import ApiUser, ClientApi
from tests.support.link_proxy import LinkProxy
from tests.support.synapse_process import (
    MAIN,
    Launcher,
    SynapseProcess,
    WorkerSpec,
    stock,
)


class SynapseDeployment:
    """A homeserver with several processes.

    :param database: the connection parameters of an empty database (UTF8, C
        locale), in psycopg2's form.
    :param redis: the ``redis`` section of the configuration, without ``enabled``.
    :param workers: the workers, in addition to the main process.
    :param stream_writers: the writers by stream, as in the configuration.
    :param launchers: how each process is started, by its instance name; those
        that are not named start stock.
    :param settings: further settings of ``homeserver.yaml``.
    :param environ: further environment variables of the processes.
    :param relays: the proxies through which the others reach a process, by its name.
    :ivar directory: the folder of configuration and logs.
    :ivar processes: by instance name, the main one first.
    :ivar config_file: the shared ``homeserver.yaml``.
    :ivar secret: ``worker_replication_secret``.
    :ivar database: see above.
    :ivar stream_writers: see above.
    """

    def __init__(
        self,
        *,
        database: Mapping[str, Any],
        redis: Mapping[str, Any],
        workers: Sequence[WorkerSpec] = (),
        stream_writers: Mapping[str, Sequence[str]] | None = None,
        launchers: Mapping[str, Launcher] | None = None,
        settings: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
        relays: Mapping[str, LinkProxy] | None = None,
        server_name: str = "repl.test",
    ) -> None:
        self.server_name = server_name
        self.secret = secrets.token_hex(16)
        self.registration_secret = secrets.token_hex(16)
        self.directory = Path(tempfile.mkdtemp(prefix="synapse-replication-peer-"))
        self.config_file = self.directory / "homeserver.yaml"
        self.processes: dict[str, SynapseProcess] = {}
        self._replaced: list[SynapseProcess] = []
        self._specs = {spec.name: spec for spec in workers}
        self._relays = dict(relays or {})
        self.replication_ports = {MAIN: free_port()} | {
            spec.name: free_port() for spec in workers
        }
        self.database = dict(database)
        self._redis = dict(redis)
        self.stream_writers = {k: list(v) for k, v in (stream_writers or {}).items()}
        self._settings = dict(settings or {})
        self._environ = dict(environ or {})
        launchers = launchers or {}
        main_port = free_port()
        (self.directory / "signing.key").write_text(_signing_key())
        self._write("homeserver.yaml", self._shared_config(main_port))
        self._write_log_config(MAIN)
        self.processes[MAIN] = self._make_process(
            MAIN,
            "synapse.app.homeserver",
            [self.config_file],
            main_port,
            launchers.get(MAIN),
        )
        for spec in workers:
            self._add_worker(spec, launchers.get(spec.name))

    def replace(self, name: str) -> SynapseProcess:
        """Put a successor in the place of a worker, which may go on running.

        The worker must have a relay, which then leads to the successor.

        :return: the worker. It ends with the deployment.
        """
        replaced = self.processes[name]
        self._replaced.append(replaced)
        self.replication_ports[name] = free_port()
        self._add_worker(
            self._specs[name], replaced.launcher, f"{name}.{len(self._replaced)}"
        )
        return replaced

    # -- configuration ------------------------------------------------------------

    def worker_file(self, name: str) -> Path:
        """Return the path of a worker's own configuration file."""
        return self.directory / f"{name}.yaml"

    def log_file(self, name: str) -> Path:
        """Return the path of a process's log."""
        return self.directory / f"{name}.log"

    def _make_process(
        self,
        name: str,
        module: str,
        files: Sequence[Path],
        port: int,
        launcher: Launcher | None,
        file_name: str = "",
    ) -> SynapseProcess:
        arguments = [part for file in files for part in ("-c", str(file))]
        return SynapseProcess(
            name,
            module,
            arguments,
            self.log_file(file_name or name),
            ClientApi("127.0.0.1", port),
            launcher or stock,
            self._environ,
        )

    def _add_worker(
        self, spec: WorkerSpec, launcher: Launcher | None, file_name: str = ""
    ) -> None:
        """Configure a worker.

        :param file_name: of its configuration and log, without an ending; by default,
            the name of the worker.
        """
        file_name = file_name or spec.name
        port = free_port()
        if spec.name in self._relays:
            target = ("127.0.0.1", self.replication_ports[spec.name])
            self._relays[spec.name].retarget(target)
        listeners = [
            _listener(self.replication_ports[spec.name], ["replication"]),
            _listener(port, [*spec.resources, "health"]),
        ]
        self._write(
            f"{file_name}.yaml",
            {
                "worker_app": "synapse.app.generic_worker",
                "worker_name": spec.name,
                "worker_listeners": listeners,
                "worker_log_config": str(self._write_log_config(file_name)),
                **spec.settings,
            },
        )
        self.processes[spec.name] = self._make_process(
            spec.name,
            "synapse.app.generic_worker",
            [self.config_file, self.worker_file(file_name)],
            port,
            launcher,
            file_name,
        )

    def _shared_config(self, main_port: int) -> dict[str, Any]:
        unlimited = {"per_second": 100_000, "burst_count": 100_000}
        instance_map = {
            "main" if name == MAIN else name: {
                "host": "127.0.0.1",
                "port": self._relays[name].port if name in self._relays else port,
            }
            for name, port in self.replication_ports.items()
        }
        return {
            "server_name": self.server_name,
            "report_stats": False,
            "pid_file": str(self.directory / "main.pid"),
            "signing_key_path": str(self.directory / "signing.key"),
            "media_store_path": str(self.directory / "media"),
            "log_config": str(self.directory / f"{MAIN}.log.yaml"),
            "macaroon_secret_key": secrets.token_hex(16),
            "form_secret": secrets.token_hex(16),
            "registration_shared_secret": self.registration_secret,
            "worker_replication_secret": self.secret,
            "listeners": [
                _listener(main_port, ["client", "federation", "metrics"]),
                _listener(self.replication_ports[MAIN], ["replication"]),
            ],
            "database": {
                "name": "psycopg2",
                "args": {**self.database, "cp_min": 1, "cp_max": 5},
            },
            "redis": {"enabled": True, **self._redis},
            "instance_map": instance_map,
            "stream_writers": self.stream_writers,
            "trusted_key_servers": [],
            "suppress_key_server_warning": True,
            "federation_domain_whitelist": [],
            "presence": {"enabled": True},
            # The most events of a room that one response of /sync may contain.
            "filter_timeline_limit": 100_000,
            "rc_message": unlimited,
            "rc_registration": unlimited,
            "rc_login": {"address": unlimited, "account": unlimited},
            "rc_joins": {"local": unlimited, "remote": unlimited},
            "rc_invites": {
                "per_room": unlimited,
                "per_user": unlimited,
                "per_issuer": unlimited,
            },
            "rc_room_creation": unlimited,
            "rc_reports": unlimited,
            "rc_presence": {"per_user": unlimited},
            **self._settings,
        }

    def _write_log_config(self, name: str) -> Path:
        return self._write(
            f"{name}.log.yaml",
            {
                "version": 1,
                "disable_existing_loggers": False,
                "formatters": {
                    "plain": {
                        "format": "%(asctime)s - %(name)s - %(lineno)d - "
                        "%(levelname)s - %(request)s - %(message)s"
                    }
                },
                "handlers": {
                    "file": {
                        "class": "logging.FileHandler",
                        "formatter": "plain",
                        "filename": str(self.log_file(name)),
                    }
                },
                "loggers": {"synapse.storage.SQL": {"level": "WARNING"}},
                "root": {"level": "INFO", "handlers": ["file"]},
            },
        )

    def _write(self, name: str, content: Mapping[str, Any]) -> Path:
        path = self.directory / name
        path.write_text(yaml.safe_dump(dict(content), sort_keys=False))
        return path

    # -- life ---------------------------------------------------------------------

    @property
    def main(self) -> SynapseProcess:
        """The main process."""
        return self.processes[MAIN]

    def start(self) -> SynapseDeployment:
        """Start the main process, which fills the database, then the workers.

        :raises ServerStartError: if one did not start; all are stopped again.
        """
        try:
            self.main.start()
            for process in self.processes.values():
                process.launch()
            for process in self.processes.values():
                process.wait_until_ready()
        except BaseException:
            self.halt()
            raise
        return self

    def halt(self) -> None:
        """Stop all processes, workers first; configuration and logs remain."""
        for process in self._replaced:
            process.kill()
        for process in reversed(self.processes.values()):
            process.stop()

    def stop(self) -> None:
        """Stop all processes and remove the folder. May be called twice."""
        self.halt()
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> SynapseDeployment:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    # -- use ----------------------------------------------------------------------

    def register(self, name: str) -> ApiUser:
        """Create a user on the main process."""
        return self.main.api.register(name, self.registration_secret)

    def problems(self) -> dict[str, list[str]]:
        """
        Return the errors in the logs by process, without processes that have none.
        """
        found = {
            process.name: process.problems() for process in self.processes.values()
        }
        return {name: problems for name, problems in found.items() if problems}


def _signing_key() -> str:
    seed = base64.b64encode(secrets.token_bytes(32)).decode().rstrip("=")
    return f"ed25519 a_{secrets.token_hex(2)} {seed}\n"


def _listener(port: int, names: Sequence[str]) -> dict[str, Any]:
    return {
        "type": "http",
        "port": port,
        "bind_addresses": ["127.0.0.1"],
        "resources": [{"names": list(names), "compress": False}],
    }
