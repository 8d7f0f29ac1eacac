"""Tests for a worker under systemd: a real socket, real signals, a watchdog."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from tests.integration.deployment import PATIENCE, DeploymentTestCase
from tests.support.forks import ForkedProcess

#: Interval of watchdog messages in s: half of systemd's timeout.
_FEED_INTERVAL = 0.2


class _Manager:
    """Listens on the notification socket in place of systemd."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address)
        self._address = address
        self._messages: list[tuple[float, dict[str, str]]] = []
        self._all_read = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while (message := self._socket.recv(65536)) != b"END=":
            if message == b"READ=":
                self._all_read.set()
                continue
            fields = dict(line.split("=", 1) for line in message.decode().split("\n"))
            self._messages.append((time.monotonic(), fields))

    def close(self) -> None:
        self._socket.sendto(b"END=", self._address)
        self._thread.join()
        self._socket.close()

    def forget(self) -> None:
        """Discard all messages so far, including those not yet read."""
        self._all_read.clear()
        self._socket.sendto(b"READ=", self._address)
        self._all_read.wait(PATIENCE)
        self._messages.clear()

    def messages(self) -> list[dict[str, str]]:
        """Return the messages other than those for the watchdog."""
        return [fields for _, fields in self._messages if "WATCHDOG" not in fields]

    def values_of(self, name: str) -> list[str]:
        """Return the values received under a name, in order."""
        return [fields[name] for _, fields in self._messages if name in fields]

    def watchdog_times(self) -> list[float]:
        """Return when the watchdog was notified."""
        return [when for when, fields in self._messages if "WATCHDOG" in fields]


class SystemdTests(DeploymentTestCase):
    """The worker has a ``NOTIFY_SOCKET``; main runs without a manager."""

    def setUp(self) -> None:
        super().setUp()
        self.manager = _Manager(str(self.folder / "notify"))
        self.addCleanup(self.manager.close)
        self.block = self.folder / "block"
        self.gate = self.folder / "gate"
        self.worker["synapse_replication"] = {
            "row_sink": {
                "module": "tests.integration.blocking_module.make_gated_journal",
                "config": {
                    "path": str(self.folder / "journal.jsonl"),
                    "gate": str(self.gate),
                },
            },
            "modules": [
                {
                    "module": "tests.integration.blocking_module.make_blocker",
                    "config": {"file": str(self.block)},
                }
            ],
        }

    def environment(self, command: str) -> Mapping[str, str]:
        environment = dict(os.environ)
        if command == "worker":
            environment["NOTIFY_SOCKET"] = str(self.folder / "notify")
            environment["WATCHDOG_USEC"] = str(int(2e6 * _FEED_INTERVAL))
        return environment

    def wait_for_value(self, name: str, value: str) -> None:
        self.wait_until(
            f"{name}={value} in {self.manager.messages()}",
            lambda: any(value in each for each in self.manager.values_of(name)),
        )

    def start_both(self) -> ForkedProcess:
        self.start("main", self.main)
        worker = self.start("worker", self.worker)
        self.wait_for_value("READY", "1")
        return worker

    def reload(self, worker: ForkedProcess, **own: Any) -> None:
        """Change the worker's file and send SIGHUP."""
        self.worker["synapse_replication"].update(own)
        (self.folder / "worker.1.yaml").write_text(json.dumps(self.worker))
        self.manager.forget()
        worker.send_signal(signal.SIGHUP)
        self.wait_for_value("READY", "1")
        self.assertEqual(len(self.manager.values_of("RELOADING")), 1)

    def test_ready_only_when_caught_up(self) -> None:
        """
        A worker that was stopped is ready only once it has delivered the missed rows.
        """
        worker = self.start_both()
        self.write_upto(10)
        self.wait_for_rows(10)
        worker.kill()
        worker.wait()
        self.write_upto(310)
        self.wait_until_main_wrote(310)
        self.manager.forget()
        self.gate.touch()
        self.start("worker", self.worker)
        self.wait_for_value("STATUS", "catching up notes/master 0 of 300")
        self.wait_until(
            "watchdog messages for a while",
            lambda: len(self.manager.watchdog_times()) > 10,
        )
        self.assertEqual(self.manager.values_of("READY"), [])
        first = self.manager.messages()[0]
        self.assertEqual(first["STATUS"], "starting")
        self.assertEqual(first["EXTEND_TIMEOUT_USEC"], "60000000")
        self.gate.unlink()
        self.wait_for_value("READY", "1")
        self.wait_for_rows(310)
        (ready,) = [each for each in self.manager.messages() if "READY" in each]
        # The missed rows were in the writer's backlog.
        self.assertIn(
            "live: 2 streams of 1 writer; partial resync of notes/master",
            ready["STATUS"],
        )

    def test_stop(self) -> None:
        """
        A worker that stops sends STOPPING first, and then no longer notifies the
        watchdog.
        """
        worker = self.start_both()
        self.assertEqual(self.stop(worker), 0, self.log_of("worker"))
        self.wait_for_value("STOPPING", "1")
        self.assertEqual(
            self.manager.messages()[-1], {"STOPPING": "1", "STATUS": "stopping"}
        )

    def test_watchdog(self) -> None:
        """The watchdog is notified in time, unless the reactor hangs."""
        self.start_both()
        self.manager.forget()
        self.wait_until(
            "watchdog messages", lambda: len(self.manager.watchdog_times()) > 10
        )
        self.block.touch()
        held = self.block.with_suffix(".held")
        self.wait_until("the reactor hangs", held.exists)
        self.manager.forget()
        started = time.monotonic()
        self.wait_until(
            "silence", lambda: time.monotonic() > started + 10 * _FEED_INTERVAL
        )
        self.assertEqual(self.manager.watchdog_times(), [])
        self.block.unlink()
        self.wait_until(
            "watchdog messages again", lambda: bool(self.manager.watchdog_times())
        )

    def test_reload(self) -> None:
        """
        On SIGHUP, the log level changes, other changes need a restart, and an invalid
        file changes nothing.
        """
        worker = self.start_both()
        self.write_upto(3)
        self.wait_for_rows(3)
        self.assertNotIn("[synapse_replication#debug]", self.log_of("worker"))
        before = time.monotonic_ns() // 1000
        self.reload(worker, log_level="debug")
        (sent,) = self.manager.values_of("MONOTONIC_USEC")
        self.assertGreaterEqual(int(sent), before)
        self.wait_until("log", lambda: "log_level is debug" in self.log_of("worker"))
        self.assertNotIn("only after a restart of this process", self.log_of("worker"))

        self.reload(worker, log_level="loud", extension={"backlog_rows": 7})
        self.wait_for_value("STATUS", "is invalid, see the log")
        log = self.log_of("worker")
        self.assertIn("synapse_replication.log_level", log)
        self.assertIn("the old one stays in use", log)
        self.assertNotIn("backlog_rows 7", log)

        self.reload(
            worker, log_level="info", direct_tcp={"listen": "tcp:0:interface=127.0.0.1"}
        )
        self.wait_for_value("STATUS", "restart to use the new synapse_replication")
        log = self.log_of("worker")
        self.assertIn("backlog_rows 7", log)
        self.assertIn("synapse_replication.direct_tcp.listen", log)
        self.write_upto(6)
        self.wait_for_rows(6)
        self.assertEqual(self.stop(worker), 0, self.log_of("worker"))

    def test_wrong_socket(self) -> None:
        """A ``NOTIFY_SOCKET`` of an unsupported kind is a clear error at the start."""
        environment = self.environment
        self.environment = lambda command: {  # type: ignore[method-assign]
            **environment(command),
            "NOTIFY_SOCKET": "vsock:2:1",
        }
        worker = self.start("worker", self.worker)
        self.assertEqual(worker.wait(PATIENCE), 1)
        self.assertIn("NOTIFY_SOCKET is 'vsock:2:1'", self.log_of("worker"))
        self.assertNotIn("Traceback", self.log_of("worker"))
