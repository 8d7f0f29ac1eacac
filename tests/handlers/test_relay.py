"""Tests of relaying, and of copies that arrive on several links."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import permutations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.command_handler import ReplicationCommandHandler
from synapse_replication.handlers.epochs import PeerEpochs
from synapse_replication.handlers.extension.extension import ReplicationExtension
from synapse_replication.handlers.host_commands import (
    COPY_WINDOW,
    MAX_ORIGINS,
    CopyFilter,
)
from synapse_replication.handlers.interfaces import Identity
from synapse_replication.testing.doubles import MemoryConnection
from synapse_replication.wire.commands import (
    Command,
    LockReleasedCommand,
    RemoteServerUpCommand,
    UserSyncCommand,
)
from synapse_replication.wire.extension import MAX_STREAMS
from synapse_replication.wire.rdata import read_lines
from tests.support.recording_observer import RecordingHost

COMMAND = RemoteServerUpCommand("a.example")
LOCK = LockReleasedCommand("w0", "lock", "key")


class CopyFilterTests(SynchronousTestCase):
    """Tests for :class:`CopyFilter`."""

    def setUp(self) -> None:
        self.filter = CopyFilter()
        self.one, self.two = MemoryConnection("one"), MemoryConnection("two")

    def test_copy_on_another_link(self) -> None:
        """
        The same command on another link is a copy; on the same link it is a new event.
        """
        self.assertFalse(self.filter.check_and_record(COMMAND, self.one, 0))
        self.assertTrue(self.filter.check_and_record(COMMAND, self.two, 0.1))
        self.assertFalse(self.filter.check_and_record(COMMAND, self.one, 0.2))
        self.assertTrue(self.filter.check_and_record(COMMAND, self.two, 0.3))

    def test_another_command_is_no_copy(self) -> None:
        """A command with other content is not a copy."""
        self.filter.check_and_record(COMMAND, self.one, 0)
        other = RemoteServerUpCommand("b.example")
        self.assertFalse(self.filter.check_and_record(other, self.two, 0))

    def test_copy_expires(self) -> None:
        """After the window, the same command is a new event on any link."""
        self.filter.check_and_record(COMMAND, self.one, 0)
        self.assertFalse(self.filter.check_and_record(COMMAND, self.two, COPY_WINDOW))

    def test_first_link_is_lost(self) -> None:
        """
        After the first link was lost, the same command on another link is a new event.
        """
        self.filter.check_and_record(COMMAND, self.one, 0)
        self.filter.forget(self.one)
        self.assertFalse(self.filter.check_and_record(COMMAND, self.two, 0.1))

    def test_bounded(self) -> None:
        """Beyond the limit, the oldest command is forgotten."""
        self.filter.check_and_record(COMMAND, self.one, 0)
        for number in range(MAX_ORIGINS):
            self.filter.check_and_record(
                RemoteServerUpCommand(f"s{number}"), self.one, 0
            )
        self.assertFalse(self.filter.check_and_record(COMMAND, self.two, 0))
        self.assertTrue(
            self.filter.check_and_record(RemoteServerUpCommand("s999"), self.two, 0)
        )


class _Wire(MemoryConnection):
    """One end of a link between instances; lines are queued for the other end."""

    is_direct = True
    has_own_channel = False
    other: _Wire
    owner: Instance

    def __init__(self, name: str, net: Net, *, relays: bool) -> None:
        super().__init__(name, relays=relays)
        self.net = net

    def send_lines(self, command_name: str, lines: Sequence[bytes]) -> None:
        self.net.under_way.extend((self.other, False, line) for line in lines)

    def send_extension(self, payloads: Sequence[bytes], to: str = "") -> None:
        self.net.under_way.extend((self.other, True, each) for each in payloads)


class Instance:
    """An instance of a net, with or without the extension."""

    def __init__(self, number: int, *, speaks: bool) -> None:
        self.host = RecordingHost()
        self.host.identity = Identity("hs", f"w{number}", f"epoch{number}")
        self.handler = ReplicationCommandHandler(self.host, self.host.observer)
        self.extension: ReplicationExtension | None = None
        if speaks:
            self.extension = ReplicationExtension(self.handler, PeerEpochs(), None)

    def take(self, end: _Wire, payload: bytes, *, is_extension: bool) -> None:
        if is_extension:
            assert self.extension is not None
            self.extension.extension_received(end, payload)
        else:
            self.handler.received(end, read_lines([payload]))


class Net:
    """Instances with direct connections.

    :param links: pairs of a client and a server, by their numbers.
    :param speaks: the instances with the extension.
    """

    def __init__(
        self, size: int, links: Iterable[tuple[int, int]], speaks: Collection[int] = ()
    ) -> None:
        self.under_way: deque[tuple[_Wire, bool, bytes]] = deque()
        self.instances = [
            Instance(number, speaks=number in speaks) for number in range(size)
        ]
        self.ends: list[_Wire] = []
        for client, server in links:
            self._connect(client, server)
        self.run()

    def _connect(self, client: int, server: int) -> None:
        near = _Wire(f"to w{server}", self, relays=False)
        far = _Wire(f"from w{client}", self, relays=True)
        near.other, far.other = far, near
        near.owner, far.owner = self.instances[client], self.instances[server]
        for end in (near, far):
            end.owner.handler.new_connection(end)
            if near.owner.extension and far.owner.extension:
                assert end.owner.extension is not None
                end.owner.extension.extension_up(end)

    def run(self, most: int = 1000) -> int:
        """Deliver all queued lines; return their number."""
        for count in range(most):
            if not self.under_way:
                return count
            end, is_extension, payload = self.under_way.popleft()
            end.owner.take(end, payload, is_extension=is_extension)
        return most

    def delivered(self) -> list[list[Command]]:
        """Return the commands that each instance received."""
        return [each.host.commands.received for each in self.instances]

    def from_outside(self, number: int) -> int:
        """Let a peer that the others do not know send COMMAND to an instance.

        :return: the number of lines that the instances sent because of it.
        """
        outsider = MemoryConnection("stranger", relays=True)
        handler = self.instances[number].handler
        handler.new_connection(outsider)
        self.run()
        handler.received(outsider, read_lines([b"REMOTE_SERVER_UP a.example"]))
        return self.run()


def mesh(size: int, speaks: Collection[int] = ()) -> Net:
    """Return instances that each connect to every other one."""
    return Net(size, permutations(range(size), 2), speaks)


class MeshTests(SynchronousTestCase):
    """Tests with four instances that each connect to every other one."""

    def setUp(self) -> None:
        #: Without the extension, with it, and half of them with it.
        self.meshes = [mesh(4), mesh(4, range(4)), mesh(4, (0, 2))]

    def test_external_command_reaches_each_once(self) -> None:
        """A command from outside reaches each instance once."""
        for net, lines in zip(self.meshes, (3, 3, 5), strict=True):
            self.assertEqual(net.from_outside(0), lines)
            for calls in net.delivered():
                self.assertEqual(calls, [COMMAND])

    def test_command_on_several_links_is_delivered_once(self) -> None:
        """A command that reaches an instance on several links is delivered once."""
        for net in self.meshes:
            net.instances[0].handler.sender.send(LOCK)
            self.assertLess(net.run(), 20)
            first, *others = net.delivered()
            self.assertEqual(first, [])
            for calls in others:
                self.assertEqual(calls, [LOCK])

    def test_released_again(self) -> None:
        """A lock released twice in quick succession is delivered twice."""
        for net in self.meshes:
            for _ in range(2):
                net.instances[0].handler.sender.send(LOCK)
                net.run()
            for calls in net.delivered()[1:]:
                self.assertEqual(len(calls), 2)


class ChainTests(SynchronousTestCase):
    """Tests with instances that are not all connected to one another."""

    def test_chain(self) -> None:
        """A command crosses instances that both listen and connect, and no echo."""
        links = [(0, 1), (1, 2), (3, 2), (3, 4)]
        for sender in range(5):
            net = Net(5, links, range(5))
            net.instances[sender].handler.sender.send(COMMAND)
            self.assertEqual(net.run(), 4)
            delivered = net.delivered()
            self.assertEqual(delivered.pop(sender), [])
            self.assertEqual(delivered, [[COMMAND]] * 4)

    def test_from_outside(self) -> None:
        """A plain line of a client crosses the chain, too."""
        net = Net(3, [(0, 1), (1, 2)], range(3))
        net.from_outside(0)
        self.assertEqual(net.delivered(), [[COMMAND]] * 3)

    def test_two_ways(self) -> None:
        """A command that arrives in two ways is relayed once."""
        net = Net(5, [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4)], range(5))
        net.instances[0].handler.sender.send(COMMAND)
        self.assertEqual(net.run(), 5)

    def test_slow_links(self) -> None:
        """
        Even if links are slower than the filter of copies, a command does not
        circulate.
        """
        ring = [(0, 1), (1, 2), (2, 0)]
        for net in (Net(3, ring, range(3)), Net(3, ring), mesh(3), mesh(3, (0, 1))):
            net.instances[0].handler.sender.send(LOCK)
            lines = 0
            while net.under_way and lines < 100:
                lines += net.run(1)
                for each in net.instances:
                    each.host.reactor.advance(2 * COPY_WINDOW)
            self.assertLess(lines, 20)
            for calls in net.delivered()[1:]:
                self.assertIn(LOCK, calls)

    def test_hostile_command(self) -> None:
        """Only the two broadcast commands are accepted in a message."""
        net = Net(3, [(0, 1), (1, 2)], range(3))
        extension = net.instances[0].extension
        assert extension is not None
        extension.relay(UserSyncCommand("i", "@a:b", None, True, 1), None, frozenset())
        extension.relay(COMMAND, None, frozenset(["w1"]))
        net.run()
        self.assertEqual(net.delivered(), [[], [], []])

    def test_invalid_command(self) -> None:
        """A command that cannot be encoded is left to the sender, which reports it."""
        net = Net(2, [(0, 1)], range(2))
        extension = net.instances[0].extension
        assert extension is not None
        invalid = RemoteServerUpCommand("a\nb")
        self.assertEqual(len(extension.relay(invalid, None, frozenset())), 0)
        self.assertEqual(net.run(), 0)

    def test_many_instances(self) -> None:
        """If a message cannot have the names of all instances, none is sent."""
        net = Net(3, [(0, 1), (1, 2)], range(3))
        extension = net.instances[1].extension
        assert extension is not None
        for length, count in ((200, 100), (3, MAX_STREAMS)):
            names = (f"{number:0{length}}" for number in range(count))
            with self.subTest(count=count):
                self.assertEqual(
                    len(extension.relay(COMMAND, None, frozenset(names))), 0
                )
                self.assertEqual(net.run(), 0)
