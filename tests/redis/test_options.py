"""Tests of Redis's address, and of the reactor's method to connect to it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from twisted.internet.protocol import ClientFactory
from twisted.internet.testing import MemoryReactorClock
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.redis.options import (
    RedisOptions,
    RedisTlsOptions,
    SentinelOptions,
)


class RedisOptionsTests(SynchronousTestCase):
    """Tests for :class:`RedisOptions` and :class:`RedisTlsOptions`."""

    def setUp(self) -> None:
        self.reactor: Any = MemoryReactorClock()
        self.factory = ClientFactory()

    def test_port(self) -> None:
        """A host and port are connected to by TCP."""
        options = RedisOptions("redis.example", 1234)
        options.connect(self.reactor, self.factory, 10)
        self.assertEqual(
            self.reactor.tcpClients[0][:2] + self.reactor.tcpClients[0][3:4],
            ("redis.example", 1234, 10),
        )
        self.assertEqual(options.address, "redis.example:1234")

    def test_unix_socket(self) -> None:
        """A path takes precedence over host and port."""
        options = RedisOptions(path="/run/redis.sock")
        options.connect(self.reactor, self.factory, 10)
        self.assertEqual(self.reactor.unixClients[0][0], "/run/redis.sock")
        self.assertEqual(options.address, "/run/redis.sock")

    def test_sentinel(self) -> None:
        """With Sentinel, the address is the master's name; no password is shown."""
        options = RedisOptions(
            sentinel=SentinelOptions("mymaster", (("s", 1),), password="knock")
        )
        self.assertEqual(options.address, "Sentinel's master mymaster")
        self.assertNotIn("knock", repr(options))

    def test_tls(self) -> None:
        """With TLS, the server's name or address is verified."""
        for host in ("redis.example", "127.0.0.1"):
            options = RedisOptions(host, tls=RedisTlsOptions())
            options.connect(self.reactor, self.factory, 10)
            self.assertEqual(self.reactor.sslClients[-1][0], host)
        self.assertEqual(options.address, "127.0.0.1:6379 (TLS)")

    def test_secret(self) -> None:
        """``repr`` does not contain the password."""
        self.assertNotIn("hush", repr(RedisOptions(password="hush")))

    def test_files(self) -> None:
        """An error about a missing file or one without a certificate names it."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "authority.pem"
            with self.assertRaises(OSError):
                RedisTlsOptions(file).context_factory("redis.example")
            file.write_text("nothing")
            with self.assertRaisesRegex(ValueError, r"authority\.pem"):
                RedisTlsOptions(file).context_factory("redis.example")
