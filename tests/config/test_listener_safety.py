"""Tests for the check that listeners are protected from other machines."""

from __future__ import annotations

import json

from synapse_replication.config.listener_safety import (
    is_for_this_machine,
    why_unguarded,
)
from synapse_replication.config.process import load_config
from synapse_replication.errors import ConfigError
from synapse_replication.testing.certificates import PrivateAuthority
from tests.support.config_files import FilesMixin

_BASE = "server_name: x.test\nredis: {enabled: true}\n"
_OWN = "synapse_replication: {streams: [typing], "


class UnprotectedListenersTests(FilesMixin):
    """Tests that an unprotected listener must be local, unless explicitly allowed."""

    def problems_of(self, text: str) -> list[str]:
        path = self.write("h.yaml", _BASE + text)
        try:
            load_config([path])
        except ConfigError as error:
            return [f"{problem.key}: {problem.problem}" for problem in error.problems]
        return []

    def http(self, more: str, resource: str = "replication") -> str:
        listener = f"{{type: http, {more}, resources: [{{names: [{resource}]}}]}}"
        return f"listeners: [{listener}]\n"

    def test_http(self) -> None:
        """
        An HTTP listener without a secret is refused if other machines can reach it.
        """
        problem = "listeners[0].bind_addresses: any client can"
        streams = _OWN + "}\n"
        for more in (
            "port: 1",
            "port: 1, bind_addresses: ['127.0.0.1', '::']",
            "port: 1, bind_address: db.test",
        ):
            (invalid,) = self.problems_of(streams + self.http(more))
            self.assertIn(problem, invalid)
            secret = "worker_replication_secret: hush\n"
            self.assertEqual(self.problems_of(streams + secret + self.http(more)), [])
        for more in (
            "port: 1, bind_addresses: ['127.0.0.1', '::1', localhost]",
            "path: /run/x.sock",
        ):
            self.assertEqual(self.problems_of(streams + self.http(more)), [])
        self.assertEqual(self.problems_of(streams + self.http("port: 1", "health")), [])

    def test_direct_tcp(self) -> None:
        """Direct TCP has no secret, so it is refused even if one is configured."""
        text = (
            "worker_replication_secret: hush\n"
            "listeners: [{type: replication, port: 1}]\n"
            f"{_OWN}direct_tcp: {{listen: ['tcp:2', 'unix:/x']}}}}\n"
        )
        first, second = self.problems_of(text)
        self.assertIn("listeners[0].bind_addresses: direct TCP on 0.0.0.0", first)
        self.assertIn("direct_tcp.listen[0]: tcp:2 sends every row", second)

    def test_client_certificates(self) -> None:
        """A listener that requires client certificates counts as protected."""
        authority = PrivateAuthority(self.folder)
        pair = authority.issue("own")
        tls = {
            "certificate_file": str(pair.certificate),
            "private_key_file": str(pair.private_key),
        }
        listeners = (
            "listeners:\n- {type: replication, port: 1, tls: true}\n- {type: http, "
            "port: 2, tls: true, resources: [{names: [replication]}]}\n"
        )
        for client_ca, count in (
            ({}, 2),
            ({"client_ca_file": authority.certificate}, 0),
        ):
            section = json.dumps(
                tls | {key: str(file) for key, file in client_ca.items()}
            )
            text = f"{listeners}{_OWN}tls: {section}}}\n"
            self.assertEqual(len(self.problems_of(text)), count, text)

    def test_allowed_explicitly(self) -> None:
        """The operator may allow unprotected listeners explicitly."""
        text = (
            self.http("port: 1")
            + f"{_OWN}allow_unprotected_listeners: true, "
            + "direct_tcp: {listen: ['tcp:2']}}\n"
        )
        self.assertEqual(self.problems_of(text), [])

    def test_addresses(self) -> None:
        """Loopback addresses and localhost are local; other names are not resolved."""
        for address in ("127.0.0.1", "127.8.9.1", "::1", "localhost"):
            self.assertTrue(is_for_this_machine(address), address)
        for address in ("0.0.0.0", "::", "10.0.0.1", "db.test", "", "127.0.0.1.x"):
            self.assertFalse(is_for_this_machine(address), address)

    def test_endpoints(self) -> None:
        """
        An endpoint is protected by a local address, a Unix socket or client
        certificates.
        """
        for description in (
            "tcp:1:interface=127.0.0.1",
            "tcp:1:127.0.0.1",
            "tcp6:1:interface=\\:\\:1",
            "ssl:1:privateKey=k:certKey=c:caCertsDir=/ca",
            "ssl:1:privateKey=k:interface=127.0.0.1",
            "unix:/run/x",
            "systemd:domain=INET:index=0",
        ):
            self.assertIsNone(why_unguarded(description), description)
        for description in (
            "tcp:1",
            "tcp:1:interface=0.0.0.0",
            "tcp:port=1",
            "tcp6:1:interface=\\:\\:",
            "ssl:1:privateKey=k:certKey=c",
            "ssl:1:127.0.0.1:c",
        ):
            self.assertIsNotNone(why_unguarded(description), description)
