"""Tests for the problems that :mod:`synapse_replication.config.process` reports."""

from __future__ import annotations

from synapse_replication.config.process import (
    load_config,
)
from synapse_replication.errors import ConfigError
from synapse_replication.streams.standard.registry import STANDARD_STREAMS
from tests.config.process_case import HOMESERVER, WORKER, LoadConfigTestCase


class InvalidConfigTests(LoadConfigTestCase):
    """Tests for invalid configurations and the reported problems."""

    def test_all_problems_at_once(self) -> None:
        """Problems in different files and of different kinds are reported together."""
        self.assertEqual(
            self.problems_of(
                HOMESERVER,
                """\
redis:
  enabled: maybe
  port: 77777
instance_map:
  persister1: {host: localhost}
synapse_replication:
  row_snik: {module: a.b}
  streams: [typnig]
""",
                "worker_name: main\nworker_replication_port: x\n",
            ),
            [
                "1.yaml:2: redis.enabled: expected `bool`, got `str`; write true or "
                "false",
                "1.yaml:3: redis.port: expected `int` <= 65535; write a port number "
                "from 1 to 65535",
                "1.yaml:5: instance_map.persister1: the address of the process "
                "is missing; write host and port, or path (of a Unix socket)",
                "2.yaml:2: worker_replication_port: expected `int`, got `str`; write "
                "a port number from 1 to 65535",
                "1.yaml:8: synapse_replication.streams[0]: 'typnig' is not a "
                "standard stream; did you mean 'typing'?",
                "1.yaml:7: synapse_replication.row_snik: there is no such key; did "
                "you mean 'row_sink'?",
                "2.yaml:1: worker_name: 'main' is the name of the main process; write "
                "a name that no other process of this homeserver has",
            ],
        )

    def test_problem_hides_no_other(self) -> None:
        """A problem in a section does not hide another one that is found later."""
        found = self.problems_of(
            HOMESERVER,
            """\
redis: {enabled: true, port: x, password_path: /nowhere}
stream_writers: {receipts: 3, evnts: [persister1], typing: [a, a]}
""",
        )
        self.assertEqual(
            [line.split(": ")[1] for line in found],
            [
                "redis.port",
                "stream_writers.receipts",
                "redis.password_path",
                "stream_writers.evnts",
                "stream_writers.typing",
                "stream_writers.typing",
                "stream_writers.typing[0]",
                "stream_writers.typing[1]",
            ],
            found,
        )

    def test_parameter_of_the_database(self) -> None:
        """An unknown connection parameter is reported without any value."""
        (found,) = self.problems_of(
            HOMESERVER,
            "database: {name: psycopg2, args: {dbnam: x, password: hunter2}}\n",
        )
        self.assertIn("database.args: invalid dsn: invalid connection option", found)
        self.assertIn('"dbnam"', found)
        self.assertNotIn("hunter2", found)

    def test_connection_string(self) -> None:
        """An invalid connection string is reported without a word of it."""
        (found,) = self.problems_of(
            HOMESERVER,
            "database: {name: psycopg2, args: {dsn: 'password=a hunter2'}}\n",
        )
        self.assertIn("database.args: dsn is not a valid connection string", found)
        self.assertNotIn("hunter2", found)

    def test_worker_with_a_bad_name(self) -> None:
        """A worker's listeners are checked even if its name is invalid."""
        found = self.problems_of(
            HOMESERVER,
            "worker_name: a b\nworker_listeners: [{type: http, port: 1, tls: true, "
            "resources: [{names: [replication]}]}]\n",
        )
        self.assertIn("worker_listeners[0].tls", "".join(found))

    def test_streams_declared_twice(self) -> None:
        """A stream that is declared twice, or has an unknown writer, is reported."""
        found = self.problems_of(
            HOMESERVER,
            """\
synapse_replication:
  streams:
    - typing
    - typing
    - {name: orders, table: t, id_column: i, columns: [c], sequence: s, writers: nobody}
""",
        )
        self.assertIn("streams[1]: typing is declared twice", found[0])
        self.assertIn("'nobody' is not in instance_map", found[1])

    def test_no_server_name(self) -> None:
        """If server_name is missing, the problem says what to write."""
        self.assertEqual(
            self.problems_of("redis: {enabled: true}\ndatabase: {name: psycopg2}\n"),
            [
                "0.yaml: server_name: is missing; write the homeserver's name, without "
                "slashes; for instance `server_name: example.com`"
            ],
        )

    def test_unreadable_file_hides_no_problem(self) -> None:
        """An unreadable file does not hide problems in other files."""
        path = self.write("a.yaml", HOMESERVER + "run_background_tasks_on: [1]\n")
        with self.assertRaises(ConfigError) as caught:
            load_config([path, str(self.folder / "no.yaml")])
        self.assertEqual(
            [problem.key for problem in caught.exception.problems],
            ["(the file)", "run_background_tasks_on"],
        )

    def test_unknown_stream(self) -> None:
        """An unknown key of stream_writers is reported with a suggestion."""
        self.assertEqual(
            self.problems_of(HOMESERVER, "stream_writers: {recepits: writer1}\n"),
            [
                "1.yaml:1: stream_writers.recepits: there is no such stream; did you "
                "mean 'receipts'?"
            ],
        )

    def test_unknown_stream_beside_unknown_key(self) -> None:
        """A key that only begins like ``streams`` does not hide an unknown stream."""
        keys = [
            invalid.split(": ")[1]
            for invalid in self.problems_of(
                HOMESERVER,
                "stream_writers: {recepits: writer1}\n"
                "synapse_replication: {streamss: []}\n",
            )
        ]
        self.assertEqual(
            keys, ["synapse_replication.streamss", "stream_writers.recepits"]
        )

    def test_unknown_writer(self) -> None:
        """A writer that is not in instance_map is reported with a suggestion."""
        self.assertEqual(
            self.problems_of(
                HOMESERVER, "stream_writers:\n  events: [writer2, nobody, main]\n"
            ),
            [
                "1.yaml:2: stream_writers.events[0]: instance 'writer2' is not in "
                "instance_map; did you mean 'writer1'?",
                "1.yaml:2: stream_writers.events[1]: instance 'nobody' is not in "
                "instance_map; add it: `instance_map: {nobody: {host: ..., port: "
                "...}}`",
                "1.yaml:2: stream_writers.events[2]: as a writer, the main process is "
                "not called 'main'; write master",
            ],
        )

    def test_two_writers_of_a_single_writer_stream(self) -> None:
        """Two writers of a single-writer stream are refused."""
        (invalid,) = self.problems_of(
            HOMESERVER, "stream_writers: {typing: [writer1, persister1]}\n"
        )
        self.assertIn("stream_writers.typing: may have one writer only", invalid)

    def test_empty_writers(self) -> None:
        """An empty list of writers is refused."""
        (invalid,) = self.problems_of(HOMESERVER, "stream_writers: {events: []}\n")
        self.assertIn("stream_writers.events: names no instance", invalid)

    def test_writer_of_memory_that_does_not_listen(self) -> None:
        """
        A writer of a stream in memory must have a listener, since readers catch up from
        it.
        """
        (invalid,) = self.problems_of(HOMESERVER, WORKER, "worker_listeners: []\n")
        self.assertIn("this process writes typing, held in memory, but has no", invalid)
        self.assertIn("resources: [{names: [replication]}]", invalid)

    def test_no_link(self) -> None:
        """A worker without Redis and without a replication port is refused."""
        (invalid,) = self.problems_of(HOMESERVER, WORKER, "redis: {enabled: false}\n")
        self.assertIn("redis.enabled: there is no link to the other processes", invalid)

    def test_database(self) -> None:
        """A database that is missing, or that is not PostgreSQL, is a problem."""
        (invalid,) = self.problems_of(HOMESERVER, "database: {name: sqlite3}\n")
        self.assertIn("database.name: 'sqlite3' cannot be replicated", invalid)
        (invalid,) = self.problems_of("server_name: x\n")
        self.assertIn("database: is missing; write name: psycopg2", invalid)
        (invalid,) = self.problems_of(
            "server_name: x\ndatabase: {name: psycopg2, args: {cp_max: 0}}\n"
        )
        self.assertIn("database.args.cp_max", invalid)

    def test_worker_name(self) -> None:
        """A worker must have a name, and the main process must not."""
        (invalid,) = self.problems_of(HOMESERVER, purpose="worker")
        self.assertIn("worker_name: is missing", invalid)
        (invalid,) = self.problems_of(HOMESERVER, WORKER, purpose="main")
        self.assertIn(
            "worker_name: the main process must not have a worker_name", invalid
        )

    def test_redis(self) -> None:
        """Incomplete or conflicting settings of ``redis`` are refused."""
        (invalid,) = self.problems_of(HOMESERVER, "redis: {certificate_file: a}\n")
        self.assertIn("redis: a client certificate needs its private key", invalid)
        (invalid,) = self.problems_of(
            HOMESERVER, "redis: {enabled: yes, username: a}\n"
        )
        self.assertIn("redis.username: a user name is of no use", invalid)
        (invalid,) = self.problems_of(
            HOMESERVER, "redis: {enabled: yes, use_tls: yes, ca_file: /nowhere}\n"
        )
        self.assertIn("redis.ca_file: /nowhere does not exist", invalid)
        (invalid,) = self.problems_of(
            HOMESERVER, "redis: {enabled: yes, password: a, password_path: b}\n"
        )
        self.assertIn("redis.password_path: redis.password is set, too", invalid)

    def test_listeners(self) -> None:
        """Invalid listeners are reported with suggestions."""
        self.assertEqual(
            self.problems_of(
                HOMESERVER,
                """\
listeners:
  - {type: htpp, port: 1}
  - {type: http, port: 1, path: /x}
  - {type: http, port: 1, resources: [{names: [replicaton]}]}
""",
            ),
            [
                "1.yaml:2: listeners[0]: 'htpp' is not a type of listener; did you "
                "mean 'http'?",
                "1.yaml:3: listeners[1]: a listener needs either a port or a "
                "path; write port: 9093, or path: /run/synapse/main.sock",
                "1.yaml:4: listeners[2].resources[0]: 'replicaton' is not a resource; "
                "did you mean 'replication'?",
            ],
        )

    def test_required_key_without_value(self) -> None:
        """A required key that is left empty is refused, also if it takes a list."""
        self.assertEqual(
            self.problems_of(
                HOMESERVER,
                """\
listeners:
  - {type: http, port: 1, resources: [{names: }]}
""",
            ),
            [
                "1.yaml:2: listeners[0].resources[0].names: is empty; write the names "
                "of resources, for instance `names: [replication]`",
            ],
        )

    def test_tls_listener_without_certificate(self) -> None:
        """A TLS listener without a certificate is refused."""
        (invalid,) = self.problems_of(
            HOMESERVER,
            WORKER,
            """\
worker_listeners:
  - {type: http, port: 1, tls: true, resources: [{names: replication}]}
""",
        )
        self.assertIn("worker_listeners[0].tls: this listener cannot", invalid)

    def test_instance_with_path_and_host(self) -> None:
        """An instance with both a socket path and a host is refused."""
        (invalid,) = self.problems_of(
            HOMESERVER,
            "stream_writers:\ninstance_map: {a: {path: /a, host: b, port: 1}}\n",
        )
        self.assertIn("instance_map.a: it has both a path and a host", invalid)

    def test_paths_of_sockets(self) -> None:
        """Paths that are too long for a Unix socket are refused."""
        path = "/run/" + "a" * 103
        problems = self.problems_of(
            HOMESERVER,
            f"redis: {{enabled: true, path: {path}}}\n",
            f"instance_map: {{master: {{path: {path}}}, w1: {{path: {path}}}}}\n",
            f"worker_listeners: [{{type: metrics, path: {path}}}]\n",
        )
        for key in (
            "redis.path",
            "instance_map.master.path",
            "instance_map.w1.path",
            "worker_listeners[0].path",
        ):
            self.assertTrue(
                any(f"{key}: " in each and "108 bytes" in each for each in problems),
                f"{key}: {problems}",
            )

    def test_declaration_of_a_stream(self) -> None:
        """Problems in the declaration of a stream are reported with hints."""
        problems_of = self.problems_of(
            HOMESERVER,
            """\
synapse_replication:
  streams:
    - {name: a, tabel: b}
    - {name: a}
    - {name: a, table: "B b", id_column: i, columns: [c], sequence: s, writers: w}
    - 7
    - nothing-like-it
  modules: [{module: no_dots}]
""",
        )
        self.assertEqual(
            [invalid.partition(" synapse_replication.")[2] for invalid in problems_of],
            [
                "streams[0]: 'tabel' is not a key of a stream; did you mean 'table'?",
                "streams[1]: the declaration lacks table, id_column, columns, "
                "sequence, writers; add the missing keys",
                "streams[2]: stream a: table is 'B b'; write a plain SQL identifier: "
                "lower-case letters, digits and _, at most 63 characters",
                "streams[3]: each entry must be a mapping, or the name of a standard "
                "stream; write name, table, id_column, columns, sequence and "
                "writers",
                "streams[4]: 'nothing-like-it' is not a standard stream; declare it by "
                f"its table, or write one of {', '.join(STANDARD_STREAMS)}",
                "modules[0].module: is not of the required form; write the dotted "
                "name of a function, for instance my_package.my_module.make_sink",
            ],
        )
