"""Tests for functions that all private servers share."""

from __future__ import annotations

import socket
import sys
import tempfile
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.testing import private_process
from synapse_replication.testing.private_process import (
    free_port,
    is_binary,
    wheel_folder,
)


class PrivateProcessTests(SynchronousTestCase):
    """Tests for the functions; the class is tested with the servers that use it."""

    def test_free_port(self) -> None:
        """A free port can be listened on."""
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", free_port()))

    def test_free_port_is_not_for_outgoing_connections(self) -> None:
        """No outgoing connection takes a port before a server listens on it."""
        first, last = 40_000, 60_000
        self.patch(private_process, "_outgoing_ports", lambda: (first, last))
        for _ in range(20):
            self.assertTrue(10_000 <= free_port() < first)
        self.patch(private_process, "_outgoing_ports", lambda: (1024, 65_000))
        self.assertGreater(free_port(), 65_000)

    def test_all_ports_are_for_outgoing_connections(self) -> None:
        """
        If the kernel may assign any port to outgoing connections, it chooses the free
        port.
        """
        self.patch(private_process, "_outgoing_ports", lambda: (1024, 65_535))
        self.assertGreaterEqual(free_port(), 1024)

    def test_binaries(self) -> None:
        """
        An executable binary is recognised, but not a script, a text or a missing file.
        """
        self.assertTrue(is_binary(Path(sys.executable)))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "program"
            self.assertFalse(is_binary(path))
            path.write_bytes(b"\x7fELF")
            self.assertFalse(is_binary(path))
            path.chmod(0o755)
            self.assertTrue(is_binary(path))
            path.write_bytes(b"#!/bin/sh")
            self.assertFalse(is_binary(path))

    def test_wheels(self) -> None:
        """The folder of an installed package is found without importing it."""
        self.assertIsNone(wheel_folder("no_such_package"))
        found = wheel_folder("twisted")
        assert found is not None
        self.assertTrue((found / "__init__.py").exists())
