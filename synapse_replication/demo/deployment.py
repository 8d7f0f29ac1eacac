"""The deployment of the demonstration: tables, configuration files, processes."""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Any

import attrs
import psycopg2
import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from synapse_replication.demo.check import JournalEntry, read_entries
from synapse_replication.demo.processes import ReplicationProcess
from synapse_replication.demo.script import STREAMS, DemoStream
from synapse_replication.streams.standard.registry import MAIN_INSTANCE
from synapse_replication.testing.private_process import free_port
from synapse_replication.testing.servers import PrivatePostgres, PrivateRedis

#: The processes that write, the main one first.
WRITERS = (MAIN_INSTANCE, "event_writer1", "event_writer2", "typing_writer")
READERS = ("reader1", "reader2")

SERVER_NAME = "demo.example"
DATABASE = "demo"


@attrs.frozen
class DemoPlan:
    """The parameters of a demonstration.

    :ivar recording: the recording from which the rows are taken.
    :ivar rows: the minimum number of rows to write.
    :ivar rate: the rate of all writers together, in rows per second.
    :ivar use_redis: whether to use Redis instead of direct TCP.
    """

    recording: Path
    rows: int
    rate: float
    use_redis: bool


class Deployment:
    """The servers, files and processes of a demonstration.

    The files are in a temporary folder. Each server has a temporary folder of its own.

    :param plan: the parameters of the demonstration.
    :ivar tcp_ports: the ports of the writers' direct TCP listeners; empty with Redis.
    """

    def __init__(self, plan: DemoPlan) -> None:
        self.plan = plan
        self.directory = Path(tempfile.mkdtemp(prefix="synapse-replication-demo-"))
        self.postgres = PrivatePostgres()
        self.redis = PrivateRedis() if plan.use_redis else None
        self.processes: dict[str, ReplicationProcess] = {}
        self._dsn = ""
        self.tcp_ports: dict[str, int] = {}
        self._page_port = 0

    @property
    def status_page(self) -> str:
        """The URL of the status page of the last reader."""
        return f"http://127.0.0.1:{self._page_port}/status"

    # -- starting and stopping ------------------------------------------------------

    def start_servers(self) -> None:
        """Start PostgreSQL and, if it is used, Redis; create the tables and files."""
        self.postgres.start()
        if self.redis is not None:
            self.redis.start()
        self._dsn = self.postgres.new_database(DATABASE)
        self._make_tables()
        if not self.plan.use_redis:
            self.tcp_ports = {name: free_port() for name in WRITERS}
        self._page_port = free_port()
        self._write_files()

    def start_processes(self) -> None:
        """Start the main process and the workers; do not wait until they are ready."""
        for process in self.processes.values():
            process.start()

    def let_writers_begin(self) -> None:
        """Signal the writers to start writing."""
        self.begin_file.touch()

    def stop_processes(self) -> dict[str, int | None]:
        """Stop all processes, and return the exit status of each by its name."""
        for process in self.processes.values():
            process.request_stop()
        return {name: process.wait() for name, process in self.processes.items()}

    def close(self) -> None:
        """Stop all processes and servers, and remove the folder."""
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, self.directory, ignore_errors=True)
            stack.callback(self.postgres.stop)
            if self.redis is not None:
                stack.callback(self.redis.stop)
            self.stop_processes()

    # -- written and received rows --------------------------------------------------

    def log_of(self, writer: str) -> Path:
        """Return the path of the file to which a writer logs its rows."""
        return self.directory / f"{writer}.written.jsonl"

    def journal_of(self, reader: str) -> Path:
        """Return the path of a reader's journal."""
        return self.directory / f"{reader}.journal.jsonl"

    def journal(self, reader: str) -> list[JournalEntry]:
        """Read the journal of a reader."""
        return read_entries(self.journal_of(reader))

    def written_rows(self, stream: DemoStream, writer: str) -> list[tuple[int, Any]]:
        """Read ``(token, row)`` of each row that a writer wrote to a stream.

        The rows are in the writer's log if the stream is held in memory, otherwise in
        the stream's table.
        """
        if stream.in_memory:
            return [
                (entry.token, row)
                for entry in read_entries(self.log_of(writer))
                if entry.stream_name == stream.name
                for row in entry.rows
            ]
        columns = ", ".join(stream.columns)
        with (
            contextlib.closing(psycopg2.connect(self._dsn)) as connection,
            connection.cursor() as cursor,
        ):
            cursor.execute(
                f"SELECT stream_id, json_build_array({columns})::text "
                f"FROM {stream.table} WHERE instance_name = %s",
                (writer,),
            )
            return [(token, json.loads(row)) for token, row in cursor.fetchall()]

    # -- files and tables -------------------------------------------------------------

    @property
    def begin_file(self) -> Path:
        """The file whose existence makes the writers begin."""
        return self.directory / "begin"

    def socket_of(self, name: str) -> Path:
        """Return the path of the Unix socket on which an instance serves HTTP."""
        return self.directory / f"{name}.sock"

    def _make_tables(self) -> None:
        with (
            contextlib.closing(psycopg2.connect(self._dsn)) as connection,
            connection.cursor() as cursor,
        ):
            cursor.execute(self._render("tables.sql"))
            connection.commit()

    def _write_files(self) -> None:
        shared = self.directory / "homeserver.yaml"
        # JSON is YAML.
        shared.write_text(json.dumps(self._shared_config(), indent=2))
        for name in (*WRITERS, *READERS):
            own = self.directory / f"{name}.yaml"
            own.write_text(json.dumps(self._own_config(name), indent=2))
            self.processes[name] = ReplicationProcess(
                name,
                [
                    "main" if name == MAIN_INSTANCE else "worker",
                    *("-c", str(shared), "-c", str(own)),
                ],
                self.socket_of(name),
                self.directory / f"{name}.log",
            )

    def _shared_config(self) -> Any:
        text = self._render("homeserver.yaml", secret=secrets.token_hex(16))
        return yaml.safe_load(text)

    def _own_config(self, name: str) -> Any:
        return yaml.safe_load(self._render("process.yaml", name=name))

    def _render(self, template: str, **values: object) -> str:
        """Return a template with the values of this deployment."""
        environment = Environment(
            loader=PackageLoader("synapse_replication.demo"),
            undefined=StrictUndefined,
            autoescape=False,
            trim_blocks=True,
        )
        environment.filters["quoted"] = lambda value: json.dumps(str(value))
        return environment.get_template(template).render(
            deployment=self,
            server_name=SERVER_NAME,
            database=DATABASE,
            main=MAIN_INSTANCE,
            writers=WRITERS,
            readers=READERS,
            streams=STREAMS,
            page_port=self._page_port,
            **values,
        )
