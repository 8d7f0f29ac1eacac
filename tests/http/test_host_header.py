"""Tests for the host that requests name."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.http.client import HttpCatchUpClient
from synapse_replication.http.location import InstanceLocation


class _Agent:
    """Records the headers of the requests, and answers none."""

    def __init__(self) -> None:
        self.hosts: list[Any] = []

    def request(self, method: bytes, uri: bytes, headers: Any, body: Any) -> Any:
        self.hosts.append(headers.getRawHeaders(b"host"))
        return Deferred()


class HostHeaderTests(SynchronousTestCase):
    def test_host(self) -> None:
        """A request names the configured host, also if the URL has an alias of it."""
        for host, named in (
            ("main.example", b"main.example:9093"),
            ("synapse_main_1", b"synapse_main_1:9093"),
            ("[::1]", b"[::1]:9093"),
        ):
            agent: Any = _Agent()
            clock: Any = Clock()
            locations = {"w1": InstanceLocation(host, 9093)}
            client = HttpCatchUpClient(agent, locations, None, clock)
            Deferred.fromCoroutine(client.get_status("w1")).addErrback(lambda _: None)
            self.assertEqual(agent.hosts, [[named]])
