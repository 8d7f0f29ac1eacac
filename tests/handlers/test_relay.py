"""Tests of relaying, and of copies that arrive on several links."""

from __future__ import annotations

from collections import deque

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.handler import ReplicationCommandHandler
from synapse_replication.handlers.interfaces import Identity
from synapse_replication.handlers.relay import MAX_REMEMBERED, WINDOW, CopyFilter
from synapse_replication.testing.doubles import MemoryConnection, MemoryHost
from synapse_replication.wire.commands.base import Command
from synapse_replication.wire.commands.standard import (
    LockReleasedCommand,
    RemoteServerUpCommand,
)
from synapse_replication.wire.rdata import read_lines

COMMAND = RemoteServerUpCommand("a.example")


class CopyFilterTests(SynchronousTestCase):
    """Tests for :class:`CopyFilter`."""

    def setUp(self) -> None:
        self.filter = CopyFilter()
        self.one, self.two = MemoryConnection("one"), MemoryConnection("two")

    def test_copy_on_another_link(self) -> None:
        """
        The same command on another link is a copy; on the same link it is a new event.
        """
        self.assertFalse(self.filter.is_copy(COMMAND, self.one, 0))
        self.assertTrue(self.filter.is_copy(COMMAND, self.two, 0.1))
        self.assertFalse(self.filter.is_copy(COMMAND, self.one, 0.2))
        self.assertTrue(self.filter.is_copy(COMMAND, self.two, 0.3))

    def test_another_command_is_no_copy(self) -> None:
        """A command with other content is not a copy."""
        self.filter.is_copy(COMMAND, self.one, 0)
        other = RemoteServerUpCommand("b.example")
        self.assertFalse(self.filter.is_copy(other, self.two, 0))

    def test_copy_expires(self) -> None:
        """After the window, the same command is a new event on any link."""
        self.filter.is_copy(COMMAND, self.one, 0)
        self.assertFalse(self.filter.is_copy(COMMAND, self.two, WINDOW))

    def test_first_link_is_lost(self) -> None:
        """
        After the first link was lost, the same command on another link is a new event.
        """
        self.filter.is_copy(COMMAND, self.one, 0)
        self.filter.forget(self.one)
        self.assertFalse(self.filter.is_copy(COMMAND, self.two, 0.1))

    def test_bounded(self) -> None:
        """Beyond the limit, the oldest command is forgotten."""
        self.filter.is_copy(COMMAND, self.one, 0)
        for number in range(MAX_REMEMBERED):
            self.filter.is_copy(RemoteServerUpCommand(f"s{number}"), self.one, 0)
        self.assertFalse(self.filter.is_copy(COMMAND, self.two, 0))
        self.assertTrue(self.filter.is_copy(RemoteServerUpCommand("s999"), self.two, 0))


class _Wire(MemoryConnection):
    """One end of a link in a mesh; lines are queued for the other end."""

    other: _Wire
    owner: ReplicationCommandHandler

    def __init__(self, name: str, mesh: Mesh, *, relays: bool) -> None:
        super().__init__(name, relays=relays)
        self.mesh = mesh

    def send_lines(self, command_name: str, lines: object) -> None:
        assert isinstance(lines, list)
        self.mesh.under_way.extend((self.other, line) for line in lines)


class Mesh:
    """Instances that each connect to every other one."""

    def __init__(self, size: int) -> None:
        self.under_way: deque[tuple[_Wire, bytes]] = deque()
        self.hosts = [MemoryHost() for _ in range(size)]
        for number, host in enumerate(self.hosts):
            host.identity = Identity("hs", f"w{number}", f"epoch{number}")
        self.handlers = [
            ReplicationCommandHandler(host, host.observer) for host in self.hosts
        ]
        for client in range(size):
            for server in range(size):
                if client != server:
                    self._connect(client, server)
        self.run()

    def _connect(self, client: int, server: int) -> None:
        near = _Wire(f"to w{server}", self, relays=False)
        far = _Wire(f"from w{client}", self, relays=True)
        near.other, far.other = far, near
        near.owner, far.owner = self.handlers[client], self.handlers[server]
        near.owner.new_connection(near)
        far.owner.new_connection(far)

    def run(self, most: int = 1000) -> int:
        """Deliver all queued lines; return their number."""
        for count in range(most):
            if not self.under_way:
                return count
            end, line = self.under_way.popleft()
            end.owner.received(end, read_lines([line]))
        return most

    def delivered(self) -> list[list[Command]]:
        """Return the commands that each host received."""
        return [host.commands.received for host in self.hosts]


class MeshTests(SynchronousTestCase):
    """Tests with four instances that each connect to every other one."""

    def setUp(self) -> None:
        self.mesh = Mesh(4)

    def test_external_command_reaches_each_once(self) -> None:
        """A command from outside reaches each instance once."""
        mesh = self.mesh
        outsider = MemoryConnection("stranger", relays=True)
        mesh.handlers[0].new_connection(outsider)
        mesh.run()
        line = b"REMOTE_SERVER_UP a.example"
        mesh.handlers[0].received(outsider, read_lines([line]))
        self.assertEqual(mesh.run(), 3)
        for calls in mesh.delivered():
            self.assertEqual(calls, [RemoteServerUpCommand("a.example")])

    def test_command_on_several_links_is_delivered_once(self) -> None:
        """A command that reaches an instance on several links is delivered once."""
        mesh = self.mesh
        mesh.handlers[0].sender.send(LockReleasedCommand("w0", "lock", "key"))
        self.assertLess(mesh.run(), 20)
        first, *others = mesh.delivered()
        self.assertEqual(first, [])
        for calls in others:
            self.assertEqual(calls, [LockReleasedCommand("w0", "lock", "key")])

    def test_released_again(self) -> None:
        """A lock released twice in quick succession is delivered twice."""
        mesh = self.mesh
        for _ in range(2):
            mesh.handlers[0].sender.send(LockReleasedCommand("w0", "lock", "key"))
            mesh.run()
        for calls in mesh.delivered()[1:]:
            self.assertEqual(len(calls), 2)
