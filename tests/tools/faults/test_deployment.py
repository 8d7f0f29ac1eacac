"""Tests for :mod:`scripts.tools.faults.deployment`."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from pathlib import Path

import attrs
import psycopg2
from twisted.trial.unittest import SkipTest, SynchronousTestCase

from scripts.tools.faults.deployment import (
    FaultDeployment,
    Needs,
    SmallDiskPostgres,
    connected_sockets,
    count_catch_ups,
)
from synapse_replication.demo.deployment import DemoPlan
from synapse_replication.demo.script import STREAMS
from synapse_replication.errors import ServerStartError

PLAN = DemoPlan(Path("recording"), 0, 5.0, use_redis=True)


class CountCatchUpsTests(SynchronousTestCase):
    def test_all_streams_are_added_up(self) -> None:
        """
        The counts of the histogram are added up for all streams; its buckets and sums
        are not.
        """
        name = "synapse_replication_catch_up_seconds"
        self.assertEqual(
            count_catch_ups(
                f"# HELP {name} x\n"
                f'{name}_bucket{{le="1.0",stream_name="a"}} 7.0\n'
                f'{name}_count{{stream_name="a"}} 2.0\n'
                f'{name}_sum{{stream_name="a"}} 9.0\n'
                f'{name}_count{{stream_name="b"}} 3.0\n'
            ),
            5,
        )

    def test_none_yet(self) -> None:
        """A process that has fetched nothing has a count of zero."""
        self.assertEqual(count_catch_ups("HTTP/1.1 200 OK\r\n\r\n"), 0)


class ConnectedSocketsTests(SynchronousTestCase):
    def test_own(self) -> None:
        """Connected Unix sockets are found, and listening ones are not."""
        path = self.mktemp()
        listener = socket.socket(socket.AF_UNIX)
        self.addCleanup(listener.close)
        listener.bind(path)
        listener.listen()
        client = socket.socket(socket.AF_UNIX)
        self.addCleanup(client.close)
        client.connect(path)
        accepted, _ = listener.accept()
        self.addCleanup(accepted.close)
        found = connected_sockets(Path("/proc/self/net/unix").read_text())
        own = [
            os.readlink(f"/proc/self/fd/{each.fileno()}") in found
            for each in (client, accepted, listener)
        ]
        self.assertEqual(own, [True, True, False])


class FaultDeploymentTests(SynchronousTestCase):
    def test_move(self) -> None:
        """
        The configurations of all processes name the new writers, and nothing else
        changes.
        """
        deployment = FaultDeployment(PLAN, Needs(proxied="event_writer1"), 7)
        self.addCleanup(deployment.close)
        deployment.start_servers()
        proxy = deployment.proxy
        shared = (deployment.directory / "homeserver.yaml").read_text()
        deployment.move("event_writer1", "typing_writer")
        self.assertIs(deployment.proxy, proxy)
        self.assertEqual((deployment.directory / "homeserver.yaml").read_text(), shared)
        for name in ("reader1", "event_writer2"):
            own = json.loads((deployment.directory / f"{name}.yaml").read_text())
            (writers,) = (
                stream["writers"]
                for stream in own["synapse_replication"]["streams"]
                if isinstance(stream, dict) and stream["name"] == "events"
            )
            self.assertEqual(writers, ["event_writer2", "typing_writer"])
        events, typing = STREAMS["events"], STREAMS["typing"]
        self.assertEqual(
            deployment.all_writers_of(events),
            ["event_writer1", "event_writer2", "typing_writer"],
        )
        self.assertEqual(deployment.all_writers_of(typing), ["typing_writer"])
        self.assertFalse(deployment.is_writing("event_writer1"))
        self.assertTrue(deployment.is_writing("typing_writer"))

    def test_one_process_goes_through_the_proxy(self) -> None:
        """Only the process whose link is cut connects to Redis through the proxy."""
        deployment = FaultDeployment(PLAN, Needs(proxied="reader1"), 7)
        self.addCleanup(deployment.close)
        deployment.start_servers()
        assert deployment.proxy is not None
        own = {
            name: json.loads((deployment.directory / f"{name}.yaml").read_text())
            for name in deployment.processes
        }
        self.assertEqual(own["reader1"]["redis"]["port"], deployment.proxy.port)
        self.assertEqual([name for name in own if "redis" in own[name]], ["reader1"])
        module = own["event_writer1"]["synapse_replication"]["modules"][0]
        self.assertEqual(module["config"]["skip"], 7)

    def test_classic_wire(self) -> None:
        """In a scenario without the extension, every process disables it."""
        deployment = FaultDeployment(PLAN, Needs(extension=False), 0)
        self.addCleanup(deployment.close)
        deployment.start_servers()
        for name in deployment.processes:
            own = json.loads((deployment.directory / f"{name}.yaml").read_text())
            section = own["synapse_replication"]["extension"]
            self.assertEqual(section, {"enabled": False}, name)

    def test_one_link_over_direct_tcp_goes_through_the_proxy(self) -> None:
        """Only one process connects to only one writer through the proxy."""
        deployment = FaultDeployment(
            attrs.evolve(PLAN, use_redis=False),
            Needs(proxied="reader1", direct_tcp=True),
            0,
        )
        self.addCleanup(deployment.close)
        deployment.start_servers()
        assert deployment.proxy is not None
        own = {
            name: json.loads((deployment.directory / f"{name}.yaml").read_text())
            for name in deployment.processes
        }
        connects = {
            name: own[name]["synapse_replication"]["direct_tcp"]["connect"]
            for name in ("reader1", "reader2")
        }
        (moved,) = set(connects["reader1"]) - set(connects["reader2"])
        self.assertEqual(moved, f"tcp:127.0.0.1:{deployment.proxy.port}")
        (writer1,) = set(connects["reader2"]) - set(connects["reader1"])
        listen = own["event_writer1"]["synapse_replication"]["direct_tcp"]["listen"]
        self.assertTrue(listen.startswith(writer1.replace("127.0.0.1:", "")))
        self.assertNotIn("redis", own["reader1"])


class SmallDiskPostgresTests(SynchronousTestCase):
    def test_fill_and_free(self) -> None:
        """
        A full disk rejects rows until there is space again, and nothing stays mounted.
        """
        if os.geteuid():
            raise SkipTest("only root may mount a small disk")
        postgres = SmallDiskPostgres()
        self.addCleanup(postgres.stop)
        try:
            postgres.start()
        except ServerStartError as error:
            raise SkipTest(str(error)) from error
        data = postgres.directory / "data"
        insert = (
            "CREATE TABLE t AS SELECT repeat('x', 100) FROM generate_series(1, 9999)"
        )
        with contextlib.closing(psycopg2.connect(postgres.dsn())) as connection:
            connection.autocommit = True
            with connection.cursor() as cursor:
                postgres.fill_disk()
                with self.assertRaises(psycopg2.OperationalError) as caught:
                    cursor.execute(insert)
                self.assertIn("No space left", str(caught.exception))
                postgres.free_disk()
                cursor.execute(insert)
        postgres.stop()
        self.assertFalse(data.exists())
