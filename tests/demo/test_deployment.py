"""Tests for :mod:`synapse_replication.demo.deployment`."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import psycopg2
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.config.process import ProcessConfig, load_config
from synapse_replication.demo.deployment import (
    READERS,
    WRITERS,
    DemoPlan,
    Deployment,
    ReplicationProcess,
    wait_until_ready,
)
from synapse_replication.demo.script import STREAMS
from synapse_replication.errors import ServerStartError


class DeploymentTests(SynchronousTestCase):
    def start(self, *, use_redis: bool) -> Deployment:
        deployment = Deployment(DemoPlan(Path("recording"), 10, 5.0, use_redis))
        self.addCleanup(deployment.close)
        deployment.start_servers()
        return deployment

    def configs(self, deployment: Deployment) -> dict[str, ProcessConfig]:
        shared = str(deployment.directory / "homeserver.yaml")
        return {
            name: load_config([shared, str(deployment.directory / f"{name}.yaml")])
            for name in (*WRITERS, *READERS)
        }

    def test_files_are_valid(self) -> None:
        """Each process's configuration is valid, with its name, modules and sink."""
        configs = self.configs(self.start(use_redis=True))
        for name, config in configs.items():
            self.assertEqual(config.instance_name, name)
            self.assertIsNotNone(config.redis)
            self.assertEqual(bool(config.modules), name in WRITERS)
            self.assertEqual(config.row_sink is not None, name in READERS)
        self.assertEqual(
            configs["reader1"].writers["events"], ("event_writer1", "event_writer2")
        )

    def test_status_page(self) -> None:
        """The last reader serves the status page, on the loopback interface only."""
        deployment = self.start(use_redis=True)
        listener = self.configs(deployment)[READERS[-1]].listeners[-1]
        self.assertEqual(listener.addresses, ("127.0.0.1",))
        self.assertEqual(
            deployment.status_page, f"http://127.0.0.1:{listener.port}/status"
        )

    def test_direct_tcp(self) -> None:
        """Without Redis, each process connects to every other writer."""
        deployment = self.start(use_redis=False)
        self.assertIsNone(deployment.redis)
        configs = self.configs(deployment)
        ports = {name: configs[name].tcp_listen[0].split(":")[1] for name in WRITERS}
        for name, config in configs.items():
            connected = {endpoint.split(":")[2] for endpoint in config.tcp_connect}
            others = {port for writer, port in ports.items() if writer != name}
            self.assertEqual(connected, others)

    def test_written_rows_come_from_their_source(self) -> None:
        """Written rows are read from the table, or for memory from the writer's log."""
        deployment = self.start(use_redis=True)
        dsn = deployment.postgres.dsn("demo")
        with psycopg2.connect(dsn) as connection, connection.cursor() as cursor:
            cursor.execute(
                "INSERT INTO demo_events VALUES "
                "(2, 'event_writer1', 'ev', '[1, null]'), "
                "(3, 'event_writer2', 'ev', '{}')"
            )
        connection.close()
        self.assertEqual(
            deployment.written_rows(STREAMS["events"], "event_writer1"),
            [(2, ["ev", [1, None]])],
        )
        entry = {"stream": "typing", "writer": "typing_writer", "token": 1}
        deployment.log_of("typing_writer").write_text(
            json.dumps(entry | {"rows": [["!r:x", []]]}) + '\n{"finished": true}\n'
        )
        self.assertEqual(
            deployment.written_rows(STREAMS["typing"], "typing_writer"),
            [(1, ["!r:x", []])],
        )

    def test_folders_are_removed(self) -> None:
        """After close() the folders are removed."""
        deployment = self.start(use_redis=True)
        folders = [deployment.directory, deployment.postgres.directory]
        deployment.close()
        self.assertEqual([folder.exists() for folder in folders], [False, False])


class ReplicationProcessTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.process = ReplicationProcess(
            "reader9",
            ["worker", "-c", "/nowhere/homeserver.yaml"],
            Path("/nowhere/reader9.sock"),
            Path(self.mktemp()),
        )
        self.addCleanup(self.process.kill)

    def test_failed_start_is_reported_with_log(self) -> None:
        """A process that does not start is reported with the end of its log."""
        self.process.start()
        with self.assertRaises(ServerStartError) as caught:
            wait_until_ready([self.process])
        self.assertIn("reader9 ended with status 2", str(caught.exception))
        self.assertIn("/nowhere/homeserver.yaml", str(caught.exception))

    def test_process_not_started(self) -> None:
        """A process that was not started is not ready and need not be stopped."""
        self.process.check()
        self.process.request_stop()
        self.assertFalse(self.process.is_ready())
        self.assertIsNone(self.process.wait())

    def test_interrupted_while_it_is_checked(self) -> None:
        """An interruption arrives after the check, which holds a lock."""
        previous = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.addCleanup(signal.signal, signal.SIGINT, previous)
        checked: list[bool] = []

        def poll(process: subprocess.Popen[bytes]) -> None:
            signal.raise_signal(signal.SIGINT)
            checked.append(True)

        self.process.start()
        self.patch(subprocess.Popen, "poll", poll)
        self.assertRaises(KeyboardInterrupt, self.process.check)
        self.assertEqual(checked, [True])

    def test_kill(self) -> None:
        """A killed process may be started again."""
        self.process.start()
        self.process.kill()
        self.process.check()
        self.process.start()
        self.process.request_stop()
        self.assertIsNotNone(self.process.wait())
