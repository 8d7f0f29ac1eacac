"""Tests for a real deployment with processes on this package ("on ours").

All or some of them are on ours, or they are swapped while users send messages.

Five processes: main, two event persisters, a writer of typing, receipts and to-device
messages, and a worker that serves ``/sync``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.streams.standard.registry import STANDARD_STREAMS
from synapse_replication.testing.servers import PrivateRedis
from tests.external import skip_reason
from tests.external.synapse.real import (
    Chat,
    MessageSender,
    eventually,
    new_deployment,
    query,
    stored_positions,
)
from tests.support.synapse_process import Launcher, WorkerSpec, ours, stock

skip = skip_reason("synapse")

WORKERS = ("persister1", "persister2", "writer1", "sync1")
PROCESSES = ("master", *WORKERS)
#: Rooms are distributed over the persisters by their ids.
CHATS = 4
MAX_CHATS = 20


class _FiveProcessDeployment(SynchronousTestCase):
    """Starts and checks a deployment; has no tests of its own."""

    def start(self, launchers: Mapping[str, Launcher]) -> None:
        """Start the deployment."""
        self.redis = PrivateRedis().start()
        self.addCleanup(self.redis.stop)
        self.deployment = new_deployment(
            self.redis,
            [WorkerSpec(name, ("client",)) for name in WORKERS],
            {
                "events": ["persister1", "persister2"],
                "typing": ["writer1"],
                "receipts": ["writer1"],
                "to_device": ["writer1"],
            },
            launchers,
        )
        self.addCleanup(self.deployment.stop)
        self.deployment.start()

    def check_messages(self, chat: Chat) -> None:
        """Check that ``/sync`` on the sync worker shows all messages in order."""

        def difference() -> object:
            shown = chat.shown_by("sync1")
            return None if shown == chat.sent else (shown, chat.sent)

        eventually(f"what sync1 shows of {chat.room_id}", difference)

    def check_positions(self) -> None:
        """Check that no table holds a row beyond its writer's position."""
        eventually("positions agree with the tables", self._rows_beyond_positions)

    def _rows_beyond_positions(self) -> list[Any]:
        stored = stored_positions(self.deployment)
        tables = {
            table
            for (table,) in query(self.deployment, "SELECT tablename FROM pg_tables")
        }
        beyond = []
        for name, stream in STANDARD_STREAMS.items():
            if stream.positions_name is None:
                continue
            sign = "-" if stream.negative else ""
            for column in stream.id_columns:
                if column.table not in tables:
                    # A table of a newer version.
                    continue
                writer = column.writer_column or "NULL"
                rows = query(
                    self.deployment,
                    f"SELECT {writer}, max({sign}{column.id_column}) "
                    f"FROM {column.table} GROUP BY 1",
                )
                for instance_name, token in rows:
                    # Rows without a writer belong to the main process.
                    position = stored.get((name, instance_name or "master"))
                    if token > 1 and (position is None or position < token):
                        beyond.append((column.table, instance_name, token, position))
        return beyond

    def check_logs(self, names: Iterable[str] = PROCESSES) -> None:
        """Check that no process logged an error."""
        problems = self.deployment.problems()
        errors = [problem for name in names for problem in problems.get(name, [])]
        self.assertEqual(errors, [], "\n\n".join(errors))


class DropInTests(_FiveProcessDeployment):
    """Tests for deployments with all or some processes on ours."""

    def _drive(self, on_ours: tuple[str, ...]) -> None:
        self.start({name: ours() for name in on_ours})
        chats = [Chat.begin(self.deployment, number) for number in range(CHATS)]
        # Ids are random: sometimes all of the first rooms belong to one persister.
        while len(chats) < MAX_CHATS and not self._both_persist():
            chats.append(Chat.begin(self.deployment, len(chats)))
        for _ in range(2):
            for chat in chats:
                chat.do_everything()
        for chat in chats:
            self.check_messages(chat)
            self._check_other_streams(chat)
        self.check_positions()
        writers = {writer for stream, writer in stored_positions(self.deployment)}
        self.assertLess(
            {"persister1", "persister2", "writer1", "master"}, writers | {""}
        )
        self.check_logs()
        self.deployment.halt()
        # Stock processes log errors when they are stopped.
        self.check_logs(on_ours)

    def _both_persist(self) -> bool:
        stored = stored_positions(self.deployment)
        return {("events", "persister1"), ("events", "persister2")} <= set(stored)

    def _check_other_streams(self, chat: Chat) -> None:
        """
        Check everything that is not a message: each kind is replicated by another
        stream.
        """
        api = self.deployment.processes["sync1"].api
        alice, bob = chat.alice.at(api), chat.bob.at(api)

        def missing() -> list[str]:
            for_alice, for_bob = alice.sync(), bob.sync()
            room = for_alice["rooms"]["join"][chat.room_id]
            found = {
                "receipts": [
                    event
                    for event in room["ephemeral"]["events"]
                    if event["type"] == "m.receipt"
                ],
                "tags": [
                    event
                    for event in room["account_data"]["events"]
                    if "u.round2" in event["content"].get("tags", {})
                ],
                "account data": [
                    event
                    for event in for_alice["account_data"]["events"]
                    if event["content"] == {"number": 2}
                ],
                "push rules": [
                    rule
                    for event in for_alice["account_data"]["events"]
                    if event["type"] == "m.push_rules"
                    for rule in event["content"]["global"]["content"]
                    if rule["rule_id"] == "word2"
                ],
                "presence": [
                    event
                    for event in for_bob["presence"]["events"]
                    if event["content"].get("status_msg") == "round 2"
                ],
                "names": [
                    event
                    for event in room["timeline"]["events"]
                    if event["content"].get("displayname") == "Alice 2"
                ],
                "to-device": [
                    event
                    for event in for_bob["to_device"]["events"]
                    if event["content"] == {"body": "hello 2"}
                ],
            }
            return [what for what, events in found.items() if not events]

        eventually(f"what sync1 shows of {alice.user_id}", missing)

    def test_all_on_ours(self) -> None:
        """With all five processes on ours, every stream reaches the sync worker."""
        self._drive(PROCESSES)

    def test_main_and_a_persister_on_ours(self) -> None:
        """The main process and a persister on ours work with three stock processes."""
        self._drive(("master", "persister1"))

    def test_three_workers_on_ours(self) -> None:
        """
        Three workers on ours work with a stock main process and a stock persister.
        """
        self._drive(("persister2", "writer1", "sync1"))


class SwapTests(_FiveProcessDeployment):
    """Tests that swap, restart and kill processes while users send messages."""

    def test_rolling_swap(self) -> None:
        """
        If each process is restarted from stock to ours and back, one at a time, no
        message is missing from ``/sync``.
        """
        self.start({})
        chat = Chat.begin(self.deployment)
        with MessageSender(chat) as sender:
            for launcher in (ours(), stock):
                for name in PROCESSES:
                    self.deployment.processes[name].restart(launcher)
                    sender.wait_for(5)
        self.check_messages(chat)
        self.check_positions()

    def test_redis_restarted_and_a_worker_killed(self) -> None:
        """If Redis is restarted and persisters are killed, no message is missing."""
        self.start({name: ours() for name in PROCESSES})
        chat = Chat.begin(self.deployment)
        with MessageSender(chat) as sender:
            sender.wait_for(10)
            self.redis.restart()
            sender.wait_for(10)
            for name in ("persister1", "persister2"):
                self.deployment.processes[name].kill()
                self.deployment.processes[name].start()
                sender.wait_for(10)
            self.redis.kill()
            self.redis.start()
            sender.wait_for(10)
        self.check_messages(chat)
        self.check_positions()
