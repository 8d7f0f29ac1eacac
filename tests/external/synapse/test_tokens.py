"""Tests for the token of all writers of a real homeserver's ``events``."""

from __future__ import annotations

from typing import Any

import yaml
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.testing.servers import PrivateRedis
from tests.external import skip_reason
from tests.external.synapse.real import (
    Chat,
    OurProcess,
    eventually,
    json_lines,
    new_deployment,
    query,
    stored_positions,
)
from tests.support.synapse_process import WorkerSpec

skip = skip_reason("synapse")

WRITERS = ("persister1", "persister2")
MAX_CHATS = 20


class TwoWritersTests(SynchronousTestCase):
    """A stock homeserver with two writers of ``events``, and a process of ours."""

    def setUp(self) -> None:
        redis = PrivateRedis().start()
        self.addCleanup(redis.stop)
        self.deployment = new_deployment(
            redis,
            [WorkerSpec(name, ("client",)) for name in WRITERS],
            {"events": WRITERS},
        )
        self.addCleanup(self.deployment.stop)
        self.deployment.start()
        self.chats = [Chat.begin(self.deployment)]
        # Ids of rooms are random: sometimes the first ones belong to one persister.
        while len(self._rooms_by_writer()) < len(WRITERS):
            self.assertLess(len(self.chats), MAX_CHATS)
            self.chats.append(Chat.begin(self.deployment, len(self.chats) + 1))

    def _rooms_by_writer(self) -> dict[str, str]:
        rows = query(
            self.deployment,
            "SELECT instance_name, room_id FROM events WHERE instance_name <> 'master'",
        )
        return dict(rows)

    def _start_reader(self, name: str) -> OurProcess:
        folder = self.deployment.directory
        config = folder / f"{name}.yaml"
        self.tokens = folder / f"{name}.tokens"
        module = {
            "module": "tests.external.synapse.token_module.make_recorder",
            "config": {"path": str(self.tokens)},
        }
        config.write_text(
            yaml.safe_dump(
                {
                    "worker_app": "synapse_replication.worker",
                    "worker_name": name,
                    "synapse_replication": {"modules": [module]},
                }
            )
        )
        files = ("-c", str(self.deployment.config_file), "-c", str(config))
        reader = OurProcess(folder / f"{name}.out", "worker", *files)
        self.addCleanup(reader.stop)
        eventually(
            "the reader starts",
            lambda: not list(json_lines(self.tokens)) and f"log: {reader.errors()}",
        )
        return reader

    def _behind(self) -> Any:
        """Return what the reader has last recorded, if it is behind the table."""
        ((last,),) = query(self.deployment, "SELECT max(stream_ordering) FROM events")
        recorded = list(json_lines(self.tokens))[-1]
        is_there = recorded["persisted"] == recorded["minimum"] == last
        return None if is_there else (recorded, last)

    def test_a_writer_is_down(self) -> None:
        """
        While one of two writers is down, the minimum of the token follows the rows of
        the other, and waits for it end, also in a process that starts then.
        """
        self._start_reader("reader1")
        for chat in self.chats:
            chat.send_messages(2)
        eventually("both writers are up", self._behind)
        down, up = WRITERS
        self.deployment.processes[down].kill()
        room = self._rooms_by_writer()[up]
        (chat,) = [each for each in self.chats if each.room_id == room]
        chat.send_messages(5)
        eventually("one writer is down", self._behind)
        stored = stored_positions(self.deployment)
        self.assertLess(stored["events", down], stored["events", up])
        self._start_reader("reader2")
        eventually("a new reader, before any row", self._behind)
        chat.send_messages(5)
        eventually("a new reader", self._behind)
