"""Tests for synapse_replication.config.process and its models."""

from __future__ import annotations

import attrs

from synapse_replication.config.listener_safety import Listener
from synapse_replication.handlers.receiving.context import ReceiverOptions
from synapse_replication.http.location import InstanceLocation
from synapse_replication.redis.options import RedisOptions
from synapse_replication.streams.backlog import BacklogOptions
from synapse_replication.streams.standard.registry import DEFAULT_STREAMS
from synapse_replication.streams.table import TableStream
from synapse_replication.wire.pending_lines import PendingLimit
from tests.config.process_case import HOMESERVER, WORKER, LoadConfigTestCase


class LoadConfigTests(LoadConfigTestCase):
    def test_main(self) -> None:
        """The homeserver.yaml alone configures the main process."""
        config = self.load(HOMESERVER)
        self.assertTrue(config.is_main)
        self.assertEqual(config.server_name, "x.test")
        self.assertEqual(config.instance_name, "master")
        self.assertEqual(
            config.redis, RedisOptions(host="redis.test", port=6379, password="hush")
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
        self.assertEqual(config.secret, "knock")
        self.assertTrue(config.stores_user_ips)
        self.assertEqual(config.tcp_connect, ())
        self.assertEqual(config.streams, DEFAULT_STREAMS)

    def test_only_our_listeners(self) -> None:
        """Listeners without resources of this project are skipped."""
        config = self.load(HOMESERVER)
        self.assertEqual(
            config.listeners,
            (
                Listener(9093, None, ("127.0.0.1",), frozenset({"replication"}), False),
                Listener(9000, None, ("0.0.0.0",), frozenset({"metrics"}), False),
            ),
        )

    def test_worker(self) -> None:
        """The shared file together with a worker's file configures a worker."""
        config = self.load(HOMESERVER, WORKER)
        self.assertFalse(config.is_main)
        self.assertEqual(config.instance_name, "writer1")
        self.assertFalse(config.stores_user_ips)
        self.assertEqual(
            [(listener.port, listener.resources) for listener in config.listeners],
            [(9096, frozenset({"replication", "health"}))],
        )

    def test_writers(self) -> None:
        """Each stream has the writers of its key; without a key, main writes it."""
        writers = self.load(HOMESERVER).writers
        self.assertEqual(writers["events"], ("persister1", "persister2"))
        self.assertEqual(writers["backfill"], ("persister1", "persister2"))
        self.assertEqual(writers["typing"], ("writer1",))
        self.assertEqual(writers["receipts"], ("master",))
        self.assertEqual(writers["pushers"], ("master",))
        self.assertEqual(writers["caches"], ())

    def test_instance_map(self) -> None:
        """Instances are listed under their writers' names; main is listed as master."""
        instances = self.load(HOMESERVER).instances
        self.assertEqual(
            instances["master"], InstanceLocation("localhost", 9093, False, None)
        )
        self.assertEqual(instances["persister1"].path, "/run/persister1.sock")
        self.assertTrue(instances["persister2"].tls)
        self.assertNotIn("main", instances)

    def test_background_tasks(self) -> None:
        """The instance that runs background tasks, and main, need the client IPs."""
        extra = "run_background_tasks_on: writer1\n"
        self.assertTrue(self.load(HOMESERVER, WORKER, extra).stores_user_ips)
        self.assertTrue(self.load(HOMESERVER, extra).stores_user_ips)
        extra = "run_background_tasks_on: another1\n"
        self.assertFalse(self.load(HOMESERVER, WORKER, extra).stores_user_ips)
        # Over direct TCP, only the main process receives them.
        extra += "redis: {enabled: false}\nlisteners: [{type: replication, port: 9092, "
        extra += "bind_address: 127.0.0.1}]\n"
        self.assertTrue(self.load(HOMESERVER, extra).stores_user_ips)

    def test_pending_limit(self) -> None:
        """The limits on pending data of direct TCP are configurable."""
        self.assertEqual(self.load(HOMESERVER).tcp_limit, PendingLimit())
        own = "synapse_replication: {direct_tcp: {%s}}\n"
        config = self.load(
            HOMESERVER, own % "max_pending_commands: 500, max_pending_bytes: 1000000"
        )
        self.assertEqual(config.tcp_limit, PendingLimit(500, 1_000_000))
        (invalid,) = self.problems_of(HOMESERVER, own % "max_pending_bytes: 10")
        self.assertIn("direct_tcp.max_pending_bytes", invalid)

    def test_receiving(self) -> None:
        """The limits on received data are configurable, and have defaults."""
        self.assertEqual(self.load(HOMESERVER).receiving, ReceiverOptions())
        own = "synapse_replication: {receiving: {%s}}\n"
        config = self.load(
            HOMESERVER,
            own % "plausible_distance: 5000, max_queue_bytes: 2000000, "
            "max_batch_rows: 200, position_check_seconds: 0",
        )
        self.assertEqual(
            config.receiving,
            ReceiverOptions(
                2_000_000, 200, plausible_distance=5000, position_check_seconds=0
            ),
        )
        for key in ("plausible_distance", "max_queue_bytes", "max_batch_rows"):
            (invalid,) = self.problems_of(HOMESERVER, own % f"{key}: 10")
            self.assertIn(f"receiving.{key}", invalid)
        (invalid,) = self.problems_of(HOMESERVER, own % "plausible_distanse: 5000")
        self.assertIn("did you mean 'plausible_distance'?", invalid)

    def test_extension(self) -> None:
        """
        The extension is enabled by default; the bounds of its backlog are configurable.
        """
        self.assertEqual(self.load(HOMESERVER).backlog, BacklogOptions())
        own = "synapse_replication: {extension: %s}\n"
        config = self.load(HOMESERVER, own % "{backlog_rows: 5, backlog_bytes: 0}")
        self.assertEqual(config.backlog, BacklogOptions(5, 0))
        self.assertIsNone(self.load(HOMESERVER, own % "{enabled: false}").backlog)
        (invalid,) = self.problems_of(HOMESERVER, own % "{backlog_rows: -1}")
        self.assertIn("extension.backlog_rows", invalid)

    def test_secrets_do_not_show(self) -> None:
        """The repr of a configuration contains no secret."""
        text = repr(self.load(HOMESERVER))
        for secret in ("hunter2", "hush", "knock"):
            self.assertNotIn(secret, text)

    def test_secrets_from_files(self) -> None:
        """Secrets may be read from files."""
        one, two = self.write("one", "hush\n"), self.write("two", "knock\n")
        config = self.load(
            HOMESERVER.replace("password: hush", f"password_path: {one}").replace(
                "worker_replication_secret: knock",
                f"worker_replication_secret_path: {two}",
            )
        )
        assert config.redis is not None
        self.assertEqual(config.redis.password, "hush")
        self.assertEqual(config.secret, "knock")

    def test_direct_tcp_worker(self) -> None:
        """Without Redis, a worker connects to the legacy replication port."""
        config = self.load(
            HOMESERVER,
            WORKER,
            "redis: {enabled: false}\nworker_replication_port: 9092\n",
        )
        self.assertIsNone(config.redis)
        self.assertEqual(config.tcp_connect, ("tcp:localhost:9092",))

    def test_direct_tcp_endpoint(self) -> None:
        """A worker may configure any other client endpoint instead."""
        config = self.load(
            HOMESERVER,
            WORKER,
            "redis:\nsynapse_replication: {direct_tcp: {connect: 'tls:h:1'}}\n",
        )
        self.assertEqual(config.tcp_connect, ("tls:h:1",))

    def test_direct_tcp_to_several(self) -> None:
        """
        A reader of several writers connects to each writer, because writers do not
        relay rows.
        """
        config = self.load(
            HOMESERVER,
            WORKER,
            "redis:\nsynapse_replication:\n"
            "  direct_tcp: {connect: ['tcp:h:1', 'unix:/s']}\n",
        )
        self.assertEqual(config.tcp_connect, ("tcp:h:1", "unix:/s"))

    def test_direct_tcp_served_by_a_worker(self) -> None:
        """A worker that only writes serves direct TCP without any client endpoint."""
        config = self.load(
            HOMESERVER,
            WORKER,
            "redis:\nsynapse_replication: {direct_tcp: {listen: 'unix:/s'}}\n",
        )
        self.assertEqual((config.tcp_connect, config.tcp_listen), ((), ("unix:/s",)))

    def test_direct_tcp_main(self) -> None:
        """A listener of type ``replication`` serves direct TCP."""
        config = self.load(
            HOMESERVER,
            "listeners: [{type: replication, port: 9092, bind_addresses: '::1'}]\n",
        )
        self.assertEqual(
            config.listeners, (Listener(9092, None, ("::1",), frozenset(), True),)
        )

    def test_follow_needs_no_database(self) -> None:
        """For ``follow``, a link suffices; the database may be SQLite."""
        config = self.load(HOMESERVER, "database: {name: sqlite3}\n", purpose="follow")
        self.assertIsNone(config.database)
        self.assertEqual(config.listeners, ())

    def test_status_needs_no_link(self) -> None:
        """The status of instances can be asked without a link, as over direct TCP."""
        config = self.load(
            "server_name: x.test\n",
            "instance_map: {main: {host: localhost, port: 9093}}\n",
            "listeners: [{type: replication, port: 9092}]\n",
            purpose="status",
        )
        self.assertIsNone(config.redis)
        self.assertEqual(config.tcp_connect, ())
        self.assertEqual(list(config.instances), ["master"])

    def test_own_streams(self) -> None:
        """Streams are declared by table, or named if they are standard streams."""
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
        """A loaded configuration is immutable."""
        config = self.load(HOMESERVER)
        with self.assertRaises(attrs.exceptions.FrozenInstanceError):
            config.server_name = "y"  # type: ignore[misc]
