"""Tests for the effects of hostile peers and browsers on real processes."""

from __future__ import annotations

import contextlib
import http.client
import re
import time

from scripts.tools import hostile
from scripts.tools.faults.deployment import FaultDeployment
from synapse_replication.demo.deployment import READERS, SERVER_NAME, WRITERS
from tests.integration.hostile import HostileTestCase, UnixHTTPConnection, post

LINE = b"REMOTE_SERVER_UP matrix.example.org\n"

PATHS = (
    "/health",
    "/metrics",
    "/status",
    "/_synapse/replication/get_repl_stream_updates/events/1",
    "/nothing",
)


class RelayTests(HostileTestCase):
    """Tests for four writers connected to one another over direct TCP."""

    def test_one_line_is_received_once(self) -> None:
        """A line sent to one writer is received once by each."""
        deployment = self.deploy(use_redis=False)
        self.wait_for_links(deployment)

        def counts() -> list[int]:
            return [
                self.received(deployment, name, "REMOTE_SERVER_UP") for name in WRITERS
            ]

        with self.peer(deployment, WRITERS[0], b"NAME stranger\n" + LINE):
            self.wait_until("all received it", lambda: min(counts()) > 0)
            time.sleep(1.0)
            self.assertEqual(counts(), [1, 1, 1, 1])


class WebPageTests(HostileTestCase):
    """Tests for requests that a web page can make a local browser send."""

    def test_to_the_direct_tcp_port(self) -> None:
        """An HTTP request to the port has no effect and gets no rows."""
        deployment = self.deploy(use_redis=False)
        body = b"x\nPOSITION typing typing_writer 0 7\nREPLICATE\n" + LINE
        request = (
            b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: text/plain\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        before = self.received(deployment, WRITERS[0], "REMOTE_SERVER_UP")
        with self.peer(deployment, WRITERS[0], request) as connection:
            answer = self.read_until_closed(connection)[:500]
        self.assertIn(b"does not speak HTTP", answer)
        self.assertNotIn(b"POSITION", answer)
        self.assertNotIn(b"RDATA", answer)
        received = self.received(deployment, WRITERS[0], "REMOTE_SERVER_UP")
        self.assertEqual(received, before)


class HttpTests(HostileTestCase):
    """Tests for requests of a client without the secret."""

    def setUp(self) -> None:
        self.deployment = self.deploy(use_redis=True)

    def test_bodies(self) -> None:
        """A form of 20 MiB is rejected before it is read, by length and in chunks."""
        deployment = self.deployment
        before = self.peak_memory(deployment, READERS[-1])
        form = b"&".join(b"a%d=b" % number for number in range(20 * 2**20 // 10))
        started = time.monotonic()
        for path in PATHS:
            for is_chunked in (False, True):
                connection = UnixHTTPConnection(deployment.socket_of(READERS[-1]))
                status = post(connection, path, form, is_chunked=is_chunked)
                self.assertEqual(status, 413, path)
        self.assertLess(self.peak_memory(deployment, READERS[-1]) - before, 20.0)
        self.assertLess(time.monotonic() - started, 20.0)

    def test_hosts(self) -> None:
        """The status is served only if the Host header names this machine."""
        port = int(self.deployment.status_page.split(":")[2].split("/")[0])
        for path in ("/status", "/status.json", "/metrics"):
            for host, status in (("evil.example", 421), (f"localhost:{port}", 200)):
                connection = http.client.HTTPConnection("127.0.0.1", port)
                with contextlib.closing(connection):
                    connection.request("GET", path, headers={"Host": host})
                    self.assertEqual(connection.getresponse().status, status)


class MadeUpNamesTests(HostileTestCase):
    """Tests for long or many names that a peer makes up."""

    def inspect(self, deployment: FaultDeployment, name: str) -> tuple[list[str], int]:
        """Return an instance's log and the size of its metrics."""
        log = (deployment.directory / f"{name}.log").read_text("utf-8", "replace")
        return log.splitlines(), len(deployment.get_metrics(name))

    def test_long_names(self) -> None:
        """
        Long names over TCP and Redis appear in no metric and cause no long log line.
        """
        for use_redis in (False, True):
            deployment = self.deploy(use_redis=use_redis)
            victim = READERS[0] if use_redis else WRITERS[0]
            _, size = self.inspect(deployment, victim)
            if deployment.redis is not None:
                for length, most in ((16_000, 200), (2_000_000, 5)):
                    names = hostile.long_names(length)
                    port = deployment.redis.port
                    hostile.publish(port, SERVER_NAME, names, 20, most)
            else:
                names = hostile.long_names(16_000)
                hostile.send_lines(deployment.tcp_ports[victim], names, 20, 200)
            self.wait_until(
                "a refusal",
                lambda: "refused_lines_total{" in deployment.get_metrics(victim),  # noqa: B023
            )
            log, new_size = self.inspect(deployment, victim)
            self.assertLess(max(map(len, log)), 8192)
            self.assertLess(new_size - size, 20_000)

    def test_many_writers_and_peers(self) -> None:
        """
        One undeclared writer of a stream is shown; NAME lines do not fill the log.
        """
        deployment = self.deploy(use_redis=False)
        victim = WRITERS[0]
        port = deployment.tcp_ports[victim]
        before, _ = self.inspect(deployment, victim)
        hostile.send_lines(port, hostile.made_up_writers(), 20, 2000)
        self.wait_until(
            "what was discarded",
            lambda: 'reason="undeclared_writer"' in deployment.get_metrics(victim),
        )
        shown = re.findall(r"ghost\d+", deployment.get_metrics(victim))
        self.assertLessEqual(len(set(shown)), 1)
        hostile.connect_with_names(port, 150, 30)
        log, _ = self.inspect(deployment, victim)
        self.assertLess(len(log) - len(before), 150)
