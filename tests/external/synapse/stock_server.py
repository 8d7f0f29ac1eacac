"""A test for a stock server whose client supports the extension.

``test_extension.py`` runs it in a process of its own, in which nothing is replaced. It
prints :data:`EQUAL_ANSWERS` on success.
"""

from __future__ import annotations

from typing import Any

from twisted.internet.testing import StringTransport

from tests.external.synapse import homeserver

#: Printed on success. Trial's own result is useless: stock code leaves connections to
#: Redis open when it is shut down.
EQUAL_ANSWERS = "answers are equal"


def _leave_stock() -> dict[str, Any]:
    return {}


homeserver._originals = _leave_stock  # type: ignore[assignment]


class StockServerTests(homeserver.HomeserverTestCase):
    """A stock homeserver's end of a direct TCP connection."""

    def answer(self, ping: bytes) -> list[bytes]:
        """Connect, send what our client sends, and return the server's commands."""
        module = homeserver.host_module("replication.tcp.resource")
        factory = module.ReplicationStreamProtocolFactory(self.hs)
        protocol, transport = factory.buildProtocol(None), StringTransport()
        self.assertTrue(type(protocol).__module__.startswith("synapse."))
        protocol.makeConnection(transport)
        protocol.dataReceived(b"NAME w\nPING " + ping + b"\nREPLICATE\n")
        protocol.dataReceived(b"REMOTE_SERVER_UP a.example\nPING 1700000000001\n")
        self.assertFalse(transport.disconnecting)
        lines = transport.value().splitlines()
        protocol.close()
        return [line for line in lines if not line.startswith(b"PING ")]

    def test_ping(self) -> None:
        """
        The extension's word in our PING does not change what a stock server sends.
        """
        plain = self.answer(b"1700000000000")
        self.assertEqual(plain[0], b"SERVER test")
        self.assertIn(b"POSITION events master", b"\n".join(plain))
        self.assertEqual(self.answer(b"1700000000000 replication_ext/1"), plain)
        print(EQUAL_ANSWERS)  # noqa: T201 -- read by test_extension.py
