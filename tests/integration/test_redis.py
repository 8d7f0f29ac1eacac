"""Tests for the address of Redis in the configuration of real processes."""

from __future__ import annotations

import json

from synapse_replication.testing.servers import PrivateRedis
from tests.integration.deployment import DeploymentTestCase, get_over_socket
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

    def test_split(self) -> None:
        """
        While two Sentinels name different masters, the page of a process at one says
        that it does not hear those at the other, and nothing else is lost.
        """
        servers = [self.start_redis(), self.start_redis()]
        sentinels = [PrivateSentinel(servers[0], password="knock") for _ in servers]
        password = self.secret("password", "hush")
        for sentinel, process in zip(sentinels, (self.main, self.worker), strict=True):
            self.addCleanup(sentinel.stop)
            sentinel.start()
            process["redis"] = {
                "enabled": True,
                "password_path": password,
                "sentinel": {
                    "master": "mymaster",
                    "sentinels": [f"{sentinel.host}:{sentinel.port}"],
                    "password": "knock",
                },
            }
        page = self.folder / "worker.sock"
        resources = [{"names": ["metrics"]}]
        self.worker["worker_listeners"] = [
            {"type": "http", "path": str(page), "resources": resources}
        ]
        self.start_both()
        self.write_upto(5)
        self.wait_for_rows(5)

        def monitor(server: PrivateRedis) -> None:
            command = sentinels[1].command
            command("SENTINEL", "REMOVE", "mymaster")
            command("SENTINEL", "MONITOR", "mymaster", server.host, server.port, "1")
            command("SENTINEL", "SET", "mymaster", "auth-pass", "hush")

        def reasons() -> set[tuple[str, str | None]]:
            status = json.loads(get_over_socket(page, "/status.json"))
            return {
                (each["instance_name"], each["reason"]) for each in status["writers"]
            }

        monitor(servers[1])
        self.wait_until(
            "the page says so", lambda: reasons() == {("master", "writer_gone")}
        )
        self.write_upto(10)
        self.wait_until_main_wrote(10)
        monitor(servers[0])
        self.wait_for_rows(10)
        self.wait_until("all is well", lambda: reasons() == {("master", None)})
