"""The base class of the sender's tests."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.redis.resp import encode, encode_publishes
from tests.redis.doubles import MemoryLink, RecordingTransport, rdata

_PING = encode(b"PING")


_INFO = encode(b"CLIENT", b"INFO")


_FENCING = [
    encode(b"CLIENT", b"KILL", b"ID", b"7", b"ADDR", b"203.0.113.7:4711"),
]


_POSITION = b"POSITION events writer 9 9"


def published(writes: list[bytes]) -> bytes:
    """Return only the PUBLISH commands."""
    head = encode_publishes(b"", [b""])[0][:16]
    return b"".join(data for data in writes if data.startswith(head))


class SocketTransport(RecordingTransport):
    """A transport that counts the calls of ``doWrite``.

    :ivar sent: the number of calls.
    """

    sent = 0

    def doWrite(self) -> None:
        self.sent += 1


class RedisSenderTestCase(SynchronousTestCase):
    """Tests for :class:`RedisSender` and its protocol."""

    def setUp(self) -> None:
        self.memory = MemoryLink()
        self.sender = self.memory.link.sender

    @property
    def written(self) -> list[bytes]:
        """The writes of the sending connection since the last access."""
        return self.memory.transports[0].take()

    def publish_rows(self, *tokens: int) -> None:
        """Publish rows."""
        self.sender.publish("RDATA", "hs", [rdata(token) for token in tokens])

    def end_turn(self) -> None:
        """End the current reactor turn."""
        self.memory.reactor.advance(0)

    def publish_and_refuse(self, answer: bytes) -> None:
        """Publish a row, and answer the CLIENT INFO after it with an error."""
        self.memory.greet()
        self.publish_rows(1)
        self.end_turn()
        self.assertIn(_INFO, self.written)
        self.memory.deliver_data(0, b":1\r\n" + answer)

    def publish_again(self) -> list[bytes]:
        """Reconnect, publish a row, and return all writes except publishes."""
        self.memory.lose(0)
        self.memory.connect(0)
        self.memory.greet()
        self.publish_rows(2)
        self.end_turn()
        head = encode_publishes(b"", [b""])[0][:16]
        return [data for data in self.written if not data.startswith(head)]

    def lose_and_connect(self) -> bytes:
        """Reconnect, and return what is published on the new connection."""
        self.memory.lose(0)
        transport = self.memory.connect(0)
        self.memory.greet()
        self.end_turn()
        return published(transport.take())

    @property
    def unavailable(self) -> list[tuple[str, str, str]]:
        """The reports of unavailable features."""
        return [event for event in self.memory.events.all if event[0] == "unavailable"]

    @property
    def failures(self) -> list[str]:
        """The reported failures."""
        return [event[1] for event in self.memory.events.all if event[0] == "failure"]
