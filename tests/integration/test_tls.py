"""Tests for TLS between real processes, as configured."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import Any

from twisted.trial.unittest import SkipTest

from synapse_replication.errors import ServerStartError
from synapse_replication.testing.certificates import PrivateAuthority, PrivatePair
from synapse_replication.testing.private_process import free_port
from synapse_replication.testing.server_binaries import find_redis, has_tls
from synapse_replication.testing.servers import (
    PrivateRedis,
    RedisTls,
)
from tests.integration.deployment import DeploymentTestCase, get_over_socket
from tests.support.forks import fork


class TlsTests(DeploymentTestCase):
    """Tests with certificates of a private authority and of another one."""

    def setUp(self) -> None:
        super().setUp()
        self.authority = PrivateAuthority(self.folder)
        self.other_pair = PrivateAuthority(self.folder, "other").issue("stranger")
        self.server = self.authority.issue("server")
        self.client = self.authority.issue("client")
        self.worker["worker_listeners"] = [
            {"type": "metrics", "path": str(self.folder / "metrics.sock")}
        ]

    def tls(self, own: PrivatePair | None, authority: str = "authority") -> Any:
        """Return the ``tls`` section of a process."""
        section = {"ca_file": str(self.folder / f"{authority}.crt")}
        if own is not None:
            section["certificate_file"] = str(own.certificate)
            section["private_key_file"] = str(own.private_key)
        return section

    def check_buffers(self, *connections: str) -> None:
        """Check that the worker exports the buffers of links over TLS."""
        metrics = get_over_socket(self.folder / "metrics.sock", "/metrics")
        exported = [
            line.rpartition(" ")[0]
            for line in metrics.splitlines()
            if line.startswith("synapse_replication_tcp_protocol_transport_kernel_send")
        ]
        for name in connections:
            self.assertTrue(any(f'name="{name}' in each for each in exported), exported)

    def use_tls(self) -> None:
        """Let main listen over TLS only, and require client certificates."""
        del self.shared["redis"]
        self.tcp_port, self.http_port = free_port(), free_port()
        where = {"bind_addresses": ["127.0.0.1"], "tls": True}
        resources = [{"names": ["replication", "health"]}]
        self.main["listeners"] = [
            {"type": "http", "port": self.http_port, "resources": resources} | where,
            {"type": "replication", "port": self.tcp_port} | where,
        ]
        self.shared["instance_map"] = {
            "main": {"host": "127.0.0.1", "port": self.http_port, "tls": True}
        }
        client_authority = {"client_ca_file": str(self.authority.certificate)}
        self.main["synapse_replication"]["tls"] = (
            self.tls(self.server) | client_authority
        )

    def other_process(
        self, name: str, command: str, own: dict[str, Any], *options: str
    ) -> None:
        """Start a process with a log file of its own."""
        path = self.folder / f"{name}.yaml"
        path.write_text(json.dumps(self.shared | own))
        with (self.folder / f"{name}.log").open("ab") as log:
            process = fork(
                "synapse_replication",
                [command, "-c", str(path), *options],
                log.fileno(),
                log.fileno(),
            )
        self.running.append(process)

    def test_direct_tcp_and_http(self) -> None:
        """Rows arrive over TLS, and missed rows are fetched over TLS."""
        self.use_tls()
        own = self.worker["synapse_replication"]
        own["tls"] = self.tls(self.client)
        own["direct_tcp"] = {"connect": f"tls:127.0.0.1:{self.tcp_port}"}
        main = self.start("main", self.main)
        worker = self.start("worker", self.worker)
        self.wait_until_up("main")
        self.wait_until_up("worker")
        self.write_upto(10)
        self.wait_for_rows(10)
        self.check_buffers("to ")
        worker.kill()
        worker.wait()
        self.write_upto(20)
        self.wait_until_main_wrote(20)
        worker = self.start("worker", self.worker)
        # The rows of a stream in memory can only come over HTTP.
        self.wait_for_rows(20)
        self.assertEqual(self.stop(worker), 0, self.log_of("worker"))
        self.assertEqual(self.stop(main), 0, self.log_of("main"))
        self.assertNotIn("letting in", self.log_of("main"))

    def test_endpoint_requires_client_certificate(self) -> None:
        """
        ``ssl:`` with ``caCertsDir`` requests a certificate of clients, and ``tls:``
        sends one.
        """
        self.use_tls()
        del self.main["listeners"][1]
        roots = self.folder / "roots"
        roots.mkdir()
        (roots / "authority.pem").write_bytes(self.authority.certificate.read_bytes())
        self.main["synapse_replication"]["direct_tcp"] = {
            "listen": f"ssl:{self.tcp_port}:privateKey={self.server.private_key}:"
            f"certKey={self.server.certificate}:caCertsDir={roots}"
        }
        self.start("main", self.main)
        self.wait_until_up("main")
        endpoint = f"tls:127.0.0.1:{self.tcp_port}:trustRoots={roots}"
        shown = (
            f":certificate={self.client.certificate}"
            f":privateKey={self.client.private_key}"
        )
        for name, more in (("good", shown), ("bare", "")):
            own = {"streams": ["typing"], "direct_tcp": {"connect": endpoint + more}}
            self.other_process(name, "follow", {"synapse_replication": own})
        self.wait_until("good connects", lambda: "Connected" in self.log_of("good"))
        self.wait_until(
            "the reason in the log of bare",
            lambda: "the peer requires a certificate" in self.log_of("bare"),
        )
        self.assertNotIn("Connected", self.log_of("bare"))

    def test_refused(self) -> None:
        """
        A client with a wrong certificate or none, and a server with a wrong one, are
        rejected and logged with the reason.
        """
        self.use_tls()
        self.start("main", self.main)
        self.wait_until_up("main")
        # The certificate is for 127.0.0.1 only.
        cases = (
            ("bare", "127.0.0.1", self.tls(None), "the peer requires a certificate"),
            (
                "stranger",
                "127.0.0.1",
                self.tls(self.other_pair),
                "does not trust the authority",
            ),
            (
                "misled",
                "127.0.0.1",
                self.tls(self.client, "other"),
                "not issued by an authority that this process trusts",
            ),
            ("lost", "localhost", self.tls(self.client), "is not for localhost"),
        )
        for name, host, tls, _ in cases:
            own: dict[str, Any] = {
                "streams": ["typing"],
                "tls": tls,
                "direct_tcp": {"connect": f"tls:{host}:{self.tcp_port}"},
            }
            place = {"host": host, "port": self.http_port, "tls": True}
            config = {"synapse_replication": own, "instance_map": {"main": place}}
            self.other_process(name, "follow", config)
            self.other_process(f"{name}-http", "status", config, "--json")
            if name == "bare":
                # Only the first client is logged: such lines are logged once a minute.
                self.wait_until(
                    "the rejected client in the log of main",
                    lambda: (
                        "Rejected input from the TLS client 127.0.0.1: TLS"
                        in self.log_of("main")
                    ),
                )
        for name, _, _, words in cases:
            for log in (name, f"{name}-http"):
                self.wait_until(
                    f"{words!r} in {log}",
                    lambda log=log, words=words: words in self.log_of(log),  # type: ignore[misc]
                )
                self.assertNotIn("Traceback", self.log_of(log))
            self.assertNotIn("Connected", self.log_of(name))
        # Each rejection is one warning, without a traceback of Twisted.
        for text in ("Traceback", "#critical"):
            self.assertNotIn(text, self.log_of("main"))

    def test_plain_client(self) -> None:
        """A client that does not speak TLS gets no rows, and main logs it."""
        self.use_tls()
        self.start("main", self.main)
        self.wait_until_up("main")
        with socket.create_connection(("127.0.0.1", self.tcp_port), 10) as plain:
            plain.sendall(b"NAME x\nREPLICATE\n")
            answer = b""
            with contextlib.suppress(ConnectionError):
                while data := plain.recv(1000):
                    answer += data
        self.assertNotIn(b"SERVER", answer)
        self.wait_until(
            "a line in the log of main",
            lambda: "does not speak TLS" in self.log_of("main"),
        )

    def test_redis(self) -> None:
        """
        Both connections to Redis use TLS, an ACL user, a password file and a database.
        """
        try:
            available = has_tls(find_redis())
        except ServerStartError as error:
            raise SkipTest(str(error)) from error
        if not available:
            raise SkipTest(f"{find_redis()} was built without TLS")
        redis = PrivateRedis(
            password="hush",
            acl=["user bob on >secret +@all ~* &*"],
            tls=RedisTls(
                self.server.certificate,
                self.server.private_key,
                self.authority.certificate,
            ),
        )
        self.addCleanup(redis.stop)
        redis.start()
        password = self.folder / "password"
        password.write_text("secret\n")
        self.shared["redis"] = {
            "enabled": True,
            "host": redis.host,
            "port": redis.tls_port,
            "username": "bob",
            "password_path": str(password),
            "dbid": 3,
            "use_tls": True,
            "ca_file": str(self.authority.certificate),
            "certificate_file": str(self.client.certificate),
            "private_key_file": str(self.client.private_key),
        }
        self.start("main", self.main)
        self.start("worker", self.worker)
        self.wait_until_up("main")
        self.wait_until_up("worker")
        started = time.monotonic()
        self.write_upto(10)
        self.wait_for_rows(10)
        self.assertLess(time.monotonic() - started, 20)
        self.check_buffers("redis", "redis_out")
        for kind in ("normal", "pubsub"):
            found = [
                (client["user"], client["db"])
                for client in redis.clients(kind)
                if not client["laddr"].startswith(str(redis.directory))
            ]
            self.assertEqual(found, [("bob", "3")] * 2, kind)
