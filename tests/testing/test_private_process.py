"""Tests for functions that all private servers share."""

from __future__ import annotations

import socket

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.testing import private_process
from synapse_replication.testing.private_process import free_port


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

    def test_not_again(self) -> None:
        """A port that was returned, but on which nothing listens yet, is not reused."""
        self.patch(private_process, "_outgoing_ports", lambda: (10_100, 65_535))
        ports = [free_port() for _ in range(50)]
        self.assertEqual(len(set(ports)), 50)

    def test_all_ports_are_for_outgoing_connections(self) -> None:
        """
        If the kernel may assign any port to outgoing connections, it chooses the free
        port.
        """
        self.patch(private_process, "_outgoing_ports", lambda: (1024, 65_535))
        self.assertGreaterEqual(free_port(), 1024)
