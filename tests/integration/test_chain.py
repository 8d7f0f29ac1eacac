"""Tests for real processes of which each connects only to the previous one."""

from __future__ import annotations

import socket
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from synapse_replication.testing.private_process import free_port
from tests.integration.deployment import DeploymentTestCase, get_over_socket

NAMES = ("main", "w1", "w2", "w3", "w4")


class ChainTests(DeploymentTestCase):
    """Five processes over direct TCP, of which three both listen and connect."""

    def setUp(self) -> None:
        super().setUp()
        del self.shared["redis"]
        self.shared["synapse_replication"] = {"streams": ["typing"]}
        self.ports = {name: free_port() for name in NAMES}
        previous = ""
        for name in NAMES:
            listeners = [
                {"type": "metrics", "path": str(self.metrics_of(name))},
                {
                    "type": "replication",
                    "port": self.ports[name],
                    "bind_addresses": ["127.0.0.1"],
                },
            ]
            if name == "main":
                listeners += self.main["listeners"]
                self.start("main", {"listeners": listeners})
            else:
                endpoint = f"tcp:127.0.0.1:{self.ports[previous]}"
                section = {"direct_tcp": {"connect": endpoint}}
                self.start(
                    "worker",
                    {
                        "worker_name": name,
                        "worker_listeners": listeners,
                        "synapse_replication": section,
                    },
                    name=name,
                )
            previous = name
        for name, other in zip(NAMES[1:], NAMES, strict=False):
            port = self.ports[other]
            self.wait_for_line(name, f"Connected: to 127.0.0.1:{port}")
            self.wait_for_line(other, f"Connected: from {name} at 127.0.0.1:")
            server = other.replace("main", "master")
            self.wait_for_line(
                name, f"The server of the link to 127.0.0.1:{port} is {server}"
            )

    def wait_for_line(self, name: str, text: str) -> None:
        self.wait_until(f"{name} logs {text!r}", lambda: text in self.log_of(name))

    def metrics_of(self, name: str) -> Path:
        return self.folder / f"{name}.metrics"

    def received(self, name: str, command: str) -> int:
        """Return the number of commands that a process has received."""
        families = text_string_to_metric_families(
            get_over_socket(self.metrics_of(name), "/metrics")
        )
        return sum(
            int(sample.value)
            for family in families
            for sample in family.samples
            if sample.name.endswith("inbound_commands_total")
            and sample.labels["command"] == command
        )

    def handled(self) -> list[int]:
        """Return, for each process, the number of handled lines or relayed messages."""
        return [self.received(name, "REMOTE_SERVER_UP") for name in NAMES]

    def test_line_crosses_the_chain(self) -> None:
        """
        A line that a client sends to any process is handled once by each, and what each
        logs names the peers on both sides. No echo precedes the next line.
        """
        for number, name in enumerate(NAMES, 1):
            line = f"REMOTE_SERVER_UP {name}.example\n".encode()
            address = ("127.0.0.1", self.ports[name])
            with socket.create_connection(address, 10) as client:
                client.sendall(b"NAME client\n" + line)
                self.wait_for_lines(number)
                self.assertEqual(self.handled(), [number] * len(NAMES))

    def wait_for_lines(self, number: int) -> None:
        self.wait_until(f"line {number} at all", lambda: min(self.handled()) >= number)
