"""Tests for synapse_replication.app.endpoints."""

from __future__ import annotations

from pathlib import Path

from twisted.internet.protocol import Factory
from twisted.internet.testing import MemoryReactorClock
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.app.config import Listener, RedisConfig
from synapse_replication.app.config_redis import SentinelConfig
from synapse_replication.app.endpoints import (
    client_endpoint,
    listener_descriptions,
    redis_options,
    server_endpoint,
)
from synapse_replication.errors import ConfigError
from synapse_replication.redis.options import (
    RedisOptions,
    RedisTlsOptions,
    SentinelOptions,
)


def listener(
    port: int | None = None, path: str | None = None, addresses: tuple[str, ...] = ()
) -> Listener:
    return Listener(port, path, addresses, frozenset(), False)


class EndpointTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.reactor = MemoryReactorClock()

    def test_redis(self) -> None:
        """Every key of redis reaches the connections (C23)."""
        config = RedisConfig(
            host="h",
            port=1,
            path="/s",
            username="u",
            password="p",
            dbid=3,
            use_tls=True,
            certificate_file="c",
            private_key_file="k",
            ca_file="a",
        )
        self.assertEqual(
            redis_options(config),
            RedisOptions(
                "h",
                1,
                "/s",
                "p",
                "u",
                3,
                RedisTlsOptions(Path("a"), Path("c"), Path("k")),
            ),
        )

    def test_redis_authorities(self) -> None:
        """Authorities may be in a folder; without TLS there are none."""
        folder = redis_options(RedisConfig(use_tls=True, ca_path="/certs"))
        self.assertEqual(folder.tls, RedisTlsOptions(Path("/certs")))
        self.assertIsNone(redis_options(RedisConfig(ca_path="/certs")).tls)

    def test_sentinel(self) -> None:
        """So does every key of redis.sentinel (C23)."""
        config = RedisConfig(sentinel=SentinelConfig("m", (("h", 1),), "u", "p"))
        self.assertEqual(
            redis_options(config).sentinel, SentinelOptions("m", (("h", 1),), "u", "p")
        )

    def test_listener_addresses(self) -> None:
        """A listener listens at each of its addresses, IPv6 ones included."""
        descriptions = listener_descriptions(
            listener(80, addresses=("127.0.0.1", "::1"))
        )
        for description in descriptions:
            self.successResultOf(
                server_endpoint(self.reactor, description, []).listen(Factory())
            )
        self.assertEqual(
            [(port, address) for port, _, _, address in self.reactor.tcpServers],
            [(80, "127.0.0.1"), (80, "::1")],
        )

    def test_listener_socket(self) -> None:
        """A listener may be a Unix socket, whatever its path looks like."""
        (description,) = listener_descriptions(listener(path="/run/a:b=c"))
        self.successResultOf(
            server_endpoint(self.reactor, description, []).listen(Factory())
        )
        self.assertEqual(self.reactor.unixServers[0][0], "/run/a:b=c")

    def test_bad_descriptions(self) -> None:
        """A description that Twisted does not read is a mistake with its mend."""
        with self.assertRaises(ConfigError) as caught:
            client_endpoint(self.reactor, "tpc:h:1", ["a.yaml", "b.yaml"])
        (problem,) = caught.exception.problems
        self.assertEqual(problem.file, "a.yaml, b.yaml")
        self.assertEqual(problem.key, "synapse_replication.direct_tcp.connect")
        self.assertIn("tcp:HOST:PORT", problem.mend)
        with self.assertRaises(ConfigError) as caught:
            server_endpoint(self.reactor, "tcp:x:y:z:1", [])
        self.assertIn("ssl:PORT", caught.exception.problems[0].mend)
        with self.assertRaises(ConfigError) as caught:
            server_endpoint(self.reactor, "ssl:1:privateKey=/nowhere", [])
        self.assertIn("/nowhere", caught.exception.problems[0].problem)
