"""Tests for :mod:`synapse_replication.transport.tls`, with real handshakes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from OpenSSL import SSL
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint, wrapClientTLS
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.python.failure import Failure
from twisted.trial.unittest import TestCase

from synapse_replication.testing.certificates import PrivateAuthority
from synapse_replication.transport.error_text import explain
from synapse_replication.transport.tls import TlsConfig


def client_context(hostname: str, **files: Path | None) -> Any:
    return TlsConfig(**files).for_connecting(hostname)


def server_context(
    certificate: Path, private_key: Path, client_ca_file: Path | None = None
) -> Any:
    files = TlsConfig(None, None, None, certificate, private_key, client_ca_file)
    return files.for_listening()


class _End(Protocol):
    """Sends hello, and records what it received and why it was closed.

    :ivar received: fires with the data received, or with no bytes if closed before.
    """

    def __init__(self) -> None:
        self.received: Deferred[bytes] = Deferred()
        self.why = ""

    def connectionMade(self) -> None:
        assert self.transport is not None
        self.transport.write(b"hello")

    def dataReceived(self, data: bytes) -> None:
        self.received.callback(data)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        assert reason.value is not None
        self.why = explain(reason.value)
        if not self.received.called:
            self.received.callback(b"")


class CertificatesTests(TestCase):
    def setUp(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)
        self.authority = PrivateAuthority(self.folder)
        self.server = self.authority.issue("server", "main.example")
        self.client = self.authority.issue("client")

    async def shake_hands(self, client: Any, server: Any) -> None:
        """Connect two ends, and wait until both have received data or been closed."""
        from twisted.internet import reactor as untyped  # noqa: TID251

        reactor: Any = untyped
        self.client_end, self.server_end = ends = _End(), _End()
        port = reactor.listenSSL(
            0, Factory.forProtocol(lambda: ends[1]), server, interface="127.0.0.1"
        )
        self.addCleanup(port.stopListening)
        endpoint = TCP4ClientEndpoint(reactor, "127.0.0.1", port.getHost().port)
        await wrapClientTLS(client, endpoint).connect(
            Factory.forProtocol(lambda: ends[0])
        )
        self.received = [await end.received for end in ends]
        for end in ends:
            assert end.transport is not None
            end.transport.loseConnection()

    async def connect(self, hostname: str = "main.example", **more: Any) -> None:
        """Connect to a server that requests a certificate."""
        options = {
            "ca_file": self.authority.certificate,
            "certificate_file": self.client.certificate,
            "private_key_file": self.client.private_key,
        } | more
        await self.shake_hands(
            client_context(hostname, **options),
            server_context(
                self.server.certificate,
                self.server.private_key,
                client_ca_file=self.authority.certificate,
            ),
        )

    def assert_refused(self, client: str, server: str) -> None:
        """Assert that no data was received, and that both ends have the reason."""
        self.assertEqual(self.received, [b"", b""])
        self.assertIn(client, self.client_end.why)
        self.assertIn(server, self.server_end.why)

    async def test_both_are_verified(self) -> None:
        """Two ends with certificates of one authority accept each other."""
        await self.connect()
        self.assertEqual(self.received, [b"hello"] * 2)

    async def test_renewed(self) -> None:
        """
        New connections use the current certificate file; a broken file is ignored.
        """
        other = PrivateAuthority(self.folder, "other").issue("stranger")
        mine = self.folder / "mine.pem"
        pairs = [
            issued.certificate.read_bytes() + issued.private_key.read_bytes()
            for issued in (other, self.client)
        ]
        mine.write_bytes(pairs[0])
        context = client_context(
            "main.example",
            ca_file=self.authority.certificate,
            certificate_file=mine,
        )
        server = server_context(
            self.server.certificate,
            self.server.private_key,
            client_ca_file=self.authority.certificate,
        )
        await self.shake_hands(context, server)
        self.assertEqual(self.received, [b"", b""])
        for text in (pairs[1], b"half of it"):
            mine.write_bytes(text)
            await self.shake_hands(context, server)
            self.assertEqual(self.received, [b"hello"] * 2)

    async def test_client_without_certificate(self) -> None:
        """A client without a certificate is rejected; both ends have the reason."""
        await self.connect(certificate_file=None, private_key_file=None)
        self.assert_refused("the peer requires a certificate", "without a certificate")

    async def test_client_of_another_authority(self) -> None:
        """A client certificate of another authority is rejected."""
        other = PrivateAuthority(self.folder, "other").issue("stranger")
        await self.connect(
            certificate_file=other.certificate, private_key_file=other.private_key
        )
        self.assert_refused(
            "does not trust the authority",
            "not issued by an authority that this process trusts",
        )

    async def test_server_of_another_authority(self) -> None:
        """
        A server certificate of another authority is rejected; the server has the
        reason.
        """
        other = PrivateAuthority(self.folder, "other")
        await self.connect(ca_file=other.certificate)
        self.assert_refused(
            "not issued by an authority that this process trusts",
            "does not trust the authority",
        )

    async def test_another_name(self) -> None:
        """A certificate for another name is rejected with the expected name."""
        for name in ("writer.example", "127.0.0.1"):
            await self.connect(name)
            self.assert_refused(f"is not for {name}; connect by a name", "")

    async def test_no_certificate_asked(self) -> None:
        """A server without an authority for clients accepts every client."""
        await self.shake_hands(
            client_context("main.example", ca_file=self.authority.certificate),
            server_context(self.server.certificate, self.server.private_key),
        )
        self.assertEqual(self.received, [b"hello"] * 2)

    async def test_folder_of_authorities(self) -> None:
        """Authorities may be in a folder, and each of them is trusted."""
        folder = self.folder / "trusted"
        folder.mkdir()
        shutil.copy(self.authority.certificate, folder / "b.pem")
        other = PrivateAuthority(self.folder, "other")
        shutil.copy(other.certificate, folder / "a.pem")
        await self.connect(ca_file=folder)
        self.assertEqual(self.received, [b"hello"] * 2)

    async def test_chain(self) -> None:
        """Intermediate certificates are sent with a certificate."""
        between = PrivateAuthority(self.folder, "between", self.authority)
        pairs = [between.issue("s", "main.example"), between.issue("c")]
        chains = []
        for pair in pairs:
            chain = pair.certificate.with_suffix(".chain")
            chain.write_bytes(
                pair.certificate.read_bytes() + between.certificate.read_bytes()
            )
            chains.append(chain)
        trusted = self.authority.certificate
        await self.shake_hands(
            client_context(
                "main.example",
                ca_file=trusted,
                certificate_file=chains[1],
                private_key_file=pairs[1].private_key,
            ),
            server_context(chains[0], pairs[0].private_key, client_ca_file=trusted),
        )
        self.assertEqual(self.received, [b"hello"] * 2)

    async def test_one_file_for_both(self) -> None:
        """Certificate and key may be in one file."""
        both = self.folder / "both.pem"
        both.write_bytes(
            self.client.private_key.read_bytes() + self.client.certificate.read_bytes()
        )
        await self.connect(certificate_file=both, private_key_file=None)
        self.assertEqual(self.received, [b"hello"] * 2)

    def test_bad_files(self) -> None:
        """Each file with invalid content is named."""
        empty = self.folder / "empty.pem"
        empty.write_text("nothing")
        broken = self.folder / "broken.pem"
        broken.write_text(
            "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
        )
        own, key = self.client.certificate, self.client.private_key
        makes: list[Callable[[Path], object]] = [
            lambda file: client_context("h", ca_file=file),
            lambda file: client_context("h", certificate_file=file),
            lambda file: client_context(
                "h", certificate_file=own, private_key_file=file
            ),
            lambda file: server_context(file, key),
            lambda file: server_context(own, file),
            lambda file: server_context(own, key, client_ca_file=file),
        ]
        for make in makes:
            for file in (empty, broken):
                with self.assertRaisesRegex(ValueError, file.name):
                    make(file)
            with self.assertRaises(OSError):
                make(self.folder / "none.pem")

    def test_key_of_another(self) -> None:
        """A key that does not belong to the certificate is rejected by name."""
        makes: list[Callable[[], object]] = [
            lambda: client_context(
                "h",
                certificate_file=self.client.certificate,
                private_key_file=self.server.private_key,
            ),
            lambda: server_context(self.client.certificate, self.server.private_key),
        ]
        for make in makes:
            with self.assertRaisesRegex(
                ValueError,
                r"server\.key does not contain the private key of .*client\.crt",
            ):
                make()

    def test_other_errors(self) -> None:
        """Errors that are not of TLS, and unknown ones of TLS, keep their text."""
        self.assertEqual(explain(OSError("gone")), "gone")
        self.assertEqual(explain(ConnectionResetError()), "ConnectionResetError")
        odd = SSL.Error([("SSL routines", "", "odd thing")])
        self.assertEqual(explain(odd), "TLS: odd thing")
        self.assertEqual(explain(SSL.Error()), "TLS: Error")
