"""Tests for synapse_replication.app.service."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from twisted.application.service import Service
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.error import CannotListenError, ConnectionRefusedError
from twisted.internet.testing import MemoryReactorClock, StringTransport
from twisted.logger import capturedLogs, formatEvent
from twisted.python.failure import Failure

from synapse_replication.app import service
from synapse_replication.app.service import Replication, make_process
from synapse_replication.app.stop_steps import DRAIN_TIMEOUT
from synapse_replication.config.process import load_config
from synapse_replication.errors import ConfigError
from synapse_replication.handlers.interfaces import RowSink
from synapse_replication.instrumentation.hooks import (
    ModuleLoaded,
    ModuleUnloaded,
    Stopping,
)
from synapse_replication.instrumentation.status.model import Condition
from synapse_replication.streams.memory import MemoryStream
from synapse_replication.streams.standard.registry import STANDARD_STREAMS
from synapse_replication.testing.doubles import MemoryConnection, receive_lines
from tests.support.config_files import FilesMixin


class Recorder(Service):
    """A module and sink that records its calls."""

    calls: list[str]
    stopping: Deferred[None] | None

    def startService(self) -> None:
        self.calls.append("start")

    def stopService(self) -> Deferred[None] | None:
        self.calls.append("stop")
        return self.stopping

    def on_rdata(
        self, stream_name: str, instance_name: str, token: int, rows: list[Any]
    ) -> None:
        """Ignore the rows."""

    def on_position(self, stream_name: str, instance_name: str, token: int) -> None:
        """Ignore the position."""

    def close(self) -> None:
        self.calls.append("close")


if TYPE_CHECKING:
    _sink: type[RowSink] = Recorder

_recorder: Recorder


def make_recorder(host: Any, config: dict[str, Any]) -> Recorder:
    """Return the recorder of the running test."""
    return _recorder


def add_stream(host: Any, config: dict[str, Any]) -> None:
    """Add a stream that one instance may write."""
    name = "presence"
    stream = MemoryStream(
        STANDARD_STREAMS[name].description, instance_name="master",
        fetch=host.fetch_from_writer(name),
    )  # fmt: skip
    host.streams.add(stream, is_written_here=False, writers=["w1"])


class _RunningReactor(MemoryReactorClock):
    """A reactor that runs, as older versions of Twisted do not simulate."""

    def callWhenRunning(
        self, callable: Callable[..., object], *args: Any, **kw: Any
    ) -> None:
        callable(*args, **kw)


class ReplicationTests(FilesMixin):
    def setUp(self) -> None:
        super().setUp()
        global _recorder
        _recorder = self.recorder = Recorder()
        self.recorder.calls = []
        self.recorder.stopping = None
        self.reactor = _RunningReactor()

    def make(self, **more: Any) -> Replication:
        name = f"{__name__}.make_recorder"
        own = {
            "streams": ["typing"],
            "modules": [{"module": name}],
            "row_sink": {"module": name},
        }
        config = {
            "server_name": "x.test",
            "redis": {"enabled": True, "host": "redis.test"},
            "listeners": [
                {"type": "http", "port": 80, "resources": [{"names": ["health"]}]},
                {"type": "replication", "port": 9092, "bind_address": "127.0.0.1"},
            ],
            "synapse_replication": own,
            **more,
        }
        path = self.write("h.yaml", json.dumps(config))
        return make_process(load_config([path]), self.reactor)

    def test_imports_before_it_waits(self) -> None:
        """The modules that a configuration requires are imported before a start."""
        imported: list[str] = []
        self.patch(service, "import_module", imported.append)
        self.make()
        self.assertEqual(
            [name.removeprefix("synapse_replication.") for name in imported],
            [
                "app.http_site",
                "app.listening",
                "tcp.factory",
                "storage.id_generators",
            ],
        )

    def test_start(self) -> None:
        """A process opens its listeners and links, and starts the modules."""
        process = self.make()
        process.startService()
        self.successResultOf(process.started)
        self.assertEqual([server[0] for server in self.reactor.tcpServers], [80, 9092])
        self.assertEqual(
            [client[:2] for client in self.reactor.tcpClients],
            [("redis.test", 6379)] * 2,
        )
        self.assertEqual(self.recorder.calls, ["start"])

    def test_writers_of_an_added_stream(self) -> None:
        """Declared writers of a module's stream are expected, and only they write."""
        modules = [{"module": f"{__name__}.add_stream"}]
        own = {"streams": ["typing"], "modules": modules}
        process = self.make(synapse_replication=own)
        process.startService()
        self.successResultOf(process.started)
        handler = process._wiring.handler
        writers = process._status.snapshot().writers
        conditions = {each.instance_name: each.condition for each in writers}
        self.assertIs(conditions["w1"], Condition.WAITING)
        connection = MemoryConnection("redis")
        handler.new_connection(connection)
        for name in ("stranger", "w1"):
            receive_lines(handler, connection, f"RDATA presence {name} 1 [[]]")
        self.assertEqual(list(handler.receivers["presence"].readers()), ["w1"])

    def test_torture(self) -> None:
        """With a torture level, rows of each stream are sent with a delay."""
        process = self.make(replication_torture_level=60_000)
        process.startService()
        self.successResultOf(process.started)
        factory: Any = self.reactor.tcpServers[1][1]
        transport = StringTransport()
        protocol = factory.buildProtocol(None)
        protocol.makeConnection(transport)
        protocol.dataReceived(b"NAME w1\nREPLICATE\n")
        stream: Any = process.host.streams.get_streams()["typing"]
        self.reactor.advance(1)
        transport.clear()
        stream.write([stream.description.codec.from_json(["!r", ["@u:s"]])])
        self.reactor.advance(0)
        self.assertNotIn(b"RDATA", transport.value())
        self.reactor.pump([1.0] * 60)
        self.assertIn(b"RDATA", transport.value())
        process.stopService()
        self.reactor.pump([DRAIN_TIMEOUT] * 10)

    def test_a_step_of_the_clock(self) -> None:
        """After a step of the wall clock, no writer appears stalled."""
        process = self.make()
        process.startService()
        self.reactor.advance(86_400)
        status = process.snapshot()
        self.assertLess(status.up_for, 3600)
        self.assertEqual(status.stalled, ())

    def test_stop(self) -> None:
        """Modules stop first; the sink is closed after everything that uses it."""
        process = self.make()
        process.startService()
        process.stopService()
        self.reactor.pump([DRAIN_TIMEOUT] * 10)
        self.assertEqual(self.recorder.calls, ["start", "stop", "close"])

    def test_stopping_hook(self) -> None:
        """The hook is called before anything stops."""
        process = self.make()
        process.startService()
        process.host.hooks.subscribe(
            Stopping, lambda event: self.recorder.calls.append("hook")
        )
        process.stopService()
        self.assertEqual(self.recorder.calls[:3], ["start", "hook", "stop"])
        self.reactor.pump([DRAIN_TIMEOUT] * 10)

    def test_module_hooks(self) -> None:
        """
        The hooks for modules are called when each has returned, and after the stop.
        """
        process = self.make()
        calls: list[Any] = self.recorder.calls
        for kind in (ModuleLoaded, ModuleUnloaded):
            process.host.hooks.subscribe(kind, calls.append)
        process.startService()
        self.reactor.advance(0)
        name = f"{__name__}.make_recorder"
        self.assertEqual(calls, ["start", ModuleLoaded(name)])
        process.stopService()
        self.reactor.pump([DRAIN_TIMEOUT] * 10)
        self.assertLess(calls.index("stop"), calls.index(ModuleUnloaded(name)))

    def test_stop_is_bounded(self) -> None:
        """
        A step that does not finish is abandoned at the time limit; later steps still
        run.
        """
        self.recorder.stopping = Deferred()
        process = self.make(redis={"enabled": False})
        process.startService()
        with capturedLogs() as logged:
            stopped = process.stopService()
            self.reactor.advance(DRAIN_TIMEOUT - 1)
            self.assertNoResult(stopped)
            self.assertEqual(self.recorder.calls, ["start", "stop"])
            self.reactor.advance(1)
            self.successResultOf(stopped)
        self.assertEqual(self.recorder.calls, ["start", "stop", "close"])
        self.assertIn("warnings above", formatEvent(logged[-1]))
        self.assertIn("stopping", process.unfinished)
        # Another call, for instance after SIGTERM, has nothing left to wait for.
        self.successResultOf(process.stopService())

    def test_stop_twice(self) -> None:
        """Each call waits for the one stop; cancelling one does not end the stop."""
        self.recorder.stopping = Deferred()
        process = self.make(redis={"enabled": False})
        process.startService()
        first, second = process.stopService(), process.stopService()
        first.cancel()
        self.failureResultOf(first, CancelledError)
        self.assertNoResult(second)
        self.recorder.stopping.callback(None)
        self.successResultOf(second)
        self.assertEqual(self.recorder.calls, ["start", "stop", "close"])
        self.assertEqual(process.unfinished, "")

    def test_stop_within_the_sink(self) -> None:
        """A sink that waits for the stop is abandoned, and named in the last line."""
        process = self.make(redis={"enabled": False})
        process.startService()
        ends: list[str] = []

        async def stop() -> None:
            await process.stopService()
            ends.append("sink")

        with capturedLogs() as logged:
            process._wiring.handler.receivers["typing"]._queue.call(stop)
            stopped = process.stopService()
            self.assertNoResult(stopped)
            self.reactor.pump([DRAIN_TIMEOUT] * 3)
            self.successResultOf(stopped)
        self.assertEqual(ends, ["sink"])
        (last,) = [
            text for text in map(formatEvent, logged) if text and "has stopped" in text
        ]
        self.assertIn("received rows of typing were not delivered", last)
        self.assertIn("handling received commands", process.unfinished)

    def test_stop_within_a_callback(self) -> None:
        """
        Whichever callback waits for the stop, or never returns, the process stops
        within the time limits; if a step waits for it, the last log line names it, and
        the exit status is 1.
        """
        for part in ("module", "sink", "hook", "work"):
            for is_stop in (True, False):
                with self.subTest(part=part, is_stop=is_stop):
                    self._stop_within(part, is_stop=is_stop)

    def _stop_within(self, part: str, *, is_stop: bool) -> None:
        process = self.make(redis={"enabled": False})
        stuck: Deferred[None] = Deferred()

        def wait() -> Deferred[None]:
            return process.stopService() if is_stop else stuck

        methods = {"module": "stopService", "sink": "close"}
        if part in methods:
            setattr(self.recorder, methods[part], wait)
        process.startService()
        if part == "hook":
            process.host.hooks.subscribe(Stopping, lambda _: wait())
        with capturedLogs() as logged:
            if part == "work":
                process.host.run_as_background_process("work", wait)
            stopped = process.stopService()
            self.reactor.pump([DRAIN_TIMEOUT] * 10)
            self.successResultOf(stopped)
        if part in methods:
            delattr(self.recorder, methods[part])
        texts = [text for text in map(formatEvent, logged) if text]
        (last,) = [text for text in texts if "has stopped" in text]
        named = {"module": "stopping <", "sink": "closing Recorder"}.get(part, "")
        self.assertIn(named, process.unfinished)
        self.assertEqual(bool(process.unfinished), bool(named))
        self.assertIn(named or "everything received was handled", last)

    def test_last_line(self) -> None:
        """The last log line confirms that everything received was handled."""
        process = self.make(redis={"enabled": False})
        process.startService()
        with capturedLogs() as logged:
            self.successResultOf(process.stopService())
        self.assertIn(
            "master has stopped; everything received was handled",
            formatEvent(logged[-1]),
        )

    def test_last_line_without_a_link(self) -> None:
        """Without a link, the last log line says that readers will fetch the rows."""
        process = self.make()
        process.startService()
        for client, connector in zip(
            self.reactor.tcpClients, self.reactor.connectors, strict=True
        ):
            client[2].clientConnectionFailed(
                connector, Failure(ConnectionRefusedError())
            )
        with capturedLogs() as logged:
            process.stopService()
            self.reactor.pump([DRAIN_TIMEOUT] * 10)
        self.assertIn("no link was up: readers will fetch", formatEvent(logged[-1]))

    def test_port_in_use(self) -> None:
        """The error names the key of the listener that cannot listen."""
        for port, key in ((80, "listeners"), (9000, "synapse_replication.direct_tcp")):
            self.reactor = _RunningReactor()
            listen = self.reactor.listenTCP

            def listen_tcp(
                wanted: int,
                *args: Any,
                used: int = port,
                listen: Any = listen,
                interface: str = "",
                **kwargs: Any,
            ) -> Any:
                if wanted == used:
                    raise CannotListenError(interface, wanted, OSError("in use"))
                return listen(wanted, *args, **kwargs)

            self.patch(self.reactor, "listenTCP", listen_tcp)
            process = self.make(
                synapse_replication={
                    "streams": ["typing"],
                    "direct_tcp": {"listen": "tcp:9000:interface=127.0.0.1"},
                }
            )
            process.startService()
            error = self.failureResultOf(process.started, ConfigError).value
            (problem,) = error.problems
            self.assertTrue(problem.key.startswith(key), problem)
            process.stopService()
            self.reactor.pump([DRAIN_TIMEOUT] * 10)

    def test_does_not_start(self) -> None:
        """
        If a listener is invalid, the start fails, and all started parts are stopped.
        """
        process = self.make(
            synapse_replication={
                "streams": ["typing"],
                "row_sink": {"module": f"{__name__}.make_recorder"},
                "direct_tcp": {"listen": "tpc:1"},
            }
        )
        process.startService()
        self.failureResultOf(process.started, ConfigError)
        process.stopService()
        self.reactor.pump([DRAIN_TIMEOUT] * 10)
        self.assertEqual(self.recorder.calls, ["close"])
