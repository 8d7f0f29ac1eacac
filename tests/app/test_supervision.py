"""Tests for synapse_replication.app.supervision."""

from __future__ import annotations

import copy
import json
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import attrs
from twisted.internet.defer import Deferred, succeed
from twisted.internet.task import Clock
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.app.service_runner import Runnable
from synapse_replication.app.supervision import (
    EXTEND_INTERVAL,
    NotifySocket,
    SupervisedProcess,
    SystemdNotifier,
    needs_restart,
    open_notify_socket,
    watchdog_interval,
)
from synapse_replication.config.process import (
    ProcessConfig,
    load_config,
)
from synapse_replication.errors import SupervisorError
from synapse_replication.handlers.events import (
    CatchUpEvent,
    CatchUpPage,
    Resync,
    Resynced,
)
from synapse_replication.handlers.host_parts import ReactorClock
from synapse_replication.instrumentation.status.model import ProcessStatus
from synapse_replication.instrumentation.status.status_observer import StatusObserver
from synapse_replication.streams.backlog import BacklogOptions
from tests.support.config_files import FilesMixin
from tests.support.known_readers import KnownReaders


class NotifySocketTests(SynchronousTestCase):
    def listen(self, address: str) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.addCleanup(listener.close)
        listener.bind(address)
        listener.settimeout(10)
        return listener

    def open(self, address: str) -> NotifySocket:
        opened = open_notify_socket({"NOTIFY_SOCKET": address}, 7)
        assert opened is not None
        self.addCleanup(opened.close)
        return opened

    def path(self) -> str:
        # The path of a Unix socket must be short.
        folder = tempfile.TemporaryDirectory(prefix="notify-")
        self.addCleanup(folder.cleanup)
        return str(Path(folder.name) / "socket")

    def test_path(self) -> None:
        """A message is one datagram with one line per assignment."""
        path = self.path()
        listener = self.listen(path)
        self.assertTrue(self.open(path).send("READY=1", "STATUS=a\nb"))
        self.assertEqual(listener.recv(1000), b"READY=1\nSTATUS=a b")

    def test_abstract(self) -> None:
        """An address that starts with ``@`` names an abstract socket."""
        name = Path(self.path()).parent.name
        listener = self.listen(f"\0{name}")
        self.assertTrue(self.open(f"@{name}").send("READY=1"))
        self.assertEqual(listener.recv(1000), b"READY=1")

    def test_no_listener(self) -> None:
        """If no process listens, one error is logged, and no exception is raised."""
        notify = self.open(self.path())
        with capturedLogs() as logs:
            self.assertFalse(notify.send("READY=1"))
            self.assertFalse(notify.send("READY=1"))
        (event,) = logs
        self.assertIn("NOTIFY_SOCKET", event["log_format"])

    def test_full(self) -> None:
        """If the manager does not read, sending fails without blocking."""
        path = self.path()
        self.listen(path)
        notify = self.open(path)
        with capturedLogs():
            sent = [notify.send("STATUS=x") for _ in range(10_000)]
        self.assertFalse(all(sent))

    def test_not_set(self) -> None:
        """Without ``NOTIFY_SOCKET`` no socket is opened."""
        self.assertIsNone(open_notify_socket({}, 7))
        self.assertIsNone(open_notify_socket({"NOTIFY_SOCKET": ""}, 7))

    def test_unknown_kind(self) -> None:
        """An address of another kind raises an error that shows it."""
        with self.assertRaisesRegex(SupervisorError, "NOTIFY_SOCKET is 'vsock:2:1'"):
            open_notify_socket({"NOTIFY_SOCKET": "vsock:2:1"}, 7)

    def test_watchdog(self) -> None:
        """The socket knows how often to feed the watchdog of its process."""
        environ = {"NOTIFY_SOCKET": self.path(), "WATCHDOG_USEC": "6000000"}
        opened = open_notify_socket(environ, 7)
        assert opened is not None
        self.addCleanup(opened.close)
        self.assertEqual(opened.feed_interval, 3.0)


class WatchdogIntervalTests(SynchronousTestCase):
    def test_half(self) -> None:
        """The interval is half the watchdog's timeout."""
        environ = {"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "7"}
        self.assertEqual(watchdog_interval(environ, 7), 15.0)

    def test_none(self) -> None:
        """The watchdog may be disabled, or meant for another process."""
        self.assertIsNone(watchdog_interval({}, 7))
        environ = {"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "8"}
        self.assertIsNone(watchdog_interval(environ, 7))

    def test_no_time(self) -> None:
        """An invalid timeout is an error."""
        for text in ("0", "-1", "1s", "½"):
            with self.assertRaisesRegex(SupervisorError, "WATCHDOG_USEC"):
                watchdog_interval({"WATCHDOG_USEC": text}, 7)


class SystemdNotifierTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.observer = StatusObserver(
            "x.test",
            "reader1",
            [("events", "persister1")],
            monotonic=self.clock.seconds,
        )
        self.known = KnownReaders(self.observer)
        self.sent: list[tuple[str, ...]] = []
        self.arrives = True
        self.notify = NotifySocket("/nowhere", feed_interval=3.0)
        self.addCleanup(self.notify.close)
        self.patch(self.notify, "send", self.send)
        self.patch(time, "monotonic_ns", lambda: 123_000)
        self.notifier = SystemdNotifier(
            self.notify, ReactorClock(self.clock), self.observer.snapshot
        )

    def send(self, *assignments: str) -> bool:
        if self.arrives:
            self.sent.append(assignments)
        return self.arrives

    def assignments_sent(self, seconds: int = 1) -> list[str]:
        """
        Return the assignments sent in some seconds, except watchdog and extensions.
        """
        before = len(self.sent)
        for _ in range(seconds):
            self.clock.advance(1)
        return [
            assignment
            for message in self.sent[before:]
            for assignment in message
            if not assignment.startswith(("WATCHDOG", "EXTEND"))
        ]

    def catch_up(self) -> None:
        self.observer.position_changed("events", "persister1", 1000)
        event = CatchUpEvent("events", "persister1", 1000, 99_211)
        self.known.link_up()
        self.known.fetch(event)
        self.observer.observe(CatchUpPage(event, 12_034, 13_034))

    def be_live(self) -> None:
        self.known.go_live("events", "persister1", 99_211)

    def test_ready(self) -> None:
        """
        READY is sent once every writer is live; until then, the status shows the
        progress.
        """
        self.notifier.start()
        self.assertIn("STATUS=starting", self.sent[0])
        self.notifier.up()
        self.assertIn("STATUS=waiting for events/persister1", self.sent[-1])
        self.catch_up()
        self.assertEqual(
            self.assignments_sent(),
            ["STATUS=catching up events/persister1 12,034 of 98,211"],
        )
        self.be_live()
        self.assertEqual(
            self.assignments_sent(), ["STATUS=live: 1 stream of 1 writer", "READY=1"]
        )
        self.assertEqual(self.assignments_sent(20), [])

    def test_partial_resync(self) -> None:
        """A partial resync is reported by the names of stream and writer."""
        self.catch_up()
        self.be_live()
        self.notifier.start()
        self.notifier.up()
        self.observer.observe(Resynced("events", "persister1", Resync.PARTIAL))
        live = "STATUS=live: 1 stream of 1 writer"
        self.assertEqual(
            self.assignments_sent(), [f"{live}; partial resync of events/persister1"]
        )
        self.assertEqual(self.assignments_sent(60), [live])

    def test_not_up(self) -> None:
        """READY is not sent before the process has started."""
        self.catch_up()
        self.be_live()
        self.notifier.start()
        self.assertEqual(self.assignments_sent(5), [])
        self.notifier.up()
        self.assertIn("READY=1", self.sent[-1])

    def test_stalled(self) -> None:
        """A stall after READY is reported once."""
        self.catch_up()
        self.be_live()
        self.notifier.start()
        self.notifier.up()
        self.known.link_lost(why="it was cut")
        assignments_sent = self.assignments_sent(15)
        self.assertEqual(
            assignments_sent,
            [
                "STATUS=waiting for events/persister1",
                "STATUS=stalled: events/persister1: redis: it was cut",
            ],
        )

    def test_watchdog(self) -> None:
        """The watchdog is fed at its interval, beginning at startup."""
        self.notifier.start()
        for _ in range(60):
            self.clock.advance(0.5)
        self.assertEqual(self.sent.count(("WATCHDOG=1",)), 11)

    def test_more_time(self) -> None:
        """
        More start-up time is requested periodically until READY, but not afterwards.
        """

        def extensions() -> int:
            return sum("EXTEND_TIMEOUT_USEC=60000000" in each for each in self.sent)

        self.notifier.start()
        self.notifier.up()
        self.assignments_sent(int(4 * EXTEND_INTERVAL))
        self.assertEqual(extensions(), 5)
        self.catch_up()
        self.be_live()
        self.assignments_sent(int(4 * EXTEND_INTERVAL))
        self.assertEqual(extensions(), 5)

    def test_failed_message_is_retried(self) -> None:
        """A message that could not be sent is sent again a second later."""
        self.arrives = False
        self.notifier.start()
        self.catch_up()
        self.be_live()
        self.notifier.up()
        self.arrives = True
        self.assertEqual(
            self.assignments_sent(), ["STATUS=live: 1 stream of 1 writer", "READY=1"]
        )

    def test_reload(self) -> None:
        """A reload starts with RELOADING and its time, and ends with READY."""
        self.catch_up()
        self.be_live()
        self.notifier.start()
        self.notifier.up()
        self.notifier.reloading()
        self.assertEqual(self.sent[-1], ("RELOADING=1", "MONOTONIC_USEC=123"))
        self.notifier.reloaded("see the log")
        self.assertEqual(
            self.sent[-1],
            ("STATUS=live: 1 stream of 1 writer; see the log", "READY=1"),
        )
        self.notifier.reloading()
        self.notifier.reloaded()
        self.assertEqual(
            self.sent[-1], ("STATUS=live: 1 stream of 1 writer", "READY=1")
        )
        self.assertEqual(self.assignments_sent(5), [])

    def test_reload_before_ready(self) -> None:
        """A reload before READY sends neither RELOADING nor READY."""
        self.notifier.start()
        self.notifier.up()
        self.notifier.reloading()
        self.notifier.reloaded()
        self.assignments_sent(5)
        words = {word for message in self.sent for word in message}
        self.assertFalse(words & {"RELOADING=1", "READY=1"})

    def test_stopping(self) -> None:
        """STOPPING is the last message, after which the socket is closed."""
        closed: list[bool] = []
        self.patch(self.notify, "close", lambda: closed.append(True))
        self.notifier.start()
        self.notifier.up()
        self.notifier.stopping()
        self.assertEqual(self.sent[-1], ("STOPPING=1", "STATUS=stopping"))
        self.assertEqual(closed, [True])
        self.assertEqual(self.clock.getDelayedCalls(), [])


class FakeProcess:
    """A process that a test controls; it is its own hooks."""

    def __init__(self) -> None:
        self.started: Deferred[None] = Deferred()
        self.lost: Deferred[None] = Deferred()
        self.hooks = self
        self.sizes: list[BacklogOptions] = []
        self.reloads: list[tuple[str, tuple[str, ...]]] = []

    def startService(self) -> None:
        """Do nothing."""

    def stopService(self) -> Deferred[None]:
        return succeed(None)

    def snapshot(self) -> ProcessStatus:
        return ProcessStatus("x.test", "master", "1", 1.0, (), (), (), (), ())

    def resize_backlog(self, options: BacklogOptions) -> None:
        self.sizes.append(options)

    def configuration_reloaded(
        self, problem: str, needs_restart: Sequence[str]
    ) -> None:
        self.reloads.append((problem, tuple(needs_restart)))


class FakeNotify(NotifySocket):
    """Records messages instead of sending them."""

    def __init__(self) -> None:
        super().__init__("/nowhere")
        self.sent: list[tuple[str, ...]] = []
        self.is_closed = False

    def send(self, *assignments: str) -> bool:
        self.sent.append(assignments)
        return True

    def close(self) -> None:
        super().close()
        self.is_closed = True


if TYPE_CHECKING:
    _runnable: type[Runnable] = SupervisedProcess


class SupervisedProcessTests(FilesMixin):
    def setUp(self) -> None:
        super().setUp()
        self.settings: dict[str, Any] = {
            "server_name": "x.test",
            "redis": {"enabled": True, "host": "redis.test"},
            "database": {"name": "psycopg2", "args": {"host": "db.test"}},
            "synapse_replication": {
                "streams": [
                    "typing",
                    {
                        "name": "notes",
                        "table": "notes",
                        "id_column": "stream_id",
                        "columns": {"note": "text"},
                        "sequence": "notes_seq",
                        "writers": "master",
                    },
                ]
            },
        }
        self.process = FakeProcess()
        self.levels: list[str] = []
        self.notify = FakeNotify()
        self.addCleanup(self.notify.close)
        config = self.read_config()
        self.supervised = SupervisedProcess(
            cast(Any, self.process),
            config,
            self.read_config,
            self.levels.append,
            SystemdNotifier(self.notify, ReactorClock(Clock()), self.process.snapshot),
        )

    def read_config(self) -> ProcessConfig:
        return load_config([self.write("h.yaml", json.dumps(self.settings))])

    def start_process(self) -> None:
        self.supervised.startService()
        self.process.started.callback(None)
        self.notify.sent.clear()

    def change_own_settings(self, **settings: Any) -> None:
        self.settings["synapse_replication"].update(settings)

    def reload(self) -> list[tuple[str, str]]:
        """Reload the configuration.

        :return: (level, message) of each logged event.
        """
        with capturedLogs() as logs:
            self.supervised.reload()
        return [(event["log_level"].name, formatEvent(event)) for event in logs]

    def test_from_start_to_stop(self) -> None:
        """The manager is notified of start, readiness and stop."""
        self.supervised.startService()
        self.assertEqual(self.notify.sent[0][0], "STATUS=starting")
        self.process.started.callback(None)
        self.assertEqual(
            self.notify.sent[-1], ("STATUS=live: follows no other process", "READY=1")
        )
        self.successResultOf(self.supervised.stopService())
        self.assertEqual(self.notify.sent[-1][0], "STOPPING=1")
        self.assertTrue(self.notify.is_closed)

    def test_does_not_start(self) -> None:
        """
        If the process cannot start, READY is not sent, and the failure is propagated.
        """
        self.supervised.startService()
        self.process.started.errback(OSError("no"))
        self.failureResultOf(self.supervised.started, OSError)
        self.assertFalse(any("READY=1" in sent for sent in self.notify.sent))

    def test_applied_immediately(self) -> None:
        """The log level and the backlog sizes change immediately."""
        self.start_process()
        self.change_own_settings(
            log_level="debug", extension={"backlog_rows": 5, "backlog_bytes": 6}
        )
        ((level, text),) = self.reload()
        self.assertEqual(level, "info")
        self.assertIn("log_level is debug, backlog_rows 5 and backlog_bytes 6", text)
        self.assertEqual(self.levels, ["debug"])
        self.assertEqual(self.process.sizes, [BacklogOptions(5, 6)])
        (begin, end) = self.notify.sent
        self.assertEqual(begin[0], "RELOADING=1")
        self.assertEqual(end, ("READY=1",))

    def test_invalid_configuration(self) -> None:
        """An invalid configuration changes nothing, and all its problems are logged."""
        self.start_process()
        self.change_own_settings(log_level="loud", extension={"backlog_rows": -5})
        ((level, text),) = self.reload()
        self.assertEqual(level, "error")
        self.assertIn("the old one stays in use", text)
        self.assertIn("synapse_replication.log_level", text)
        self.assertIn("synapse_replication.extension.backlog_rows", text)
        self.assertEqual((self.levels, self.process.sizes), ([], []))
        ((problem, later),) = self.process.reloads
        self.assertIn("synapse_replication.log_level", problem)
        self.assertEqual(later, ())
        self.assertIn("is invalid, see the log", self.notify.sent[-1][0])
        self.assertEqual(self.notify.sent[-1][1], "READY=1")

    def test_no_file(self) -> None:
        """If the file is missing, nothing changes, and an error is logged."""
        self.start_process()

        def read() -> ProcessConfig:
            raise FileNotFoundError(2, "No such file", "h.yaml")

        self.supervised._read_config = read
        ((level, text),) = self.reload()
        self.assertEqual(level, "error")
        self.assertIn("h.yaml", text)

    def test_problems_fixed(self) -> None:
        """After the problems are fixed, the status no longer mentions them."""
        self.start_process()
        self.change_own_settings(log_level="loud")
        self.reload()
        self.change_own_settings(log_level="warn")
        self.reload()
        self.assertEqual(
            self.notify.sent[-1], ("STATUS=live: follows no other process", "READY=1")
        )
        self.assertEqual(self.levels, ["warn"])

    def test_needs_a_restart(self) -> None:
        """
        A change that needs a restart is logged at each reload until it is reverted.
        """
        self.start_process()
        self.settings["redis"]["host"] = "elsewhere.test"
        self.change_own_settings(extension={"enabled": False}, log_level="warn")
        for _ in range(2):
            _, (level, text) = self.reload()
            self.assertEqual(level, "warn")
            self.assertEqual(
                text,
                "Changes to redis, synapse_replication.extension.enabled take effect "
                "only after a restart of this process",
            )
        self.assertEqual(self.process.sizes, [])
        changed = ("redis", "synapse_replication.extension.enabled")
        self.assertEqual(self.process.reloads, [("", changed)] * 2)
        (_, (status, _), *_) = self.notify.sent
        self.assertIn("restart to use the new redis", status)
        self.settings["redis"]["host"] = "redis.test"
        self.change_own_settings(extension={"enabled": True})
        self.assertEqual(len(self.reload()), 1)

    def test_every_setting(self) -> None:
        """Any change except one of the log level is reported as needing a restart."""
        config = self.read_config()
        for field in attrs.fields(ProcessConfig):
            if field.name in ("files", "warnings", "log_level"):
                continue
            changed = copy.copy(config)
            other = None if getattr(config, field.name) is not None else "other"
            object.__setattr__(changed, field.name, other)
            self.assertEqual(len(needs_restart(config, changed)), 1, field.name)

    def test_without_a_manager(self) -> None:
        """Reloading works without systemd, too."""
        supervised = SupervisedProcess(
            cast(Any, self.process),
            self.read_config(),
            self.read_config,
            self.levels.append,
        )
        supervised.startService()
        self.process.started.callback(None)
        self.change_own_settings(log_level="critical")
        supervised.reload()
        self.assertEqual(self.levels, ["critical"])
        self.successResultOf(supervised.stopService())
