"""Tests for partial resync with a real Synapse."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections import Counter
from typing import Any, cast
from urllib.parse import urlencode

import attrs
import yaml
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families
from twisted.internet import reactor  # noqa: TID251 -- that of the homeserver
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.server import Site

from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.http.resource import ReplicationResource
from synapse_replication.streams.backlog import Backlog, BacklogOptions
from synapse_replication.testing.doubles import SourceStream
from synapse_replication.testing.private_process import free_port
from synapse_replication.testing.servers import PrivateRedis
from synapse_replication.wire.commands import PositionCommand
from synapse_replication.wire.extension import (
    ExtensionMessage,
    MessageType,
    encode_message,
)
from tests.external import skip_reason
from tests.external.synapse.homeserver import HomeserverTestCase, RecordingConnection
from tests.external.synapse.real import (
    Chat,
    Listener,
    OurProcess,
    eventually,
    json_lines,
    new_deployment,
    query,
)
from tests.support.http_root import under_root
from tests.support.link_proxy import Cut, LinkProxy
from tests.support.recording_observer import RecordingHost
from tests.support.synapse_process import MAIN, Launcher, WorkerSpec, ours

skip = skip_reason("synapse")

WORKERS = ("persister1", "writer1", "sync1")


@attrs.frozen
class AnyRow:
    """A row type for rows that stay JSON."""


def get(port: int, path: str, secret: str | None = None) -> tuple[int, str]:
    """Send a GET request to a process; return the status and the body."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
    if secret is not None:
        request.add_header("Authorization", f"Bearer {secret}")
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


class BacklogTests(SynchronousTestCase):
    """Four Synapse processes and a reader of ours; both readers can be disconnected."""

    def start(self, launchers: dict[str, Launcher]) -> None:
        """
        Start the deployment and the reader, and listen to the extension's channel.
        """
        redis = PrivateRedis().start()
        self.addCleanup(redis.stop)
        self.proxy = LinkProxy((redis.host, redis.port))
        self.addCleanup(self.proxy.close)
        by_proxy = {"enabled": True, "host": "127.0.0.1", "port": self.proxy.port}
        self.deployment = new_deployment(
            redis,
            [
                WorkerSpec("persister1", ("client",)),
                WorkerSpec("writer1", ("client",)),
                WorkerSpec("sync1", ("client", "metrics"), {"redis": by_proxy}),
            ],
            {"events": ["persister1"], "typing": ["writer1"], "receipts": ["writer1"]},
            launchers,
            {"enable_metrics": True},
        )
        self.listener = Listener(redis, self.deployment.server_name)
        self.addCleanup(self.listener.stop)
        self.addCleanup(self.deployment.stop)
        self.deployment.start()
        self.metrics_port = free_port()
        folder = self.deployment.directory
        self.journal = folder / "reader.journal"
        config = folder / "reader.yaml"
        config.write_text(yaml.safe_dump(self.reader_config(by_proxy)))
        self.reader = OurProcess(
            folder / "reader.out",
            *("worker", "-c", str(self.deployment.config_file), "-c", str(config)),
        )
        self.addCleanup(self.reader.stop)
        eventually("the reader is up", lambda: " is up" not in self.reader.errors())

    def reader_config(self, redis: dict[str, Any]) -> dict[str, Any]:
        """Return the configuration of our own process."""
        return {
            "worker_app": "synapse_replication.worker",
            "worker_name": "reader",
            "redis": redis,
            "worker_listeners": [
                {
                    "type": "metrics",
                    "port": self.metrics_port,
                    "bind_addresses": ["127.0.0.1"],
                }
            ],
            "synapse_replication": {
                "row_sink": {
                    "module": "synapse_replication.app.journal.make_journal",
                    "config": {"path": str(self.journal)},
                }
            },
        }

    def resyncs(self, name: str) -> Counter[tuple[str, str]]:
        """Return the resyncs that a reader counted, by stream and kind."""
        port, path = self.metrics_port, "/metrics"
        if name == "sync1":
            port = self.deployment.processes[name].api.port
            path = "/_synapse/metrics"
        return Counter(
            {
                (sample.labels["stream_name"], sample.labels["kind"]): int(sample.value)
                for family in text_string_to_metric_families(get(port, path)[1])
                if family.name == "synapse_replication_resyncs"
                for sample in family.samples
                if sample.name.endswith("_total")
            }
        )

    def all_arrived(self, chat: Chat) -> object:
        """
        Return the shown texts and missing events if a reader lacks any, else ``None``.
        """
        shown = chat.shown_by("sync1")
        rows = query(
            self.deployment, "SELECT event_id FROM events WHERE stream_ordering > 0"
        )
        lacks = {event_id for (event_id,) in rows} - {
            row[1][0]
            for line in json_lines(self.journal)
            if line["stream"] == "events"
            for row in line["rows"]
            if row[0] == "ev"
        }
        return None if (shown, lacks) == (chat.sent, set()) else (shown, lacks)

    def miss_rows(self, chat: Chat) -> None:
        """Disconnect both readers while rows of all kinds are written."""
        eventually("all arrived", lambda: self.all_arrived(chat))
        self.proxy.cut(Cut.SUBSCRIPTION)
        chat.do_everything()
        self.proxy.heal()
        eventually("the missed rows arrived", lambda: self.all_arrived(chat))

    def backlog_requests(self, name: str) -> list[str]:
        """Return a process's log lines of requests for its backlog."""
        log = self.deployment.processes[name].log_tail(10**8)
        return [line for line in log.splitlines() if "backlog=1" in line]

    def backlog_path(self, **changes: Any) -> str:
        """Return the path of a request for rows of events in persister1's backlog."""
        (epoch,) = self.listener.epochs("persister1")
        wanted = {"from_token": 1, "upto_token": 9, "epoch": epoch, "backlog": 1}
        path = "/_synapse/replication/get_repl_stream_updates/events/abc"
        return f"{path}?{urlencode(wanted | changes)}"

    def test_partial_resync(self) -> None:
        """
        Rows that readers missed come from the writers' backlogs and not from the
        database; only requests with the secret, to replication listeners, are served.
        """
        self.start({name: ours() for name in (MAIN, *WORKERS)})
        chat = Chat.begin(self.deployment)
        chat.do_everything()
        before = {name: self.resyncs(name) for name in ("sync1", "reader")}
        self.miss_rows(chat)
        for name in ("sync1", "reader"):
            new = self.resyncs(name) - before[name]
            # A writer of only caches may not have stated its epoch to this reader.
            full = {stream for stream, kind in new if kind == "full"}
            self.assertLessEqual(full, {"caches"}, name)
            # Streams of all three writers.
            partial = {stream for stream, kind in new if kind == "partial"}
            self.assertLessEqual(
                {"events", "receipts", "account_data", "push_rules"}, partial, name
            )
        for name in (MAIN, "persister1", "writer1"):
            self.assertTrue(self.backlog_requests(name), name)
        self.check_who_is_answered()
        self.assertEqual(self.deployment.problems(), {})
        self.assertEqual(self.reader.stop(), 0, self.reader.errors())

    def check_who_is_answered(self) -> None:
        """Send requests to persister1 and to the public listeners of all processes."""
        secret = self.deployment.secret
        port = self.deployment.replication_ports["persister1"]
        last = max(
            message.positions["events"].token
            for message in self.listener.messages_of(
                "persister1", MessageType.HEARTBEAT
            )
        )
        path = self.backlog_path(from_token=last - 1, upto_token=last)
        status, answer = get(port, path, secret)
        self.assertEqual(status, 200, answer)
        page = json.loads(answer)
        self.assertEqual((page["upto_token"], page["limited"]), (last, False))
        self.assertEqual({token for token, _ in page["updates"]}, {last})
        for wrong in (None, "", secret[:-1], f"{secret}x"):
            status, answer = get(port, path, wrong)
            self.assertEqual(status, 401)
            self.assertNotIn(secret, answer)
        self.assertEqual(get(port, self.backlog_path(epoch="x"), secret)[0], 409)
        self.assertEqual(get(port, self.backlog_path(from_token=0), secret)[0], 410)
        for process in self.deployment.processes.values():
            self.assertEqual(get(process.api.port, path, secret)[0], 404)
        # The host's own responses are unchanged.
        own = self.backlog_path(backlog=0, from_token=last - 1, upto_token=last)
        self.assertEqual(json.loads(get(port, own, secret)[1]), page)

    def test_stock_writers(self) -> None:
        """
        No backlog is requested from stock writers and from those without one, and an
        empty backlog has no rows: the missed rows come from the database.
        """
        self.start(
            {
                "persister1": ours("--backlog-rows", "0"),
                "writer1": ours("--except", "backlog"),
                "sync1": ours(),
            }
        )
        chat = Chat.begin(self.deployment)
        chat.do_everything()
        before = {name: self.resyncs(name) for name in ("sync1", "reader")}
        self.miss_rows(chat)
        for name in ("sync1", "reader"):
            new = self.resyncs(name) - before[name]
            full = {stream for stream, kind in new if kind == "full"}
            self.assertLessEqual({"events", "receipts", "account_data"}, full, name)
        for name in (MAIN, "writer1"):
            self.assertEqual(self.backlog_requests(name), [])
        self.assertTrue(self.backlog_requests("persister1"))
        (hello, *_) = self.listener.messages_of("writer1", MessageType.HELLO)
        self.assertFalse(hello.has_backlog)
        self.assertEqual(self.deployment.problems(), {})


class FromOursTests(HomeserverTestCase):
    """Tests for a Synapse process that missed rows of one of our processes."""

    def other_address(self) -> dict[str, Any]:
        """Serve our process on a Unix socket and return its address."""
        path = f"/tmp/replication-{free_port()}.sock"
        host = RecordingHost(SourceStream("events", AnyRow), written=["events"])
        self.backlog = Backlog(BacklogOptions())
        resource = ReplicationResource(
            host.streams,
            "other",
            "hush",
            ReplicationObserver(),
            epoch="e1",
            backlog=self.backlog,
        )
        port = cast(Any, reactor).listenUNIX(path, Site(under_root(resource)))
        self.addCleanup(port.stopListening)
        return {"path": path}

    def resyncs(self, kind: str) -> float:
        """Return how many resyncs of events were counted."""
        labels = {"stream_name": "events", "kind": kind, "server_name": "test"}
        name = "synapse_replication_resyncs_total"
        return REGISTRY.get_sample_value(name, labels) or 0.0

    async def test_from_ours(self) -> None:
        """
        The missed rows come from the backlog, over the socket in ``instance_map``.
        """
        handler = self.hs.get_replication_command_handler()
        got: list[tuple[Any, ...]] = []
        data_handler = self.hs.get_replication_data_handler()
        on_rdata = data_handler.on_rdata

        async def record(name: str, writer: str, token: int, rows: Any) -> None:
            if rows:
                # The host also calls it without rows, for a position.
                got.append((name, writer, token, [row.type for row in rows]))
            await on_rdata(name, writer, token, [])

        self.patch(data_handler, "on_rdata", record)
        connection = RecordingConnection()
        handler.new_connection(connection)
        hello = ExtensionMessage(
            type=MessageType.HELLO,
            instance_name="other",
            epoch="e1",
            time_ms=0,
            positions={},
        )
        handler.extension.extension_received(connection, encode_message(hello))
        known = handler.get_streams()["events"].current_token("other")
        partial, full = self.resyncs("partial"), self.resyncs("full")
        row = b'["ev",["$1","!r:test","m.x",null,null,null,null,false,false]]'
        self.backlog.of("events").add(known, [(known + 2, [row])])
        last = known + 2
        handler.on_POSITION(connection, PositionCommand("events", "other", last, last))
        await self.until(lambda: got)
        self.assertEqual(got, [("events", "other", last, ["ev"])])
        await self.until(lambda: self.resyncs("partial") == partial + 1)
        self.assertEqual(self.resyncs("full"), full)
