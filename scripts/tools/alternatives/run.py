"""One run: the service under faults, then what its consumer received."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import psycopg2
import psycopg2.extensions
from typing_extensions import override

from scripts.tools.alternatives.service import FULL_SPEED, PACE, SCHEMA, read_lines
from synapse_replication.errors import ServerStartError
from synapse_replication.testing.private_process import (
    ChildProcess,
    PrivateServer,
    free_port,
)
from synapse_replication.testing.servers import PrivatePostgres, PrivateRedis
from tests.support.link_proxy import Cut, LinkProxy

_ROOT = Path(__file__).resolve().parents[3]
WRITERS = ("writer1", "writer2")
#: The rows per second of each writer, and how many are written at full speed.
RATE, BURST = 100.0, 20_000
#: The time without faults in which latencies are measured, in s.
STEADY = 15.0
#: How long a process or a server is down, in s, and traffic between two faults.
DOWN, PAUSE = 2.0, 1.5
#: How long a consumer is away on purpose, in s, and a transaction of others is open.
AWAY, OPEN_FOR = 8.0, 8.0
#: How often each process is killed.
KILLS = 5
#: After which time without a new row nothing more is expected, in s.
SILENCE = 12.0
#: The name of the alternative that is this package.
OURS = "ours"


@attrs.define(eq=False, repr=False, slots=False)
class PrivateNats(PrivateServer):
    """A NATS server with JetStream on disk, on a loopback port."""

    kind = "nats"
    port: int = attrs.field(default=0, init=False)

    @staticmethod
    def find() -> str | None:
        """Return the path of the program; ``None`` if it is not installed."""
        return shutil.which("nats-server", path=f"{os.environ['PATH']}:/usr/sbin")

    @override
    def _prepare(self) -> None:
        self.port = free_port()

    @override
    def _command(self) -> list[str]:
        program = self.find()
        if program is None:
            raise ServerStartError("nats-server is not installed")
        folder = str(self.directory)
        return [program, "-a", "127.0.0.1", "-p", str(self.port), "-js", "-sd", folder]

    @override
    def _is_ready(self, pid: int) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True


@attrs.frozen
class Result:
    """What a consumer received.

    :ivar written: the number of committed rows.
    :ivar reordered: the number of rows that arrived after a row of the same writer with
        a higher id.
    :ivar latencies: the times from the commit to the arrival without faults, in ms.
    :ivar delayed: the longest time from the commit to the arrival while another
        transaction of the database was open, in ms.
    :ivar rate: the rows per second from the first commit to the last arrival when
        writers were not limited.
    """

    name: str
    written: int
    lost: int
    doubled: int
    reordered: int
    latencies: tuple[float, ...]
    delayed: float
    rate: float

    def quantile(self, percent: int) -> float:
        """Return a percentile of the latencies, in ms."""
        return statistics.quantiles(self.latencies, n=100)[percent - 1]


class _Process(ChildProcess):
    """A process of the service, which can be started again."""

    def __init__(self, name: str, command: list[str], folder: Path) -> None:
        super().__init__()
        self.name = name
        self._command = command
        self._log = folder / f"{name}.log"

    def start(self) -> None:
        environ = {**os.environ, "PYTHONPATH": str(_ROOT)}
        self._process = self._launch(self._command, self._log, env=environ)

    def has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None


class _Course:
    """The processes and servers of a run, and the faults."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.stack = contextlib.ExitStack()
        self.postgres = PrivatePostgres(tcp=True)
        self.broker: PrivateServer | None = None
        self.processes: dict[str, _Process] = {}

    def start(self) -> None:
        self.stack.callback(self.postgres.stop)
        self.postgres.start()
        self.dsn = self.postgres.new_database("depot")
        self.query(SCHEMA)
        port = 0
        if self.name in ("streams", OURS):
            settings = {"appendonly": "yes"} if self.name == "streams" else None
            redis = PrivateRedis(settings=settings)
            self.stack.callback(redis.stop)
            self.broker = redis.start()
            port = redis.port
        elif self.name == "jetstream":
            nats = PrivateNats()
            self.stack.callback(nats.stop)
            self.broker = nats.start()
            port = nats.port
            self._create_stream(port)
        self.set_pace(0)
        target: tuple[str, int] = ("127.0.0.1", port)
        tcp: dict[str, Any] = {}
        if not port:
            tcp = psycopg2.extensions.parse_dsn(self.postgres.dsn("depot", tcp=True))
            target = tcp["host"], int(tcp["port"])
        self.proxy = LinkProxy(target)
        self.stack.callback(self.proxy.close)
        own_ports = [free_port() for _ in WRITERS]
        for role in (*WRITERS, "consumer"):
            dsn, broker_port = self.dsn, port
            if role == "consumer" and port:
                broker_port = self.proxy.port
            elif role == "consumer":
                own = {**tcp, "host": "127.0.0.1", "port": self.proxy.port}
                dsn = psycopg2.extensions.make_dsn(**own)
            command = self._command(role, dsn, broker_port, own_ports)
            self.processes[role] = process = _Process(role, command, self.folder)
            process.start()
            self.stack.callback(process.kill)
        time.sleep(5)

    def _command(
        self, role: str, dsn: str, port: int, own_ports: Sequence[int]
    ) -> list[str]:
        module, arguments = "peers", [self.name, role, str(self.folder), dsn, str(port)]
        if self.name == OURS:
            settings = {
                "dsn": dsn,
                "redis": port,
                "ports": own_ports,
                "folder": str(self.folder),
            }
            module, arguments = "ours", [role, json.dumps(settings)]
        return [
            sys.executable,
            "-m",
            f"scripts.tools.alternatives.{module}",
            *arguments,
        ]

    def _create_stream(self, port: int) -> None:
        from scripts.tools.alternatives.peers import JetStream

        JetStream(self.dsn, port).create_stream()

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        connection = psycopg2.connect(self.dsn)
        with contextlib.closing(connection), connection, connection.cursor() as cursor:
            cursor.execute(sql)
            return list(cursor.fetchall()) if cursor.description else []

    def set_pace(self, rate: float) -> None:
        path = self.folder / "pace.new"
        path.write_text(str(rate))
        path.replace(self.folder / PACE)

    def received(self) -> list[tuple[float, int, str]]:
        """Return the time, the token and the writer of each row, in order."""
        return [
            (line["at"], token, writer)
            for line in read_lines(self.folder / "received")
            for token, writer in line["rows"]
        ]

    def commits(self) -> dict[int, float]:
        """Return when each row was committed, as its writer noted."""
        found: dict[int, float] = {}
        for writer in WRITERS:
            for line in (self.folder / f"{writer}.commits").read_text().splitlines():
                token, at = line.split()
                found[int(token)] = float(at)
        return found

    def wait_for_silence(self, expected: int | None = None) -> None:
        last, since = -1, time.monotonic()
        while time.monotonic() - since < SILENCE:
            count = len(self.received())
            if expected is not None and count >= expected:
                return
            if count != last:
                last, since = count, time.monotonic()
            time.sleep(0.2)

    def check(self) -> None:
        """Check that all processes run.

        :raises ServerStartError: if one has ended by itself.
        """
        for name, process in self.processes.items():
            if process.has_ended():
                log = (self.folder / f"{name}.log").read_text()
                raise ServerStartError(f"{name} of {self.name} ended: {log[-1000:]}")

    # -- faults --------------------------------------------------------------------

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        time.sleep(DOWN)
        self.processes[name].start()
        time.sleep(PAUSE)

    def leave(self) -> None:
        self.processes["consumer"].end(signal.SIGTERM)
        time.sleep(AWAY)
        self.processes["consumer"].start()
        time.sleep(PAUSE)

    def disconnect(self) -> None:
        self.proxy.cut(Cut.SUBSCRIPTION if self.name == OURS else Cut.REPLIES)
        time.sleep(DOWN)
        self.proxy.heal()
        time.sleep(PAUSE)

    def kill_broker(self) -> None:
        if self.broker is not None:
            self.broker.kill()
            time.sleep(DOWN)
            self.broker.start()
            time.sleep(PAUSE)

    def open_transaction(self) -> None:
        """Let another program of the database write, and commit much later."""
        self.query("CREATE TABLE IF NOT EXISTS unrelated (n BIGINT)")
        connection = psycopg2.connect(self.dsn)
        with contextlib.closing(connection), connection, connection.cursor() as cursor:
            cursor.execute("INSERT INTO unrelated VALUES (1)")
            time.sleep(OPEN_FOR)


def run(name: str, print_line: Callable[[str], None], folder: Path) -> Result:
    """Run one alternative under all faults.

    :param folder: an empty folder.
    :raises ReplicationError: if a server does not start.
    """
    course = _Course(name, folder)
    with course.stack:
        course.start()
        course.set_pace(RATE)
        time.sleep(2)
        steady = time.time()
        time.sleep(STEADY)
        quiet = time.time()
        course.open_transaction()
        calm = time.time()
        time.sleep(PAUSE)
        for _ in range(KILLS):
            for role in (*WRITERS, "consumer"):
                course.kill(role)
            course.disconnect()
        course.leave()
        for _ in range(2):
            course.kill_broker()
        course.set_pace(0)
        course.wait_for_silence()
        course.check()
        before = len(course.received())
        print_line(f"{name}: {before} rows arrived under faults")
        latencies = _latencies(course, steady, quiet)
        delayed = max(_latencies(course, quiet, calm), default=0.0)
        began, count = time.time(), course.query("SELECT count(*) FROM movements")[0][0]
        course.set_pace(FULL_SPEED)
        while course.query("SELECT count(*) FROM movements")[0][0] < count + BURST:
            time.sleep(0.1)
        course.set_pace(0)
        time.sleep(1)
        total = course.query("SELECT count(*) FROM movements")[0][0]
        course.wait_for_silence(before + total - count)
        received = course.received()
        rate = (len(received) - before) / (received[-1][0] - began)
        written = dict(course.query("SELECT stream_id, instance_name FROM movements"))
        return _judge(name, written, received, latencies, delayed, rate)


def _latencies(course: _Course, start: float, end: float) -> tuple[float, ...]:
    arrived: dict[int, float] = {}
    for at, token, _ in course.received():
        arrived.setdefault(token, at)
    return tuple(
        1000 * (arrived[token] - at)
        for token, at in course.commits().items()
        if start <= at < end and token in arrived
    )


def _judge(
    name: str,
    written: dict[int, str],
    received: list[tuple[float, int, str]],
    latencies: tuple[float, ...],
    delayed: float,
    rate: float,
) -> Result:
    counts = Counter(token for _, token, _ in received)
    return Result(
        name,
        len(written),
        len(written.keys() - counts.keys()),
        sum(counts.values()) - len(counts),
        sum(1 for _ in _reordered(received)),
        latencies,
        delayed,
        rate,
    )


def _reordered(received: list[tuple[float, int, str]]) -> Iterator[int]:
    last: dict[str, int] = {}
    for _, token, writer in received:
        if token < last.get(writer, 0):
            yield token
        last[writer] = max(token, last.get(writer, 0))
