"""The code that both sides share: how a measure runs and reports its result.

It needs only Twisted and the standard library.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from types import ModuleType
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import react
from twisted.internet.threads import deferToThread


def main(measures: Mapping[str, Callable[..., Any]]) -> None:
    """Run the measure that the command line names, and print its result."""
    parameters = json.loads(sys.argv[2])
    if isinstance(parameters, list):
        result = measures[sys.argv[1]](*parameters)
    else:
        result = measures[sys.argv[1]](**parameters)
    print(json.dumps(result), flush=True)  # noqa: T201 -- the result


def run(work: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
    """Run work on the reactor of this process, and return the result."""
    results: list[Any] = []
    # Real processes of both sides exclude imported objects from collections, too.
    gc.collect()
    gc.freeze()
    # Processes of this package use this interval, which does not slow the other side.
    sys.setswitchinterval(0.0005)

    async def store_result(reactor: Any) -> None:
        results.append(await work(reactor))

    try:
        react(lambda reactor: Deferred.fromCoroutine(store_result(reactor)))
    except SystemExit as ended:
        if ended.code:
            raise
    return results[0]


class Counting:
    """Counts rows, and fires :attr:`done` after a given number.

    :param wanted: the number of rows.
    :param timed: whether to measure latencies with the time in ns in each event id.
    :ivar seconds: the latencies in s.
    :ivar finished: the monotonic time in s of the last row.
    :ivar connected: fires when a writer announces its position.
    """

    def __init__(self, wanted: int, *, timed: bool = False) -> None:
        self.wanted = wanted
        self.timed = timed
        self.seconds: list[float] = []
        self.finished = 0.0
        self.connected: Deferred[None] = Deferred()
        self.done: Deferred[None] = Deferred()

    def count(self, rows: list[Any]) -> None:
        """Count rows of ``events``."""
        if self.timed:
            now = time.monotonic_ns()
            for row in rows:
                self.seconds.append((now - int(row.data.event_id[1:])) / 1e9)
        self.wanted -= len(rows)
        if self.wanted == 0:
            self.finished = time.monotonic()
            self.done.callback(None)

    def position(self) -> None:
        """Record that a writer announced its position."""
        if not self.connected.called:
            self.connected.callback(None)


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Return percentiles in ms, without the first tenth, which is the warm-up."""
    ordered = sorted(seconds[len(seconds) // 10 :])
    return {
        f"p{percent}": 1000 * ordered[len(ordered) * percent // 100]
        for percent in (50, 99)
    }


class Child:
    """Another process of a measure, which reports that it is ready, then its result."""

    def __init__(self, *command: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    async def answer(self) -> Any:
        """Wait for the next line that the process prints, and return its JSON value."""
        assert self._process.stdout is not None
        line = await deferToThread(self._process.stdout.readline)
        if not line:
            raise RuntimeError(f"{self._process.args!r} ended without an answer")
        return json.loads(line)

    def go(self) -> None:
        """Signal the process to begin."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def stop(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.communicate()


class RedisMeasures:
    """The measures over Redis, with processes of either side.

    :param program: the program of the side, which each further process runs.
    :param make: creates a process from ``(reactor, instance_name, counting, port)``.
    :param traffic: the module that generates the traffic for both sides.
    """

    def __init__(
        self, program: str, make: Callable[..., Any], traffic: ModuleType
    ) -> None:
        self._program = program
        self._make = make
        self._traffic = traffic

    def by_name(self) -> dict[str, Callable[..., Any]]:
        """Return all measures by name."""
        return {
            "receive": self.receive,
            "send": self.send,
            "end_to_end": self.end_to_end,
            "read": self.read,
            "idle": self.idle,
        }

    def receive(self, port: int, rows: int) -> dict[str, float]:
        """Receive and deliver rows that a plain socket publishes at full speed."""
        traffic = self._traffic

        async def work(reactor: Any) -> dict[str, float]:
            counting = Counting(rows)
            process = self._make(reactor, traffic.READER, counting, port)
            publisher = Child(
                str(traffic.__file__), "publish", str(port), "rows", str(rows)
            )
            try:
                process.connect_redis(port)
                await process.connected()
                await publisher.answer()
                started = time.monotonic()
                publisher.go()
                await counting.done
                await process.stop()
            finally:
                publisher.stop()
            return {"seconds": counting.finished - started}

        result: dict[str, float] = run(work)
        return result

    def send(self, port: int, rows: int) -> dict[str, float]:
        """Send rows at full speed through Redis to a plain socket that subscribes."""
        traffic = self._traffic

        async def work(reactor: Any) -> dict[str, float]:
            process = self._make(reactor, traffic.WRITER, Counting(0), port)
            subscriber = Child(
                str(traffic.__file__), "count_rows", str(port), str(rows)
            )
            try:
                process.connect_redis(port)
                await process.connected()
                process.start_streamer()
                await subscriber.answer()
                made = [traffic.row_of(n) for n in range(1, rows + 1)]
                started = time.monotonic()
                process.write(made)
                finished = (await subscriber.answer())["finished"]
                await process.stop()
            finally:
                subscriber.stop()
            return {"seconds": finished - started}

        result: dict[str, float] = run(work)
        return result

    def end_to_end(
        self, port: int, rows: int, readers: int, rate: int
    ) -> dict[str, float]:
        """Write rows in this process; readers, each in its own process, deliver them.

        :param rate: rows per second; 0 for full speed.
        """
        traffic = self._traffic

        async def work(reactor: Any) -> dict[str, float]:
            process = self._make(reactor, traffic.WRITER, Counting(0), port)
            children = [
                Child(
                    self._program, "read", json.dumps([port, rows, rate, f"reader{n}"])
                )
                for n in range(readers)
            ]
            try:
                process.connect_redis(port)
                await process.connected()
                process.start_streamer()
                for child in children:
                    await child.answer()
                made = [traffic.row_of(n) for n in range(1, rows + 1)]
                started = time.monotonic()
                if rate:
                    process.write_at_rate(rows, rate)
                else:
                    process.write(made)
                results = [await child.answer() for child in children]
                await process.stop()
            finally:
                for child in children:
                    child.stop()
            if rate:
                return {key: max(r[key] for r in results) for key in ("p50", "p99")}
            return {"seconds": max(r["finished"] for r in results) - started}

        result: dict[str, float] = run(work)
        return result

    def read(self, port: int, rows: int, rate: int, name: str) -> dict[str, float]:
        """Run as a reader; report the first position, then the last row."""

        async def work(reactor: Any) -> dict[str, float]:
            counting = Counting(rows, timed=rate > 0)
            process = self._make(reactor, name, counting, port)
            process.connect_redis(port)
            await counting.connected
            print('"ready"', flush=True)  # noqa: T201 -- read by Child.answer()
            await counting.done
            await process.stop()
            times = percentiles(counting.seconds) if rate else {}
            return {"finished": counting.finished, **times}

        result: dict[str, float] = run(work)
        return result

    def idle(self, port: int, lines: int) -> dict[str, float]:
        """Measure the CPU time of a process while others are sent USER_IP commands."""
        traffic = self._traffic

        async def work(reactor: Any) -> dict[str, float]:
            process = self._make(reactor, traffic.READER, Counting(0), port)
            publisher = Child(
                str(traffic.__file__), "publish", str(port), "user_ips", str(lines)
            )
            try:
                process.connect_redis(port)
                await process.connected()
                await publisher.answer()
                await process.sleep(0.5)
                started = time.process_time()
                publisher.go()
                await publisher.answer()
                await process.sleep(0.2)
                spent = time.process_time() - started
                await process.stop()
            finally:
                publisher.stop()
            return {"cpu": 1000 * spent}

        result: dict[str, float] = run(work)
        return result
