"""Tests for :mod:`synapse_replication.config.redis`."""

from __future__ import annotations

from synapse_replication.config.process import Purpose, load_config
from synapse_replication.config.redis import RedisConfig, SentinelConfig
from synapse_replication.errors import ConfigError
from tests.config.test_files import FilesMixin

SENTINEL = """\
server_name: x.test
redis:
  enabled: true
  password: hush
  sentinel:
    master: mymaster
    sentinels: ["s1:7000", s2, "[::1]:7001", "[::1]"]
    username: bob
    password_path: PATH
"""


class RedisTests(FilesMixin):
    """Tests for the section ``redis``; more are in test_process.py."""

    def load(self, text: str) -> RedisConfig:
        config = load_config([self.write("1.yaml", text)], Purpose.FOLLOW)
        assert config.redis is not None
        return config.redis

    def problems_of(self, text: str) -> list[str]:
        with self.assertRaises(ConfigError) as caught:
            self.load(text)
        return [str(problem) for problem in caught.exception.problems]

    def test_sentinel(self) -> None:
        """Sentinels may omit the port; their password may come from a file."""
        secret = self.write("secret", " knock\n")
        redis = self.load(SENTINEL.replace("PATH", secret))
        sentinels = (("s1", 7000), ("s2", 26379), ("::1", 7001), ("::1", 26379))
        self.assertEqual(
            redis.sentinel, SentinelConfig("mymaster", sentinels, "bob", "knock")
        )
        self.assertNotIn("knock", repr(redis))
        self.assertEqual(
            redis.address,
            "the master mymaster of the Sentinels at s1:7000, s2:26379, ::1:7001, "
            "::1:26379",
        )

    def test_one_sentinel(self) -> None:
        """A single Sentinel may be given without a list."""
        redis = self.load(
            "server_name: x\nredis: {enabled: true, "
            "sentinel: {master: m, sentinels: 's:1'}}\n"
        )
        self.assertEqual(redis.sentinel, SentinelConfig("m", (("s", 1),)))

    def test_address(self) -> None:
        """Without Sentinel, ``address`` is host and port, or the socket's path."""
        self.assertEqual(RedisConfig(host="h", port=1).address, "h:1")
        self.assertEqual(RedisConfig(path="/s").address, "/s")

    def test_problems(self) -> None:
        """Each problem has its key and a hint."""
        for section, *expected in (
            ("{master: m}", "sentinel.sentinels: is missing; add it"),
            ("{master: m, sentinels: []}", "sentinels", "write at least one entry"),
            ("{sentinels: s}", "redis.sentinel.master: is missing"),
            ("{master: m, sentinel: s, sentinels: s}", "did you mean 'sentinels'?"),
            ("{master: m, sentinels: ['a:b']}", "sentinels[0]: 'a:b'", "HOST:PORT"),
            (
                "{master: m, sentinels: ['a:0']}",
                "sentinels[0]: 'a:0' is not a host and port",
            ),
            (
                "{master: m, sentinels: ['a b']}",
                "sentinels[0]: 'a b' is not a host and port",
            ),
            (
                "{master: m, sentinels: ['[::1']}",
                "sentinels[0]: '[::1' is not a host and port",
            ),
            ("{master: m, sentinels: s, username: u}", "sentinel.username: a user"),
            (
                "{master: m, sentinels: s, password_path: /nowhere}",
                "redis.sentinel.password_path: /nowhere cannot be read",
            ),
            ("{master: m, sentinels: s}, path: /s", "redis.sentinel: redis.path is"),
        ):
            (invalid,) = self.problems_of(
                f"server_name: x\nredis: {{enabled: true, sentinel: {section}}}\n"
            )
            for text in expected:
                self.assertIn(text, invalid)
