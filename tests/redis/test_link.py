"""Tests of a link with a real Redis."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from twisted.internet.defer import Deferred, fail, succeed

from synapse_replication.errors import NameLostError
from synapse_replication.redis.options import RedisOptions
from synapse_replication.testing.servers import shared_redis
from synapse_replication.wire.commands import RemoteServerUpCommand, UserIpCommand
from tests.redis.real_redis import (
    Peer,
    RealRedisTestCase,
    by_port,
)


def _has_name(lost: Sequence[NameLostError] = ()) -> Deferred[None]:
    return fail(lost[0]) if lost else succeed(None)


class RoundTripTests(RealRedisTestCase):
    """Each instance, including the sender, receives the sent rows."""

    async def exchange(self, *peers: Peer) -> None:
        """Send rows from the first peer and receive them on all."""
        for peer in peers:
            await peer.wait_until_up()
        peers[0].write(500)
        for peer in peers:
            await peer.events.until(lambda peer=peer: peer.handler.seen == 500)  # type: ignore[misc]
            self.assertEqual(peer.handler.gaps, [])

    async def test_two_readers(self) -> None:
        """Rows arrive in order at each reader."""
        options = by_port(shared_redis())
        await self.exchange(self.start_peer(options), self.start_peer(options))

    async def test_unix_socket(self) -> None:
        """Both connections work with a Unix socket."""
        options = RedisOptions(path=str(shared_redis().socket_path))
        await self.exchange(self.start_peer(options))

    async def test_earlier_connection_is_closed(self) -> None:
        """A new sending connection makes Redis close the earlier one first."""
        redis = shared_redis()
        peer = self.start_peer(by_port(redis))
        factory = peer.link._outbound
        await self.until(lambda: factory.lost_connections.previous is not None)
        (first,) = factory.connections
        # Simulate that only this end has noticed the loss of the connection.
        factory.stopTrying()
        self.reactor.connectTCP(redis.host, redis.port, factory)
        await self.until(lambda: first not in factory.connections)
        (second,) = factory.connections
        self.assertTrue(second.established)

    async def test_predecessor(self) -> None:
        """
        The connection of a process that has acquired its name ends that of its
        predecessor, which then publishes nothing, before it is used.
        """
        redis = shared_redis()
        for options in (by_port(redis), RedisOptions(path=str(redis.socket_path))):
            lost: list[NameLostError] = []
            first = self.start_peer(options, confirm=partial(_has_name, lost))
            other = self.start_peer(
                options, instance_name=options.address, confirm=_has_name
            )
            reader = self.start_peer(options)
            for peer in (first, other, reader):
                await peer.wait_until_up()
            lost.append(NameLostError("writer", "another"))
            successor = self.start_peer(options, confirm=_has_name)
            await successor.wait_until_up()
            first.write(3)
            await first.wait_for_event("again", "another process writes as writer")
            first.write(4)
            successor.write(5)
            await reader.events.until(lambda: reader.handler.seen >= 5)  # noqa: B023
            self.assertEqual(reader.handler.seen, 5)
            self.assertEqual(reader.handler.gaps, [])
            self.assertNotIn("lost", str(other.events.all))

    async def test_password_user_and_database(self) -> None:
        """User, password and database apply to both connections."""
        redis = self.start_redis(
            password="hush",
            acl=[
                "user bob on >secret ~* &* -@all +auth +select +subscribe +publish "
                "+ping +set +get +client|info +client|kill +client|setname "
                "+client|list"
            ],
        )
        peer = self.start_peer(
            by_port(redis, username="bob", password="secret", dbid=3),
            confirm=_has_name,
        )
        await self.exchange(peer)
        for kind in ("normal", "pubsub"):
            users = {(c["user"], c["db"]) for c in redis.clients(kind)}
            self.assertIn(("bob", "3"), users)
        await peer.link.cache.set("c", "k", [1, "ä"], 60_000)
        self.assertEqual(await peer.link.cache.get("c", "k"), [1, "ä"])
        # No command was refused by the ACL.
        self.assertEqual(redis.command("ACL", "LOG"), [])

    async def test_password_only(self) -> None:
        """A password for the default user applies to both connections."""
        redis = self.start_redis(password="hush")
        await self.exchange(self.start_peer(by_port(redis, password="hush")))

    async def test_user_ip(self) -> None:
        """USER_IP reaches only the subscribers of its channel."""
        options = by_port(shared_redis())
        with_ips = self.start_peer(options, channels=["USER_IP"])
        without = self.start_peer(options)
        await with_ips.wait_until_up()
        await without.wait_until_up()
        command = UserIpCommand("@a:hs", "token", "::1", "agent", None, 5)
        without.send(command)
        without.send(RemoteServerUpCommand("x.example"))
        for peer in (with_ips, without):
            await peer.events.until(
                lambda peer=peer: (  # type: ignore[misc]
                    RemoteServerUpCommand("x.example") in peer.handler.items
                )
            )
        self.assertIn(command, with_ips.handler.items)
        self.assertNotIn(command, without.handler.items)
        await without.sender.drained()

    async def test_flushed_on_stop(self) -> None:
        """Rows that were published right before the stop arrive."""
        options = by_port(shared_redis())
        reader = self.start_peer(options)
        peer = Peer(self.reactor, options, self.server_name)
        await reader.wait_until_up()
        await peer.wait_until_up()
        peer.write(5000)
        await peer.link.stop()
        await reader.events.until(lambda: reader.handler.seen == 5000)
