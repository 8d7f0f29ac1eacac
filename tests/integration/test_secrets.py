"""Tests that no access token, secret or password is in a log, error or metric.

Everything that observes a process is attached, at every level: the log as text and as
JSON, tracebacks, Python's own log, metrics, the status page's data, spans. Then lines
with secrets are sent, well formed and malformed, and the outputs are searched for them.
"""

from __future__ import annotations

import inspect
import io
import logging
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, get_args

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest
from twisted.internet import reactor  # noqa: TID251 -- a real Redis
from twisted.internet.defer import Deferred, fail
from twisted.internet.task import deferLater
from twisted.logger import LogEvent, Logger, eventAsText, globalLogPublisher
from twisted.trial.unittest import SynchronousTestCase, TestCase

from synapse_replication.config.process import load_config
from synapse_replication.errors import (
    ConfigError,
    HttpCatchUpError,
    RemoteProtocolError,
)
from synapse_replication.handlers import events
from synapse_replication.handlers.command_handler import ReplicationCommandHandler
from synapse_replication.handlers.events import (
    AnnouncedBy,
    CatchUpEvent,
    CommandDropReason,
    ConnectionBuffers,
    DiscardReason,
    Event,
    PeerHeartbeat,
    Resync,
    Work,
)
from synapse_replication.handlers.observer import CompositeObserver, ReplicationObserver
from synapse_replication.instrumentation.log_file import json_line
from synapse_replication.instrumentation.logs import LoggingObserver
from synapse_replication.instrumentation.prometheus import (
    PrometheusObserver,
    ReplicationMetrics,
)
from synapse_replication.instrumentation.status.model import encode_status
from synapse_replication.instrumentation.status.status_observer import StatusObserver
from synapse_replication.instrumentation.tracing import TracingObserver
from synapse_replication.redis.link import RedisReplicationLink
from synapse_replication.redis.options import RedisOptions
from synapse_replication.tcp.protocol import (
    BaseReplicationStreamProtocol,
    ClientReplicationStreamProtocol,
    ServerReplicationStreamProtocol,
)
from synapse_replication.testing.doubles import SourceStream
from synapse_replication.testing.servers import PrivateRedis
from synapse_replication.wire.close_reason import CloseReason
from synapse_replication.wire.commands import UserIpCommand, parse_command_from_line
from synapse_replication.wire.rdata import RefusedLine, read_lines
from tests.handlers.fixtures import Row
from tests.support.recording_observer import RecordingHost
from tests.tcp.doubles import PausingTransport

TOKEN = "syt_YWxpY2U_qWeRtYuIoPaSdFgHjKlZ_0aBcDe"
SECRET = "replication-secret-1b2c3d4e5f"
PASSWORD = "redis-password-9z8y7x6w5v"
SECRETS = (TOKEN, SECRET, PASSWORD)

_GOOD = f'USER_IP @alice:hs ["{TOKEN}","192.0.2.1","Element","DEV",1700000000000]'
#: Lines with an access token in them, from well formed to garbage.
LINES: tuple[bytes, ...] = tuple(
    line if isinstance(line, bytes) else line.encode()
    for line in (
        _GOOD,
        _GOOD[:-1],
        _GOOD + " more",
        _GOOD.replace('"192', "192"),
        _GOOD.replace(" @alice:hs", ""),
        _GOOD.replace("USER_IP", "USER_IPS"),
        _GOOD.replace("USER_IP ", "USER_IP\t"),
        _GOOD.replace("1700000000000", "NaN"),
        _GOOD.replace("1700000000000", "1" * 400),
        _GOOD.replace("1700000000000", f'"{TOKEN}"'),
        _GOOD.replace("Element", "\\ud800"),
        _GOOD.replace("Element", "x" * 20_000),
        _GOOD.replace("Element", "\x00\x1b[31m"),
        _GOOD.encode().replace(b"Element", b"\xff\xfe"),
        f"USER_IP {TOKEN}",
        f'USER_IP "{TOKEN}',
        f"USER_IP @alice:hs [[[[[[{TOKEN}",
        f'USER_IP @alice:hs {{"access_token":"{TOKEN}"}}',
        f"{TOKEN}",
        f'["{TOKEN}","192.0.2.1"',
        f"{TOKEN} @alice:hs",
        f'INVALIDATE_CACHE get_user_by_access_token ["{TOKEN}"]',
        f'INVALIDATE_CACHE get_user_by_access_token ["{TOKEN}"',
        f'RDATA caches w 5 ["get_user_by_access_token",["{TOKEN}"],1700000000000]',
        f'RDATA caches w 6 ["get_user_by_access_token",["{TOKEN}"],"{TOKEN}"]',
        f'RDATA caches w 7 ["{TOKEN}"',
        f'RDATA caches w {TOKEN} ["f",["k"],1]',
        f"POSITION caches w {TOKEN} 5",
        f"USER_SYNC {TOKEN}",
        f"FEDERATION_ACK {TOKEN}",
        f'LOCK_RELEASED ["{TOKEN}"',
        f"PING {TOKEN}",
    )
)


class FailingCommands:
    """A command handler whose every method fails with its arguments in the message."""

    def get_currently_syncing_users(self) -> list[Any]:
        return []

    def __getattr__(self, name: str) -> Callable[..., Awaitable[None]]:
        if not name.startswith("on_"):
            raise AttributeError(name)

        def handle(*arguments: Any) -> Any:
            error = ValueError(f"cannot store {arguments!r}")
            if getattr(arguments[0], "user_id", "") == "@alice:hs":
                return fail(error)
            raise error

        return handle


class Watch:
    """Everything that observes a process."""

    def __init__(self, test: SynchronousTestCase) -> None:
        self.events: list[LogEvent] = []
        self.texts = io.StringIO()
        keep: Any = self.events.append
        globalLogPublisher.addObserver(keep)
        test.addCleanup(globalLogPublisher.removeObserver, keep)
        handler = logging.StreamHandler(self.texts)
        logging.getLogger().addHandler(handler)
        test.addCleanup(logging.getLogger().removeHandler, handler)
        self.registry = CollectorRegistry()
        self.status = StatusObserver("hs.example", "reader")
        provider = TracerProvider()
        self.spans = InMemorySpanExporter()
        provider.add_span_processor(SimpleSpanProcessor(self.spans))
        self.observer = CompositeObserver(
            [
                self.status,
                # An hour between calls: no line is suppressed.
                LoggingObserver(Logger("synapse_replication"), _Hours().seconds),
                PrometheusObserver(
                    ReplicationMetrics(self.registry), "hs.example", status=self.status
                ),
                TracingObserver(provider.get_tracer("test"), "hs.example"),
            ]
        )

    def everything(self) -> str:
        """Return everything that was written, in every form."""
        seen = [self.texts.getvalue()]
        for event in self.events:
            seen.append(eventAsText(event, includeTraceback=True))
            seen.append(json_line(event))
            # All other fields that an operator's log observer receives.
            seen += [repr(v) for k, v in event.items() if k != "log_logger"]
        seen.append(generate_latest(self.registry).decode())
        seen.append(encode_status(self.status.snapshot()).decode())
        seen += [span.to_json() for span in self.spans.get_finished_spans()]
        return "\n".join(seen)

    def check(self, test: SynchronousTestCase, sent: str = "") -> None:
        """Check that no secret was written or sent to a peer."""
        text = self.everything() + sent
        for secret in SECRETS:
            at = text.find(secret)
            test.assertEqual(at, -1, text[max(0, at - 300) : at + 100])


class _Hours:
    """A clock that advances by an hour with each call."""

    def __init__(self) -> None:
        self._now = 0.0

    def seconds(self) -> float:
        self._now += 3600
        return self._now


def make_handler(watch: Watch) -> tuple[RecordingHost, ReplicationCommandHandler]:
    """Return a process whose host stores client IPs, and fails to."""
    host = RecordingHost(SourceStream("caches", Row), stores_user_ips=True)
    host.observer = watch.observer  # type: ignore[assignment]
    host.commands = FailingCommands()  # type: ignore[assignment]
    return host, ReplicationCommandHandler(host, watch.observer)


class DirectTcpTests(SynchronousTestCase):
    """Tests for direct TCP."""

    def end(
        self, watch: Watch, protocol: Any
    ) -> tuple[BaseReplicationStreamProtocol, PausingTransport]:
        host, handler = make_handler(watch)
        names = ["c"] if protocol is ClientReplicationStreamProtocol else []
        end: BaseReplicationStreamProtocol = protocol(
            *names, "hs.example", host.clock, handler, watch.observer
        )
        transport = PausingTransport()
        end.makeConnection(transport)
        return end, transport

    def test_lines(self) -> None:
        """
        No line leaks a secret, whole or in pieces, at either end, before or after the
        handshake.
        """
        for line in LINES:
            watch = Watch(self)
            sent = b""
            for data in (line + b"\n", b"PING 1\n" + line + b"\nREPLICATE\n"):
                for kind in (
                    ServerReplicationStreamProtocol,
                    ClientReplicationStreamProtocol,
                ):
                    is_server = kind is ServerReplicationStreamProtocol
                    handshake = b"NAME w\n" if is_server else b"SERVER hs.example\n"
                    for greeting in (b"", handshake):
                        end, transport = self.end(watch, kind)
                        end.dataReceived(greeting + data[:30])
                        end.dataReceived(data[30:])
                        end.connectionLost()
                        sent += transport.buffer
            watch.check(self, sent.decode("utf-8", "replace"))
            self.flushLoggedErrors()

    def test_error_of_a_peer(self) -> None:
        """
        The ERROR of a stock peer, which repeats a malformed line, leaks no secret.
        """
        for line in LINES:
            # A correct process does not send the other lines.
            if not line.startswith((b"USER_IP ", b"INVALIDATE", b"RDATA caches")):
                continue
            watch = Watch(self)
            for form in (b"Failed to parse line: %b (no)", b"%b", b"'%b'", b"b'%b"):
                for kind in (
                    ServerReplicationStreamProtocol,
                    ClientReplicationStreamProtocol,
                ):
                    end, _ = self.end(watch, kind)
                    if not end.relays:
                        end.dataReceived(b"SERVER hs.example\n")
                    end.dataReceived(b"ERROR " + form % line[:10_000] + b"\n")
                    end.connectionLost()
            watch.check(self)
            self.flushLoggedErrors()

    def test_sending(self) -> None:
        """A command that cannot be sent is rejected without its secrets."""
        watch = Watch(self)
        for kind in (ServerReplicationStreamProtocol, ClientReplicationStreamProtocol):
            # On the server's end, the command is retained for another link.
            end, _ = self.end(watch, kind)
            _, handler = make_handler(watch)
            handler.new_connection(end)
            for agent in ("x" * 20_000, "\ud800"):
                handler.sender.send(
                    UserIpCommand("@alice:hs", TOKEN, "192.0.2.1", agent, None, 1)
                )
        command = UserIpCommand("@alice:hs", TOKEN, "192.0.2.1", "x", None, 1)
        watch.check(self, repr(command) + str(command) + command.get_logcontext_id())
        self.flushLoggedErrors()


class RedisTests(TestCase):
    """Tests for a real Redis with a password."""

    timeout = 60

    async def link(
        self, watch: Watch, redis: PrivateRedis, password: str
    ) -> RedisReplicationLink:
        _, handler = make_handler(watch)
        link = RedisReplicationLink(
            reactor,
            RedisOptions(port=redis.port, password=password),
            "hs.example",
            handler,
            watch.observer,
            lambda lost: None,
            ["USER_IP"],
        )
        link.start()
        self.addCleanup(lambda: Deferred.fromCoroutine(link.stop()))
        return link

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await deferLater(reactor, 0.01)

    async def test_lines(self) -> None:
        """No line leaks a secret on either channel, whether handled or rejected."""
        watch = Watch(self)
        redis = PrivateRedis(password=PASSWORD).start()
        self.addCleanup(redis.stop)
        link = await self.link(watch, redis, PASSWORD)
        await self.until(lambda: bool(redis.clients("pubsub")))
        for line in (*LINES, b"REMOTE_SERVER_UP last"):
            for channel in ("hs.example", "hs.example/USER_IP"):
                link.sender.publish("USER_IP", channel, [line])
        await self.until(lambda: "data='last'" in watch.everything())
        watch.check(self)
        self.assertIn(
            "UserIpCommand(user_id='@alice:hs', access_token=<secret>, ip='192.0.2.1'",
            watch.everything(),
        )
        self.flushLoggedErrors()

    async def test_password_is_refused(self) -> None:
        """
        The error of a Redis that rejects or repeats the password is reported without
        it.
        """
        for settings in ({}, {"rename-command": 'AUTH ""'}):
            watch = Watch(self)
            redis = PrivateRedis(
                password=None if settings else "another", settings=settings
            ).start()
            self.addCleanup(redis.stop)
            await self.link(watch, redis, PASSWORD)
            word = "unknown command" if settings else "WRONGPASS"
            while word not in watch.everything():
                await deferLater(reactor, 0.01)
            watch.check(self)


class EventTests(SynchronousTestCase):
    """Tests for everything that an observer can report."""

    def errors(self) -> list[BaseException]:
        """Return the errors that our code raises for input with secrets."""
        errors: list[BaseException] = []
        for line in LINES:
            errors += [
                item.error
                for item in read_lines([line])
                if isinstance(item, RefusedLine)
            ]
            try:
                parse_command_from_line(line.decode("utf-8", "replace"))
            except RemoteProtocolError as error:
                errors.append(error)
        errors.append(HttpCatchUpError("GET", "http://w/x", 401, "no"))
        return errors

    def test_every_event(self) -> None:
        """No method and no event of the observers leaks a secret in any error."""
        watch = Watch(self)
        methods = {
            name: inspect.signature(method)
            for name, method in inspect.getmembers(ReplicationObserver, callable)
            if not name.startswith("_") and name not in ("observe", "span")
        }
        kinds = [
            kind
            for _, kind in inspect.getmembers(events, inspect.isclass)
            if issubclass(kind, Event) and not kind.__subclasses__()
        ]
        self.assertGreater(len(kinds), 20)
        errors = self.errors()
        self.assertGreater(len(errors), 20)
        for error in errors:
            for kind in kinds:
                watch.observer.observe(_make(kind, error))
            for kind in get_args(Work):
                with watch.observer.span(_make(kind, error)):
                    pass
            for name, signature in methods.items():
                _, *parameters = signature.parameters.values()
                arguments = [
                    _value(parameter.name, str(parameter.annotation), error)
                    for parameter in parameters
                ]
                result = getattr(watch.observer, name)(*arguments)
                if hasattr(result, "__enter__"):
                    with result:
                        pass
        self.flushLoggedErrors()
        watch.check(self)
        levels = {event["log_level"].name for event in watch.events}
        self.assertLessEqual({"debug", "info", "warn", "error", "critical"}, levels)


#: Arguments for the observers' methods, by type.
_VALUES: dict[str, Any] = {
    "int": 5,
    "float": 5.0,
    "str": "name",
    "bool": True,
    "CatchUpEvent": CatchUpEvent("s", "w", 1, 5),
    "CloseReason": CloseReason.PEER_ERROR,
    "CommandDropReason": next(iter(CommandDropReason)),
    "AnnouncedBy": AnnouncedBy.ROW,
    "DiscardReason": DiscardReason.UNDECODABLE,
    "Resync": Resync.FULL,
    "Mapping": {},
    "tuple": (5,),
    "MutableMapping": {},
    "Any": {},
    "PeerHeartbeat": PeerHeartbeat("w", "e", "0.1.0", "h:1", False, {"s": (5, 1.0)}),
    "ConnectionBuffers": ConnectionBuffers("c", 1, 1, 1, 1),
}


def _make(kind: Any, error: BaseException) -> Any:
    """Return an event, or a piece of work, of a class."""
    fields: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        fields |= inspect.get_annotations(base)
    return kind(*[_value(name, of, error) for name, of in fields.items()])


def _value(name: str, kind: str, error: BaseException) -> Any:
    """Return a value for a parameter or a field, by its annotation."""
    if "Error" in kind or "Exception" in kind:
        return error
    if name == "why":
        return str(error)
    return _VALUES[kind.partition(" ")[0].partition("[")[0].removeprefix("events.")]


class ConfigTests(SynchronousTestCase):
    """Tests for the errors about an invalid configuration."""

    def test_errors_hide_secrets(self) -> None:
        """An invalid value in or next to a secret is reported without the secret."""
        for text in (
            f"worker_replication_secret: [{SECRET}]",
            f"worker_replication_secret: {{a: {SECRET}}}",
            f"worker_replication_secret: {SECRET}\nredis: {{password: [{PASSWORD}]}}",
            f"redis: {{enabled: true, password: {{a: {PASSWORD}}}}}",
            f"redis: {{enabled: true, passwort: {PASSWORD}}}",
            f"redis: {{enabled: maybe, password: {PASSWORD}}}",
            f"redis: [{PASSWORD}]",
            f"redis: {PASSWORD}",
            f"worker_replication_secret: '{SECRET}",
            f"{{worker_replication_secret: {SECRET}",
            "worker_replication_secret_path: /no/such\n"
            f"worker_replication_secret: {SECRET}",
        ):
            path = Path(tempfile.mkstemp(dir=self.mktemp_folder())[1])
            path.write_text(f"server_name: hs.example\n{text}\n")
            error = self.assertRaises(ConfigError, load_config, [str(path)])
            for secret in SECRETS:
                self.assertNotIn(secret, f"{error} {error!r}", text)

    def mktemp_folder(self) -> str:
        folder: str = self.mktemp()
        Path(folder).mkdir()
        return folder
