"""Our own processes attach to a running deployment of stock processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.streams.standard.registry import STANDARD_STREAMS
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

#: Streams that the drive of a deployment of two processes writes rows to.
WRITTEN = {
    "account_data",
    "caches",
    "device_lists",
    "events",
    "presence",
    "push_rules",
    "pushers",
    "receipts",
    "to_device",
    "typing",
}


class AttachTests(SynchronousTestCase):
    """A main process and a worker, all stock; ``follow`` and ``worker`` of ours."""

    def setUp(self) -> None:
        self.redis = PrivateRedis().start()
        self.addCleanup(self.redis.stop)
        self.deployment = new_deployment(
            self.redis,
            [WorkerSpec("worker1", ("client",))],
            {"events": ["worker1"], "typing": ["worker1"]},
        )
        self.addCleanup(self.deployment.stop)
        self.deployment.start()
        folder = self.deployment.directory
        self.journal = folder / "reader.journal"
        config = folder / "reader.yaml"
        config.write_text(yaml.safe_dump(_reader_config(self.journal)))
        shared = ("-c", str(self.deployment.config_file))
        # It asks for nothing: it has to listen when the reader asks for positions.
        subscribers = self._count_subscribers()
        self.follower = OurProcess(folder / "follow.jsonl", "follow", *shared, "--json")
        self.addCleanup(self.follower.stop)
        eventually("follow listens", lambda: self._count_subscribers() == subscribers)
        self.reader = OurProcess(
            folder / "reader.out", "worker", *shared, "-c", str(config)
        )
        self.addCleanup(self.reader.stop)

    def _count_subscribers(self) -> int:
        name = self.deployment.server_name
        _, count = self.redis.command("PUBSUB", "NUMSUB", name)
        return int(count)

    def _journal_positions(self) -> dict[tuple[str, str], int]:
        return {
            (line["stream"], line["writer"]): line["token"]
            for line in json_lines(self.journal)
        }

    def _followed_positions(self) -> dict[tuple[str, str], int]:
        positions = {}
        for line in json_lines(self.follower.output):
            token = line.get("token", line.get("new_token"))
            if token is not None and line["command"] in ("RDATA", "POSITION"):
                positions[line["stream_name"], line["instance_name"]] = token
        return positions

    def _behind(self, positions: dict[tuple[str, str], int]) -> list[Any]:
        """Return what a reader lacks: (stream, writer), where it is, where to be."""
        return [
            (key, positions.get(key), token)
            for key, token in stored_positions(self.deployment).items()
            if positions.get(key, -1) < token
        ]

    def _differences(self) -> list[Any]:
        """Return where a reader is not exactly where the table says."""
        stored = stored_positions(self.deployment)
        return [
            (key, positions.get(key), token)
            for positions in (self._journal_positions(), self._followed_positions())
            for key, token in stored.items()
            if positions.get(key) != token
        ]

    def _both_catch_up(self) -> None:
        eventually("worker", lambda: self._behind(self._journal_positions()))
        eventually("follow", lambda: self._behind(self._followed_positions()))

    def test_follow_and_worker(self) -> None:
        """
        Both follow every stream through a restart of Redis and of the main process,
        and end where ``stream_positions`` says; no row of an event is missing.
        """
        # Both hear of every stream before anything is written.
        eventually(
            "all streams are announced",
            lambda: (
                set(STANDARD_STREAMS)
                # Not in every deployment, and not in every version.
                - {"federation", "profile_updates"}
                - {stream for stream, _ in self._followed_positions()}
            ),
        )
        chat = Chat.begin(self.deployment)
        chat.do_everything()
        self._both_catch_up()
        self.redis.restart()
        chat.do_everything()
        self._both_catch_up()
        self.deployment.main.restart()
        chat.do_everything()
        self._both_catch_up()

        # A position may be stored a moment after its row.
        eventually("every event arrived", self._difference_of_events)
        self.assertEqual(WRITTEN - self._streams_with_rows(), set())
        # Where they end is not past what was written, either. The host may still be
        # writing what follows from the last of it.
        eventually("both end where the table says", self._differences)
        # Not of the stock processes: they log errors while Redis restarts.
        for process in (self.reader, self.follower):
            self.assertEqual(process.stop(), 0, process.errors())
            self.assertEqual(_problems(process), [])

    def _difference_of_events(self) -> tuple[list[int], list[int]] | None:
        received, stored = self._event_ids(), self._event_ids_in_table()
        return None if received == stored else (received, stored)

    def _event_ids(self) -> list[int]:
        return [
            line["token"]
            for line in json_lines(self.journal)
            if line["stream"] == "events"
            for row in line["rows"]
            if row[0] == "ev"
        ]

    def _event_ids_in_table(self) -> list[int]:
        rows = query(
            self.deployment,
            "SELECT stream_ordering FROM events WHERE stream_ordering > 0 "
            "ORDER BY stream_ordering",
        )
        return [stream_ordering for (stream_ordering,) in rows]

    def _streams_with_rows(self) -> set[str]:
        return {line["stream"] for line in json_lines(self.journal) if line["rows"]}


def _problems(process: OurProcess) -> list[str]:
    """Return the lines of a log of ours that report an error."""
    marks = ("#error]", "#critical]", "Traceback (most recent call last)")
    return [
        line
        for line in process.errors().splitlines()
        if any(mark in line for mark in marks)
    ]


def _reader_config(journal: Path) -> dict[str, Any]:
    return {
        "worker_app": "synapse_replication.worker",
        "worker_name": "reader",
        "synapse_replication": {
            "row_sink": {
                "module": "synapse_replication.app.journal.make_journal",
                "config": {"path": str(journal)},
            }
        },
    }
