"""Tests for backlogs in instances of the host that do not need Synapse."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from treq.testing import StubTreq
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorPluggableNameResolver
from twisted.internet.testing import MemoryReactorClock, StringTransport
from twisted.trial.unittest import SkipTest, SynchronousTestCase
from twisted.web.resource import Resource

from synapse_replication.dropin.backlogs import (
    instance_locations,
    row_requests,
    serves_backlog,
    with_backlog,
)
from synapse_replication.dropin.observer import observer_of
from synapse_replication.dropin.settings import variable
from synapse_replication.dropin.synapse_host import HostClock
from synapse_replication.errors import HttpCatchUpError, StreamConfigurationError
from synapse_replication.handlers.epochs import PeerEpochs
from synapse_replication.handlers.events import Resync
from synapse_replication.handlers.receiving.partial_resync import PartialResync
from synapse_replication.wire.commands import PositionCommand
from synapse_replication.wire.extension import (
    ExtensionMessage,
    MessageType,
    encode_message,
    parse_message,
)
from tests.dropin.host import (
    FakeClock,
    FakeStream,
    HostWithHandler,
    Link,
    SingleCommandConnection,
    SingleCommandHandler,
    fake_modules,
)

_EVENTS = "http://w/_synapse/replication/get_repl_stream_updates/events/abc"
_SECRET = {"Authorization": "Bearer hush"}


class HostResource(Resource):
    """The resource that the host mounts at its replication path."""

    isLeaf = True  # noqa: N815

    def __init__(self, hs: Any) -> None:
        super().__init__()

    def render(self, request: Any) -> bytes:
        """Respond to any request, as after the host's own check."""
        return b'"the host"'


def listener(*names: str) -> SimpleNamespace:
    """
    Return a listener of the host's configuration; without names, its type is not HTTP.
    """
    options = SimpleNamespace(
        resources=[SimpleNamespace(names=["health"]), SimpleNamespace(names=names)]
    )
    return SimpleNamespace(http_options=options if names else None)


class HostTestCase(SynchronousTestCase):
    """A worker ``w`` of a host made of doubles, with the extended resource."""

    def setUp(self) -> None:
        self.patch(os, "environ", {})
        self.stream = FakeStream("events", {"w": 5, "v": 3}, 5)
        fake_modules(
            self,
            {"events": lambda hs: self.stream},
            modules={
                "synapse.replication.http": {
                    "ReplicationRestResource": with_backlog(HostResource)
                }
            },
        )
        self.hs: Any = HostWithHandler(
            "w",
            worker_listeners=[listener(), listener("client"), listener("replication")],
            worker_replication_secret="hush",
            instance_map={
                "main": SimpleNamespace(host="127.0.0.1", port=8001, tls=False),
                "v": SimpleNamespace(path="/run/v.sock"),
                "t": SimpleNamespace(host="t.example", port=8002, tls=True),
            },
        )
        self.hs.config.server.listeners = [listener("client")]

    def turn_off(self) -> None:
        """Restore the host's own resource."""
        module: Any = importlib.import_module("synapse.replication.http")
        module.ReplicationRestResource = HostResource


class ServingTests(HostTestCase):
    """Tests for with_backlog and serves_backlog."""

    def serve(self) -> Any:
        """Create the resource and mount it, as the host does."""
        root, synapse = Resource(), Resource()
        root.putChild(b"_synapse", synapse)
        module = importlib.import_module("synapse.replication.http")
        synapse.putChild(b"replication", module.ReplicationRestResource(self.hs))
        return StubTreq(root)

    def request_rows(
        self,
        treq: Any,
        headers: Mapping[str, str] = _SECRET,
        url: str = _EVENTS,
        **params: str,
    ) -> tuple[int, Any]:
        """Return the status code and the JSON content of a response."""
        query = {"from_token": "5", "upto_token": "9", "epoch": "abc", "backlog": "1"}
        response = self.successResultOf(
            treq.get(url, params=query | params, headers=headers)
        )
        return response.code, json.loads(self.successResultOf(treq.content(response)))

    def send_rows(self) -> None:
        """Write rows up to token 9, and send them on a connection."""
        self.hs.get_replication_command_handler().new_connection(
            SingleCommandConnection()
        )
        streamer = self.hs.get_replication_streamer()
        self.stream.updates = [(7, ["a"]), (9, ["b"])]
        self.stream.local_token = self.stream.tokens["w"] = 9
        streamer.on_notifier_poke()

    def test_backlog(self) -> None:
        """The rows sent last are served from memory, in one page."""
        self.send_rows()
        self.stream.updates = []
        treq = self.serve()
        page = {"updates": [[7, ["a"]], [9, ["b"]]], "upto_token": 9, "limited": False}
        self.assertEqual(self.request_rows(treq), (200, page))
        page["updates"] = [[9, ["b"]]]
        self.assertEqual(self.request_rows(treq, from_token="7"), (200, page))

    def test_refusals(self) -> None:
        """
        A wrong secret is always refused with 401, another epoch with 409, and a range
        outside the backlog with 410.
        """
        self.send_rows()
        treq = self.serve()
        for headers in ({}, {"Authorization": "Bearer hus"}):
            for url in (_EVENTS, _EVENTS.replace("events", "gone")):
                status, answer = self.request_rows(treq, headers, url)
                self.assertEqual(status, 401)
                self.assertNotIn("hush", str(answer))
        self.assertEqual(self.request_rows(treq, epoch="other")[0], 409)
        self.assertEqual(self.request_rows(treq, from_token="1")[0], 410)

    def test_requests_for_the_host(self) -> None:
        """Requests that do not ask for a backlog are passed to the host."""
        self.send_rows()
        treq = self.serve()
        for backlog in ("0", ""):
            self.assertEqual(
                self.request_rows(treq, backlog=backlog), (200, "the host")
            )
        send = "http://w/_synapse/replication/fed_send_edu/x"
        response = self.successResultOf(treq.post(send, data=b"{}"))
        content = self.successResultOf(treq.content(response))
        self.assertEqual(content, b'"the host"')

    def test_without_a_backlog(self) -> None:
        """
        Without a backlog, or with the host's own handler, all requests are passed to
        the host.
        """
        os.environ["SYNAPSE_REPLICATION_EXTENSION"] = "false"
        self.assertIsNone(self.hs.get_replication_command_handler().backlog)
        self.assertEqual(self.request_rows(self.serve()), (200, "the host"))
        stock = SingleCommandHandler()
        self.hs.get_replication_command_handler = lambda: stock
        self.assertEqual(self.request_rows(self.serve()), (200, "the host"))

    def test_needs_a_listener(self) -> None:
        """
        A backlog is created only if a listener of this instance serves the resource.
        """
        self.assertTrue(serves_backlog(self.hs))
        self.hs.config.worker.worker_listeners = [listener("client"), listener()]
        self.assertFalse(serves_backlog(self.hs))
        # A worker reads the main process's listeners, but does not use them.
        self.hs.config.server.listeners = [listener("replication")]
        self.assertFalse(serves_backlog(self.hs))
        self.hs._instance_name = "master"
        self.assertTrue(serves_backlog(self.hs))
        self.turn_off()
        self.assertFalse(serves_backlog(self.hs))

    def test_hello_announces_backlog(self) -> None:
        """HELLO states whether this instance has a backlog."""
        for listeners in ([listener("replication")], [listener("client")]):
            self.hs.config.worker.worker_listeners = listeners
            self.hs._handler = None
            link: Any = Link()
            handler = self.hs.get_replication_command_handler()
            handler.extension.extension_up(link)
            (hello,) = map(parse_message, link.payloads)
            self.assertEqual(hello.has_backlog, handler.backlog is not None)
            self.assertEqual(hello.has_backlog, "replication" in str(listeners))

    def test_status(self) -> None:
        """The status is served to requests with the secret, even without a backlog."""
        url = "http://w/_synapse/replication/status"
        for listeners in ([listener("replication")], [listener("client")]):
            self.hs.config.worker.worker_listeners = listeners
            self.hs._handler = None
            treq = self.serve()
            answer = self.request_rows(treq, url=url)
            self.assertEqual(answer, (200, {"how": "well"}))
            self.assertEqual(self.request_rows(treq, {}, url=url)[0], 401)

    def test_status_of_a_stock_handler(self) -> None:
        """With the host's own handler, the host responds."""
        self.hs.get_replication_command_handler = SingleCommandHandler
        url = "http://w/_synapse/replication/status"
        self.assertEqual(self.request_rows(self.serve(), url=url), (200, "the host"))

    def test_bounds(self) -> None:
        """
        The environment sets the bounds of the backlog, whose size is exported as
        metrics.
        """
        watched: list[Any] = []
        self.hs.observers.metrics.watch_backlog = watched.append
        os.environ.update(
            {variable("backlog_rows"): "1", variable("backlog_bytes"): "1000"}
        )
        self.send_rows()
        (backlog,) = watched
        self.assertEqual([of.rows for _, of in backlog], [1])
        self.assertEqual(self.request_rows(self.serve())[0], 410)
        self.assertEqual(self.request_rows(self.serve(), from_token="7")[0], 200)

    def test_invalid_bound(self) -> None:
        """An invalid bound raises an error that names the variable."""
        for value in ("many", "-1", ""):
            os.environ[variable("backlog_rows")] = value
            with self.assertRaises(StreamConfigurationError) as caught:
                serves_backlog(self.hs)
            self.assertIn(
                f"SYNAPSE_REPLICATION_BACKLOG_ROWS is {value!r}", str(caught.exception)
            )


class RequestTests(HostTestCase):
    """Tests for :func:`row_requests`."""

    def setUp(self) -> None:
        super().setUp()
        self.reactor = MemoryReactorClock()
        self.hs.reactor, self.hs.clock = self.reactor, FakeClock(self.reactor)
        self.clock = HostClock(self.hs.clock, self.reactor)
        self.tls_hosts: list[bytes] = []

        def creator(host: bytes, port: int) -> Any:
            self.tls_hosts.append(host)
            raise ValueError("no certificate of its own")

        self.hs.get_http_client_context_factory = lambda: SimpleNamespace(
            creatorForNetloc=creator
        )
        self.epochs = PeerEpochs()
        for name in ("master", "v", "t", "nowhere"):
            self.epochs.record_message(name, f"epoch of {name}", 0)

    def request_rows(self, writer: str) -> Deferred[Any]:
        """Request rows of events from a writer."""
        requests, observer = row_requests(self.hs), observer_of(self.hs)
        assert requests is not None
        partial = PartialResync(self.epochs, requests, self.clock, observer)
        return Deferred.fromCoroutine(partial.get_updates_since("events", writer, 5, 9))

    def connect(self, factory: Any) -> StringTransport:
        """Establish the requested connection."""
        transport = StringTransport()
        protocol = factory.buildProtocol(None)
        protocol.makeConnection(transport)
        self.protocol = protocol
        return transport

    def answer(self, status: str, body: str) -> None:
        """Send a response."""
        self.protocol.dataReceived(
            f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        )

    def test_port(self) -> None:
        """The main process is queried at its port, with secret and epoch."""
        if not IReactorPluggableNameResolver.providedBy(self.reactor):
            raise SkipTest("in this Twisted, MemoryReactor cannot resolve names")
        response = self.request_rows("master")
        host, port, factory, *_ = self.reactor.tcpClients[0]
        self.assertEqual((host, port), ("127.0.0.1", 8001))
        request = self.connect(factory).value().decode()
        self.assertRegex(
            request, r"^GET /_synapse/replication/get_repl_stream_updates/events/\S+\?"
        )
        for part in ("epoch=epoch%20of%20master", "backlog=1", "from_token=5"):
            self.assertIn(part, request)
        self.assertIn("Authorization: Bearer hush\r\n", request)
        self.answer("200 OK", '{"updates":[[7,["a"]]],"upto_token":9,"limited":false}')
        result = self.successResultOf(response)
        self.assertEqual(result.updates, [(7, ["a"])])
        # The connection is kept open until the host shuts down.
        (at_end,) = self.hs.at_shutdown
        at_end["shutdown_func"]()
        self.assertTrue(self.protocol.transport.disconnecting)

    def test_socket(self) -> None:
        """An instance that listens on a Unix socket is queried on this socket."""
        response = self.request_rows("v")
        path, factory, *_ = self.reactor.unixClients[0]
        self.assertEqual(path, "/run/v.sock")
        self.connect(factory)
        self.answer("410 Gone", "{}")
        self.assertIsNone(self.successResultOf(response))

    def test_tls(self) -> None:
        """With TLS, the host's own context factory verifies the server."""
        self.assertIsNone(self.successResultOf(self.request_rows("t")))
        self.assertEqual(self.tls_hosts, [b"t.example"])

    def test_writer_not_in_instance_map(self) -> None:
        """
        A writer that is not in ``instance_map`` is not queried, and an error is
        reported.
        """
        self.assertIsNone(self.successResultOf(self.request_rows("nowhere")))
        ((_, writer, error),) = self.hs.observer.backlog_answers
        self.assertIsInstance(error, HttpCatchUpError)
        self.assertIn("add nowhere to the addresses", str(error))
        self.assertEqual(writer, "nowhere")

    def test_locations(self) -> None:
        """
        The main process is listed under its name on the wire, whatever a worker's map
        says.
        """
        places = instance_locations(self.hs.config.worker.instance_map)
        self.assertEqual(set(places), {"master", "v", "t"})
        self.assertEqual(places["v"].path, "/run/v.sock")
        self.assertTrue(places["t"].tls)
        self.assertEqual(
            instance_locations({"master": SimpleNamespace(path="/m")})["master"].path,
            "/m",
        )

    def test_before_the_database(self) -> None:
        """A gap is requested from its writer first, without a query of the database."""
        handler = self.hs.get_replication_command_handler()
        hello = ExtensionMessage(
            type=MessageType.HELLO,
            instance_name="v",
            epoch="e",
            time_ms=0,
            positions={},
        )
        link: Any = Link()
        handler.extension.extension_up(link)
        handler.extension.extension_received(link, encode_message(hello))
        connection = SingleCommandConnection()
        handler.new_connection(connection)
        self.stream.updates = [(7, ["from the database"])]
        handler.on_POSITION(connection, PositionCommand("events", "v", 9, 9))
        self.connect(self.reactor.unixClients[0][1])
        self.answer("200 OK", '{"updates":[[7,["a"]]],"upto_token":9,"limited":false}')
        rows = [call for call in self.hs.calls if call[0] == "on_rdata"]
        self.assertEqual(rows, [("on_rdata", "events", "v", 7, ["A"])])
        partial = ("events", "v", Resync.PARTIAL)
        self.assertEqual(self.hs.observer.resyncs, {partial: 1})

    def test_not_in_use(self) -> None:
        """
        If the part is not replaced or the extension is disabled, no rows are requested
        from backlogs.
        """
        os.environ["SYNAPSE_REPLICATION_EXTENSION"] = "false"
        self.assertIsNone(row_requests(self.hs))
        del os.environ["SYNAPSE_REPLICATION_EXTENSION"]
        self.turn_off()
        self.assertIsNone(row_requests(self.hs))
