"""Tests for :mod:`tests.support.sentinel`."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.testing.servers import PrivateRedis
from tests.support.sentinel import PrivateSentinel, private_replica


class PrivateSentinelTests(SynchronousTestCase):
    def test_watches(self) -> None:
        """A Sentinel requires its password and returns the address of its master."""
        with PrivateRedis() as master, PrivateSentinel(master, password="p") as one:
            self.assertEqual(
                one.command("SENTINEL", "get-master-addr-by-name", "mymaster"),
                [master.host, str(master.port)],
            )
            self.assertFalse(one.knows_replica())
            one.password = None
            self.assertIn("NOAUTH", one.command("PING"))

    def test_replica(self) -> None:
        """A replica reports its master."""
        with PrivateRedis() as master, private_replica(master) as replica:
            role = replica.command("ROLE")
            self.assertEqual(role[:3], ["slave", master.host, master.port])
