"""The deployment of the demonstration: servers, tables, files, and processes.

Theory of operation: the main process and the workers are processes of the operating
system, as in a real deployment. Their configuration comes from templates. Some of the
functions block. Call all of them in the main thread of the launcher: on Linux, each
process is started with PR_SET_PDEATHSIG, so the kernel kills it when the thread that
started it ends.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
import psycopg2
import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from synapse_replication.demo.check import JournalEntry, read_entries
from synapse_replication.demo.script import STREAMS, DemoStream
from synapse_replication.errors import ServerStartError
from synapse_replication.streams.standard.registry import MAIN_INSTANCE
from synapse_replication.testing.private_process import ChildProcess, free_port
from synapse_replication.testing.servers import PrivatePostgres, PrivateRedis

#: The processes that write, the main one first.
WRITERS = (MAIN_INSTANCE, "event_writer1", "event_writer2", "typing_writer")
READERS = ("reader1", "reader2")

SERVER_NAME = "demo.example"
DATABASE = "demo"

#: The time within which all processes must be up, in s.
START_TIMEOUT = 60.0

#: The maximum number of log lines that are shown when a process has failed.
TAIL_LINES = 25

#: The signals that raise ``KeyboardInterrupt`` in the launcher.
_INTERRUPTING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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


@attrs.define(eq=False, repr=False, slots=False)
class ReplicationProcess(ChildProcess):
    """A process of the demonstration: the main process or a worker.

    :param name: the instance name.
    :param arguments: the arguments of ``synapse-replication``.
    :param health_socket: the Unix socket on which the process serves ``/health`` once
        it is up.
    :param log_file: the file to which the output of the process is appended.
    :ivar program: the command line of ``synapse-replication``.
    """

    name: str
    _arguments: Sequence[str]
    _health_socket: Path
    _log_file: Path
    program: Sequence[str] = attrs.field(
        default=(sys.executable, "-m", "synapse_replication"), init=False
    )

    stop_timeout = 20.0

    def start(self) -> None:
        """Start the process, without waiting until it is up.

        Call it again only after :meth:`wait` or :meth:`kill`.
        """
        command = [*self.program, *self._arguments]
        self._process = self._launch(command, self._log_file)

    def check(self) -> None:
        """Check that the process has not ended unexpectedly.

        :raises ServerStartError: if the process was started and has ended, and
            :meth:`wait` was not called; the message contains the end of its log.
        """
        if self._process is None:
            return
        # An interruption in ``poll`` would leave its lock locked, for which
        # :meth:`wait` would wait for ever.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTING)
        try:
            status = self._process.poll()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if status is not None:
            raise ServerStartError(
                f"{self.name} ended with status {status}; "
                f"the end of its log:\n{self.log_tail()}"
            )

    def is_ready(self) -> bool:
        """Return whether the process is up, according to ``/health``."""
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(1.0)
                connection.connect(str(self._health_socket))
                connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
                return b" 200 " in connection.recv(100)
        except OSError:
            return False

    def request_stop(self) -> None:
        """Send SIGTERM. A second SIGTERM would end the process without a clean stop."""
        self.send_signal(signal.SIGTERM)

    def log_text(self) -> str:
        """Return the process's log."""
        return self._log_file.read_text("utf-8", "replace")

    def log_tail(self) -> str:
        """Return the last lines of the process's log."""
        lines = self.log_text().splitlines()
        return "\n".join(f"  {line}" for line in lines[-TAIL_LINES:])


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


def interrupt_on_termination() -> None:
    """Install handlers of SIGTERM and SIGHUP that raise ``KeyboardInterrupt``.

    The process then cleans up as it does on Ctrl-C.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)


def wait_until_ready(processes: Iterable[ReplicationProcess]) -> None:
    """Wait until all processes are up.

    :raises ServerStartError: if a process ended before it was up, or was not up in
        time.
    """
    deadline = time.monotonic() + START_TIMEOUT
    for process in processes:
        while not process.is_ready():
            process.check()
            if time.monotonic() > deadline:
                raise ServerStartError(
                    f"{process.name} did not come up within {START_TIMEOUT:.0f} s; "
                    f"the end of its log:\n{process.log_tail()}"
                )
            time.sleep(0.05)
