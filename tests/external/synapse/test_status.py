"""Tests for status, systemd, logs, hooks and spans of a real Synapse on ours."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psycopg2
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.testing.servers import PrivateRedis
from tests.external import skip_reason
from tests.external.synapse.real import Chat, eventually, new_deployment
from tests.support.span_collector import SpanCollector
from tests.support.synapse_process import WorkerSpec, ours

skip = skip_reason("synapse")

PROCESSES = ("master", "persister1", "persister2", "writer1", "sync1")
EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"


class Systemd:
    """Reads, in a thread, the messages that processes send to systemd.

    Synapse requires that the socket is read.

    :ivar lines: received from all processes, in order.
    """

    def __init__(self, path: str) -> None:
        self.lines: list[str] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(path)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while data := self._socket.recv(4096):
            self.lines += data.decode().splitlines()

    def close(self) -> None:
        """Stop reading."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()


class StatusTests(SynchronousTestCase):
    """Five processes, all on ours."""

    def setUp(self) -> None:
        redis = PrivateRedis().start()
        self.addCleanup(redis.stop)
        folder = tempfile.TemporaryDirectory(prefix="notify-")
        self.addCleanup(folder.cleanup)
        notify = str(Path(folder.name) / "socket")
        self.systemd = Systemd(notify)
        self.addCleanup(self.systemd.close)
        self.collector = SpanCollector()
        self.addCleanup(self.collector.close)
        paths = [str(EXAMPLES), os.environ.get("PYTHONPATH", "")]
        launcher = ours("--tracing-endpoint", self.collector.url)
        self.deployment = new_deployment(
            redis,
            [WorkerSpec(name, ("client",)) for name in PROCESSES[1:]],
            {
                "events": ["persister1", "persister2"],
                "typing": ["writer1"],
                "receipts": ["writer1"],
                "to_device": ["writer1"],
            },
            dict.fromkeys(PROCESSES, launcher)
            | {"sync1": ours("--hooks", "hooks.subscribe")},
            environ={
                "NOTIFY_SOCKET": notify,
                "WATCHDOG_USEC": "4000000",
                "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            },
        )
        self.addCleanup(self.deployment.stop)
        self.deployment.start()

    def status(self) -> tuple[int, str]:
        """Run ``synapse-replication status``; return its exit status and its output."""
        done = subprocess.run(
            [
                *(sys.executable, "-m", "synapse_replication", "status"),
                *("-c", str(self.deployment.config_file)),
            ],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**os.environ, "COLUMNS": "120"},
        )
        return done.returncode, done.stdout + done.stderr

    def log_of(self, name: str) -> str:
        return self.deployment.processes[name].log_tail(10**8)

    def test_status(self) -> None:
        """
        All five processes are live and trace their catch-ups; a killed writer is
        reported in its readers' logs, to hooks and in ``status``.
        """
        chat = Chat.begin(self.deployment)
        chat.do_everything()
        eventually("status 0", lambda: self.status()[0])
        code, text = self.status()
        self.assertEqual(code, 0, text)
        for name in PROCESSES:
            self.assertIn(f"{name}: All rows arrive", text)
        eventually(
            "the status line of systemd",
            lambda: "STATUS=live" not in "\n".join(self.systemd.lines),
        )
        self.assertIn("WATCHDOG=1", self.systemd.lines)
        # Once per process, by Synapse itself.
        self.assertEqual(self.systemd.lines.count("READY=1"), len(PROCESSES))

        writer = self.deployment.processes["writer1"]
        writer.kill()
        eventually("status 1", lambda: not self.status()[0])
        code, text = self.status()
        self.assertEqual(code, 1)
        self.assertIn("writer1: no valid status: ", text)
        eventually(
            "a line in the log", lambda: "stalled for" not in self.log_of("sync1")
        )
        eventually("a line of a hook", lambda: "is stalled" not in self.log_of("sync1"))
        writer.start()
        chat.do_everything()
        eventually("status 0 again", lambda: self.status()[0])
        eventually(
            "spans of catch-ups",
            lambda: (
                not any(
                    self.collector.named("replication-catch-up", name)
                    for name in PROCESSES
                )
            ),
        )
        self.deployment.halt()
        self.assertEqual(self.deployment.problems(), {})

    def test_stuck_id(self) -> None:
        """
        An id that waits for another session is named with its stream and writer, that
        session, its query and how to end it.
        """
        chat = Chat.begin(self.deployment)
        event_id = chat.send_messages(1)
        eventually("status 0", lambda: self.status()[0])
        reader = chat.bob.at(self.deployment.processes["writer1"].api)
        blocker = psycopg2.connect(**self.deployment.database)
        self.addCleanup(blocker.close)
        with blocker.cursor() as cursor:
            cursor.execute("LOCK TABLE receipts_linearized IN EXCLUSIVE MODE")
        reading = threading.Thread(
            target=reader.read_up_to, args=(chat.room_id, event_id)
        )
        reading.start()
        self.addCleanup(reading.join)
        self.addCleanup(blocker.rollback)
        # The session is looked for after the id was found.
        eventually(
            "the session", lambda: "pg_terminate_backend(" not in self.status()[1]
        )
        code, text = self.status()
        self.assertEqual(code, 1)
        shown = " ".join(text.split())
        self.assertRegex(shown, "id [0-9]+ of receipts, written by writer1, is ")
        pid = blocker.info.backend_pid
        self.assertIn(f"session {pid} of ", shown)
        self.assertIn("query LOCK TABLE receipts_linearized", shown)
        self.assertIn(f"pg_terminate_backend({pid})", shown)
        blocker.rollback()
        eventually("status 0 again", lambda: self.status()[0])
