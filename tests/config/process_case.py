"""
The configuration of a homeserver and of a worker, and a base class that loads them.
"""

from __future__ import annotations

from synapse_replication.config.process import (
    ProcessConfig,
    Purpose,
    load_config,
)
from synapse_replication.errors import ConfigError
from tests.support.config_files import FilesMixin

#: The keys that Synapse's own generator writes into homeserver.yaml, plus a database
#: and workers as in Synapse's documentation.
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


class LoadConfigTestCase(FilesMixin):
    def load(self, *texts: str, purpose: Purpose | None = None) -> ProcessConfig:
        paths = [self.write(f"{i}.yaml", text) for i, text in enumerate(texts)]
        return load_config(paths, purpose)

    def problems_of(self, *texts: str, purpose: Purpose | None = None) -> list[str]:
        """
        Load an invalid configuration; return its problems without the folder's name.
        """
        with self.assertRaises(ConfigError) as caught:
            self.load(*texts, purpose=purpose)
        return [
            str(problem).replace(f"{self.folder}/", "")
            for problem in caught.exception.problems
        ]
