"""Tests for the extension between processes of a real Synapse, some of them stock."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.testing.servers import PrivateRedis
from synapse_replication.wire.extension import (
    MessageType,
)
from tests.external import skip_reason
from tests.external.synapse.real import Chat, Listener, eventually, new_deployment
from tests.support.synapse_process import Launcher, WorkerSpec, ours

skip = skip_reason("synapse")

PROCESSES = ("master", "persister1", "writer1", "sync1")
#: Part of the log line about rows that did not arrive.
MISSED_ROWS = "but did not arrive"


class DirectTcpTests(SynchronousTestCase):
    """Tests for direct TCP, where a client indicates support of the extension."""

    def test_stock_server(self) -> None:
        """A stock server ignores the indication."""
        command = [sys.executable, "-m", "twisted.trial"]
        command += [
            "--temp-directory",
            str(Path(self.mktemp()).resolve()),
            "tests.external.synapse.stock_server",
        ]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            # Trial tests in a folder of its own.
            cwd=Path(__file__).resolve().parents[3],
            timeout=120,
            check=False,
        )
        self.assertIn("answers are equal", done.stdout, done.stdout + done.stderr)


class ExtensionTests(SynchronousTestCase):
    """Four processes, all on ours or some of them stock."""

    def start(self, launchers: Mapping[str, Launcher]) -> None:
        """Subscribe to the channel, then start the deployment."""
        redis = PrivateRedis().start()
        self.addCleanup(redis.stop)
        self.deployment = new_deployment(
            redis,
            [WorkerSpec(name, ("client",)) for name in PROCESSES[1:]],
            {
                "events": ["persister1"],
                "typing": ["writer1"],
                "receipts": ["writer1"],
                "to_device": ["writer1"],
            },
            launchers,
        )
        self.listener = Listener(redis, self.deployment.server_name)
        self.addCleanup(self.listener.stop)
        self.addCleanup(self.deployment.stop)
        self.deployment.start()

    def drive(self) -> Chat:
        """Write to every stream, and check what ``/sync`` shows."""
        chat = Chat.begin(self.deployment)
        for _ in range(2):
            chat.do_everything()
        self.check_messages(chat)
        return chat

    def check_messages(self, chat: Chat) -> None:
        """Check that ``/sync`` shows all messages in order."""

        def difference() -> object:
            shown = chat.shown_by("sync1")
            return None if shown == chat.sent else (shown, chat.sent)

        eventually(f"what sync1 shows of {chat.room_id}", difference)

    def gaps(self, names: Sequence[str] = PROCESSES) -> list[str]:
        """Return the processes' log lines about missed rows."""
        return [
            f"{name}: {line}"
            for name in names
            for line in self.deployment.processes[name].log_tail(10**8).splitlines()
            if MISSED_ROWS in line
        ]

    def test_epochs_and_heartbeats(self) -> None:
        """
        Each process sends a hello with its epoch and positions, and a goodbye when it
        stops; no process reports a gap.
        """
        self.start({name: ours() for name in PROCESSES})
        self.drive()
        for name in PROCESSES:
            (epoch,) = self.listener.epochs(name)
            self.assertTrue(epoch)
            self.assertTrue(self.listener.messages_of(name, MessageType.HELLO), name)
        persister = self.listener.messages_of("persister1", MessageType.ROWS)
        self.assertIn("events", {s for m in persister for s in m.positions})
        # Idle processes send a heartbeat every 5 s.
        before = len(self.listener.messages_of("sync1", MessageType.HEARTBEAT))
        eventually(
            "one more heartbeat of sync1",
            lambda: (
                len(self.listener.messages_of("sync1", MessageType.HEARTBEAT)) <= before
            ),
        )
        self.assertEqual(self.gaps(), [])
        problems = self.deployment.problems()
        self.assertEqual([p for name in PROCESSES for p in problems.get(name, [])], [])
        self.deployment.processes["writer1"].stop()
        eventually(
            "goodbye of writer1",
            lambda: not self.listener.messages_of("writer1", MessageType.GOODBYE),
        )

    def test_writer_of_memory_starts_again(self) -> None:
        """
        If the writer of typing is killed and restarted with another epoch, typing and
        all other streams reach the reader.
        """
        self.start({name: ours() for name in PROCESSES})
        chat = Chat.begin(self.deployment)
        chat.do_everything()
        self.deployment.processes["writer1"].kill()
        self.deployment.processes["writer1"].start()
        eventually("a new epoch", lambda: len(self.listener.epochs("writer1")) < 2)
        chat.do_everything()
        self.check_messages(chat)
        alice = chat.alice.at(self.deployment.processes["writer1"].api)
        bob = chat.bob.at(self.deployment.processes["sync1"].api)
        # Identical requests are answered from a cache for two minutes.
        since = bob.sync(limit=1)["next_batch"]
        alice.set_typing(chat.room_id)

        def has_no_typists() -> bool:
            nonlocal since
            answer = bob.sync(since, timeout_ms=1000)
            since = answer["next_batch"]
            room = answer.get("rooms", {}).get("join", {}).get(chat.room_id, {})
            return not any(
                event["content"]["user_ids"]
                for event in room.get("ephemeral", {}).get("events", [])
                if event["type"] == "m.typing"
            )

        eventually("typing", has_no_typists)
        self.assertEqual(self.gaps(), [])

    def test_with_stock_processes(self) -> None:
        """
        Next to stock processes, only those on ours use the channel; no process logs an
        error, and every message is shown.
        """
        self.start({name: ours() for name in ("master", "sync1")})
        self.drive()
        names = {message.instance_name for message in self.listener.messages}
        self.assertEqual(names, {"master", "sync1"})
        self.assertEqual(self.gaps(("master", "sync1")), [])
        problems = self.deployment.problems()
        self.assertEqual([p for name in PROCESSES for p in problems.get(name, [])], [])

    def test_turned_off(self) -> None:
        """Without the extension the channel is silent, and every message is shown."""
        self.start({name: ours("--no-extension") for name in PROCESSES})
        self.drive()
        self.assertEqual(self.listener.messages, [])
