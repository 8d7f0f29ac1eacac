"""Tests of agreeing on the extension, and of receiving its lines."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import UnknownCommandError
from synapse_replication.wire.commands import RemoteServerUpCommand
from synapse_replication.wire.connection import LineConnection
from synapse_replication.wire.extension import ExtensionLine
from synapse_replication.wire.rdata import RdataGroup


class ExtensionTests(SynchronousTestCase):
    """Tests for the conditions under which a connection uses the extension."""

    def client(self, *, speaks: bool = True) -> LineConnection:
        connection = LineConnection(
            "repl.test", 0.0, is_server=False, speaks_extension=speaks
        )
        connection.receive_data(b"SERVER repl.test\nPING 1\n", 0.0)
        return connection

    def test_mark(self) -> None:
        """Only the exact word in a PING announces the extension."""
        connection = self.client()
        for ping in (b"PING 1", b"PING 1 replication_ext/10", b"PING replication_ext"):
            connection.receive_data(ping + b"\n", 0.0)
            self.assertFalse(connection.extension_agreed, ping)
        connection.receive_data(b"PING 1 more replication_ext/1 else\n", 0.0)
        self.assertTrue(connection.extension_agreed)

    def test_stock_peer(self) -> None:
        """
        Without the extension, the word in a PING is ignored, and the command of the
        extension is unknown.
        """
        connection = self.client(speaks=False)
        received = connection.receive_data(
            b"PING 1 replication_ext/1\nREPLICATION_EXT {}\nREMOTE_SERVER_UP a\n", 0.0
        )
        self.assertFalse(connection.extension_agreed)
        self.assertEqual(received.items, [RemoteServerUpCommand("a")])
        (error,) = received.refused
        self.assertIsInstance(error, UnknownCommandError)
        self.assertTrue(connection.is_open)

    def test_unasked(self) -> None:
        """A message before the extension was agreed is an unknown command."""
        connection = self.client()
        received = connection.receive_data(
            b"REPLICATION_EXT {}\nREMOTE_SERVER_UP a\nPING 1 replication_ext/1\n"
            b"REPLICATION_EXT {}\n",
            0.0,
        )
        self.assertEqual(
            received.items, [RemoteServerUpCommand("a"), ExtensionLine(b"{}")]
        )
        self.assertEqual(len(received.refused), 1)
        self.assertEqual(received.counts["EXTENSION"], 1)

    def test_before_name(self) -> None:
        """A server rejects a message before NAME, even after a marked PING."""
        connection = LineConnection(
            "repl.test", 0.0, is_server=True, speaks_extension=True
        )
        received = connection.receive_data(
            b"PING 1 replication_ext/1\nREPLICATION_EXT {}\n", 0.0
        )
        self.assertEqual(received.items, [])
        self.assertFalse(connection.is_open)

    def test_order(self) -> None:
        """
        Messages keep their order among rows and commands, however the data is split.
        """
        data = (
            b"PING 1 replication_ext/1\nREMOTE_SERVER_UP a\nREPLICATION_EXT 1\n"
            b'RDATA events w 5 ["a"]\nRDATA events w 6 ["b"]\nREPLICATION_EXT 2\n'
            b"REPLICATION_EXT 3\nREMOTE_SERVER_UP b\n"
        )
        for size in (1, 5, 17, len(data)):
            connection = self.client()
            words = []
            for start in range(0, len(data), size):
                received = connection.receive_data(data[start : start + size], 0.0)
                for item in received.items:
                    if isinstance(item, ExtensionLine):
                        words.append(item.payload.decode())
                    elif isinstance(item, RdataGroup):
                        words += [str(token) for token in item.tokens]
                    elif isinstance(item, RemoteServerUpCommand):
                        words.append(item.data)
            self.assertEqual(words, ["a", "1", "5", "6", "2", "3", "b"])

    def test_nothing_after_the_end(self) -> None:
        """Lines after an ERROR, including messages, are ignored."""
        connection = self.client()
        received = connection.receive_data(
            b"PING 1 replication_ext/1\nERROR no\nREPLICATION_EXT {}\n", 0.0
        )
        self.assertEqual(received.items, [])
