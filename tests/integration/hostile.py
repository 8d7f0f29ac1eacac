"""A deployment of real processes for tests to attack, and ways to inspect it."""

from __future__ import annotations

import atexit
import contextlib
import http.client
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.faults.deployment import FaultDeployment, Needs
from synapse_replication.demo.deployment import (
    READERS,
    WRITERS,
    DemoPlan,
    wait_until_ready,
)
from synapse_replication.recordings.reader import shipped_recording

#: Timeout in s for events that normally happen within a moment.
PATIENCE = 60.0

#: The running deployments by ``use_redis``.
_shared: dict[bool, FaultDeployment] = {}


class UnixHTTPConnection(http.client.HTTPConnection):
    """An HTTP connection to a process's Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=PATIENCE)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def post(
    connection: http.client.HTTPConnection,
    path: str,
    body: bytes,
    *,
    is_chunked: bool,
) -> int:
    """Post a form; return the status, or 0 if the connection was closed before it."""
    length = ("Transfer-Encoding", "chunked") if is_chunked else None
    with contextlib.closing(connection):
        connection.putrequest("POST", path)
        connection.putheader("Content-Type", "application/x-www-form-urlencoded")
        connection.putheader(*(length or ("Content-Length", str(len(body)))))
        connection.endheaders()
        # The server may answer and close the connection before it has read everything.
        with contextlib.suppress(ConnectionError):
            if is_chunked:
                connection.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
            else:
                connection.send(body)
        try:
            return connection.getresponse().status
        except ConnectionError:
            return 0


class HostileTestCase(SynchronousTestCase):
    """Starts four writers and two readers that write nothing on their own."""

    def deploy(self, *, use_redis: bool) -> FaultDeployment:
        """Return a running deployment; all tests share one of each kind."""
        if use_redis not in _shared:
            plan = DemoPlan(shipped_recording(), 0, 100.0, use_redis=use_redis)
            needs = Needs(direct_tcp=not use_redis)
            deployment = FaultDeployment(plan, needs, 0)
            atexit.register(deployment.close)
            deployment.start_servers()
            deployment.start_processes()
            wait_until_ready(deployment.processes.values())
            _shared[use_redis] = deployment
        return _shared[use_redis]

    @contextlib.contextmanager
    def peer(
        self, deployment: FaultDeployment, name: str, greeting: bytes = b""
    ) -> Iterator[socket.socket]:
        """Connect to a writer's direct TCP port."""
        with socket.create_connection(
            ("127.0.0.1", deployment.tcp_ports[name]), PATIENCE
        ) as connection:
            connection.sendall(greeting)
            yield connection

    @staticmethod
    def read_until_closed(connection: socket.socket) -> bytes:
        """Return everything that a peer sends before it closes."""
        data = b""
        with contextlib.suppress(ConnectionError):
            while chunk := connection.recv(65536):
                data += chunk
        return data

    def wait_until(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > deadline:
                self.fail(f"timed out waiting for: {what}")
            time.sleep(0.05)

    def received(self, deployment: FaultDeployment, name: str, command: str) -> int:
        """Return how many lines with the command an instance has received."""
        return int(
            sum(
                sample.value
                for family in text_string_to_metric_families(
                    deployment.get_metrics(name).partition("\r\n\r\n")[2]
                )
                for sample in family.samples
                if sample.name.endswith("inbound_commands_total")
                and sample.labels["command"] == command
            )
        )

    def wait_for_links(self, deployment: FaultDeployment) -> None:
        """Wait until each writer has links with every other one, in both directions."""
        wanted = 2 * (len(WRITERS) - 1) + len(READERS)
        self.wait_until(
            "the mesh",
            lambda: all(
                re.search(
                    rf"total_connections(?:{{[^}}]*}})? {wanted}\.0",
                    deployment.get_metrics(name),
                )
                for name in WRITERS
            ),
        )

    @staticmethod
    def peak_memory(deployment: FaultDeployment, name: str) -> float:
        """Return the peak memory of an instance, in MiB."""
        status = Path(f"/proc/{deployment.processes[name].pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024
