"""Tests for the address of Redis in the configuration of real processes."""

from __future__ import annotations

from synapse_replication.testing.servers import PrivateRedis
from tests.integration.deployment import DeploymentTestCase
from tests.support.sentinel import PrivateSentinel, private_replica


class RedisAddressTests(DeploymentTestCase):
    """Tests that main and a worker find Redis; TLS is tested in test_tls.py."""

    def start_redis(self) -> PrivateRedis:
        redis = PrivateRedis(password="hush")
        self.addCleanup(redis.stop)
        return redis.start()

    def secret(self, name: str, text: str) -> str:
        """Write a secret to a file and return its path."""
        path = self.folder / name
        path.write_text(f"{text}\n")
        return str(path)

    def start_both(self) -> None:
        self.start("main", self.main)
        self.start("worker", self.worker)
        self.wait_until_up("main")
        self.wait_until_up("worker")

    def test_unix_socket(self) -> None:
        """Redis is reached by a Unix socket, with a password from a file."""
        redis = self.start_redis()
        self.shared["redis"] = {
            "enabled": True,
            "path": str(redis.socket_path),
            "password_path": self.secret("password", "hush"),
        }
        self.start_both()
        self.write_upto(5)
        self.wait_for_rows(5)
        self.assertEqual(len(redis.clients("pubsub")), 2)
        # The third one is the connection of the test itself.
        self.assertEqual(len(redis.clients("normal")), 3)
        flags = {client["flags"] for client in redis.clients("pubsub")}
        self.assertTrue(all("U" in each for each in flags), flags)

    def test_sentinel(self) -> None:
        """Redis is found by a Sentinel with another password, even after a failover."""
        redis = self.start_redis()
        replica = private_replica(redis)
        self.addCleanup(replica.stop)
        replica.start()
        sentinel = PrivateSentinel(redis, password="knock")
        self.addCleanup(sentinel.stop)
        sentinel.start()
        self.wait_until("the replica is known", sentinel.knows_replica)
        self.shared["redis"] = {
            "enabled": True,
            "password_path": self.secret("password", "hush"),
            "sentinel": {
                "master": "mymaster",
                "sentinels": [f"{sentinel.host}:{sentinel.port}"],
                "password_path": self.secret("knock", "knock"),
            },
        }
        self.start_both()
        self.write_upto(5)
        self.wait_for_rows(5)
        redis.kill()
        self.write_upto(10)
        self.wait_for_rows(10)
        self.wait_until(
            "both connections to the replica",
            lambda: (
                len(replica.clients("pubsub")) >= 2
                and len(replica.clients("normal")) >= 3
            ),
        )
