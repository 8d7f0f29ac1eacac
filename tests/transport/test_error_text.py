"""Tests for synapse_replication.transport.error_text."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any

from twisted.internet.address import IPv4Address, UNIXAddress
from twisted.internet.error import ConnectionRefusedError, DNSLookupError
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.transport.error_text import (
    destination,
    error_text,
    with_location,
)


class OneLineTests(SynchronousTestCase):
    """Tests for :func:`error_text`."""

    def test_refused(self) -> None:
        """The system's message is not repeated, and has no full stop."""
        error = ConnectionRefusedError(
            osError=errno.ECONNREFUSED, string="Connection refused"
        )
        self.assertEqual(error_text(error), "Connection refused")

    def test_without_number(self) -> None:
        """An error of Twisted without a number keeps its text, on one line."""
        self.assertEqual(
            error_text(DNSLookupError("no results for\n\thostname lookup: nosuch.")),
            "DNS lookup failed: no results for hostname lookup: nosuch",
        )

    def test_without_words(self) -> None:
        """An error without a text is named by its type."""
        self.assertEqual(error_text(ValueError()), "ValueError")


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
        self.assertEqual(with_location("", "refused"), "refused")
        self.assertEqual(with_location("h:1", "refused"), "h:1: refused")
