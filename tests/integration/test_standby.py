"""Tests with a reader whose database is a hot standby that lags, and real processes."""

from __future__ import annotations

import contextlib
import copy
import json
import re
from functools import partial

import psycopg2

from scripts.tools import hostile
from tests.integration.deployment import (
    _SCHEMA,
    PATIENCE,
    DeploymentTestCase,
    expected_rows,
    get_over_socket,
)
from tests.support.standby import replicated_postgres


class StandbyReaderTests(DeploymentTestCase):
    """Main writes to the primary; the reader's database is its standby."""

    def setUp(self) -> None:
        super().setUp()
        self.servers = servers = replicated_postgres()
        servers.resume()
        self.addCleanup(servers.resume)
        self.dsn = servers.primary.new_database()
        with contextlib.closing(psycopg2.connect(self.dsn)) as connection:
            connection.cursor().execute(_SCHEMA)
            connection.commit()
        self.page = self.folder / "page.sock"
        self.worker["worker_listeners"] = [
            {
                "type": "http",
                "path": str(self.page),
                "resources": [{"names": ["health", "metrics"]}],
            }
        ]

    def configure(self, hosts: str) -> None:
        """Set the hosts of the database of the processes that start next."""
        self.shared = copy.deepcopy(self.shared)
        dsn = re.sub(r"host=\S+", f"host={hosts}", self.dsn)
        self.shared["database"]["args"]["dsn"] = dsn

    def check(self, extension: bool) -> None:
        section = self.shared["synapse_replication"]
        section["extension"] = {"enabled": extension}
        primary, standby = self.servers.primary, self.servers.standby
        self.configure(str(primary.directory))
        main = self.start("main", self.main)
        self.wait_until_up("main")
        # One of several hosts: the operator may not know which one it is.
        self.configure(f"{standby.directory},{primary.directory}")
        self.servers.resume()
        worker = self.start("worker", self.worker)
        self.wait_until_up("worker")
        self.write_upto(3)
        self.wait_for_rows(3)
        self.assertEqual(self.stop(worker), 0, self.log_of("worker"))
        self.servers.pause()
        self.write_upto(12)
        self.wait_until_main_wrote(12)
        # A restarted writer has no backlog.
        self.assertEqual(self.stop(main), 0, self.log_of("main"))
        module = self.main["synapse_replication"]["modules"][0]
        module["config"]["after"] = 12
        self.configure(str(primary.directory))
        self.start("main", self.main)
        self.wait_until_up("main", 2)
        self.configure(f"{standby.directory},{primary.directory}")
        self.start("worker", self.worker)
        self.wait_until_up("worker", 2)

        def is_shown() -> bool:
            status = json.loads(get_over_socket(self.page, "/status.json"))
            return any(
                writer["stream_name"] == "notes"
                and writer["reason"] == "database_behind"
                and re.search(r"is \d+ s behind: it shows", writer["detail"])
                for writer in status["writers"]
            )

        self.wait_until("the page says that the database is behind", is_shown)
        self.assertIn(
            'reason="database_behind"', get_over_socket(self.page, "/metrics")
        )
        self.assertIn("its database is a standby, which is", self.log_of("worker"))
        self.assertEqual(len(self.journal("notes")), 3)
        # Rows that arrive meanwhile must not overtake those that are missing.
        self.write_upto(15)
        self.wait_until_main_wrote(15)
        self.servers.resume()
        self.wait_until("all rows", lambda: len(self.journal("notes")) >= 15)
        rows = [row for entry in self.journal("notes") for row in entry["rows"]]
        self.assertEqual(rows, expected_rows(15))
        self.wait_until("the reader is live", self.is_live)

    def has_refuted(self, count: int) -> bool:
        metrics = get_over_socket(self.page, "/metrics")
        pattern = rf"^synapse_replication_discarded_total.*implausible.* {count}\b"
        return re.search(pattern, metrics, re.MULTILINE) is not None

    def is_live(self) -> bool:
        status = json.loads(get_over_socket(self.page, "/status.json"))
        return {writer["condition"] for writer in status["writers"]} == {"live"}

    def test_with_extension(self) -> None:
        """Rows that the standby lacks are waited for, visibly, and then delivered."""
        self.check(extension=True)

    def test_without_extension(self) -> None:
        """The same without the extension."""
        self.check(extension=False)

    def test_false_positions(self) -> None:
        """
        A reader of a standby asks a writer whose position seems to be far, or near, and
        is false; the writer says nothing else meanwhile.
        """
        self.shared["synapse_replication"]["extension"] = {"enabled": False}
        self.configure(str(self.servers.primary.directory))
        self.start("main", self.main)
        self.wait_until_up("main")
        self.configure(str(self.servers.standby.directory))
        self.start("worker", self.worker)
        self.wait_until_up("worker")
        self.write_upto(3)
        self.wait_for_rows(3)
        port = self.shared["redis"]["port"]
        name = self.shared["server_name"]
        for number, token in enumerate((2**62, 500), 1):
            line = f"POSITION notes master {token} {token}"
            hostile.publish(port, name, [line.encode()], PATIENCE)
            self.wait_until(f"{token} is refuted", partial(self.has_refuted, number))
            self.wait_until("the reader is live", self.is_live)
            self.write_upto(3 + number)
            self.wait_for_rows(3 + number)

    def test_writer(self) -> None:
        """A process that writes does not start with a standby, and says why."""
        self.configure(str(self.servers.standby.directory))
        main = self.start("main", self.main)
        self.assertNotEqual(main.wait(30), 0)
        log = self.log_of("main")
        self.assertIn("writes to the database, which is a standby", log)
        self.assertIn("target_session_attrs", log)

    def test_writer_with_several_hosts(self) -> None:
        """A process that writes selects the primary among several hosts."""
        primary, standby = self.servers.primary, self.servers.standby
        self.configure(f"{standby.directory},{primary.directory}")
        self.start_both()
        self.write_upto(2)
        self.wait_for_rows(2)

    def test_stream_without_positions(self) -> None:
        """A stream whose positions are not stored cannot be read from a standby."""
        self.configure(str(self.servers.standby.directory))
        self.shared["synapse_replication"]["streams"] = ["caches"]
        worker = self.start("worker", self.worker)
        self.assertNotEqual(worker.wait(30), 0)
        self.assertIn(
            "the positions of this stream are not stored", self.log_of("worker")
        )
