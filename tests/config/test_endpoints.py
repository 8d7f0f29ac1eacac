"""Tests for synapse_replication.config.endpoints."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import attrs
from twisted.internet import reactor  # noqa: TID251 -- a real listener
from twisted.internet.protocol import Factory
from twisted.internet.testing import MemoryReactorClock
from twisted.trial.unittest import SynchronousTestCase, TestCase

from synapse_replication.config.endpoints import (
    client_endpoint,
    listener_descriptions,
    server_endpoint,
)
from synapse_replication.config.listener_safety import Listener
from synapse_replication.config.process import ProcessConfig
from synapse_replication.config.replication_options import ReplicationOptions
from synapse_replication.config.unix_sockets import UnixSocketEndpoint
from synapse_replication.errors import ConfigError
from synapse_replication.testing.certificates import PrivateAuthority
from synapse_replication.testing.private_process import free_port
from synapse_replication.transport.reactor import as_reactor
from synapse_replication.transport.tls import TlsConfig


def listener(
    port: int | None = None, path: str | None = None, addresses: tuple[str, ...] = ()
) -> Listener:
    return Listener(port, path, addresses, frozenset(), False)


def options(tls: TlsConfig | None = None) -> ReplicationOptions:
    return ProcessConfig(
        files=["a.yaml", "b.yaml"],
        server_name="x.test",
        instance_name="w1",
        streams=(),
        writers={},
        tls=tls or TlsConfig(),
    )


class EndpointTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.reactor: Any = MemoryReactorClock()

    def test_listener_addresses(self) -> None:
        """A listener listens at each of its addresses, IPv6 ones included."""
        descriptions = listener_descriptions(
            listener(80, addresses=("127.0.0.1", "::1"))
        )
        for description in descriptions:
            self.successResultOf(
                server_endpoint(self.reactor, description, options()).listen(Factory())
            )
        self.assertEqual(
            [(port, address) for port, _, _, address in self.reactor.tcpServers],
            [(80, "127.0.0.1"), (80, "::1")],
        )

    def test_listener_socket(self) -> None:
        """A listener may be a Unix socket, whatever its path looks like."""
        (description,) = listener_descriptions(listener(path="/run/a:b=c"))
        endpoint = server_endpoint(self.reactor, description, options())
        assert isinstance(endpoint, UnixSocketEndpoint)
        self.assertEqual(endpoint.path, "/run/a:b=c")

    def test_socket_modes(self) -> None:
        """Only HTTP, or a description with a mode, lets other users connect."""
        http = listener(path="/run/a")
        direct = attrs.evolve(http, direct_tcp=True)
        for description, mode in (
            (listener_descriptions(http)[0], 0o666),
            (listener_descriptions(direct)[0], 0o600),
            ("unix:/run/b", 0o600),
            ("unix:/run/b:mode=660", 0o660),
        ):
            endpoint = server_endpoint(self.reactor, description, options())
            assert isinstance(endpoint, UnixSocketEndpoint)
            self.assertEqual(endpoint.mode, mode, description)

    def test_bad_descriptions(self) -> None:
        """A description that Twisted cannot parse is an error with a hint."""
        with self.assertRaises(ConfigError) as caught:
            client_endpoint(self.reactor, "tpc:h:1", options())
        (problem,) = caught.exception.problems
        self.assertEqual(problem.file, "a.yaml, b.yaml")
        self.assertEqual(problem.key, "synapse_replication.direct_tcp.connect")
        self.assertIn("tcp:HOST:PORT", problem.hint)
        with self.assertRaises(ConfigError) as caught:
            server_endpoint(self.reactor, "tcp:x:y:z:1", options())
        self.assertIn("ssl:PORT", caught.exception.problems[0].hint)
        with self.assertRaises(ConfigError) as caught:
            server_endpoint(self.reactor, "tcp\\", options())
        self.assertIn("ends in a backslash", caught.exception.problems[0].problem)
        with self.assertRaises(ConfigError) as caught:
            server_endpoint(self.reactor, "ssl:1:privateKey=/nowhere", options())
        self.assertIn("/nowhere", caught.exception.problems[0].problem)

    def test_server_is_verified(self) -> None:
        """A TLS client endpoint that would not verify the server is refused."""
        for description in ("ssl:h:1", "ssl:h:1:caCertsDir=/etc/ssl/certs"):
            with self.assertRaises(ConfigError) as caught:
                client_endpoint(self.reactor, description, options())
            (problem,) = caught.exception.problems
            self.assertIn("does not verify the server", problem.problem)
            self.assertIn("tls:HOST:PORT", problem.hint)
        client_endpoint(self.reactor, "ssl:h:1:hostname=h", options())
        client_endpoint(self.reactor, "tls:h:1", options())

    def test_files_of_tls(self) -> None:
        """
        A TLS file that cannot be read is named, whether configured or in a description.
        """
        tls = TlsConfig(ca_file=Path("/nowhere"))
        for description, config in (
            ("tls:h:1", tls),
            ("tls:h:1:trustRoots=/nowhere", TlsConfig()),
        ):
            with self.assertRaises(ConfigError) as caught:
                client_endpoint(self.reactor, description, options(config))
            self.assertIn("/nowhere", caught.exception.problems[0].problem)
        garbage = self.mktemp()
        Path(garbage).write_text("garbage")
        keys = f"privateKey={garbage}:certKey={garbage}"
        for make in (
            lambda: client_endpoint(
                self.reactor, f"ssl:h:1:hostname=h:{keys}", options(tls)
            ),
            lambda: server_endpoint(self.reactor, f"ssl:1:{keys}", options()),
        ):
            with self.assertRaises(ConfigError) as caught:
                make()
            (problem,) = caught.exception.problems
            self.assertIn(garbage, problem.problem)
            self.assertIn("the expected PEM data", problem.problem)
        # A description with its own trust roots does not use the configured file.
        folder = self.mktemp()
        Path(folder).mkdir()
        client_endpoint(self.reactor, f"tls:h:1:trustRoots={folder}", options(tls))

    def test_client_certificates(self) -> None:
        """A server endpoint with caCertsDir requires client certificates."""
        folder = Path(self.mktemp())
        folder.mkdir()
        authority = PrivateAuthority(folder)
        pair = authority.issue("own")
        description = (
            f"ssl:9092:privateKey={pair.private_key}:certKey={pair.certificate}"
            f":caCertsDir={authority.certificate}:interface=127.0.0.1"
        )
        self.successResultOf(
            server_endpoint(self.reactor, description, options()).listen(Factory())
        )
        ((port, _, context, _, interface),) = self.reactor.sslServers
        self.assertEqual((port, interface), (9092, "127.0.0.1"))
        self.assertTrue(context.verify and context.requireCertificate)
        for more, named in ((":sslmethod=x", "sslmethod"), ("x", "No such file")):
            with self.assertRaises(ConfigError) as caught:
                server_endpoint(
                    self.reactor,
                    description[: -len(":interface=127.0.0.1")] + more,
                    options(),
                )
            self.assertIn(named, caught.exception.problems[0].problem)


class OpenListenerTests(TestCase):
    if not socket.has_ipv6:
        skip = "this system has no IPv6"

    async def test_all_addresses(self) -> None:
        """
        A listener on ``::`` and on IPv4 addresses opens, and accepts IPv4 connections.
        """
        port = free_port()
        for description in listener_descriptions(
            listener(port, addresses=("::", "0.0.0.0", "127.0.0.1"))
        ):
            opened = await server_endpoint(
                as_reactor(reactor), description, options()
            ).listen(Factory())
            self.addCleanup(opened.stopListening)
        # The kernel accepts the connection.
        socket.create_connection(("127.0.0.1", port)).close()
