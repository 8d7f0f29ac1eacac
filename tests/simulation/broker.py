"""A double of Redis on simulated connections, with the commands that replication uses.

Each subscriber receives the messages of each publisher in the order in which they were
published; messages of different publishers interleave as they arrive at the broker. A
subscriber that reads too slowly is disconnected, as by ``client-output-buffer-limit``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random

from synapse_replication.redis.resp import ReplyParser, encode
from tests.simulation.network import Connection, SimulatedNetwork

Garbler = Callable[[str, bytes], bytes]


class SimulatedBroker:
    """The broker: channels, and the sessions of its clients.

    :param published: called with (publisher, line) for each message on the main
        channel, before its delivery.
    :ivar delivers: called with (subscriber, line) for each delivery of a published
        message; the line that it returns is delivered instead.
    :ivar discards: called with each message on the main channel; if it returns true,
        the message is delivered to nobody.
    :ivar auth_stalls: whether AUTH is left unanswered.
    :ivar auth_fails: whether AUTH is refused.
    :ivar buffer_limit: the number of bytes in flight to a subscriber above which it is
        disconnected.
    :ivar messages: the number of messages on the main channel.
    :ivar extension_messages: the number of messages on other channels.
    :ivar sessions: the sessions of the clients.
    :ivar kills: the number of subscribers disconnected because of ``buffer_limit``.
    """

    def __init__(
        self,
        network: SimulatedNetwork,
        random: Random,
        published: Callable[[str, bytes], object],
    ) -> None:
        self._network = network
        self._random = random
        self._published = published
        self.sessions: list[_Session] = []
        self._last_number = 0
        self.delivers: Garbler = lambda _, line: line
        self.discards: Callable[[bytes], bool] = lambda line: False
        self.auth_stalls = False
        self.auth_fails = False
        self.buffer_limit = 16_000
        self.messages = self.extension_messages = 0
        self.kills = 0
        network.broker_session = self._new_session

    def stop(self) -> None:
        """Stop the broker: every connection is lost, with all data in flight."""
        self._network.broker_is_up = False
        for session in list(self.sessions):
            session.connection.reset(in_flight_arrives=False)

    def start(self) -> None:
        """Restart the broker, without any sessions."""
        self._network.broker_is_up = True

    def _new_session(self, connection: Connection) -> _Session:
        self._last_number += 1
        session = _Session(self, connection, self._last_number)
        self.sessions.append(session)
        return session

    def kill(self, number: int, address: str | None, by: _Session) -> int:
        """End a client's session, and discard unread data of the client.

        :param address: its address; ``None`` if the number is enough.
        :param by: the session that requests it, which is not ended.
        :return: the number of ended sessions.
        """
        killed = 0
        for session in list(self.sessions):
            client = session.connection.address
            is_same = address in (None, f"{client.host}:{client.port}")
            if session.number == number and is_same and session is not by:
                session.connection.up.close()
                session.connection.end_session()
                killed += 1
        return killed

    def ended(self, session: _Session) -> None:
        """Remove a session, whose connection is closed."""
        if session in self.sessions:
            self.sessions.remove(session)

    def publish(self, sender: Connection, channel: bytes, line: bytes) -> int:
        """Send a message to the subscribers of a channel, and return their number."""
        if b"/" in channel:
            self.extension_messages += 1
        else:
            self.messages += 1
            self._published(sender.reactor.name, line)
        receivers = [s for s in self.sessions if channel in s.channels]
        if b"/" not in channel and self.discards(line):
            return len(receivers)
        for session in receivers:
            name = session.connection.reactor.name
            message = self.delivers(name, line)
            session.write(encode(b"message", channel, message))
            if session.connection.down.in_flight > self.buffer_limit:
                self.kills += 1
                session.connection.reset(in_flight_arrives=False)
        return len(receivers)

    def inject(self, channel: str, message: bytes, names: Iterable[str]) -> None:
        """Send some subscribers a message that no process published.

        :param names: the names of the subscribers' processes.
        """
        wanted = set(names)
        for session in list(self.sessions):
            name = session.connection.reactor.name
            if channel.encode() in session.channels and name in wanted:
                session.write(encode(b"message", channel.encode(), message))


class _Session:
    """The session of one client."""

    reactor = None

    def __init__(
        self, broker: SimulatedBroker, connection: Connection, number: int
    ) -> None:
        self._broker = broker
        self.number = number
        self.name = ""
        self.connection = connection
        self.channels: set[bytes] = set()
        self._reader = ReplyParser()

    def __str__(self) -> str:
        client = self.connection.address
        address = f"{client.host}:{client.port}"
        return f"id={self.number} addr={address} name={self.name} age=0\n"

    def write(self, data: bytes) -> None:
        self.connection.down.write(data)

    def begin(self) -> None: ...

    def lost(self) -> None:
        self._broker.ended(self)

    def received(self, data: bytes) -> None:
        self._reader.feed(data)
        answers = []
        while (command := self._reader.gets()) is not False:
            answers.append(self._answer(command))
        self.write(b"".join(answers))

    def _answer(self, command: list[bytes]) -> bytes:
        name = command[0].upper()
        if name == b"PUBLISH":
            count = self._broker.publish(self.connection, command[1], command[2])
            return b":%d\r\n" % count
        if name == b"SUBSCRIBE":
            answers = []
            for channel in command[1:]:
                self.channels.add(channel)
                answers.append(
                    b"*3\r\n$9\r\nsubscribe\r\n$%d\r\n%b\r\n:%d\r\n"
                    % (len(channel), channel, len(self.channels))
                )
            return b"".join(answers)
        if name == b"PING":
            return b"*2\r\n$4\r\npong\r\n$0\r\n\r\n" if self.channels else b"+PONG\r\n"
        if command[:2] == [b"CLIENT", b"INFO"]:
            info = str(self).encode()
            return b"$%d\r\n%b\r\n" % (len(info), info)
        if command[:3] == [b"CLIENT", b"KILL", b"ID"]:
            address = command[5].decode() if len(command) > 5 else None
            killed = self._broker.kill(int(command[3]), address, self)
            return b":%d\r\n" % killed
        if command[:2] == [b"CLIENT", b"SETNAME"]:
            self.name = command[2].decode()
        if command[:2] == [b"CLIENT", b"LIST"]:
            clients = "".join(map(str, self._broker.sessions)).encode()
            return b"$%d\r\n%b\r\n" % (len(clients), clients)
        if name == b"AUTH" and self._broker.auth_stalls:
            return b""
        if name == b"AUTH" and self._broker.auth_fails:
            return b"-WRONGPASS invalid username-password pair\r\n"
        return b"+OK\r\n"
