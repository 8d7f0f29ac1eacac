"""Tests for :mod:`synapse_replication.config.redis`."""

from __future__ import annotations

from pathlib import Path

from synapse_replication.config.process import load_config
from synapse_replication.errors import ConfigError
from synapse_replication.redis.options import (
    RedisOptions,
    RedisTlsOptions,
    SentinelOptions,
)
from tests.support.config_files import FilesMixin

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

    def load(self, text: str) -> RedisOptions:
        config = load_config([self.write("1.yaml", text)], "follow")
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
            redis.sentinel, SentinelOptions("mymaster", sentinels, "bob", "knock")
        )
        self.assertNotIn("knock", repr(redis))
        self.assertEqual(redis.address, "Sentinel's master mymaster")

    def test_one_sentinel(self) -> None:
        """A single Sentinel may be given without a list."""
        redis = self.load(
            "server_name: x\nredis: {enabled: true, "
            "sentinel: {master: m, sentinels: 's:1'}}\n"
        )
        self.assertEqual(redis.sentinel, SentinelOptions("m", (("s", 1),)))

    def test_all(self) -> None:
        """All settings of the section reach the connection options."""
        text = (
            "server_name: x\nredis: {enabled: true, host: h, port: 1, path: /s, "
            "username: u, password: p, dbid: 3, use_tls: true, certificate_file: FILE, "
            "private_key_file: FILE, ca_file: FILE}\n"
        )
        file = Path(self.write("file", ""))
        self.assertEqual(
            self.load(text.replace("FILE", str(file))),
            RedisOptions("h", 1, "/s", "p", "u", 3, RedisTlsOptions(file, file, file)),
        )

    def test_authorities(self) -> None:
        """
        The certificate authorities may be in a folder; without TLS they are ignored.
        """
        text = "server_name: x\nredis: {enabled: true, ca_path: /etc, use_tls: %s}\n"
        tls = RedisTlsOptions(Path("/etc"))
        self.assertEqual(self.load(text % "true").tls, tls)
        self.assertIsNone(self.load(text % "false").tls)

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
