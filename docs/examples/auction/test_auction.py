"""Kill each process of the auction while bids arrive; compare every bid.

``AUCTION_BIDS`` is the number of bids; the test needs the extra ``servers``.
"""

import itertools
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg2
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.testing.certificates import PrivateAuthority
from synapse_replication.testing.private_process import free_port
from synapse_replication.testing.servers import PrivateRedis, shared_postgres

PROGRAM = Path(__file__).with_name("auction.py")
NAMES = ("bid1", "bid2", "web1", "web2")
BATCH = 20
BATCHES = int(os.environ.get("AUCTION_BIDS", "400")) // BATCH


class AuctionTests(SynchronousTestCase):
    def setUp(self) -> None:
        folder = Path(self.mktemp())
        folder.mkdir()
        authority = PrivateAuthority(folder.absolute())
        self.database = shared_postgres().new_database()
        self.query(PROGRAM.with_suffix(".sql").read_text())
        self.settings: dict[str, Any] = {
            "server_name": self.id(),
            "database": self.database,
            "authority": str(authority.certificate),
            "certificates": {},
            "ports": {},
        }
        for name in NAMES:
            pair = authority.issue(name, "localhost")
            self.settings["certificates"][name] = {
                "certificate": str(pair.certificate),
                "private_key": str(pair.private_key),
            }
            kinds = ("http", "tcp", "rows")
            self.settings["ports"][name] = {kind: free_port() for kind in kinds}
        self.path = folder / "settings.json"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.addCleanup(lambda: [each.kill() for each in self.processes.values()])

    def query(self, sql: str) -> list[Any]:
        with psycopg2.connect(self.database) as connection:
            cursor = connection.cursor()
            cursor.execute(sql)
            rows = cursor.fetchall() if cursor.description else []
        connection.close()
        return rows

    def start(self, name: str) -> None:
        command = [sys.executable, str(PROGRAM), name, str(self.path)]
        self.processes[name] = subprocess.Popen(command)

    def kill(self, name: str) -> None:
        """Send SIGKILL to a process, and start it again."""
        self.processes[name].kill()
        self.processes[name].wait()
        self.start(name)

    def request(self, name: str, data: bytes | None = None) -> bytes:
        url = f"http://127.0.0.1:{self.settings['ports'][name]['http']}"
        with urllib.request.urlopen(url, data, timeout=10) as response:
            body: bytes = response.read()
        return body

    def try_until_answered(self, ask: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + 60
        while True:
            try:
                return ask()
            except OSError:
                # The process is starting, or was killed.
                self.assertLess(time.monotonic(), deadline)
                time.sleep(0.05)

    def place(self, number: int) -> None:
        """Place a batch of bids at one of the two processes, in turns.

        A process that was killed may have placed them, or not: the table is compared.
        """
        amounts = range(number * BATCH, (number + 1) * BATCH)
        bids = [{"lot": f"lot{amount % 7}", "amount": amount} for amount in amounts]
        turns = itertools.cycle(NAMES[:2] if number % 2 else NAMES[1::-1])
        body = json.dumps(bids).encode()
        self.try_until_answered(lambda: self.request(next(turns), body))

    def run_auction(self, *, redis: PrivateRedis | None = None) -> None:
        self.path.write_text(json.dumps(self.settings))
        for name in NAMES:
            self.start(name)
        step = max(2, BATCHES // (len(NAMES) + 1))
        for number in range(BATCHES):
            self.place(number)
            if redis is not None and not redis.running:
                redis.start()
            if number % step == 1 and number // step < len(NAMES):
                if redis is not None:
                    redis.kill()
                self.kill(NAMES[number // step])
        if redis is not None and not redis.running:
            redis.start()
        expected = sorted(self.query("SELECT lot, amount FROM bids"))
        self.assertGreaterEqual(len(expected), BATCHES * BATCH)
        for name in ("web1", "web2"):
            self.wait_for(name, expected)

    def received(self, name: str) -> list[Any]:
        answer = self.try_until_answered(lambda: self.request(name))
        bids = json.loads(answer)["bids"].items()
        return sorted((lot, each) for lot, amounts in bids for each in amounts)

    def wait_for(self, name: str, expected: list[Any]) -> None:
        deadline = time.monotonic() + 60
        while len(self.received(name)) < len(expected) and time.monotonic() < deadline:
            time.sleep(0.1)
        self.assertEqual(self.received(name), expected)

    def test_direct_tcp(self) -> None:
        """No bid is lost or doubled while each process is killed."""
        self.run_auction()

    def test_redis(self) -> None:
        """Neither is one over Redis, which is killed as well."""
        with PrivateRedis() as redis:
            self.settings["redis"] = redis.port
            self.run_auction(redis=redis)
