"""Tests that the tutorial's files and commands work as written on the page."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import psycopg2
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.testing.private_process import free_port
from synapse_replication.testing.server_binaries import find_postgres
from synapse_replication.testing.servers import (
    PrivateRedis,
    shared_postgres,
    shared_redis,
)

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "tutorial-orders.rst"

#: Timeout in s for events that normally happen within a moment.
PATIENCE = 60.0

#: The entry point of an installation, for the package of this checkout. As in an
#: installation, Python looks in its folder first and not in the current one.
_ENTRY_POINT = f"""#!{sys.executable}
import sys
sys.path.insert(1, {str(ROOT)!r})
from synapse_replication.cli.main import main
main()
"""

_DIRECTIVE = re.compile(
    r"^\.\. (?P<kind>code-block|literalinclude):: (?P<argument>\S+)\n"
    r"(?P<options>(?:   :.*\n)*)\n?"
    r"(?P<body>(?:(?:   .*)?\n)*)",
    re.MULTILINE,
)


@attrs.frozen
class Block:
    """A block of the page.

    :ivar caption: the name of the file, if it is one.
    :ivar part: the class of a block of commands; empty for commands that are only run.
    :ivar body: its text.
    """

    caption: str
    part: str
    body: str


def read_page() -> list[Block]:
    """Return the files and the commands of the tutorial in order."""
    blocks = []
    for match in _DIRECTIVE.finditer(PAGE.read_text()):
        options = dict(re.findall(r":(\w+): (.*)", match["options"]))
        if match["kind"] == "literalinclude":
            body = (ROOT / "docs" / match["argument"]).read_text()
        else:
            body = "\n".join(line[3:] for line in match["body"].splitlines())
        blocks.append(Block(options.get("caption", ""), options.get("class", ""), body))
    return blocks


def commands(block: Block) -> list[str]:
    """Return the command lines of a block."""
    return [line[2:] for line in block.body.splitlines() if line.startswith("$ ")]


class Terminal:
    """A command that runs until it is interrupted, with the lines that it prints."""

    def __init__(self, command: str, folder: Path, environ: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            shlex.split(command),
            cwd=folder,
            env=environ | {"PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # A command in the background of a shell ignores SIGINT, and so does
            # everything that it starts.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self._timer = threading.Timer(PATIENCE, self._process.kill)
        self._timer.start()

    def wait_for(self, found: Callable[[str], bool]) -> list[str]:
        """Read and return lines until one matches.

        :raises AssertionError: if the command ends, or time runs out, before that.
        """
        lines = []
        assert self._process.stdout is not None
        for line in self._process.stdout:
            lines.append(line)
            if found(line):
                return lines
        raise AssertionError("".join(lines))

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.communicate()
        self._timer.cancel()

    def interrupt(self) -> int:
        """Press Ctrl+C and return the exit status."""
        self._process.send_signal(signal.SIGINT)
        self._process.communicate()
        self._timer.cancel()
        return self._process.returncode


class WalkthroughTestCase(SynchronousTestCase):
    """A folder, a database named ``shop``, and the programs of an installation."""

    def setUp(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tutorial-"))
        self.addCleanup(shutil.rmtree, self.folder)
        postgres, self.redis = shared_postgres(), shared_redis()
        postgres.new_database()
        programs = self.folder / "bin"
        programs.mkdir()
        entry_point = programs / "synapse-replication"
        entry_point.write_text(_ENTRY_POINT)
        entry_point.chmod(0o755)
        self.environ = {
            "PATH": f"{programs}:{find_postgres()}:{os.environ['PATH']}",
            "PGHOST": str(postgres.directory),
            "PGPORT": str(postgres.port),
            "PGUSER": postgres.user,
            "PYTHONPATH": str(self.folder),
            "HOME": str(self.folder),
        }
        self.addCleanup(self.drop_database)

    def drop_database(self) -> None:
        with contextlib.closing(
            psycopg2.connect(shared_postgres().dsn())
        ) as connection:
            connection.autocommit = True
            connection.cursor().execute("DROP DATABASE IF EXISTS shop (FORCE)")

    def copy_example(self, name: str, redis: PrivateRedis) -> None:
        """Copy an example to the folder, with addresses and a server name of its own.

        Then its processes import this package from here.
        """
        text = (ROOT / "docs" / "examples" / name).read_text()
        for fixed, free in (
            ("6379", str(redis.port)),
            ("9094", str(free_port())),
            ("shop.example.com", self.folder.name),
        ):
            self.assertIn(fixed, text)
            text = text.replace(fixed, free)
        (self.folder / name).write_text(text)
        self.environ["PYTHONPATH"] = str(ROOT)

    def run_line(self, line: str) -> str:
        done = subprocess.run(
            ["bash", "-e", "-c", line],
            cwd=self.folder,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        self.assertEqual(done.returncode, 0, f"{line}\n{done.stdout}{done.stderr}")
        return done.stdout

    @contextlib.contextmanager
    def terminal(self, command: str) -> Iterator[Terminal]:
        terminal = Terminal(command, self.folder, self.environ)
        try:
            yield terminal
        finally:
            self.status = terminal.interrupt()


class TutorialTests(WalkthroughTestCase):
    def test_page(self) -> None:
        """Following the page gives the results that it promises."""
        blocks = read_page()
        for block in blocks:
            if block.caption:
                path = self.folder / block.caption
                # Use our Redis, and a channel of our own.
                text = block.body.replace("6379", str(self.redis.port))
                path.write_text(text.replace("shop.example.com", self.folder.name))
            elif not block.part:
                for line in commands(block):
                    self.run_line(line)
        parts = {block.part: commands(block) for block in blocks if block.part}
        ((main,), (writer,), (journal,)) = (
            parts[f"terminal-{name}"] for name in ("main", "writer1", "journal")
        )
        with self.terminal(writer):
            with self.terminal(main) as reader:
                reader.wait_for(lambda line: line.endswith(" o2 None\n"))
            self.assertEqual(self.status, 0)
            with self.terminal(journal) as reader:
                reader.wait_for(lambda line: "is up" in line)
                first = self.wait_for_journal(parts["look"][0], lambda last: last > 0)
            with self.terminal(journal):
                self.wait_for_journal(
                    parts["look"][0], lambda last: last > max(first) + 1
                )
        self.assertEqual(self.status, 0)
        last_written = self.written()[-1]
        with self.terminal(writer), self.terminal(journal):
            received = self.wait_for_journal(
                parts["look"][0], lambda last: last > last_written
            )
        begin, end = received[0], received[-1]
        self.assertEqual(received, [t for t in self.written() if begin <= t <= end])

    def written(self) -> list[int]:
        """Return the tokens in the table, one per row."""
        with contextlib.closing(
            psycopg2.connect(shared_postgres().dsn("shop"))
        ) as connection:
            cursor = connection.cursor()
            cursor.execute("SELECT stream_id FROM orders ORDER BY stream_id")
            return [token for (token,) in cursor.fetchall()]

    def wait_for_journal(self, command: str, found: Callable[[int], bool]) -> list[int]:
        """Wait until the journal's last token matches, and return all of its tokens.

        Each row contributes one token, so that a missing or doubled row is detected.
        """
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            records = [json.loads(line) for line in self.run_line(command).splitlines()]
            tokens = [record["token"] for record in records for _ in record["rows"]]
            if tokens and found(tokens[-1]):
                return tokens
            time.sleep(0.05)
        raise AssertionError(f"the journal ends with {tokens[-3:]}")


class OwnHostTests(WalkthroughTestCase):
    """Tests for the complete server in docs/examples/homeserver.py."""

    def setUp(self) -> None:
        super().setUp()
        self.run_line("createdb shop")
        self.private_redis = PrivateRedis()
        self.private_redis.start()
        self.addCleanup(self.private_redis.stop)
        self.copy_example("homeserver.py", self.private_redis)

    def create_table(self) -> None:
        sql = ROOT / "docs" / "examples" / "orders.sql"
        self.run_line(f"psql --quiet --dbname shop --file {shlex.quote(str(sql))}")

    def test_two_processes(self) -> None:
        """The reader receives both streams, over Redis and over HTTP, and both stop."""
        self.create_table()
        command = f"{shlex.quote(sys.executable)} homeserver.py "
        with self.terminal(command + "writer") as writer:
            writer.wait_for(lambda line: "Connected: redis\n" in line)
            with self.terminal(command + "reader") as reader:
                lines = reader.wait_for(lambda line: line.startswith("orders writer"))
                lines += reader.wait_for(
                    lambda line: re.match(r"cursors .*offset=[1-9]", line) is not None
                )
            self.assertEqual(self.status, 0)
        self.assertEqual(self.status, 0)
        offsets = [
            int(offset)
            for line in lines
            for offset in re.findall(r"^cursors .*offset=(\d+)", line)
        ]
        # Rows written before the reader started came over HTTP.
        self.assertEqual(offsets, list(range(len(offsets))))
        self.assertGreater(len(offsets), 1)

    def test_restart_without_redis(self) -> None:
        """If the writer is killed while Redis is down, its new rows arrive."""
        self.create_table()
        command = f"{shlex.quote(sys.executable)} homeserver.py "
        with self.terminal(command + "reader") as reader:
            writer = Terminal(command + "writer", self.folder, self.environ)
            reader.wait_for(lambda line: "offset=3)" in line)
            self.private_redis.kill()
            writer.kill()
            with self.terminal(command + "writer") as writer:
                writer.wait_for(lambda line: "is up" in line)
                self.private_redis.start()
                # The new rows from the first one on, although the tokens began anew.
                reader.wait_for(lambda line: "offset=0)" in line)
                reader.wait_for(lambda line: "offset=1)" in line)
                reader.wait_for(lambda line: line.startswith("orders"))

    def test_failed_start(self) -> None:
        """Without its table, the server says what to do, and exits with status 1."""
        command = [sys.executable, "homeserver.py", "writer"]
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        self.assertEqual(done.returncode, 1)
        self.assertIn('relation "orders', done.stderr)
        self.assertIn("create the tables and sequences", done.stderr)
        self.assertNotIn("Traceback", done.stderr)

    def test_own_test(self) -> None:
        """The example of a test of the server passes."""
        shutil.copy(ROOT / "docs" / "examples" / "test_homeserver.py", self.folder)
        self.run_line(f"{shlex.quote(sys.executable)} -m twisted.trial test_homeserver")


class AuctionTests(WalkthroughTestCase):
    """Tests for the server in docs/examples/auction."""

    def test_own_test(self) -> None:
        """Its own test passes: each process is killed, and every bid arrives once."""
        folder = ROOT / "docs" / "examples" / "auction"
        for name in ("auction.py", "auction.sql", "test_auction.py"):
            shutil.copy(folder / name, self.folder)
        self.environ["PYTHONPATH"] = str(ROOT)
        self.run_line(
            f"AUCTION_BIDS=200 {shlex.quote(sys.executable)} -m twisted.trial "
            "test_auction.AuctionTests.test_direct_tcp"
        )


class AsyncioTests(WalkthroughTestCase):
    """Tests for the server on asyncio."""

    def test_two_processes(self) -> None:
        """A sink that awaits asyncio's functions receives every row, and both stop."""
        self.copy_example("asyncio_shop.py", self.redis)
        command = f"{shlex.quote(sys.executable)} asyncio_shop.py "
        with self.terminal(command + "writer") as writer:
            writer.wait_for(lambda line: "Connected: redis\n" in line)
            with self.terminal(command + "reader") as reader:
                lines = reader.wait_for(lambda line: "price=5)" in line)
            self.assertEqual(self.status, 0)
        self.assertEqual(self.status, 0)
        stored = [line for line in lines if line.startswith("stored ")]
        # The row with the newest price is the only one of its item that is kept.
        prices = [int(line.rpartition("price=")[2].rstrip(")\n")) for line in stored]
        self.assertEqual(prices, list(range(prices[0], 6)))
