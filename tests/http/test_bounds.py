"""Tests for the bounds of a response, with raw bytes over real sockets."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IPushProducer
from twisted.internet.protocol import Factory, Protocol
from twisted.trial.unittest import TestCase
from zope.interface import implementer

from synapse_replication.errors import HttpCatchUpError
from synapse_replication.http import agent as agent_module
from synapse_replication.http.agent import make_agent
from synapse_replication.http.client import HttpCatchUpClient
from synapse_replication.http.location import InstanceLocation
from synapse_replication.streams.rows import MAX_VALUES

_OK = b"HTTP/1.1 200 OK\r\n"
_LONGEST = 4 * 1024 * 1024


def with_length(body: bytes, *headers: bytes, status: bytes = b"200 OK") -> bytes:
    """Return a response with a body of known length."""
    lines = [b"HTTP/1.1 %b" % status, b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join([*lines, b"", body])


def zipped(body: bytes, *headers: bytes, status: bytes = b"200 OK") -> bytes:
    """Return a response whose body is compressed."""
    encoding = b"Content-Encoding: gzip"
    return with_length(gzip.compress(body), encoding, *headers, status=status)


def page_of(rows: bytes) -> bytes:
    """Return a page with rows that are JSON text."""
    return b'{"updates": [%b], "upto_token": 5, "limited": false}' % rows


@implementer(IPushProducer)
class _Writer(Protocol):
    """A writer that sends bytes as fast as the reader accepts them."""

    def __init__(self, server: _Server) -> None:
        self.server = server
        self.chunks: Iterator[bytes] = iter(())
        self.is_paused = False

    def dataReceived(self, data: bytes) -> None:
        self.server.requests.append(data)
        transport: Any = self.transport
        self.chunks = iter(self.server.response())
        transport.registerProducer(self, True)
        self.resumeProducing()

    def resumeProducing(self) -> None:
        transport: Any = self.transport
        self.is_paused = False
        while not self.is_paused:
            chunk = next(self.chunks, None)
            if chunk is None:
                transport.unregisterProducer()
                return
            self.server.sent += len(chunk)
            transport.write(chunk)

    def pauseProducing(self) -> None:
        self.is_paused = True

    def stopProducing(self) -> None:
        self.is_paused = True

    def connectionLost(self, reason: object = None) -> None:
        self.server.lost.callback(None)


class _Server(Factory):
    def __init__(self, response: Callable[[], Any]) -> None:
        self.response = response
        self.requests: list[bytes] = []
        self.sent = 0
        self.lost: Deferred[None] = Deferred()

    def buildProtocol(self, addr: object) -> _Writer:
        return _Writer(self)


class BoundsTests(TestCase):
    """Tests for what a response may cost."""

    timeout = 60

    def setUp(self) -> None:
        from twisted.internet import reactor as untyped_reactor  # noqa: TID251

        self.reactor: Any = untyped_reactor

    def make_client(self, *response: bytes, endless: bytes = b"") -> HttpCatchUpClient:
        """Return a client of a server that sends a response, then a block for ever."""

        def chunks() -> Iterator[bytes]:
            yield from response
            if endless:
                yield from repeat(endless)

        self.server = _Server(chunks)
        port = self.reactor.listenTCP(0, self.server, interface="127.0.0.1")
        self.addCleanup(port.stopListening)
        at = {"w": InstanceLocation("127.0.0.1", port.getHost().port)}
        agent, pool = make_agent(self.reactor, at)
        self.addCleanup(pool.closeCachedConnections)
        return HttpCatchUpClient(
            agent, at, "hush", self.reactor, max_answer_length=_LONGEST
        )

    async def refused(self, client: HttpCatchUpClient) -> HttpCatchUpError:
        """Return the error of a request; check that it names the writer."""
        with self.assertRaises(HttpCatchUpError) as caught:
            await client.get_updates_since("events", "w", 0, 5)
        error = caught.exception
        assert isinstance(error, HttpCatchUpError)
        self.assertIn("http://127.0.0.1:", str(error))
        return error

    async def test_endless_heads(self) -> None:
        """
        A head without an end is refused, in whichever form it comes, and the connection
        is aborted.
        """
        for start, block in (
            (_OK, b"X: %b\r\n" % (b"a" * 8000)),
            (_OK, b"X: a\r\n"),
            (_OK + b"X: a\r\n", b" %b\r\n" % (b"b" * 8000)),
            (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        ):
            client = self.make_client(start, endless=block * 20)
            error = await self.refused(client)
            self.assertIn("the head of the response has more than", str(error))
            await self.server.lost
            self.assertLess(self.server.sent, 8 * 1024 * 1024)

    async def test_head_of_each_response(self) -> None:
        """The head of each response is counted by itself, and bodies are not."""
        header = b"X: %b" % (b"a" * 8000)
        lines = b"\n" * (2 * agent_module.MAX_HEAD_LINES)
        body = page_of(b"[5, 1]") + lines
        client = self.make_client(with_length(body, *[header] * 5))
        for _ in range(3):
            page = await client.get_updates_since("events", "w", 0, 5)
            self.assertEqual(page.updates, [(5, 1)])
        self.assertEqual(len(self.server.requests), 3)
        self.assertFalse(self.server.lost.called)

    async def test_endless_body(self) -> None:
        """A body without an end is refused, and the connection is aborted."""
        client = self.make_client(_OK + b"\r\n", endless=b"a" * 65536)
        error = await self.refused(client)
        self.assertIn(f"longer than {_LONGEST} bytes", str(error))
        await self.server.lost

    async def test_compressed_text(self) -> None:
        """A body that is too long when it is decompressed is refused early."""
        client = self.make_client(zipped(b" " * (256 * 1024 * 1024)))
        error = await self.refused(client)
        self.assertIn(f"longer than {_LONGEST} bytes", str(error))
        await self.server.lost

    async def test_many_values(self) -> None:
        """A body of very many values is refused before it is decoded."""
        for rows in (b"[5, 1]," * MAX_VALUES, b"[5, [" + b"[]," * MAX_VALUES):
            client = self.make_client(zipped(page_of(rows)))
            error = await self.refused(client)
            self.assertIn(f"more than {MAX_VALUES} JSON values", str(error))

    async def test_turns(self) -> None:
        """A compressed page is received, a part of it in each turn of the reactor."""
        body = b'[5, "%b"]' % (b"a" * 4_000_000)
        client = self.make_client(zipped(page_of(body)))
        inflated: list[int] = []
        inflate = agent_module._BoundedBody._inflate

        def counting(body: Any, unzip: Any, data: bytes) -> None:
            before = body._length
            inflate(body, unzip, data)
            inflated.append(body._length - before)

        self.patch(agent_module._BoundedBody, "_inflate", counting)
        page = await client.get_updates_since("events", "w", 0, 5)
        self.assertEqual(len(page.updates[0][1]), 4_000_000)
        self.assertLessEqual(max(inflated), 1024 * 1024)
        # The connection is used again.
        await client.get_updates_since("events", "w", 0, 5)
        self.assertFalse(self.server.lost.called)

    async def test_damaged_compression(self) -> None:
        """A compressed body that ends early, or is not gzip, is an error."""
        body = gzip.compress(page_of(b"[5, 1]"))
        encoding = b"Content-Encoding: gzip"
        for damaged, text in (
            (body[:-9], "the compressed response ends early"),
            (b"plain", "incorrect header check"),
        ):
            client = self.make_client(with_length(damaged, encoding))
            self.assertIn(text, str(await self.refused(client)))

    async def test_nested_compression(self) -> None:
        """A body that is compressed twice is not decompressed twice."""
        body = gzip.compress(gzip.compress(page_of(b"[5, 1]")))
        client = self.make_client(with_length(body, b"Content-Encoding: gzip, gzip"))
        self.assertIn("not a page of rows", str(await self.refused(client)))

    async def test_long_error(self) -> None:
        """The body of a response that reports an error has a bound of its own."""
        client = self.make_client(
            zipped(b"a" * 1_000_000, status=b"500 Internal Server Error")
        )
        error = await self.refused(client)
        self.assertEqual(error.status, 500)
        self.assertIn("longer than 65536 bytes", error.body)
        await self.server.lost

    async def test_no_redirection_and_cookies(self) -> None:
        """Redirections are not followed, and cookies are not sent again."""
        client = self.make_client(
            with_length(b"", b"Location: /x", b"Set-Cookie: a=b", status=b"302 Found")
        )
        for _ in range(2):
            self.assertEqual((await self.refused(client)).status, 302)
        self.assertEqual(len(self.server.requests), 2)
        self.assertNotIn(b"cookie", self.server.requests[1].lower())

    async def test_no_end_in_time(self) -> None:
        """After the time limit of a request, its connection is aborted."""
        client = self.make_client(_OK + b"Content-Length: 100\r\n\r\nbegin")
        client._timeout = 0.1
        error = await self.refused(client)
        self.assertIn("no response within 0.1 s", str(error))
        await self.server.lost
