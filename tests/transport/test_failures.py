"""Tests for synapse_replication.transport.failures."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any

from twisted.internet.address import IPv4Address, UNIXAddress
from twisted.internet.error import ConnectionRefusedError, DNSLookupError
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.transport.failures import at, destination, one_line


class OneLineTests(SynchronousTestCase):
    """Tests for :func:`one_line`."""

    def test_refused(self) -> None:
        """The system's message is not repeated, and has no full stop."""
        error = ConnectionRefusedError(
            osError=errno.ECONNREFUSED, string="Connection refused"
        )
        self.assertEqual(one_line(error), "Connection refused")

    def test_without_number(self) -> None:
        """An error of Twisted without a number keeps its text, on one line."""
        self.assertEqual(
            one_line(DNSLookupError("no results for\n\thostname lookup: nosuch.")),
            "DNS lookup failed: no results for hostname lookup: nosuch",
        )

    def test_without_words(self) -> None:
        """An error without a text is named by its type."""
        self.assertEqual(one_line(ValueError()), "ValueError")


class DestinationTests(SynchronousTestCase):
    """Tests for :func:`destination`."""

    def describe(self, address: Any) -> str:
        connector: Any = SimpleNamespace(getDestination=lambda: address)
        return destination(connector)

    def test_tcp(self) -> None:
        """A TCP address is described by host and port."""
        self.assertEqual(
            self.describe(IPv4Address("TCP", "redis.example", 6379)),
            "redis.example:6379",
        )

    def test_unix(self) -> None:
        """A Unix socket is described by its path."""
        self.assertEqual(self.describe(UNIXAddress(b"/run/redis")), "/run/redis")

    def test_unknown(self) -> None:
        """An unknown destination is described by an empty text."""
        self.assertEqual(self.describe(None), "")
        self.assertEqual(at("", "refused"), "refused")
        self.assertEqual(at("h:1", "refused"), "h:1: refused")
