"""Tests for the files for TLS that the configuration names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from synapse_replication.config.process import ProcessConfig, load_config
from synapse_replication.errors import ConfigError
from synapse_replication.testing.certificates import PrivateAuthority
from synapse_replication.transport.tls import TlsConfig
from tests.support.config_files import FilesMixin


class TlsTests(FilesMixin):
    def setUp(self) -> None:
        super().setUp()
        authority = PrivateAuthority(self.folder)
        self.authority = str(authority.certificate)
        self.pair = authority.issue("own")
        self.certificate = str(self.pair.certificate)
        self.key = str(self.pair.private_key)

    def load(self, tls: object = None, **more: Any) -> ProcessConfig:
        listener = {"type": "metrics", "port": 1, "tls": True}
        config = {
            "server_name": "x.test",
            "redis": {"enabled": True},
            "listeners": [listener],
            "synapse_replication": {"streams": ["typing"], "tls": tls},
        }
        return load_config([self.write("h.yaml", json.dumps(config | more))])

    def problems_of(self, tls: object = None, **more: Any) -> list[str]:
        with self.assertRaises(ConfigError) as caught:
            self.load(tls, **more)
        return [str(problem) for problem in caught.exception.problems]

    def test_keys_of_synapse(self) -> None:
        """Listeners use the certificate configured for Synapse; links do not."""
        config = self.load(
            tls_certificate_path=self.certificate, tls_private_key_path=self.key
        )
        self.assertEqual(
            config.tls,
            TlsConfig(
                listener_certificate_file=self.pair.certificate,
                listener_private_key_file=self.pair.private_key,
            ),
        )
        self.assertTrue(config.listeners[0].tls)
        config.tls.for_listening()

    def test_own_keys(self) -> None:
        """
        Listeners and clients use the project's own certificate, which overrides that of
        Synapse.
        """
        config = self.load(
            {
                "ca_file": self.authority,
                "client_ca_file": self.authority,
                "certificate_file": self.certificate,
                "private_key_file": self.key,
            },
            tls_certificate_path="/nowhere",
        )
        pair = (self.pair.certificate, self.pair.private_key)
        authority = Path(self.authority)
        self.assertEqual(config.tls, TlsConfig(authority, *pair, *pair, authority))

    def test_none(self) -> None:
        """A TLS listener requires a certificate; other listeners do not."""
        (invalid,) = self.problems_of()
        self.assertIn("listeners[0].tls: this listener cannot use TLS", invalid)
        self.assertIn("tls_certificate_path", invalid)
        plain = {"type": "metrics", "port": 1}
        client = {"type": "http", "port": 2, "tls": True, "resources": []}
        config = self.load(tls_certificate_path="/x", listeners=[plain, client])
        self.assertFalse(config.listeners[0].tls)

    def test_unusable_files(self) -> None:
        """
        A TLS file that is missing or empty, or a key without its certificate, is
        reported.
        """
        empty = self.write("empty.pem", "")
        other_pair = PrivateAuthority(self.folder, "other").issue("stranger")
        own = {"certificate_file": self.certificate, "private_key_file": self.key}
        for tls, key, named in (
            ({"ca_file": "/nowhere"}, "synapse_replication.tls", "/nowhere"),
            ({"ca_file": empty}, "synapse_replication.tls", "no PEM certificate"),
            (
                own | {"private_key_file": str(other_pair.private_key)},
                "synapse_replication.tls",
                "stranger.key does not contain the private key",
            ),
            (
                own | {"client_ca_file": empty},
                "listeners[0].tls",
                "empty.pem contains no",
            ),
            ({"certificate_file": self.certificate}, "synapse_replication.tls", "both"),
            ({"cafile": "x"}, "synapse_replication.tls.cafile", ""),
        ):
            (invalid, *_) = self.problems_of(tls)
            self.assertIn(f"{key}: ", invalid)
            self.assertIn(named, invalid)
