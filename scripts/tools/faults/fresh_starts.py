"""Fresh starts of a main process and a worker: no row is delivered twice.

The rows of a stream held in memory are written while the worker connects, or as soon as
both processes are up. Every second deployment finds Redis by a Sentinel. The processes
are forks of this process, which has imported their modules, so that a start takes a
fraction of a second.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import twisted.internet
from twisted.application.internet import TimerService

from synapse_replication.app import journal, service, supervision
from synapse_replication.cli.main import cli
from synapse_replication.testing.servers import PrivateRedis
from tests.support.sentinel import PrivateSentinel

#: Modules that processes import when they run; each fork has them already.
PRELOADED = (journal, service, supervision)
#: The number of tokens that a start writes.
TOKENS = 20
#: The interval between them, in s.
INTERVAL = 0.004
#: How many deployments start at the same time, and compete for the processors.
AT_ONCE = 4
#: The time within which all of them must arrive, in s.
PATIENCE = 60.0


def make_writer(host: Any, config: Mapping[str, Any]) -> TimerService:
    """Return the service that writes rows of ``typing`` once a file exists.

    :param config: ``begin_file``: the path of the file.
    """
    stream = host.streams.get_streams()["typing"]
    begin_file, written = Path(config["begin_file"]), 0

    def write() -> None:
        nonlocal written
        if written < TOKENS and begin_file.exists():
            written += 1
            row = stream.description.codec.from_json([f"!{written}:x", ["@u:x"]])
            stream.write([row])

    return TimerService(INTERVAL, write)  # type: ignore[no-untyped-call]


def run_fresh_starts(count: int, print_line: Callable[[str], object]) -> int:
    """Start ``count`` deployments, several at a time.

    :return: the number of starts that did not deliver every token once and in order.
    """
    bad = 0
    with (
        _servers() as redis_sections,
        TemporaryDirectory(prefix="fresh-") as folder,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):

        def start(number: int) -> list[int]:
            own = Path(folder) / str(number)
            own.mkdir()
            return _Start(number, own, redis_sections[number % 2]).run()

        for number, tokens in enumerate(pool.map(start, range(count)), 1):
            if tokens != list(range(1, TOKENS + 1)):
                print_line(f"start {number} delivered {tokens}")
                bad += 1
            if number % 50 == 0:
                print_line(f"{number} starts, {bad} wrong")
    return bad


@contextmanager
def _servers() -> Iterator[list[dict[str, Any]]]:
    """Yield the sections ``redis`` without and with Sentinel."""
    redis = PrivateRedis()
    try:
        redis.start()
        sentinel = PrivateSentinel(redis)
        try:
            sentinel.start()
            at = {"host": redis.host, "port": redis.port}
            sentinels = [f"{sentinel.host}:{sentinel.port}"]
            by_sentinel = {"master": "mymaster", "sentinels": sentinels}
            yield [
                {"enabled": True, **at},
                {"enabled": True, "sentinel": by_sentinel},
            ]
        finally:
            sentinel.stop()
    finally:
        redis.stop()


def _forget_reactor() -> None:
    """Let a fork install a reactor of its own: forks would share this one's sockets."""
    if sys.modules.pop("twisted.internet.reactor", None) is not None:
        del vars(twisted.internet)["reactor"]


class _Start:
    """One deployment, from its start to its end."""

    def __init__(self, number: int, folder: Path, redis: dict[str, Any]) -> None:
        self._folder = folder
        self._begins_early = number % 4 < 2
        socket = str(folder / "main.sock")
        self._shared = {
            "server_name": f"start{number}",
            "redis": redis,
            "instance_map": {"main": {"path": socket}},
            "worker_replication_secret": "knock",
            "synapse_replication": {"streams": ["typing"]},
        }
        names = ["replication", "health"]
        self._main = {
            "listeners": [
                {"type": "http", "path": socket, "resources": [{"names": names}]}
            ],
            "synapse_replication": {
                "modules": [
                    {
                        "module": f"{__name__}.make_writer",
                        "config": {"begin_file": str(folder / "begin")},
                    }
                ]
            },
        }
        self._worker = {
            "worker_name": "reader1",
            "synapse_replication": {
                "row_sink": {
                    "module": f"{journal.__name__}.make_journal",
                    "config": {"path": str(folder / "journal.jsonl")},
                }
            },
        }

    def run(self) -> list[int]:
        """Return the delivered tokens, in order."""
        if self._begins_early:
            (self._folder / "begin").touch()
        processes = [
            self._fork("main", self._main),
            self._fork("worker", self._worker),
        ]
        try:
            deadline = time.monotonic() + PATIENCE
            while TOKENS not in self._tokens() and time.monotonic() < deadline:
                if self._is_up("main") and self._is_up("worker"):
                    (self._folder / "begin").touch()
                time.sleep(0.02)
            # A second delivery follows the first heartbeat.
            time.sleep(0.3)
            return self._tokens()
        finally:
            for process in processes:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)

    def _is_up(self, command: str) -> bool:
        return " is up" in (self._folder / f"{command}.log").read_text()

    def _tokens(self) -> list[int]:
        journal = self._folder / "journal.jsonl"
        if not journal.exists():
            return []
        lines = journal.read_bytes().splitlines(keepends=True)
        entries = [json.loads(line) for line in lines if line.endswith(b"\n")]
        return [entry["token"] for entry in entries if entry["rows"]]

    def _fork(self, command: str, own: dict[str, Any]) -> int:
        arguments = [command]
        for index, config in enumerate((self._shared, own)):
            path = self._folder / f"{command}.{index}.yaml"
            path.write_text(json.dumps(config))
            arguments += ["-c", str(path)]
        log = os.open(self._folder / f"{command}.log", os.O_CREAT | os.O_WRONLY)
        process = os.fork()
        if process == 0:
            os.dup2(log, sys.stdout.fileno())
            os.dup2(log, sys.stderr.fileno())
            try:
                _forget_reactor()
                cli(arguments)
            finally:
                os._exit(1)
        os.close(log)
        return process
