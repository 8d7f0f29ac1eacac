"""Tests for :mod:`synapse_replication.config.sanity`, with complete configurations."""

from __future__ import annotations

import time
from pathlib import Path

from synapse_replication.config.process import load_config
from synapse_replication.errors import ConfigError
from tests.support.config_files import FilesMixin

BASE = """
server_name: x.test
worker_replication_secret: {secret}
redis: {{enabled: true{redis}}}
listeners: {listeners}
synapse_replication: {{streams: [typing]{own}}}
{more}
"""


class SanityTests(FilesMixin):
    def problems_of(
        self,
        *,
        secret: str = "long-enough",
        redis: str = "",
        listeners: str = "[]",
        own: str = "",
        more: str = "",
    ) -> list[str]:
        """Return the problems without file and line."""
        text = BASE.format(
            secret=secret, redis=redis, listeners=listeners, own=own, more=more
        )
        path = self.write("h.yaml", text)
        try:
            self.warnings = load_config([path], "main").warnings
        except ConfigError as error:
            return [str(each).split(": ", 1)[1] for each in error.problems]
        return []

    def test_good(self) -> None:
        """A sane configuration has no problems and no warnings."""
        more = "instance_map: {main: {host: a, port: 1, tags: [x]}}"
        self.assertEqual(self.problems_of(more=more, redis=", whatever: 1"), [])
        self.assertEqual(self.warnings, ())

    def test_mistyped_top_level_keys(self) -> None:
        """Likewise at the top level, where Synapse has hundreds of other keys."""
        for more, meant in (
            ("instance_maps: {}", "instance_map"),
            ("stream_writer: {typing: master}", "stream_writers"),
            # Beside the known key, which another file may have.
            ("listener: []", "listeners"),
        ):
            name = more.partition(":")[0]
            self.assertEqual(
                self.problems_of(more=more),
                [f"{name}: there is no such key; did you mean '{meant}'?"],
            )
        others = "server_context: x\ndatabases: {}\nworker_replication_http_port: 1"
        self.assertEqual(self.problems_of(more=others), [])
        text = "server_name: x.test\nsynapse-replication: {streams: [typing]}\n"
        with self.assertRaises(ConfigError) as caught:
            load_config([self.write("h.yaml", text)], "main")
        keys = {problem.key for problem in caught.exception.problems}
        self.assertIn("synapse-replication", keys)

    def test_mistyped_keys(self) -> None:
        """
        An unknown key that resembles a known one is a problem; other keys are not.
        """
        self.assertEqual(
            self.problems_of(redis=", pasword: x"),
            ["redis.pasword: there is no such key; did you mean 'password'?"],
        )
        self.assertEqual(
            self.problems_of(
                more="instance_map: {main: {host: a, port: 1, tlss: true}}",
                listeners="[{type: http, port: 1, bind_adresses: [a], mode: 5}]",
            ),
            [
                "instance_map.main.tlss: there is no such key; did you mean 'tls'?",
                "listeners[0].bind_adresses: there is no such key; did you mean "
                "'bind_addresses'?",
            ],
        )

    def test_listeners_that_clash(self) -> None:
        """
        Two listeners with the same port and address, or the same path, are a problem.
        """
        one = "type: metrics, port: 9000"
        for other in (
            "{type: metrics, port: 9000}",
            "{type: metrics, port: 9000, bind_addresses: ['127.0.0.1']}",
        ):
            (invalid,) = self.problems_of(listeners=f"[{{{one}}}, {other}]")
            self.assertIn(
                "listeners[1].port: another listener already uses 9000", invalid
            )
        (invalid,) = self.problems_of(
            listeners=f"[{{{one}}}]",
            own=", direct_tcp: {listen: 'tcp:9000:interface=127.0.0.1'}",
        )
        self.assertIn(
            "direct_tcp.listen[0]: another listener already uses 9000", invalid
        )
        (invalid,) = self.problems_of(
            listeners="[{type: metrics, path: /a}, {type: metrics, path: /a}]"
        )
        self.assertIn("listeners[1].path", invalid)
        for listen, address, count in (
            ("tcp:9000:127.0.0.1", "10.0.0.1", 0),
            ("tcp:9000:127.0.0.1", "127.0.0.1", 1),
            ("tcp6:9000", "10.0.0.1", 0),
            ("tcp6:9000", "::1", 1),
        ):
            found = self.problems_of(
                listeners=f"[{{{one}, bind_addresses: ['{address}']}}]",
                own=f", direct_tcp: {{listen: '{listen}'}}, "
                "allow_unprotected_listeners: true",
            )
            self.assertEqual(len(found), count, (listen, address, found))
        addresses = "bind_addresses: ['127.0.0.1']}, {type: metrics, port: 9000, "
        addresses += "bind_addresses: ['127.0.0.2', '::1']}"
        self.assertEqual(self.problems_of(listeners=f"[{{{one}, {addresses}]"), [])

    def test_secrets(self) -> None:
        """A secret that is too short or contains a line break is refused."""
        for secret, why in (
            ("x", "fewer than 4"),
            (r'"\r\n"', "a line break"),
            (r'"long\r\nenough"', "a line break"),
            ('"      "', "fewer than 4"),
        ):
            (invalid,) = self.problems_of(secret=secret)
            self.assertIn("worker_replication_secret: it ", invalid)
            self.assertIn(why, invalid)

    def test_readable_secrets(self) -> None:
        """A secret's file that is readable by every user causes only a warning."""
        secret = Path(self.write("secret", "hush-hush"))
        for mode, count in ((0o644, 1), (0o640, 0)):
            secret.chmod(mode)
            self.assertEqual(self.problems_of(redis=f", password_path: {secret}"), [])
            self.assertEqual(len(self.warnings), count)
        secret.chmod(0o644)
        self.problems_of(redis=f", password_path: {secret}")
        self.assertIn("redis.password_path: every user of this", str(self.warnings[0]))
        self.assertNotIn("hush", str(self.warnings[0]))

    def test_alias_bomb(self) -> None:
        """Deeply nested YAML aliases are refused before they are expanded."""
        lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
        lines += [
            f"a{n}: &a{n} [" + ", ".join([f"*a{n - 1}"] * 9) + "]" for n in range(1, 12)
        ]
        started = time.monotonic()
        path = self.write("bomb.yaml", "\n".join(lines))
        with self.assertRaises(ConfigError) as raised:
            load_config([path])
        (problem,) = raised.exception.problems
        self.assertIn("aliases", str(problem))
        self.assertLess(time.monotonic() - started, 5)
