"""Tests for the client, with the real resource in memory and over real sockets."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import attrs
from treq.testing import RequestTraversalAgent
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase, TestCase
from twisted.web.resource import Resource
from twisted.web.server import Site

from synapse_replication.errors import HttpCatchUpError, RowsLostError
from synapse_replication.http.agent import make_agent
from synapse_replication.http.client import BACKLOG_TIMEOUT, HttpCatchUpClient
from synapse_replication.http.location import InstanceLocation
from synapse_replication.http.resource import ReplicationResource
from synapse_replication.streams.backlog import Backlog, BacklogOptions
from synapse_replication.streams.stream import StreamUpdateResult
from synapse_replication.testing.certificates import PrivateAuthority, PrivatePair
from synapse_replication.transport.tls import TlsConfig
from tests.http.doubles import (
    WRITER,
    Directory,
    FailureObserver,
    ListStream,
)
from tests.support.http_root import under_root

_ROWS = [(2, ["a"]), (3, ["b"]), (5, ["c"])]


class CannedResource(Resource):
    """Answers every request with one status and body, and records the requests."""

    isLeaf = True  # noqa: N815

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__()
        self.status = status
        self.body = body
        self.requests: list[Any] = []

    def render(self, request: Any) -> bytes:
        self.requests.append(request)
        request.setResponseCode(self.status)
        return self.body


class HttpCatchUpClientTests(SynchronousTestCase):
    """Tests for :class:`HttpCatchUpClient`, in memory."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.events = ListStream("events", _ROWS)
        self.resource = under_root(
            ReplicationResource(
                Directory(self.events), "writer1", "hush", FailureObserver()
            )
        )

    def make_client(
        self,
        resource: Resource | None = None,
        secret: str | None = "hush",
        location: InstanceLocation | None = None,
        epoch: str | None = None,
    ) -> HttpCatchUpClient:
        """Return a client connected to a resource."""
        self.agent = RequestTraversalAgent(resource or self.resource)
        return HttpCatchUpClient(
            self.agent,
            {"writer1": location or WRITER},
            secret,
            self.clock,
            epoch_of=lambda instance_name: epoch,
        )

    def fetch(self, client: HttpCatchUpClient) -> StreamUpdateResult:
        """Fetch all rows."""
        response = Deferred.fromCoroutine(
            client.get_updates_since("events", "writer1", 1, 9)
        )
        return self.successResultOf(response)

    def fail_to_fetch(self, client: HttpCatchUpClient) -> HttpCatchUpError:
        """Fetch all rows, and return the error."""
        response = Deferred.fromCoroutine(
            client.get_updates_since("events", "writer1", 1, 9)
        )
        error = self.failureResultOf(response, HttpCatchUpError).value
        assert isinstance(error, HttpCatchUpError)
        return error

    def test_page(self) -> None:
        """A page is received exactly as it was sent."""
        self.assertEqual(
            self.fetch(self.make_client()),
            StreamUpdateResult([(2, ["a"]), (3, ["b"])], 3, True),
        )

    def test_no_observer(self) -> None:
        """The observer may be ``None``, like the function for epochs."""
        client = HttpCatchUpClient(
            RequestTraversalAgent(self.resource),
            {"writer1": WRITER},
            "hush",
            self.clock,
            epoch_of=None,
            observer=None,
        )
        self.assertEqual(self.fetch(client).upto_token, 3)

    def test_lost_rows(self) -> None:
        """The client learns from the writer up to which token rows are lost."""
        self.events.error = RowsLostError("not in memory any more", 5)
        response = Deferred.fromCoroutine(
            self.make_client().get_updates_since("events", "writer1", 1, 9)
        )
        error = self.failureResultOf(response, RowsLostError).value
        assert isinstance(error, RowsLostError)
        self.assertEqual((str(error), error.lost_upto), ("not in memory any more", 5))

    def test_update_function(self) -> None:
        """The client can be used as a stream's update function."""
        fetch = self.make_client().for_stream("events")

        async def fetch_page() -> StreamUpdateResult:
            return await fetch("writer1", 3, 9, 100)

        page = self.successResultOf(Deferred.fromCoroutine(fetch_page()))
        self.assertEqual(page, StreamUpdateResult([(5, ["c"])], 9, False))

    def test_epoch(self) -> None:
        """
        A request with the writer's current epoch is answered; one with another epoch is
        rejected with 409.
        """
        client = self.make_client(self.make_extended(), epoch="abc")
        self.assertEqual(self.fetch(client).upto_token, 3)
        client = self.make_client(self.make_extended(), epoch="older")
        self.assertEqual(self.fail_to_fetch(client).status, 409)

    def test_epoch_of_page(self) -> None:
        """A page of a stream in memory states of which epoch it is."""
        typing = ListStream("typing", [(2, ["a"])])
        client = self.make_client(self.make_extended(typing=typing))
        for name, epoch in (("typing", "abc"), ("events", None)):
            response = Deferred.fromCoroutine(
                client.get_updates_since(name, "writer1", 1, 9)
            )
            self.assertEqual(self.successResultOf(response).epoch, epoch)

    def test_backlog(self) -> None:
        """Rows come from the backlog; for older ones the status is 410."""
        backlog = Backlog(BacklogOptions())
        backlog.of("events").add(3, [(4, [b'["x"]', b'["y"]'])])
        client = self.make_client(self.make_extended(backlog))

        def fetch_backlog(
            from_token: int, epoch: str = "abc"
        ) -> Deferred[StreamUpdateResult]:
            return Deferred.fromCoroutine(
                client.get_backlog("events", "writer1", epoch, from_token, 9)
            )

        self.assertEqual(
            self.successResultOf(fetch_backlog(3)),
            StreamUpdateResult([(4, ["x"]), (4, ["y"])], 4, True),
        )
        self.assertEqual(self.events.fetches, [])
        for from_token, epoch, status in ((2, "abc", 410), (3, "other", 409)):
            failure = self.failureResultOf(
                fetch_backlog(from_token, epoch), HttpCatchUpError
            )
            self.assertEqual(getattr(failure.value, "status", None), status)

    def test_writer_that_hangs(self) -> None:
        """
        A request for the backlog has a short timeout, because the rows have another
        source.
        """
        self.events.blocked_until = Deferred()
        client = self.make_client()
        response = Deferred.fromCoroutine(
            client.get_backlog("events", "writer1", "abc", 1, 9)
        )
        self.clock.advance(BACKLOG_TIMEOUT - 1)
        self.assertNoResult(response)
        self.clock.advance(1)
        self.failureResultOf(response, HttpCatchUpError)

    def make_extended(
        self, backlog: Backlog | None = None, typing: ListStream | None = None
    ) -> Resource:
        """Return the resource of a process that supports the extension."""
        streams = [self.events] if typing is None else [self.events, typing]
        return under_root(
            ReplicationResource(
                Directory(*streams, writes=streams),
                "writer1",
                "hush",
                FailureObserver(),
                epoch="abc",
                backlog=backlog,
            )
        )

    def test_request(self) -> None:
        """Each request has an id of its own, the secret, and the range."""
        canned = CannedResource(
            200, b'{"updates": [], "upto_token": 9, "limited": false}'
        )
        client = self.make_client(canned)
        self.fetch(client)
        self.fetch(client)
        first, second = canned.requests
        self.assertEqual(
            first.postpath[:-1],
            [b"_synapse", b"replication", b"get_repl_stream_updates", b"events"],
        )
        self.assertNotEqual(first.postpath[-1], second.postpath[-1])
        self.assertEqual(first.args, {b"from_token": [b"1"], b"upto_token": [b"9"]})
        self.assertEqual(first.getHeader("Authorization"), "Bearer hush")
        self.assertEqual(first.getHeader("Accept"), "application/json")

    def test_wrong_secret(self) -> None:
        """
        The error for a wrong secret has a hint, but no secret, not even one that the
        response repeats.
        """
        error = self.fail_to_fetch(self.make_client(secret="wrong"))
        self.assertEqual(error.status, 401)
        self.assertIn("the same replication secret", str(error))
        self.assertNotIn("hush", str(error))
        echoed = CannedResource(500, b"no access for Bearer wrong")
        error = self.fail_to_fetch(self.make_client(echoed, secret="wrong"))
        self.assertNotIn("wrong", str(error).replace("wrong secret", ""))

    def test_stock_refusal(self) -> None:
        """Stock Synapse answers 500 to a wrong secret; the hint mentions this."""
        stock = CannedResource(
            500, b'{"errcode":"M_UNKNOWN","error":"Internal server error"}'
        )
        error = self.fail_to_fetch(self.make_client(stock))
        self.assertEqual(error.status, 500)
        self.assertIn("the same replication secret", str(error))

    def test_wrong_listener(self) -> None:
        """If the port belongs to another listener, the hint names instance_map."""
        error = self.fail_to_fetch(self.make_client(Resource()))
        self.assertEqual(error.status, 404)
        self.assertIn("configure the address", str(error))

    def test_other_refusal(self) -> None:
        """Any other error is reported with its status and body."""
        error = self.fail_to_fetch(self.make_client(CannedResource(400, b"M_UNKNOWN")))
        self.assertEqual((error.status, error.body), (400, "M_UNKNOWN"))

    def test_malformed_response(self) -> None:
        """A malformed response is an error, whatever its status."""
        for body in (
            b"<html>",
            b"[]",
            b'{"updates": [["x", 1]], "upto_token": 1, "limited": false}',
            b'{"updates": []}',
            b'{"updates": [[%d, 1]], "upto_token": 9, "limited": false}' % (2**63),
            b'{"updates": [], "upto_token": %d, "limited": false}' % (2**63),
            b"\xff",
            b'{"updates": [[1, ' + b"[" * 5000 + b"]" * 5000 + b"]]}",
        ):
            error = self.fail_to_fetch(self.make_client(CannedResource(200, body)))
            self.assertEqual(error.status, 200)

    def test_status(self) -> None:
        """The status of a process is returned without being parsed."""
        self.resource = under_root(
            ReplicationResource(
                Directory(self.events),
                "writer1",
                "hush",
                FailureObserver(),
                status=lambda: b"fine",
            )
        )
        response = Deferred.fromCoroutine(self.make_client().get_status("writer1"))
        self.assertEqual(self.successResultOf(response), b"fine")

    def test_no_status(self) -> None:
        """The status of a process that does not support it is an error."""
        response = Deferred.fromCoroutine(self.make_client().get_status("writer1"))
        error = self.failureResultOf(response, HttpCatchUpError).value
        self.assertEqual(error.status, 404)

    def test_unknown_instance(self) -> None:
        """For a writer that is not in instance_map, the hint is to add it."""
        response = Deferred.fromCoroutine(
            self.make_client().get_updates_since("events", "writer2", 1, 9)
        )
        error = self.failureResultOf(response, HttpCatchUpError).value
        self.assertIn("add writer2 to the addresses", str(error))
        self.assertFalse(error.was_sent)

    def test_no_response_in_time(self) -> None:
        """A request without a response in time fails."""
        self.events.blocked_until = Deferred()
        response = Deferred.fromCoroutine(
            self.make_client().get_updates_since("events", "writer1", 1, 9)
        )
        self.agent.flush()
        self.clock.advance(29)
        self.assertNoResult(response)
        self.clock.advance(2)
        error = self.failureResultOf(response, HttpCatchUpError).value
        self.assertIn("did not answer: no response within 30 s", str(error))

    def test_too_long(self) -> None:
        """A response that is too long fails."""
        agent = RequestTraversalAgent(CannedResource(200, b"[" * 200))
        client = HttpCatchUpClient(
            agent,
            {"writer1": WRITER},
            None,
            self.clock,
            max_answer_length=100,
        )
        error = self.fail_to_fetch(client)
        self.assertIn("longer than 100 bytes", str(error))

    def test_url(self) -> None:
        """Errors show the URL, including that of TLS or of a Unix socket."""
        for location, shown in (
            (attrs.evolve(WRITER, tls=True), "https://writer.example:9093/_synapse/"),
            (InstanceLocation("::1", 80), "http://[::1]/_synapse/"),
            (InstanceLocation(path="/run/w.sock"), "unix:/run/w.sock:/_synapse/"),
        ):
            error = self.fail_to_fetch(
                self.make_client(CannedResource(404, b""), location=location)
            )
            self.assertIn(shown, error.url)


class RealSocketTests(TestCase):
    """Tests for client and resource on a real reactor."""

    async def test_ports_and_unix_sockets(self) -> None:
        """Rows arrive over a port and over a Unix socket, on persistent connections."""
        from twisted.internet import reactor as untyped_reactor  # noqa: TID251

        reactor: Any = untyped_reactor
        made: list[object] = []

        class CountingSite(Site):
            def buildProtocol(self, addr: Any) -> Any:
                made.append(addr)
                return super().buildProtocol(addr)

        site = CountingSite(
            under_root(
                ReplicationResource(
                    Directory(ListStream("events", _ROWS)),
                    "writer1",
                    "hush",
                    FailureObserver(),
                )
            )
        )
        folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, folder)
        port = reactor.listenTCP(0, site, interface="127.0.0.1")
        self.addCleanup(port.stopListening)
        unix = reactor.listenUNIX(str(folder / "w.sock"), site)
        self.addCleanup(unix.stopListening)
        locations = {
            "by_port": InstanceLocation("127.0.0.1", port.getHost().port),
            "by_socket": InstanceLocation(None, None, False, str(folder / "w.sock")),
            "gone": InstanceLocation(None, None, False, str(folder / "gone.sock")),
        }
        agent, pool = make_agent(reactor, locations)
        self.addCleanup(pool.closeCachedConnections)
        client = HttpCatchUpClient(agent, locations, "hush", reactor)
        for instance_name in ("by_port", "by_socket"):
            for from_token, expected in ((0, 2), (3, 1)):
                page = await client.get_updates_since(
                    "events", instance_name, from_token, 9
                )
                self.assertEqual(len(page.updates), expected)
        self.assertEqual(len(made), 2)
        with self.assertRaises(HttpCatchUpError) as caught:
            await client.get_updates_since("events", "gone", 0, 9)
        self.assertIsNone(caught.exception.status)

    async def test_tls(self) -> None:
        """
        Rows arrive over TLS; a wrong server certificate, or a rejected client, is
        reported with its reason.
        """
        from twisted.internet import reactor as untyped_reactor  # noqa: TID251

        reactor: Any = untyped_reactor
        folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, folder)
        authority = PrivateAuthority(folder)
        other = PrivateAuthority(folder, "other")
        server, client = authority.issue("server"), authority.issue("client")
        other_pair = other.issue("other_client")
        resource = ReplicationResource(
            Directory(ListStream("events", _ROWS)), "w", "hush", FailureObserver()
        )
        port = reactor.listenSSL(
            0,
            Site(under_root(resource)),
            TlsConfig(
                listener_certificate_file=server.certificate,
                listener_private_key_file=server.private_key,
                client_ca_file=authority.certificate,
            ).for_listening(),
            interface="127.0.0.1",
        )
        self.addCleanup(port.stopListening)
        number = port.getHost().port
        locations = {
            "w": InstanceLocation("127.0.0.1", number, True),
            "by_name": InstanceLocation("localhost", number, True),
            "plain": InstanceLocation("127.0.0.1", number),
        }

        async def count_rows(
            name: str = "w",
            trusted: PrivateAuthority = authority,
            own: PrivatePair | None = client,
        ) -> int:
            files = TlsConfig(
                trusted.certificate,
                own.certificate if own else None,
                own.private_key if own else None,
            )
            agent, pool = make_agent(reactor, locations, files.for_connecting)
            try:
                client = HttpCatchUpClient(agent, locations, "hush", reactor)
                page = await client.get_updates_since("events", name, 0, 9)
                return len(page.updates)
            finally:
                await pool.closeCachedConnections()

        self.assertEqual(await count_rows(), 2)
        refusals: list[tuple[dict[str, Any], str]] = [
            ({"trusted": other}, "not issued by an authority that this process trusts"),
            ({"name": "by_name"}, "is not for localhost"),
            ({"own": None}, "the peer requires a certificate"),
            ({"own": other_pair}, "does not trust the authority"),
            ({"name": "plain"}, ""),
        ]
        for arguments, words in refusals:
            with self.assertRaises(HttpCatchUpError) as caught:
                await count_rows(**arguments)
            self.assertIsNone(caught.exception.status)
            self.assertIn(words, str(caught.exception))
