"""Configurations of the shapes that templates for deployments produce.

Each is a set of files, as a template for Docker, Ansible, Kubernetes or a distribution
writes them, and names the roles that read them.
"""

# ruff: noqa: E501 -- YAML as templates write it

from __future__ import annotations

from collections.abc import Mapping

import attrs
from click.testing import CliRunner
from twisted.internet.testing import MemoryReactorClock

from synapse_replication.app.service import make_process
from synapse_replication.cli.main import cli
from synapse_replication.config.process import load_config
from synapse_replication.streams.standard.registry import MAIN_INSTANCE
from tests.support.config_files import FilesMixin

_DATABASE = """
database:
  name: psycopg2
  txn_limit: 10000
  args: {user: synapse, password: "made-up", dbname: synapse, host: %s, cp_min: 5, cp_max: 10}
"""
_CLIENT = "{type: http, port: 8008, x_forwarded: true, resources: [{names: [client, federation], compress: false}]}"
_LISTENERS = f"""
listeners:
  - {_CLIENT}
  - {{type: http, port: 9093, bind_addresses: %s, resources: [{{names: [replication]}}]}}
"""
_SECRET = "worker_replication_secret: made-up-secret\n"


@attrs.frozen
class Deployment:
    """Files of a template.

    :ivar shared: the files of all processes, by their names.
    :ivar workers: the file of each worker, by its name; these need the shared files.
    """

    shared: Mapping[str, str]
    workers: Mapping[str, str] = attrs.field(factory=dict)


def _worker(
    name: str, port: int, *, more: str = "", app: str = "generic_worker"
) -> str:
    return f"""
worker_app: synapse.app.{app}
worker_name: {name}
worker_listeners:
  - {{type: http, port: {port}, resources: [{{names: [replication, health]}}]}}
  - {{type: http, port: {port + 1000}, x_forwarded: true, resources: [{{names: [client]}}]}}
worker_log_config: /data/log.config
{more}
"""


CORPUS: Mapping[str, Deployment] = {
    # The image's entry point, without workers.
    "docker-single": Deployment(
        {
            "homeserver.yaml": 'server_name: "x.test"\npid_file: /data/homeserver.pid\n'
            f"report_stats: false\nlisteners: [{_CLIENT}]\n" + _DATABASE % "db"
        }
    ),
    # Compose names containers with underscores.
    "compose-underscores": Deployment(
        {
            "homeserver.yaml": "server_name: x.test\n"
            "redis: {enabled: true, host: synapse_redis_1, port: 6379}\n"
            "instance_map:\n  main: {host: synapse_main_1, port: 9093}\n"
            "  persister1: {host: synapse_persister_1, port: 9094}\n"
            "stream_writers: {events: [persister1]}\n"
            + _DATABASE % "synapse_db_1"
            + _LISTENERS % "['0.0.0.0']"
            + _SECRET
        },
        {"persister1.yaml": _worker("persister1", 9094)},
    ),
    # The workers' image: shared file and one for each worker.
    "workers-image": Deployment(
        {
            "homeserver.yaml": "server_name: x.test\n"
            + _DATABASE % "postgres"
            + _LISTENERS % "['127.0.0.1']"
            + _SECRET,
            "shared.yaml": "redis: {enabled: true}\n"
            "instance_map:\n  main: {host: localhost, port: 9093}\n"
            "  event_persister1: {host: localhost, port: 18009}\n"
            "  event_persister2: {host: localhost, port: 18010}\n"
            "stream_writers: {events: [event_persister1, event_persister2]}\n"
            "federation_sender_instances: [federation_sender1]\n"
            "send_federation: false\nupdate_user_directory_from_worker: user_dir1\n"
            "run_background_tasks_on: background_worker1\nnotify_appservices_from_worker: a1\n",
        },
        {
            "event_persister1.yaml": _worker("event_persister1", 18009),
            "event_persister2.yaml": _worker("event_persister2", 18010),
            "federation_sender1.yaml": _worker("federation_sender1", 18011),
        },
    ),
    # The image for Unix sockets.
    "workers-image-sockets": Deployment(
        {
            "homeserver.yaml": "server_name: x.test\n"
            "redis: {enabled: true, path: /run/redis.sock}\n"
            "instance_map:\n  main: {path: /run/main_private.sock}\n"
            "  typing1: {path: /run/typing1.sock}\nstream_writers: {typing: typing1}\n"
            "listeners:\n"
            "  - {type: http, path: /run/main_public.sock, mode: 0660, x_forwarded: true, resources: [{names: [client]}]}\n"
            "  - {type: http, path: /run/main_private.sock, mode: 0o600, resources: [{names: [replication]}]}\n"
            + _DATABASE
            % "/run/postgresql"
        },
        {
            "typing1.yaml": "worker_app: synapse.app.generic_worker\nworker_name: typing1\n"
            "worker_listeners:\n"
            '  - {type: http, path: /run/typing1.sock, mode: "0660", resources: [{names: [replication]}]}\n'
        },
    ),
    # A template that writes worker_app for the main process, too.
    "main-worker-app": Deployment(
        {
            "homeserver.yaml": "server_name: x.test\nworker_app: synapse.app.homeserver\n"
            "redis: {enabled: true, host: redis}\n"
            "instance_map: {main: {host: synapse, port: 9093}}\n"
            + _DATABASE % "db"
            + _LISTENERS % "['127.0.0.1']"
        }
    ),
    # A folder of fragments, one of them empty.
    "conf-d": Deployment(
        {
            "homeserver.yaml": "# see conf.d\n",
            "conf.d/01-name.yaml": "server_name: x.test\n",
            "conf.d/02-db.yaml": _DATABASE % "localhost",
            "conf.d/03-redis.yaml": "redis:\n  enabled: true\n",
            "conf.d/04-empty.yaml": "",
        }
    ),
    # A distribution's package: an empty conf.d.
    "debian": Deployment(
        {
            "homeserver.yaml": "pid_file: /run/matrix-synapse.pid\nserver_name: x.test\n"
            + _DATABASE % "localhost"
            + _LISTENERS % "['::1', '127.0.0.1']",
            "conf.d/.keep": "",
        }
    ),
    # Ansible writes JSON, quotes numbers and leaves sections empty.
    "ansible-quoted": Deployment(
        {
            "homeserver.yaml": 'server_name: "x.test"\n'
            '"redis": {"enabled": true, "host": "redis", "port": "6379", "password": "12345", "dbid": null}\n'
            '"instance_map": {"main": {"host": "synapse", "port": "9093"}, "g1": {"host": "g1", "port": "9100", "tls": false}}\n'
            '"stream_writers": {"events": ["g1"], "typing": [], "to_device": ["g1"]}\n'.replace(
                '"typing": [], ', ""
            )
            + '"listeners": [{"port": "9093", "bind_addresses": ["127.0.0.1"], "type": "http", "resources": [{"names": ["replication"]}]}]\n'
            "federation_sender_instances:\napp_service_config_files: []\n"
            + _DATABASE % "postgres"
            + _SECRET
        },
        {"g1.yaml": _worker("g1", 9100)},
    ),
    # A playbook with a worker for each kind of stream.
    "ansible-writers": Deployment(
        {
            "homeserver.yaml": "server_name: x.test\nredis: {enabled: true, host: matrix-redis}\n"
            "instance_map:\n  main: {host: matrix-synapse, port: 9093}\n"
            "  stream-writer-0-typing: {host: matrix-synapse-worker-stream-writer-0-typing, port: 19093}\n"
            "  stream-writer-1-receipts: {host: matrix-synapse-worker-stream-writer-1-receipts, port: 19093}\n"
            "stream_writers:\n  typing: [stream-writer-0-typing]\n"
            "  receipts: [stream-writer-1-receipts]\n"
            + _DATABASE % "matrix-postgres"
            + _LISTENERS % "['0.0.0.0']"
            + _SECRET
        },
        {
            "typing.yaml": _worker("stream-writer-0-typing", 19093),
            "receipts.yaml": _worker("stream-writer-1-receipts", 19093),
        },
    ),
    # Kubernetes: names of services, secrets in files.
    "kubernetes": Deployment(
        {
            "homeserver.yaml": "server_name: x.test\n"
            "redis: {enabled: true, host: redis-master.matrix.svc.cluster.local, password_path: %(folder)s/redis}\n"
            "instance_map:\n  main: {host: synapse-main.matrix.svc.cluster.local, port: 9093}\n"
            "  reader-0: {host: reader-0.reader.matrix.svc, port: 9093}\n"
            "stream_writers: {receipts: [reader-0]}\n"
            "worker_replication_secret_path: %(folder)s/secret\n"
            + _DATABASE % "postgres-rw"
            + _LISTENERS % "['0.0.0.0', '::']",
            "redis": "made-up\n",
            "secret": "made-up-secret\n",
        },
        {"reader-0.yaml": _worker("reader-0", 9093)},
    ),
    # A Helm chart renders all workers with the listener of metrics.
    "helm": Deployment(
        {
            "homeserver.yaml": "server_name: x.test\npublic_baseurl: https://x.test\n"
            "redis: {enabled: true, host: synapse-redis-master, port: 6379}\n"
            "enable_metrics: true\n"
            "listeners:\n"
            f"  - {_CLIENT}\n"
            "  - {type: metrics, port: 9090, bind_addresses: ['0.0.0.0'], resources: [{names: [metrics]}]}\n"
            "  - {type: http, port: 9093, resources: [{names: [replication]}]}\n"
            "instance_map: {main: {host: synapse-replication, port: 9093}}\n"
            + _DATABASE % "synapse-postgresql"
            + _SECRET
        },
        {
            "generic.yaml": "worker_app: synapse.app.generic_worker\nworker_name: generic-1\n"
            "worker_listeners:\n"
            "  - {type: http, port: 8083, x_forwarded: true, resources: [{names: [client, federation]}]}\n"
            "  - {type: metrics, port: 9091, bind_addresses: ['0.0.0.0']}\n"
        },
    ),
    # IPv6 only, with and without brackets.
    "ipv6": Deployment(
        {
            "homeserver.yaml": "server_name: x.test\nredis: {enabled: true, host: '[fd00::5]'}\n"
            "instance_map:\n  main: {host: '::1', port: 9093}\n  w1: {host: '[::1]', port: 9094}\n"
            "stream_writers: {events: [w1]}\n"
            + _DATABASE % '"::1"'
            + _LISTENERS % "['[::1]']"
        },
        {
            "w1.yaml": _worker("w1", 9094).replace(
                "port: 9094, ", "port: 9094, bind_addresses: ['::1'], "
            )
        },
    ),
    # Several databases.
    "databases": Deployment(
        {
            "homeserver.yaml": "server_name: x.test\nredis: {enabled: true}\ndatabases:\n"
            "  basement_box: {name: psycopg2, data_stores: [main], args: {dbname: synapse_main, cp_max: 10}}\n"
            "  my_other_database: {name: psycopg2, data_stores: [state], args: {dbname: synapse_state}}\n"
        }
    ),
    # A connection string, and the old name of its parameter.
    "database-dsn": Deployment(
        {
            "homeserver.yaml": "server_name: x.test\n"
            "database: {name: psycopg2, allow_unsafe_locale: true, args: {database: synapse, sslmode: require, keepalives_idle: 10, cp_openfun: null}}\n"
        }
    ),
    # Redis behind TLS.
    "redis-tls": Deployment(
        {
            "homeserver.yaml": "server_name: x.test\n"
            "redis: {enabled: true, host: redis.example.com, port: 6380, use_tls: true, dbid: 2, username: synapse, password: made-up}\n"
            + _DATABASE
            % "db"
        }
    ),
    # Replication over TLS between machines.
    "replication-tls": Deployment(
        {
            "homeserver.yaml": "server_name: x.test\nredis: {enabled: true, host: redis}\n"
            "instance_map: {main: {host: main.example.com, port: 9093, tls: true}, w1: {host: w1.example.com, port: 9093, tls: true}}\n"
            "stream_writers: {events: [w1]}\n"
            + _DATABASE % "db"
            + _LISTENERS % "['127.0.0.1']"
        },
        {"w1.yaml": _worker("w1", 9094, more=_SECRET)},
    ),
    # Anchors and merged mappings.
    "anchors": Deployment(
        {
            "homeserver.yaml": "server_name: x.test\nredis: {enabled: true}\n"
            "x-listener: &listener {type: http, bind_addresses: ['127.0.0.1'], resources: [{names: [replication]}]}\n"
            "listeners:\n  - {<<: *listener, port: 9093}\n" + _DATABASE % "db"
        }
    ),
    # Modules and sections of Synapse that this package does not read.
    "modules": Deployment(
        {
            "homeserver.yaml": "server_name: x.test\nredis: {enabled: true}\n"
            "modules: [{module: my.Module, config: {}}]\nopentracing: {enabled: false}\n"
            "caches: {global_factor: 0.5, per_cache_factors: {a: 2}}\n"
            "worker_pid_file: /run/w.pid\nworker_daemonize: false\nmanhole_settings: {}\n"
            "outbound_federation_restricted_to: []\nmedia_instance_running_background_jobs: m1\n"
            "enable_media_repo: false\nstart_pushers: false\npusher_instances: [p1]\n"
            "experimental_features: {msc3861: {enabled: false}}\n" + _DATABASE % "db"
        }
    ),
    # Each worker of a group has the folder of shared files and its own file.
    "shared-folder": Deployment(
        {
            "shared/00-base.yaml": "server_name: x.test\n" + _DATABASE % "db",
            "shared/10-workers.yaml": "redis: {enabled: true, host: redis}\n"
            "instance_map: {main: {host: main, port: 9093}, pusher1: {host: pusher1, port: 9093}}\n"
            "pusher_instances: [pusher1]\n" + _LISTENERS % "['127.0.0.1']",
        },
        {
            "pusher1.yaml": "worker_app: synapse.app.generic_worker\nworker_name: pusher1\n"
            "worker_listeners: []\n"
        },
    ),
    # This package's own section beside those of Synapse.
    "with-own-section": Deployment(
        {
            "homeserver.yaml": "server_name: x.test\nredis: {enabled: true}\n"
            "instance_map: {main: {host: localhost, port: 9093}}\n"
            "synapse_replication:\n  http: {allowed_hosts: [synapse.example.com]}\n"
            "  receiving: {plausible_distance: 5000}\n  log_level: warn\n"
            + _DATABASE % "db"
            + _LISTENERS % "['127.0.0.1']"
        },
        {
            "reader1.yaml": "worker_name: reader1\n"
            "worker_listeners: [{type: metrics, port: 9101, bind_addresses: ['127.0.0.1']}]\n"
        },
    ),
}


class CorpusTests(FilesMixin):
    def write_all(self, files: Mapping[str, str]) -> list[str]:
        """Write files; return the arguments that name them, folders as such."""
        names = []
        for name, text in files.items():
            folder, _, _ = name.rpartition("/")
            (self.folder / folder).mkdir(exist_ok=True)
            self.write(name, text.replace("%(folder)s", str(self.folder)))
            is_config = name.endswith(".yaml") or folder
            path = str(self.folder / (folder or name))
            if is_config and path not in names:
                names.append(path)
        return names

    def test_size(self) -> None:
        """There are twenty shapes."""
        self.assertEqual(len(CORPUS), 20)

    def test_accepted(self) -> None:
        """Each is valid for its main process, its workers, and for observers."""
        for name, deployment in CORPUS.items():
            self.setUp()
            shared = self.write_all(deployment.shared)
            arguments = [word for path in shared for word in ("-c", path)]
            found = CliRunner().invoke(cli, ["check-config", *arguments])
            self.assertEqual(found.exit_code, 0, f"{name}: {found.output}")
            self.assertIn("main process", found.output, name)
            self.assertTrue(load_config(shared, "main").is_main)
            observed = (
                load_config(shared, "follow")
                if "redis" in str(deployment.shared)
                else None
            )
            self.assertTrue(observed is None or not observed.listeners)
            for file, text in deployment.workers.items():
                path = self.write(file, text)
                found = CliRunner().invoke(
                    cli, ["check-config", *arguments, "-c", path]
                )
                self.assertEqual(found.exit_code, 0, f"{name}: {found.output}")
                config = load_config([*shared, path], "worker")
                self.assertIn(f"worker {config.instance_name}", found.output)

    def test_services(self) -> None:
        """The services of the main process and of each worker are created."""
        reactor = MemoryReactorClock()
        for deployment in CORPUS.values():
            self.setUp()
            shared = self.write_all(deployment.shared)
            main = make_process(load_config(shared, "main"), reactor)
            self.assertEqual(main.host.identity.instance_name, MAIN_INSTANCE)
            for file, text in deployment.workers.items():
                config = load_config([*shared, self.write(file, text)], "worker")
                worker = make_process(config, reactor)
                self.assertEqual(
                    worker.host.identity.instance_name, config.instance_name
                )
