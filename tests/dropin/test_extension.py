"""Tests for the extension in instances of the host that do not need Synapse."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.dropin.redis_factories import (
    DropInRedisFactory,
    RedisDirectTcpReplicationClientFactory,
    lazyConnection,
)
from synapse_replication.wire.extension import MessageType, parse_message
from tests.dropin.host import (
    FakeStream,
    HostWithHandler,
    Link,
    SingleCommandHandler,
    fake_modules,
)


class ExtensionTests(SynchronousTestCase):
    """Tests for the extension of a homeserver made of doubles."""

    def setUp(self) -> None:
        self.patch(os, "environ", {})
        fake_modules(
            self,
            {
                "events": lambda hs: FakeStream("events", {"w": 5}, 5),
                "typing": lambda hs: FakeStream("typing", {"w": 3}, 3),
            },
            modules={
                "synapse.replication.tcp.redis": {
                    "SynapseRedisFactory": DropInRedisFactory,
                    "RedisDirectTcpReplicationClientFactory": (
                        RedisDirectTcpReplicationClientFactory
                    ),
                },
            },
        )
        self.hs: Any = HostWithHandler("w")
        reactor: Any = self.hs.reactor
        self.hs.config.redis = SimpleNamespace(
            redis_enabled=True,
            redis_path=None,
            redis_use_tls=False,
            redis_host="r",
            redis_port=6379,
            redis_password=None,
        )
        reactor.connectTCP = lambda *args, **named: None
        reactor.addSystemEventTrigger = lambda *args: None
        reactor.removeSystemEventTrigger = lambda *args: None

    def subscription(self, outbound: Any = None) -> Any:
        """Create the factory of the subscription, as the host does."""
        return RedisDirectTcpReplicationClientFactory(
            self.hs, outbound or lazyConnection(self.hs), channel_names=[]
        )

    def test_hello(self) -> None:
        """
        HELLO has the host's instance name, and its random instance id as the epoch.
        """
        handler = self.hs.get_replication_command_handler()
        link: Any = Link()
        handler.extension.extension_up(link)
        (hello,) = map(parse_message, link.payloads)
        self.assertEqual(hello.type, MessageType.HELLO)
        self.assertEqual((hello.instance_name, hello.epoch), ("w", "abc"))
        self.assertEqual(hello.positions["events"].token, 5)
        self.assertFalse(hello.has_backlog)
        self.assertRegex(hello.where, rf".+:{os.getpid()}$")

    def test_subscription(self) -> None:
        """
        The subscription uses the extension only with this project's handler and sender.
        """
        extension = self.hs.get_replication_command_handler().extension
        factory = self.subscription()
        self.assertIs(factory.extension, extension)
        self.assertEqual(factory.extension_channel, "test/replication_ext")
        self.assertEqual(factory.channels, ["test"])
        foreign = SimpleNamespace(publish=lambda *args: None)
        self.assertIsNone(self.subscription(foreign).extension)
        stock = SingleCommandHandler()
        self.hs.get_replication_command_handler = lambda: stock
        self.assertIsNone(self.subscription().extension)

    def test_turned_off(self) -> None:
        """If the extension is disabled, the link is that of the classic protocol."""
        os.environ["SYNAPSE_REPLICATION_EXTENSION"] = "false"
        self.assertIsNone(self.hs.get_replication_command_handler().extension)
        self.assertIsNone(self.subscription().extension)
        # Nothing is sent when the outbound connection is re-established, either.
        lazyConnection(self.hs)._factory.sender._on_connected()

    def test_lifecycle(self) -> None:
        """
        Heartbeats are sent while replication runs, HELLO on each reconnect, GOODBYE at
        the end.
        """
        handler = self.hs.get_replication_command_handler()
        self.hs.get_outbound_redis_connection = lambda: lazyConnection(self.hs)
        handler.start_replication(self.hs)
        link: Any = Link()
        handler.extension.extension_up(link)
        self.hs.reactor.pump([1] * 7)
        self.assertEqual(
            link.types,
            [MessageType.HELLO, MessageType.HEARTBEAT, MessageType.HEARTBEAT],
        )
        lazyConnection(self.hs)._factory.sender._on_connected()
        self.assertEqual(link.types[3:], [MessageType.HELLO])
        for handler_of_end in self.hs.at_shutdown:
            handler_of_end["shutdown_func"]()
        self.assertEqual(link.types[4:], [MessageType.GOODBYE])
        self.hs.reactor.pump([1] * 7)
        self.assertEqual(len(link.types), 5)
