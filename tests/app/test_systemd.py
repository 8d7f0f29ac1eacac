"""Tests for :mod:`synapse_replication.app.systemd`."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

from twisted.internet.task import Clock
from twisted.logger import capturedLogs
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.app.systemd import (
    EXTEND_INTERVAL,
    NotifySocket,
    SystemdNotifier,
    open_notify_socket,
    watchdog_interval,
)
from synapse_replication.clock import ReactorClock
from synapse_replication.errors import SupervisorError
from synapse_replication.handlers.events import CatchUpEvent, CatchUpPage
from synapse_replication.instrumentation.status.observer import StatusObserver
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
        self.notifier = SystemdNotifier(
            self.notify,
            ReactorClock(self.clock),
            self.observer.snapshot,
            lambda: 123,
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
