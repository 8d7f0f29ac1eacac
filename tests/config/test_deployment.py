"""Tests for synapse_replication.config.deployment."""

from __future__ import annotations

import subprocess
import sys

from synapse_replication.config.deployment import load_deployment
from synapse_replication.errors import ConfigError
from tests.support.config_files import FilesMixin

SHARED = """
server_name: x.test
database: {name: psycopg2, args: {dbname: synapse, cp_max: 3}}
instance_map: {w1: {host: localhost, port: 9093}}
stream_writers: {events: [w1]}
"""


class LoadDeploymentTests(FilesMixin):
    """Tests for the settings that all instances share."""

    def test_shared(self) -> None:
        """Database, streams and writers are read."""
        deployment = load_deployment([self.write("a.yaml", SHARED)])
        assert deployment.database is not None
        self.assertEqual(deployment.database.conninfo, {"dbname": "synapse"})
        self.assertEqual(deployment.database.max_connections, 3)
        self.assertIn("events", deployment.streams)
        self.assertEqual(deployment.writers["events"], ("w1",))
        self.assertEqual(deployment.writers["typing"], ("master",))
        self.assertEqual(deployment.writers["caches"], ())

    def test_streams_written_with_events(self) -> None:
        """Streams that are written together with events have the writers of events."""
        writers = load_deployment([self.write("a.yaml", SHARED)]).writers
        with_events = {
            name for name, instances in writers.items() if instances == ("w1",)
        }
        self.assertEqual(
            with_events, {"events", "backfill", "profile_updates", "sticky_events"}
        )

    def test_files_of_a_process(self) -> None:
        """
        Missing certificate files are ignored, since they may be on another machine.
        """
        tls = "synapse_replication: {tls: {ca_file: /nonexistent/ca.pem}}\n"
        load_deployment([self.write("a.yaml", SHARED + tls)])

    def test_no_database(self) -> None:
        """
        If the database is missing, the error names two remedies; without streams, no
        database is needed.
        """
        error = self.assertRaises(
            ConfigError, load_deployment, [self.write("a.yaml", "server_name: x")]
        )
        (problem,) = error.problems
        self.assertEqual(problem.key, "database")
        self.assertIn("name: psycopg2", problem.hint)
        self.assertIn("synapse_replication.streams", problem.hint)
        without = "server_name: x\nsynapse_replication: {streams: []}\n"
        deployment = load_deployment([self.write("b.yaml", without)])
        self.assertEqual((deployment.database, deployment.streams), (None, ()))

    def test_all_problems(self) -> None:
        """Problems of database, streams and writers are reported together."""
        text = (
            "server_name: x.test\n"
            "database: {name: psycopg2, args: {cp_max: none}}\n"
            "stream_writers: {event: [w1], typing: []}\n"
        )
        error = self.assertRaises(
            ConfigError, load_deployment, [self.write("a.yaml", text)]
        )
        self.assertEqual(
            [problem.key for problem in error.problems],
            [
                "database.args.cp_max",
                "stream_writers.event",
                "stream_writers.event[0]",
                "stream_writers.typing",
            ],
        )

    def test_database_named_twice(self) -> None:
        """A database named by both of the driver's parameters is a problem."""
        text = (
            "server_name: x.test\n"
            "database: {name: psycopg2, args: {database: a, dbname: b}}\n"
        )
        error = self.assertRaises(
            ConfigError, load_deployment, [self.write("a.yaml", text)]
        )
        (problem,) = error.problems
        self.assertEqual(problem.key, "database.args")
        self.assertIn("both 'database' and 'dbname'", problem.problem)

    def test_no_reactor(self) -> None:
        """
        Reading a deployment does not import Twisted, which executors of a cluster lack.
        """
        script = (
            "import sys, synapse_replication.config.deployment\n"
            "sys.exit('twisted' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", script], timeout=60, check=False)
        self.assertEqual(done.returncode, 0)
