"""Tests for requests on the publishing connection."""

from __future__ import annotations

from typing import Any

import txredisapi
from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from synapse_replication.redis.resp import encode
from synapse_replication.wire.close_reason import CloseReason
from tests.redis.sender_case import RedisSenderTestCase


class RequestTests(RedisSenderTestCase):
    """Tests for :meth:`RedisSenderProtocol.request`."""

    def setUp(self) -> None:
        super().setUp()
        self.memory.establish()
        self.results: list[Any] = []

    def _request(self, *arguments: bytes) -> Deferred[Any]:
        waiting: Deferred[Any] = self.memory.protocols[0].request(*arguments)
        return waiting.addBoth(self._ended)

    def _ended(self, result: Any) -> None:
        if isinstance(result, Failure):
            result = type(result.value).__name__, str(result.value)
        self.results.append(result)

    def test_replies_in_order(self) -> None:
        """Publishes, requests and txredisapi's commands receive their own replies."""
        self.publish_rows(1, 2)
        self.end_turn()
        self._request(b"GET", b"a")
        self.memory.protocols[0].get("b").addBoth(self._ended)
        self._request(b"SET", b"c", b"1")
        self.publish_rows(3)
        self.end_turn()
        self.assertIn(encode(b"GET", b"a"), self.written)
        self.memory.deliver_data(0, b":1\r\n:1\r\n$2\r\n\xff1\r\n$-1\r\n+O")
        self.assertEqual(self.results, [b"\xff1", None])
        self.assertEqual(self.memory.protocols[0].unacknowledged, 1)
        self.memory.deliver_data(0, b"K\r\n:1\r\n")
        self.assertEqual(self.results[2:], [b"OK"])
        self.assertEqual(self.memory.protocols[0].unacknowledged, 0)

    def test_error(self) -> None:
        """An error fails only the request that it answers."""
        self._request(b"GET", b"a")
        self._request(b"GET", b"b")
        self.memory.deliver_data(0, b"-WRONGTYPE no text\r\n$1\r\n2\r\n")
        self.assertEqual(self.results, [("ResponseError", "WRONGTYPE no text"), b"2"])

    def test_cancelled(self) -> None:
        """The reply to a cancelled request is dropped."""
        self._request(b"GET", b"a").cancel()
        self._request(b"GET", b"b")
        self.memory.deliver_data(0, b"$1\r\n1\r\n$1\r\n2\r\n")
        self.assertEqual(
            [self.results[0][0], self.results[1]], ["CancelledError", b"2"]
        )

    def test_lost_connection(self) -> None:
        """A lost connection fails pending and later requests."""
        self._request(b"GET", b"a")
        lost = self.memory.protocols[0]
        self.memory.lose(0)
        lost.request(b"GET", b"b").addBoth(self._ended)
        self.assertEqual([name for name, _ in self.results], ["ConnectionError"] * 2)
        self.assertIs(
            getattr(txredisapi, self.results[0][0]), txredisapi.ConnectionError
        )

    def test_no_reply(self) -> None:
        """The connection is aborted if a request gets no reply; the request fails."""
        protocol = self.memory.protocols[0]
        # Without the pings, which would abort the connection as well.
        protocol.factory._pings.stop()
        seconds = protocol.factory.replyTimeout
        self._request(b"GET", b"a")
        self._advance(seconds / 2)
        self.memory.deliver_data(0, b"$1\r\n1\r\n")
        self._request(b"GET", b"b")
        self._advance(seconds / 2)
        # At the first check, the oldest request has waited for half the time.
        self._advance(seconds - 1)
        self.assertFalse(self.memory.transports[0].aborted)
        self._advance(2)
        self.assertTrue(self.memory.transports[0].aborted)
        self.memory.lose(0)
        self.assertEqual(
            self.results, [b"1", ("ConnectionError", f"no reply within {seconds:g} s")]
        )
        lost = [event for event in self.memory.events.all if event[0] == "lost"]
        self.assertEqual(lost[0][2], CloseReason.TIMED_OUT)

    def test_timer_ends(self) -> None:
        """Without pending requests, no timer runs."""
        self.memory.protocols[0].factory._pings.stop()
        self.memory.protocols[1].factory._pings.stop()
        self._request(b"GET", b"a")
        self.memory.deliver_data(0, b"$1\r\n1\r\n")
        self._advance(self.memory.protocols[0].factory.replyTimeout + 1)
        self.assertEqual(self.memory.reactor.getDelayedCalls(), [])

    def _advance(self, seconds: float) -> None:
        for _ in range(1000):
            self.memory.reactor.advance(seconds / 1000)
