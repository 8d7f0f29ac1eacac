"""A homeserver made of doubles, for tests without Synapse."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import attrs
from prometheus_client import CollectorRegistry, Gauge
from twisted.internet.defer import Deferred, ensureDeferred, succeed
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.dropin.command_handler import DropInCommandHandler
from synapse_replication.dropin.observer import HostObservers, _observers
from synapse_replication.dropin.streamer import DropInStreamer
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.wire.commands import parse_command_from_line
from synapse_replication.wire.extension import MessageType, parse_message
from tests.support.recording_observer import RecordingObserver


class FakeClock:
    """The host's clock in older versions, where durations are numbers."""

    def __init__(self, reactor: Clock) -> None:
        self._reactor = reactor

    def time_msec(self) -> int:
        return int(self._reactor.seconds() * 1000)

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: object
    ) -> Any:
        return self._reactor.callLater(delay, callback, *args)

    def cancel_call_later(self, call: Any) -> None:
        call.cancel()

    def sleep(self, duration: float) -> Deferred[None]:
        done: Deferred[None] = Deferred()
        self._reactor.callLater(duration, done.callback, None)
        return done


@attrs.define
class FakeStream:
    """A stream of the host.

    :ivar tokens: the known token of each writer.
    :ivar shared_token: the token up to which the rows of all writers are known.
    """

    NAME: str
    tokens: dict[str, int] = attrs.Factory(dict)
    local_token: int = 0
    updates: list[tuple[int, Any]] = attrs.Factory(list)
    shared_token: int = 0

    def current_token(self, instance_name: str) -> int:
        return max(self.tokens.get(instance_name, 0), self.shared_token)

    def minimal_local_current_token(self) -> int:
        return self.local_token

    @staticmethod
    def parse_row(row: Any) -> Any:
        (value,) = row
        return value.upper()

    async def get_updates_since(
        self, instance_name: str, from_token: int, upto_token: int
    ) -> tuple[list[tuple[int, Any]], int, bool]:
        found = [pair for pair in self.updates if from_token < pair[0] <= upto_token]
        return found, upto_token, False


class FakeObservers:
    """A double of the observers of a homeserver.

    :ivar calls: the names of the called methods.
    """

    def __init__(self, observer: ReplicationObserver) -> None:
        self.calls: list[str] = []
        self.observer = observer
        self.hooks = object()
        self.metrics = SimpleNamespace(watch_backlog=lambda backlog: None)

    def start(self, reactor: object, handler: object, ids: object, damage: str) -> None:
        self.calls.append("start")

    def stopping(self) -> None:
        self.calls.append("stopping")

    def stop(self) -> None:
        self.calls.append("stop")

    def encode_status(self) -> bytes:
        return b'{"how": "well"}'


#: A double has only the parts that a test needs.
_Double: Any = object


class FakeHomeserver(_Double):  # type: ignore[misc]
    """The parts of ``hs`` that the drop-in uses, with their calls recorded.

    :ivar calls: the calls of the host's parts.
    :ivar at_shutdown: the registered shutdown handlers.
    """

    hostname = "test"

    def __init__(self, instance_name: str = "master", **worker: Any) -> None:
        self.reactor = Clock()
        self.engine: Any = None
        self.clock = FakeClock(self.reactor)
        self.calls: list[tuple[Any, ...]] = []
        self.replication_notifier: Any = object()
        self.observer = RecordingObserver()
        self.observers = FakeObservers(self.observer)
        _observers[self] = cast(HostObservers, self.observers)
        self.at_shutdown: list[dict[str, Any]] = []
        self._instance_name = instance_name
        self.config = SimpleNamespace(
            worker=SimpleNamespace(
                **{
                    "writers": SimpleNamespace(
                        presence=["master"], typing=["w"], events=["w"]
                    ),
                    "run_background_tasks": instance_name == "master",
                    "send_federation": False,
                    **worker,
                }
            ),
            redis=SimpleNamespace(redis_enabled=False),
            server=SimpleNamespace(),
        )

    def get_instance_name(self) -> str:
        return self._instance_name

    def get_instance_id(self) -> str:
        return "abc"

    def get_reactor(self) -> Clock:
        return self.reactor

    def get_clock(self) -> FakeClock:
        return self.clock

    def register_sync_shutdown_handler(self, **handler: Any) -> None:
        self.at_shutdown.append(handler)

    def run_as_background_process(
        self, description: str, func: Callable[[], Awaitable[Any]]
    ) -> Deferred[Any]:
        self.calls.append(("process", description))
        return ensureDeferred(func())  # type: ignore[arg-type]

    def _record(self, name: str) -> Callable[..., Deferred[None]]:
        def record(*args: Any) -> Deferred[None]:
            self.calls.append((name, *args))
            return succeed(None)

        return record

    def _part(self, *names: str) -> Any:
        return SimpleNamespace(**{name: self._record(name) for name in names})

    def get_replication_data_handler(self) -> Any:
        return self._part("on_rdata", "on_position")

    def get_presence_handler(self) -> Any:
        part = self._part("update_external_syncs_row", "update_external_syncs_clear")
        part.get_currently_syncing_users_for_replication = lambda: [("@u:test", "D")]
        return part

    def get_federation_sender(self) -> Any:
        return self._part("federation_ack")

    def get_datastores(self) -> Any:
        main = self._part("insert_client_ip")
        main.db_pool = SimpleNamespace(engine=self.engine)
        return SimpleNamespace(main=main)

    def get_server_notices_sender(self) -> Any:
        return self._part("on_user_ip")

    def get_task_scheduler(self) -> Any:
        return self._part("on_new_task")

    def get_replication_command_handler(self) -> Any:
        raise NotImplementedError

    def get_replication_notifier(self) -> Any:
        return self.replication_notifier

    def get_notifier(self) -> Any:
        return self._part(
            "notify_remote_server_up",
            "notify_lock_released",
            "add_replication_callback",
            "add_lock_released_callback",
        )


class _Abstract:
    """A double of an abstract class with which other classes are registered."""

    @staticmethod
    def register(subclass: type) -> None: ...


def fake_modules(
    test: SynchronousTestCase,
    streams: Mapping[str, Callable[[Any], FakeStream]] | None = None,
    modules: Mapping[str, Mapping[str, Any]] | None = None,
) -> CollectorRegistry:
    """Install doubles of the host's modules for the duration of the test.

    :param streams: for each name, the class or function that creates the stream.
    :param modules: the contents of further modules, by name.
    :return: the registry of the host's metrics.
    """
    registry = CollectorRegistry()
    gauge = Gauge(
        "synapse_storage_stream_current_position",
        "A position.",
        ("stream_name", "server_name"),
        registry=registry,
    )

    @contextlib.contextmanager
    def preserve(context: object = None) -> Iterator[None]:
        yield

    contents: dict[str, Mapping[str, Any]] = {
        "synapse": {},
        "synapse.replication.tcp.commands": {
            "parse_command_from_line": parse_command_from_line
        },
        "synapse.replication.tcp.streams": {"STREAMS_MAP": dict(streams or {})},
        "synapse.replication.http": {"ReplicationRestResource": object},
        "synapse.storage.util.id_generators": {
            "MultiWriterIdGenerator": object,
            "AbstractStreamIdGenerator": _Abstract,
            "stream_current_position_gauge": gauge,
        },
        "synapse.storage.engines": {
            "PostgresEngine": type("PostgresEngine", (), {}),
            "IncorrectDatabaseSetup": RuntimeError,
        },
        "synapse.logging.context": {
            "PreserveLoggingContext": preserve,
            "SENTINEL_CONTEXT": None,
            "LoggingContext": lambda **_: None,
            "current_context": lambda: None,
            "set_current_context": lambda context: None,
            "make_deferred_yieldable": lambda deferred: deferred,
        },
        "synapse.metrics.background_process_metrics": {
            "run_as_background_process": lambda _, __, func: ensureDeferred(func())
        },
        **(modules or {}),
    }
    before = {name: sys.modules.get(name) for name in contents}

    def restore() -> None:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module

    test.addCleanup(restore)
    for name, namespace in contents.items():
        module = sys.modules[name] = ModuleType(name)
        vars(module).update(namespace)
    return registry


class SingleCommandConnection:
    """A connection that supports only single commands."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send_command(self, command: Any) -> None:
        self.sent.append(command)


class SingleCommandHandler:
    """A handler that supports only single commands."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.waiting: Deferred[None] = Deferred()

    def new_connection(self, connection: Any) -> None:
        self.calls.append(("new",))

    def lost_connection(self, connection: Any) -> None:
        self.calls.append(("lost",))

    def send_positions_to_connection(self) -> None:
        self.calls.append(("positions",))

    def on_RDATA(self, connection: Any, command: Any) -> None:
        self.calls.append(("RDATA", command))

    def on_POSITION(self, connection: Any, command: Any) -> None:
        raise ValueError("no such stream")

    def on_USER_IP(self, connection: Any, command: Any) -> None:
        raise RuntimeError(f"cannot insert {command.access_token}")

    def on_REPLICATE(self, connection: Any, command: Any) -> Deferred[None]:
        return self.waiting


class HostWithHandler(FakeHomeserver):
    """A host that creates its handler and streamer on demand."""

    _handler: DropInCommandHandler | None = None
    _streamer: DropInStreamer | None = None

    def get_replication_command_handler(self) -> DropInCommandHandler:
        if self._handler is None:
            self._handler = DropInCommandHandler(self)
        return self._handler

    def get_replication_streamer(self) -> DropInStreamer:
        if self._streamer is None:
            self._streamer = DropInStreamer(self)
        return self._streamer


class Link:
    """A link that records the payloads sent on it."""

    name = "redis"
    relays = False
    is_direct = False
    has_own_channel = False
    is_behind = False

    def __init__(self) -> None:
        self.payloads: list[bytes] = []

    def send_extension(self, payloads: Sequence[bytes], to: str = "") -> None:
        self.payloads += payloads

    @property
    def types(self) -> list[MessageType]:
        return [parse_message(payload).type for payload in self.payloads]


@attrs.define(slots=True)
class HostNotifier:
    """A notifier as the host defines it."""

    _replication_callbacks: list[Callable[[], None]] = attrs.Factory(list)

    def add_replication_callback(self, cb: Callable[[], None]) -> None:
        self._replication_callbacks.append(cb)

    def notify_replication(self) -> None:
        for callback in self._replication_callbacks:
            callback()
