"""Tests for positions that no stream has reached, published to real processes."""

from __future__ import annotations

import contextlib
import copy
import json
import time
from pathlib import Path
from typing import Any

import psycopg2

from scripts.tools import hostile
from tests.integration.deployment import (
    PATIENCE,
    DeploymentTestCase,
    expected_rows,
    get_over_socket,
)

#: The greatest token that the tests publish.
FAR = 2**62

#: The most time in s until the next row arrives.
DELAY = 5.0

#: The most resets of a stream within seconds: a burst, then ten in 1 s.
MOST_RESETS = 20 + int(10 * DELAY)

#: A row that no writer wrote.
FORGED = ["false", 0]

_TO_DEVICE = """
    CREATE SEQUENCE device_inbox_sequence START 2;
    CREATE TABLE device_inbox (
        user_id text, device_id text, stream_id bigint, message_json text,
        instance_name text
    );
    CREATE INDEX ON device_inbox (stream_id);
    CREATE TABLE device_federation_outbox (
        destination text, stream_id bigint, queued_ts bigint, messages_json text,
        instance_name text
    );
    CREATE INDEX ON device_federation_outbox (stream_id)
"""


class FalsePositionTests(DeploymentTestCase):
    """``notes`` is written by main and ``writer2``, and read by ``reader``."""

    def setUp(self) -> None:
        """Configure the three processes, each with a status page."""
        super().setUp()
        self.execute(_TO_DEVICE)
        self.shared = copy.deepcopy(self.shared)
        typing, notes = self.shared["synapse_replication"]["streams"]
        notes["writers"] = ["master", "writer2"]
        self.shared["synapse_replication"]["streams"] = [typing, notes, "to_device"]
        for name in ("writer2", "reader"):
            self.shared["instance_map"][name] = {"path": str(self.page_of(name))}
        self.main["listeners"][0]["resources"][0]["names"].append("metrics")
        self.writer2 = self.worker_of("writer2") | {
            "synapse_replication": {
                "modules": [
                    {
                        "module": "tests.integration.writer_module.make_writer",
                        "config": {
                            "file": str(self.folder / "upto"),
                            "streams": ["notes"],
                        },
                    }
                ]
            }
        }
        self.reader = self.worker_of("reader") | {
            "synapse_replication": self.worker["synapse_replication"]
        }
        self.after = 0
        self.writers = ["master", "writer2"]

    def worker_of(self, name: str) -> dict[str, Any]:
        """Return the configuration of a worker without its modules."""
        resources = [{"names": ["replication", "health", "metrics"]}]
        listener = {"type": "http", "path": str(self.page_of(name))}
        return {
            "worker_name": name,
            "worker_listeners": [{**listener, "resources": resources}],
        }

    def page_of(self, name: str) -> Path:
        """Return the socket on which a process serves HTTP."""
        return self.socket if name == "main" else self.folder / f"{name}.sock"

    def execute(self, sql: str) -> list[tuple[Any, ...]]:
        """Run SQL and return its rows."""
        with (
            contextlib.closing(psycopg2.connect(self.dsn)) as connection,
            connection.cursor() as cursor,
        ):
            cursor.execute(sql)
            connection.commit()
            return cursor.fetchall() if cursor.description else []

    def start_all(self, times: int) -> None:
        """Start the processes; their writers continue where they stopped."""
        for config in (self.main, self.writer2):
            (module,) = config["synapse_replication"]["modules"]
            module["config"]["after"] = self.after
        workers = {"writer2": self.writer2, "reader": self.reader}
        if "writer2" not in self.writers:
            del workers["writer2"]
        self.start("main", self.main)
        for name, config in workers.items():
            self.start("worker", config, name=name)
        for name in ("main", *workers):
            self.wait_until_up(name, times)

    def write_and_check(self, upto: int) -> None:
        """
        Let the writers write, and wait until the reader has each row once, in order.
        """
        self.write_upto(upto)
        for writer in self.writers:
            self.wait_until(
                f"{upto} tokens of {writer} in the journal",
                lambda writer=writer: len(self.notes_of(writer)) >= upto,  # type: ignore[misc]
            )
            entries = self.notes_of(writer)
            rows = [row for entry in entries for row in entry["rows"]]
            self.assertEqual(rows, expected_rows(upto), writer)
            tokens = [entry["token"] for entry in entries]
            self.assertEqual(tokens, sorted(set(tokens)), writer)
        self.after = upto

    def notes_of(self, writer: str) -> list[dict[str, Any]]:
        """Return the journal entries of a writer without forged rows."""
        return [
            entry
            for entry in self.journal("notes")
            if entry["writer"] == writer and entry["rows"] != [FORGED]
        ]

    def publish(self, *lines: str, channel: str = "") -> None:
        """Publish lines as a hostile peer does."""
        port = self.shared["redis"]["port"]
        name = self.shared["server_name"] + channel
        hostile.publish(port, name, [line.encode() for line in lines], PATIENCE)

    def page(self, name: str) -> dict[str, Any]:
        """Return the status that a process serves."""
        status: dict[str, Any] = json.loads(
            get_over_socket(self.page_of(name), "/status.json")
        )
        return status

    def conditions(self, name: str) -> set[str]:
        """Return the conditions of all writers that a process follows."""
        return {writer["condition"] for writer in self.page(name)["writers"]}

    def epoch_of(self, name: str) -> str:
        """Return the epoch of a process, as shown by the reader's page."""
        epochs = {
            peer["instance_name"]: peer["epoch"]
            for peer in self.page("reader")["peers"]
        }
        return str(epochs.get(name, ""))

    def announce_far_positions(self) -> None:
        """
        Announce far positions in every form, some of them in the names of writers.
        """
        self.wait_until("an epoch", lambda: self.epoch_of("writer2") != "")
        now = int(time.time() * 1000)
        heartbeat = {
            "v": 1,
            "type": "heartbeat",
            "instance": "writer2",
            "epoch": self.epoch_of("writer2"),
            "time": now,
            "positions": {"notes": [FAR, now]},
        }
        self.publish(json.dumps(heartbeat), channel="/replication_ext")
        self.publish(
            f"RDATA notes writer2 {FAR} {json.dumps(FORGED)}",
            f"POSITION notes writer2 {FAR} {FAR}",
            f"POSITION notes master 0 {FAR}",
            f"POSITION to_device master 0 {FAR}",
            f"POSITION notes zz {FAR} {FAR}",
        )

    def assert_nothing_is_far(self) -> None:
        """Check that no far token was persisted."""
        for sequence in ("notes_seq", "device_inbox_sequence"):
            ((last,),) = self.execute(f"SELECT last_value FROM {sequence}")
            self.assertLess(last, 1000)
        stored = self.execute("SELECT max(stream_id) FROM stream_positions")
        self.assertLess(stored[0][0], 1000)
        journal = (self.folder / "journal.jsonl").read_text()
        self.assertNotIn(str(FAR), journal)

    def test_near_and_far(self) -> None:
        """
        False positions stop no writer and hide no row, and far ones do not survive a
        restart.

        If other instances write as well, the sequence is moved forward beyond a near
        forged row.
        """
        self.start_all(1)
        self.write_and_check(3)
        # Before that, main would discard the row.
        self.wait_until(
            "main is live", lambda: self.conditions("main") == {"written here", "live"}
        )
        ((last,),) = self.execute("SELECT last_value FROM notes_seq")
        self.publish(f"RDATA notes writer2 {last + 30} {json.dumps(FORGED)}")
        self.wait_until(
            "main has advanced the sequence",
            lambda: f"announced up to {last + 30}, but" in self.log_of("main"),
        )
        self.write_and_check(6)
        self.wait_until(
            "every writer is live", lambda: self.conditions("reader") == {"live"}
        )

        self.announce_far_positions()
        self.wait_until(
            "the reader refutes them",
            lambda: (
                self.log_of("reader").count(f"was announced at {FAR} of stream") >= 2
            ),
        )
        self.assertIn("an instance of another deployment", self.log_of("reader"))
        self.write_and_check(9)
        self.announce_far_positions()
        self.write_and_check(12)
        self.assert_nothing_is_far()
        for process in self.running:
            self.assertEqual(self.stop(process), 0)

        self.start_all(2)
        self.write_and_check(15)
        self.assert_nothing_is_far()
        self.wait_until(
            "every writer is live", lambda: self.conditions("reader") == {"live"}
        )

    def test_many_positions(self) -> None:
        """
        After 10,000 false positions with gaps, the next row arrives within seconds.
        """
        self.start_all(1)
        self.write_and_check(3)
        ((last,),) = self.execute("SELECT last_value FROM notes_seq")
        self.publish(
            *(
                f"POSITION notes master {token} {token + 1}"
                for token in range(last + 1, last + 20_001, 2)
            )
        )
        sent = time.monotonic()
        self.wait_until(
            "writer2 has advanced the sequence",
            lambda: f"announced up to {last + 20_000}, but" in self.log_of("writer2"),
        )
        self.write_and_check(6)
        self.assertLess(time.monotonic() - sent, DELAY)
        self.wait_until(
            "every writer is live", lambda: self.conditions("reader") == {"live"}
        )

    def test_lower_positions_in_memory(self) -> None:
        """
        After 5,000 positions far below that of the writer of a stream held in memory,
        its next row arrives within seconds. Its rows were delivered again a few times,
        and that is not reported as a stall.
        """
        self.start_all(1)
        self.write_and_check(50)
        self.wait_until("typing", lambda: len(self.journal("typing")) == 50)
        lies = ("POSITION typing master 50 50", "POSITION typing master 1 1") * 5000
        self.publish(*lies)
        sent = time.monotonic()
        self.write_and_check(53)
        self.wait_until("a row", lambda: self.journal("typing")[-1]["token"] == 53)
        self.assertLess(time.monotonic() - sent, DELAY)
        self.wait_until(
            "every writer is live", lambda: self.conditions("reader") == {"live"}
        )
        tokens = [entry["token"] for entry in self.journal("typing")]
        self.assertEqual(tokens[-53:], list(range(1, 54)))
        self.assertIn(tokens.count(1), range(2, 2 + MOST_RESETS))
        self.assertNotIn("stalled", self.log_of("reader").lower())

    def test_ahead_of_its_writer(self) -> None:
        """
        A reader ahead of a lone writer is reported as stalled, and can be repaired.
        """
        self.writers = ["master"]
        self.shared["synapse_replication"]["streams"][1]["writers"] = self.writers
        self.start_all(1)
        self.write_and_check(3)
        ((last,),) = self.execute("SELECT last_value FROM notes_seq")
        # A writer announces its position to each process that connects, whereas its
        # next heartbeat may be sent only 5 s later.
        forged = f"RDATA notes master {last + 30} {json.dumps(FORGED)}"
        self.publish(forged, "REPLICATE")
        self.wait_until(
            "a stalled writer", lambda: "stalled" in self.conditions("reader")
        )
        code, text = self.call("status")
        self.assertNotEqual(code, 0)
        self.assertIn("ahead of its writer", text)
        self.assertIn(f"is at {last + 30}", text)

        code, text = self.call("positions repair", "--seen", f"notes={last + 30}")
        self.assertEqual(code, 0, text)
        self.write_and_check(6)
        self.wait_until(
            "every writer is live", lambda: self.conditions("reader") == {"live"}
        )
