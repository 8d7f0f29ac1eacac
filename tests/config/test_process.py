"""Tests for synapse_replication.config.process and its models."""

from __future__ import annotations

import attrs

from synapse_replication.config.process import (
    ProcessConfig,
    Purpose,
    ReceivingConfig,
    RedisConfig,
    load_config,
)
from synapse_replication.config.process_parts import (
    ExtensionConfig,
    InstanceLocation,
    Listener,
)
from synapse_replication.errors import ConfigError
from synapse_replication.streams.positions import PLAUSIBLE_DISTANCE
from synapse_replication.streams.standard.registry import STANDARD_STREAMS
from synapse_replication.streams.table import TableStream
from synapse_replication.wire.pending import PendingLimit
from tests.config.test_files import FilesMixin

#: The keys that Synapse's own generator of a homeserver.yaml writes, with the
#: database and the workers that its documentation adds.
HOMESERVER = """\
server_name: "x.test"
pid_file: /run/homeserver.pid
listeners:
  - bind_addresses:
    - ::1
    - 127.0.0.1
    port: 8008
    resources:
    - compress: false
      names:
      - client
      - federation
    tls: false
    type: http
    x_forwarded: true
  - port: 9093
    bind_address: 127.0.0.1
    type: http
    resources:
      - names: [replication]
  - {type: metrics, port: 9000}
  - {type: manhole, port: 9001}
database:
  name: psycopg2
  txn_limit: 10000
  args:
    user: synapse
    password: hunter2
    database: synapse
    host: localhost
    cp_min: 5
    cp_max: 7
    keepalives_idle: 10
log_config: "/etc/x.test.log.config"
media_store_path: /var/media_store
registration_shared_secret: "secret"
report_stats: false
macaroon_secret_key: "secret"
form_secret: "secret"
signing_key_path: "/etc/x.test.signing.key"
trusted_key_servers:
  - server_name: "matrix.org"
redis:
  enabled: true
  host: redis.test
  password: hush
stream_writers:
  events: [persister1, persister2]
  typing: writer1
instance_map:
  main: {host: localhost, port: 9093}
  persister1: {path: /run/persister1.sock}
  persister2: {host: h, port: 9095, tls: true}
  writer1: {host: localhost, port: 9096}
outbound_federation_restricted_to: [persister1]
federation_sender_instances: [sender1]
worker_replication_secret: knock
"""

WORKER = """\
worker_app: synapse.app.generic_worker
worker_name: writer1
worker_listeners:
  - type: http
    port: 9096
    resources:
      - names: [replication, health]
worker_log_config: /etc/log.config
"""


class LoadConfigTests(FilesMixin):
    def load(self, *texts: str, purpose: Purpose | None = None) -> ProcessConfig:
        paths = [self.write(f"{i}.yaml", text) for i, text in enumerate(texts)]
        return load_config(paths, purpose)

    def mistakes(self, *texts: str, purpose: Purpose | None = None) -> list[str]:
        """Load what has mistakes, and give them without the folder's name."""
        with self.assertRaises(ConfigError) as caught:
            self.load(*texts, purpose=purpose)
        return [
            str(problem).replace(f"{self.folder}/", "")
            for problem in caught.exception.problems
        ]

    def test_main(self) -> None:
        """A real homeserver.yaml says all that the main process needs."""
        config = self.load(HOMESERVER)
        self.assertTrue(config.is_main)
        self.assertEqual(config.server_name, "x.test")
        self.assertEqual(config.instance_name, "master")
        self.assertEqual(
            config.redis, RedisConfig(host="redis.test", port=6379, password="hush")
        )
        assert config.database is not None
        self.assertEqual(
            config.database.conninfo,
            {
                "user": "synapse",
                "password": "hunter2",
                "dbname": "synapse",
                "host": "localhost",
                "keepalives_idle": 10,
            },
        )
        self.assertEqual(config.database.max_connections, 7)
        self.assertEqual(config.replication_secret, "knock")
        self.assertTrue(config.stores_user_ips)
        self.assertEqual(config.tcp_connect, ())
        self.assertEqual(config.streams, tuple(STANDARD_STREAMS))

    def test_only_our_listeners(self) -> None:
        """Listeners with nothing of ours to serve are skipped."""
        config = self.load(HOMESERVER)
        self.assertEqual(
            config.listeners,
            (
                Listener(9093, None, ("127.0.0.1",), frozenset({"replication"}), False),
                Listener(9000, None, ("0.0.0.0",), frozenset({"metrics"}), False),
            ),
        )

    def test_worker(self) -> None:
        """A worker's file on top of the shared one makes a worker."""
        config = self.load(HOMESERVER, WORKER)
        self.assertFalse(config.is_main)
        self.assertEqual(config.instance_name, "writer1")
        self.assertFalse(config.stores_user_ips)
        self.assertEqual(
            [(listener.port, listener.resources) for listener in config.listeners],
            [(9096, frozenset({"replication", "health"}))],
        )

    def test_writers(self) -> None:
        """Each stream gets the writers of its key; main has what is not named."""
        writers = self.load(HOMESERVER).writers
        self.assertEqual(writers["events"], ("persister1", "persister2"))
        self.assertEqual(writers["backfill"], ("persister1", "persister2"))
        self.assertEqual(writers["typing"], ("writer1",))
        self.assertEqual(writers["receipts"], ("master",))
        self.assertEqual(writers["pushers"], ("master",))
        self.assertEqual(writers["caches"], ())

    def test_instance_map(self) -> None:
        """Instances are found by the name that writers have, main as master."""
        instances = self.load(HOMESERVER).instance_map
        self.assertEqual(
            instances["master"], InstanceLocation("localhost", 9093, False, None)
        )
        self.assertEqual(instances["persister1"].path, "/run/persister1.sock")
        self.assertTrue(instances["persister2"].tls)
        self.assertNotIn("main", instances)

    def test_background_tasks(self) -> None:
        """The instance that runs background tasks stores the client IPs."""
        extra = "run_background_tasks_on: writer1\n"
        self.assertTrue(self.load(HOMESERVER, WORKER, extra).stores_user_ips)
        self.assertFalse(self.load(HOMESERVER, extra).stores_user_ips)

    def test_pending_limit(self) -> None:
        """What may wait for a slow peer over direct TCP is bounded, as one says."""
        self.assertEqual(self.load(HOMESERVER).tcp_limit, PendingLimit())
        own = "synapse_replication: {direct_tcp: {%s}}\n"
        config = self.load(
            HOMESERVER, own % "max_pending_commands: 500, max_pending_bytes: 1000000"
        )
        self.assertEqual(config.tcp_limit, PendingLimit(500, 1_000_000))
        (invalid,) = self.mistakes(HOMESERVER, own % "max_pending_bytes: 10")
        self.assertIn("direct_tcp.max_pending_bytes", invalid)

    def test_receiving(self) -> None:
        """The bounds of what is received are configuration, with defaults."""
        self.assertEqual(self.load(HOMESERVER).receiving, ReceivingConfig())
        self.assertEqual(ReceivingConfig().plausible_distance, PLAUSIBLE_DISTANCE)
        own = "synapse_replication: {receiving: {%s}}\n"
        config = self.load(
            HOMESERVER,
            own % "plausible_distance: 5000, max_queue_bytes: 2000000, "
            "max_batch_rows: 200",
        )
        self.assertEqual(config.receiving, ReceivingConfig(5000, 2_000_000, 200))
        for key in ("plausible_distance", "max_queue_bytes", "max_batch_rows"):
            (invalid,) = self.mistakes(HOMESERVER, own % f"{key}: 10")
            self.assertIn(f"receiving.{key}", invalid)
        (invalid,) = self.mistakes(HOMESERVER, own % "plausible_distanse: 5000")
        self.assertIn("did you mean 'plausible_distance'?", invalid)

    def test_extension(self) -> None:
        """The extension is on unless it is turned off; its backlog has bounds."""
        self.assertEqual(self.load(HOMESERVER).extension, ExtensionConfig())
        own = "synapse_replication: {extension: %s}\n"
        config = self.load(HOMESERVER, own % "{backlog_rows: 5, backlog_bytes: 0}")
        self.assertEqual(config.extension, ExtensionConfig(5, 0))
        self.assertIsNone(self.load(HOMESERVER, own % "{enabled: false}").extension)
        (invalid,) = self.mistakes(HOMESERVER, own % "{backlog_rows: -1}")
        self.assertIn("extension.backlog_rows", invalid)

    def test_secrets_do_not_show(self) -> None:
        """The repr of a configuration holds no secret."""
        text = repr(self.load(HOMESERVER))
        for secret in ("hunter2", "hush", "knock"):
            self.assertNotIn(secret, text)

    def test_secrets_from_files(self) -> None:
        """Secrets may come from files."""
        one, two = self.write("one", "hush\n"), self.write("two", "knock\n")
        config = self.load(
            HOMESERVER.replace("password: hush", f"password_path: {one}").replace(
                "worker_replication_secret: knock",
                f"worker_replication_secret_path: {two}",
            )
        )
        assert config.redis is not None
        self.assertEqual(config.redis.password, "hush")
        self.assertEqual(config.replication_secret, "knock")

    def test_direct_tcp_worker(self) -> None:
        """A worker without Redis connects to the legacy replication port."""
        config = self.load(
            HOMESERVER,
            WORKER,
            "redis: {enabled: false}\nworker_replication_port: 9092\n",
        )
        self.assertIsNone(config.redis)
        self.assertEqual(config.tcp_connect, ("tcp:localhost:9092",))

    def test_direct_tcp_endpoint(self) -> None:
        """A worker may name an endpoint of any kind instead."""
        config = self.load(
            HOMESERVER,
            WORKER,
            "redis:\nsynapse_replication: {direct_tcp: {connect: 'tls:h:1'}}\n",
        )
        self.assertEqual(config.tcp_connect, ("tls:h:1",))

    def test_direct_tcp_to_several(self) -> None:
        """A reader of several writers connects to each, since none relays rows."""
        config = self.load(
            HOMESERVER,
            WORKER,
            "redis:\nsynapse_replication:\n"
            "  direct_tcp: {connect: ['tcp:h:1', 'unix:/s']}\n",
        )
        self.assertEqual(config.tcp_connect, ("tcp:h:1", "unix:/s"))

    def test_direct_tcp_served_by_a_worker(self) -> None:
        """A worker that only writes serves direct TCP and connects to nobody."""
        config = self.load(
            HOMESERVER,
            WORKER,
            "redis:\nsynapse_replication: {direct_tcp: {listen: 'unix:/s'}}\n",
        )
        self.assertEqual((config.tcp_connect, config.tcp_listen), ((), ("unix:/s",)))

    def test_direct_tcp_main(self) -> None:
        """A listener of type replication serves the line protocol."""
        config = self.load(
            HOMESERVER,
            "listeners: [{type: replication, port: 9092, bind_addresses: '::1'}]\n",
        )
        self.assertEqual(
            config.listeners, (Listener(9092, None, ("::1",), frozenset(), True),)
        )

    def test_follow_needs_no_database(self) -> None:
        """An onlooker is content with an SQLite homeserver and a link."""
        config = self.load(
            HOMESERVER, "database: {name: sqlite3}\n", purpose=Purpose.FOLLOW
        )
        self.assertIsNone(config.database)
        self.assertEqual(config.listeners, ())

    def test_own_streams(self) -> None:
        """Streams are declared by table, or named if they are standard ones."""
        config = self.load(
            HOMESERVER,
            """\
stream_writers: {typing: writer1, orders: [persister1, writer1]}
synapse_replication:
  streams:
    - typing
    - name: orders
      table: orders
      id_column: id
      writer_column: instance_name
      columns: {order_id: text, note: 'text?'}
      sequence: orders_seq
      writers: persister1
  row_sink: {module: my.sinks.make, config: {path: x}}
  command_sink: {module: my.sinks.make_commands}
  modules:
    - module: my.modules.write
replication_torture_level: 50
""",
        )
        typing, orders = config.streams
        self.assertEqual(typing, "typing")
        assert isinstance(orders, TableStream)
        self.assertEqual(orders.columns, (("order_id", str), ("note", str | None)))
        self.assertEqual(
            config.writers,
            {"typing": ("writer1",), "orders": ("persister1", "writer1")},
        )
        assert config.row_sink is not None
        self.assertEqual(config.row_sink.module, "my.sinks.make")
        self.assertEqual(config.row_sink.config, {"path": "x"})
        assert config.command_sink is not None
        self.assertEqual(config.command_sink.module, "my.sinks.make_commands")
        self.assertEqual(config.torture_level, 50)
        self.assertEqual(
            [module.module for module in config.modules], ["my.modules.write"]
        )

    def test_config_is_frozen(self) -> None:
        """A configuration that was checked is not changed any more."""
        config = self.load(HOMESERVER)
        with self.assertRaises(attrs.exceptions.FrozenInstanceError):
            config.server_name = "y"  # type: ignore[misc]

    # -- mistakes -----------------------------------------------------------------

    def test_all_mistakes_at_once(self) -> None:
        """Mistakes in different files and of different kinds are told together."""
        self.assertEqual(
            self.mistakes(
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
                "1.yaml:2: redis.enabled: input should be a valid boolean, unable to "
                "interpret input; write true or false",
                "1.yaml:3: redis.port: input should be less than or equal to 65535; "
                "write a port number from 1 to 65535",
                "1.yaml:5: instance_map.persister1: it does not say where the process "
                "listens; write host and port, or path (of a Unix socket)",
                "2.yaml:2: worker_replication_port: input should be a valid integer, "
                "unable to parse string as an integer; write a port number from 1 to "
                "65535",
                "1.yaml:8: synapse_replication.streams[0]: 'typnig' is not a "
                "standard stream; did you mean 'typing'?",
                "1.yaml:7: synapse_replication.row_snik: there is no such key; did "
                "you mean 'row_sink'?",
                "2.yaml:1: worker_name: 'main' is the main process; write a name that "
                "no other process of this homeserver has",
            ],
        )

    def test_mistakes_beside_mistakes(self) -> None:
        """One mistake in a section does not hide another that shows later."""
        found = self.mistakes(
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
        """A parameter that the driver does not know is named, without any value."""
        (found,) = self.mistakes(
            HOMESERVER,
            "database: {name: psycopg2, args: {dbnam: x, password: hunter2}}\n",
        )
        self.assertIn("database.args: invalid dsn: invalid connection option", found)
        self.assertIn('"dbnam"', found)
        self.assertNotIn("hunter2", found)

    def test_worker_with_a_bad_name(self) -> None:
        """A worker is judged as one, whatever is wrong with its name."""
        found = self.mistakes(
            HOMESERVER,
            "worker_name: a b\nworker_listeners: [{type: http, port: 1, tls: true, "
            "resources: [{names: [replication]}]}]\n",
        )
        self.assertIn("worker_listeners[0].tls", "".join(found))

    def test_streams_declared_twice(self) -> None:
        """A stream that is there twice, or whose writer is nowhere, is a mistake."""
        found = self.mistakes(
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
        """A missing server_name is reported with what to write."""
        self.assertEqual(
            self.mistakes("redis: {enabled: true}\ndatabase: {name: psycopg2}\n"),
            [
                "0.yaml: server_name: is missing; write the homeserver's name, for "
                "instance `server_name: example.com`"
            ],
        )

    def test_unreadable_file_and_others(self) -> None:
        """A file that cannot be read does not hide mistakes in the others."""
        path = self.write("a.yaml", HOMESERVER + "run_background_tasks_on: [1]\n")
        with self.assertRaises(ConfigError) as caught:
            load_config([path, str(self.folder / "no.yaml")])
        self.assertEqual(
            [problem.key for problem in caught.exception.problems],
            ["(the file)", "run_background_tasks_on"],
        )

    def test_unknown_stream(self) -> None:
        """An unknown key of stream_writers is refused with the hint."""
        self.assertEqual(
            self.mistakes(HOMESERVER, "stream_writers: {recepits: writer1}\n"),
            [
                "1.yaml:1: stream_writers.recepits: there is no such stream; did you "
                "mean 'receipts'?"
            ],
        )

    def test_unknown_writer(self) -> None:
        """A writer that is not in instance_map is refused with the hint."""
        self.assertEqual(
            self.mistakes(
                HOMESERVER, "stream_writers:\n  events: [writer2, nobody, main]\n"
            ),
            [
                "1.yaml:2: stream_writers.events[0]: instance 'writer2' is not in "
                "instance_map; did you mean 'writer1'?",
                "1.yaml:2: stream_writers.events[1]: instance 'nobody' is not in "
                "instance_map; add it: `instance_map: {nobody: {host: ..., port: "
                "...}}`",
                "1.yaml:2: stream_writers.events[2]: the main process is not called "
                "'main' as a writer; write master",
            ],
        )

    def test_two_writers_of_a_single_writer_stream(self) -> None:
        """Two writers of a stream that can have one only are refused."""
        (invalid,) = self.mistakes(
            HOMESERVER, "stream_writers: {typing: [writer1, persister1]}\n"
        )
        self.assertIn("stream_writers.typing: may have one writer only", invalid)

    def test_empty_writers(self) -> None:
        """An empty list of writers is refused."""
        (invalid,) = self.mistakes(HOMESERVER, "stream_writers: {events: []}\n")
        self.assertIn("stream_writers.events: names no instance", invalid)

    def test_writer_of_memory_that_does_not_listen(self) -> None:
        """The typing writer must listen, or nobody could ever catch up."""
        (invalid,) = self.mistakes(HOMESERVER, WORKER, "worker_listeners: []\n")
        self.assertIn("worker_listeners: this worker writes typing", invalid)
        self.assertIn("resources: [{names: [replication]}]", invalid)

    def test_no_link(self) -> None:
        """A worker without Redis and without a replication port is refused."""
        (invalid,) = self.mistakes(HOMESERVER, WORKER, "redis: {enabled: false}\n")
        self.assertIn("redis.enabled: there is no link to the other processes", invalid)

    def test_database(self) -> None:
        """A missing database, or one that is not Postgres, is refused."""
        (invalid,) = self.mistakes(HOMESERVER, "database: {name: sqlite3}\n")
        self.assertIn("database.name: 'sqlite3' cannot be replicated", invalid)
        (invalid,) = self.mistakes("server_name: x\n")
        self.assertIn("database: is missing; write name: psycopg2", invalid)
        (invalid,) = self.mistakes(
            "server_name: x\ndatabase: {name: psycopg2, args: {cp_max: 0}}\n"
        )
        self.assertIn("database.args.cp_max", invalid)

    def test_worker_name(self) -> None:
        """A worker needs its name, and main must not have one."""
        (invalid,) = self.mistakes(HOMESERVER, purpose=Purpose.WORKER)
        self.assertIn("worker_name: is missing", invalid)
        (invalid,) = self.mistakes(HOMESERVER, WORKER, purpose=Purpose.MAIN)
        self.assertIn("worker_name: the main process has none", invalid)

    def test_redis(self) -> None:
        """Halves of pairs in redis are refused."""
        (invalid,) = self.mistakes(HOMESERVER, "redis: {certificate_file: a}\n")
        self.assertIn("redis: a client certificate needs its private key", invalid)
        (invalid,) = self.mistakes(HOMESERVER, "redis: {enabled: yes, username: a}\n")
        self.assertIn("redis.username: a user name is of no use", invalid)
        (invalid,) = self.mistakes(
            HOMESERVER, "redis: {enabled: yes, use_tls: yes, ca_file: /nowhere}\n"
        )
        self.assertIn("redis.ca_file: /nowhere does not exist", invalid)
        (invalid,) = self.mistakes(
            HOMESERVER, "redis: {enabled: yes, password: a, password_path: b}\n"
        )
        self.assertIn("redis.password_path: redis.password is set, too", invalid)

    def test_listeners(self) -> None:
        """Mistyped listeners are refused."""
        self.assertEqual(
            self.mistakes(
                HOMESERVER,
                """\
listeners:
  - {type: htpp, port: 1}
  - {type: http, port: 1, path: /x}
  - {type: http, port: 1, resources: [{names: [replicaton]}]}
""",
            ),
            [
                "1.yaml:2: listeners[0]: 'htpp' is no type of listener; did you mean "
                "'http'?",
                "1.yaml:3: listeners[1]: a listener has a port or a path, one of the "
                "two; write port: 9093, or path: /run/synapse/main.sock",
                "1.yaml:4: listeners[2].resources[0]: 'replicaton' is no resource; "
                "did you mean 'replication'?",
            ],
        )

    def test_listeners_that_cannot_be(self) -> None:
        """TLS on a listener is refused where there is no certificate to show."""
        (invalid,) = self.mistakes(
            HOMESERVER,
            WORKER,
            """\
worker_listeners:
  - {type: http, port: 1, tls: true, resources: [{names: replication}]}
""",
        )
        self.assertIn("worker_listeners[0].tls: this listener cannot", invalid)

    def test_instance_with_two_places(self) -> None:
        """An instance that is at a socket and at a port is refused."""
        (invalid,) = self.mistakes(
            HOMESERVER,
            "stream_writers:\ninstance_map: {a: {path: /a, host: b, port: 1}}\n",
        )
        self.assertIn("instance_map.a: it names a socket's path and a host", invalid)

    def test_declaration_of_a_stream(self) -> None:
        """Mistakes in the declaration of a stream are told with their repair."""
        mistakes = self.mistakes(
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
            [invalid.partition(" synapse_replication.")[2] for invalid in mistakes],
            [
                "streams[0]: 'tabel' is not a key of a stream; did you mean 'table'?",
                "streams[1]: table, id_column, columns, sequence, writers missing; add "
                "it to the declaration",
                "streams[2]: stream a: table is 'B b'; write a plain SQL identifier: "
                "lower-case letters, digits and _, at most 63",
                "streams[3]: a stream is declared by a mapping, or by the name of a "
                "standard one; write name, table, id_column, columns, sequence and "
                "writers",
                "streams[4]: 'nothing-like-it' is not a standard stream; declare it by "
                f"its table, or write one of {', '.join(STANDARD_STREAMS)}",
                "modules[0].module: string should match pattern "
                "'^[A-Za-z_]\\w*(\\.[A-Za-z_]\\w*)+$'; write the dotted name of a "
                "function, for instance my_package.my_module.make_sink",
            ],
        )
