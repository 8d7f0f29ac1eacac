"""Tests for the bridges between this project's classes and foreign ones."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.dropin.foreign import (
    ForeignConnection,
    ForeignHandler,
    as_connection_handler,
)
from synapse_replication.testing.doubles import MemoryConnection
from synapse_replication.wire.commands import (
    PingCommand,
    PositionCommand,
    RdataCommand,
)
from synapse_replication.wire.rdata import read_lines
from tests.dropin.host import (
    FakeHomeserver,
    SingleCommandConnection,
    SingleCommandHandler,
    fake_modules,
)


class ForeignConnectionTests(SynchronousTestCase):
    """Tests for ForeignConnection."""

    def test_lines(self) -> None:
        """Lines are sent as single commands."""
        original = SingleCommandConnection()
        connection = ForeignConnection(original)
        connection.send_lines("RDATA", [b'RDATA s w batch ["a"]', b'RDATA s w 5 ["b"]'])
        connection.send_command(PingCommand("1"))
        self.assertEqual(
            original.sent,
            [
                RdataCommand("s", "w", None, ["a"]),
                RdataCommand("s", "w", 5, ["b"]),
                PingCommand("1"),
            ],
        )


class ForeignHandlerTests(SynchronousTestCase):
    """Tests for ForeignHandler."""

    def setUp(self) -> None:
        fake_modules(self)
        self.hs = FakeHomeserver()
        self.original = SingleCommandHandler()
        self.handler = ForeignHandler(
            self.original, self.hs.run_as_background_process, self.hs.observer
        )
        self.connection = MemoryConnection()

    def test_connection(self) -> None:
        """
        On a new connection, REPLICATE and the positions of this instance are sent.
        """
        self.handler.new_connection(self.connection)
        self.handler.lost_connection(self.connection)
        self.assertEqual(self.original.calls, [("new",), ("positions",), ("lost",)])
        self.assertEqual(self.connection.sent, ["REPLICATE"])

    def test_rows(self) -> None:
        """Rows that arrive together are delivered one by one."""
        self.handler.received(
            self.connection,
            read_lines([b'RDATA s w batch ["a"]', b'RDATA s w 5 ["b"]', b"nonsense"]),
        )
        self.assertEqual(
            self.original.calls,
            [
                ("RDATA", RdataCommand("s", "w", None, ["a"])),
                ("RDATA", RdataCommand("s", "w", 5, ["b"])),
            ],
        )

    def test_failures_and_waiting(self) -> None:
        """
        A failing command is reported; a command that waits runs in a background process
        of the host.
        """
        self.handler.received(
            self.connection, [PositionCommand("s", "w", 1, 1), PingCommand("1")]
        )
        ((what, error),) = self.hs.observer.failures
        self.assertIn("POSITION", what)
        self.assertIsInstance(error, ValueError)
        self.handler.received(self.connection, read_lines([b"REPLICATE"]))
        self.assertEqual(self.hs.calls, [("process", "replication-REPLICATE")])

    def test_unparsable_rows_and_commands(self) -> None:
        """
        A row or command that the host cannot parse is skipped; the others are
        delivered.
        """
        self.handler.received(
            self.connection,
            read_lines(
                [b"RDATA s w 3 \xff", b"RDATA s w 4 nonsense", b'RDATA s w 5 ["b"]']
            ),
        )
        self.assertEqual(
            [what for what, _ in self.hs.observer.failures], ["handling RDATA"] * 2
        )
        self.assertEqual(
            self.original.calls, [("RDATA", RdataCommand("s", "w", 5, ["b"]))]
        )

    def test_errors_contain_no_token(self) -> None:
        """
        If the host fails to handle USER_IP, the reported error does not contain the
        token.
        """
        self.handler.received(
            self.connection, read_lines([b'USER_IP @u:x ["syt_abc","::1","x","D",1]'])
        )
        ((what, error),) = self.hs.observer.failures
        self.assertIn("USER_IP", what)
        self.assertIn("***", str(error))
        self.assertNotIn("syt_abc", repr(error))

    def test_foreign_handler_is_bridged(self) -> None:
        """A foreign handler is wrapped in a :class:`ForeignHandler`."""
        handler = as_connection_handler(self.hs, self.original)
        self.assertIsInstance(handler, ForeignHandler)
