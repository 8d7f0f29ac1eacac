"""Tests for our own processes attached to a running stock deployment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.streams.standard.registry import DEFAULT_STREAMS
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

#: The streams that have rows after the users of a two-process deployment have written.
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
    """A stock main process and worker, with our ``follow`` and ``worker``."""

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
        # ``follow`` sends no REPLICATE: it must be subscribed before the reader sends
        # one.
        subscribers = self._count_subscribers()
        self.follower = OurProcess(folder / "follow.jsonl", "follow", *shared, "--json")
        self.addCleanup(self.follower.stop)
        eventually("follow listens", lambda: self._count_subscribers() == subscribers)
        self.reader = OurProcess(
            folder / "reader.out", "worker", *shared, "-c", str(config)
        )
        self.addCleanup(self.reader.stop)

    def _check_processes(self) -> None:
        for process in (self.reader, self.follower):
            self.assertTrue(process.is_running(), process.errors())

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
        """Return the key, position and expected token of each writer that lags."""
        return [
            (key, positions.get(key), token)
            for key, token in stored_positions(self.deployment).items()
            if positions.get(key, -1) < token
        ]

    def _differences(self) -> list[Any]:
        """Return the differences between the readers' positions and the table's."""
        stored = stored_positions(self.deployment)
        return [
            (key, positions.get(key), token)
            for positions in (self._journal_positions(), self._followed_positions())
            for key, token in stored.items()
            if positions.get(key) != token
        ]

    def _unannounced(self) -> set[str]:
        self._check_processes()
        return (
            set(DEFAULT_STREAMS)
            # Streams that not every deployment or version has.
            - {"federation", "profile_updates", "quarantined_media", "sticky_events"}
            - {stream for stream, _ in self._followed_positions()}
        )

    def _both_catch_up(self) -> None:
        eventually("worker", lambda: self._behind(self._journal_positions()))
        eventually("follow", lambda: self._behind(self._followed_positions()))

    def test_follow_and_worker(self) -> None:
        """
        ``follow`` and ``worker`` follow every stream through a restart of Redis and of
        the main process, end at the positions in ``stream_positions``, and miss no
        event.
        """
        # Every stream is announced to both processes before anything is written.
        eventually("all streams are announced", self._unannounced)
        chat = Chat.begin(self.deployment)
        chat.do_everything()
        self._both_catch_up()
        self.redis.restart()
        chat.do_everything()
        self._both_catch_up()
        self.deployment.main.restart()
        chat.do_everything()
        self._both_catch_up()

        # A position may be stored shortly after its row.
        eventually("every event arrived", self._difference_of_events)
        self.assertEqual(WRITTEN - self._streams_with_rows(), set())
        # Both readers end exactly at the positions in the table. The host may still be
        # writing consequences of the last request.
        eventually("the positions of the table", self._differences)
        # Stock processes are not checked: they log errors while Redis restarts.
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
    """Return the log lines of our process that report an error."""
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
