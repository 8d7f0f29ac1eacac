"""Tests for hosts, listeners and databases as deployments have them."""

from __future__ import annotations

from synapse_replication.config.endpoints import listener_descriptions
from synapse_replication.config.process import load_config
from tests.config.process_case import HOMESERVER, WORKER, LoadConfigTestCase

BASE = "server_name: x.test\nsynapse_replication: {streams: []}\n"


class AddressTests(LoadConfigTestCase):
    """Tests for hosts and listeners."""

    def problem(self, *texts: str) -> str:
        (found,) = self.problems_of(BASE, *texts)
        return found

    def test_hosts(self) -> None:
        """A host that is a URL, or has a port, is a problem wherever it is."""
        for text, key in (
            ("redis: {enabled: true, host: 'redis://cache'}\n", "redis.host"),
            ("redis: {enabled: true, host: 'cache:6379'}\n", "redis.host"),
            ("redis: {enabled: true, host: ' '}\n", "redis.host"),
            (
                "instance_map: {main: {host: 'http://main', port: 1}}\n",
                "instance_map.main.host",
            ),
            (
                "instance_map: {main: {host: 'a b', port: 1}}\n",
                "instance_map.main.host",
            ),
            ("worker_replication_host: 'main:9092'\n", "worker_replication_host"),
        ):
            self.assertIn(f" {key}: ", self.problem(text))

    def test_brackets(self) -> None:
        """Brackets around an IPv6 address are removed."""
        config = self.load(
            BASE,
            "redis: {enabled: true, host: '[::1]'}\n"
            "instance_map: {main: {host: '[::1]', port: 1}}\n"
            "listeners: [{type: metrics, port: 2, bind_addresses: ['[::1]']}]\n",
        )
        assert config.redis is not None
        self.assertEqual(config.redis.host, "::1")
        self.assertEqual(config.redis.address, "[::1]:6379")
        self.assertEqual(config.instances["master"].host, "::1")
        self.assertEqual(config.listeners[0].addresses, ("::1",))

    def test_one_address_twice(self) -> None:
        """Two instances with one address are a problem, but not for observers."""
        text = (
            "instance_map:\n  main: {host: a, port: 1}\n  w1: {host: a, port: 1}\n"
            "  w2: {path: /s}\n  w3: {path: /s}\n"
        )
        self.assertEqual(
            [each.partition("; ")[0] for each in self.problems_of(BASE, text)],
            [
                "1.yaml:3: instance_map.w1: it has the same address as main: a:1",
                "1.yaml:5: instance_map.w3: it has the same address as w2: /s",
            ],
        )
        redis = "redis: {enabled: true}\n"
        self.assertTrue(self.load(BASE, text, redis, purpose="follow"))

    def test_mode(self) -> None:
        """A socket has the mode of its listener, however it is written."""
        text = "listeners: [{type: %s, path: /s, resources: [{names: [health]}]%s}]\n"
        for kind, mode, expected in (
            ("http", "", "666"),
            ("replication", "", "600"),
            ("http", ", mode: 0600", "600"),
            ("http", ", mode: 0o660", "660"),
            ("http", ', mode: "0640"', "640"),
            ("replication", ", mode: 0660", "660"),
        ):
            config = self.load(BASE, text % (kind, mode))
            (description,) = listener_descriptions(config.listeners[0])
            self.assertEqual(description, f"unix:address=/s:mode={expected}")
        for mode in ("660", '"rw"', "true", "0999", "1.5"):
            found = self.problem(text % ("http", f", mode: {mode}"))
            self.assertIn("listeners[0].mode", found)
            self.assertIn("in octal", found)


class RoleTests(LoadConfigTestCase):
    """Tests for the files that tell a worker from the main process."""

    def test_app_of_the_main_process(self) -> None:
        """The ``worker_app`` of the main process does not make a worker."""
        self.assertTrue(
            self.load(HOMESERVER, "worker_app: synapse.app.homeserver\n").is_main
        )
        self.assertFalse(self.load(HOMESERVER, WORKER).is_main)

    def test_address_of_the_main_process(self) -> None:
        """A worker needs the address of the main process; old keys say which."""
        text = HOMESERVER.replace("  main: {host: localhost, port: 9093}\n", "")
        (found,) = self.problems_of(text, WORKER)
        self.assertIn("instance_map: master writes ", found)
        self.assertIn("write `instance_map: {main: {host: ..., port: ...}}`", found)
        old = "worker_replication_host: synapse\nworker_replication_http_port: 9093\n"
        (found,) = self.problems_of(text, WORKER, old)
        self.assertIn("{main: {host: synapse, port: 9093}}", found)
        paths = [self.write("m.yaml", text)]
        self.assertTrue(load_config(paths, "main").is_main)

    def test_no_link_of_main(self) -> None:
        """A main process without a link to its workers is a problem."""
        (found,) = self.problems_of(HOMESERVER, "redis: {enabled: false}\n")
        self.assertIn("redis: there is no link to persister1", found)


class DatabasesTests(LoadConfigTestCase):
    """Tests for several databases."""

    TEXT = (
        "server_name: x.test\ndatabases:\n"
        "  one: {name: psycopg2, data_stores: [%s], args: {dbname: main, cp_max: 3}}\n"
        "  two: {name: psycopg2, data_stores: [state], args: {dbname: state}}\n"
    )

    def test_main(self) -> None:
        """The database that holds the data store ``main`` is used."""
        config = self.load(self.TEXT % "main")
        assert config.database is not None
        self.assertEqual(config.database.conninfo, {"dbname": "main"})
        self.assertEqual(config.database.max_connections, 3)

    def test_problems(self) -> None:
        """No such database, two, ``database`` beside them, or a bad one: a problem."""
        (found,) = self.problems_of(self.TEXT % "other")
        self.assertIn("databases: 0 databases hold the data store main", found)
        (found,) = self.problems_of((self.TEXT % "main").replace("[state]", "[main]"))
        self.assertIn("databases: 2 databases hold the data store main", found)
        (found,) = self.problems_of(self.TEXT % "main", "database: {args: {}}\n")
        self.assertIn("databases: database is set, too", found)
        (found,) = self.problems_of(
            (self.TEXT % "main").replace("cp_max: 3", "cp_max: 0")
        )
        self.assertIn(
            "2.yaml:3: databases.one.args.cp_max", found.replace("0.yaml", "2.yaml")
        )
