"""What the two sides have in common: how a measure runs and answers.

Needs Twisted and the standard library only.
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

__all__ = ["Child", "Counting", "RedisMeasures", "main", "percentiles", "run"]


def main(measures: Mapping[str, Callable[..., Any]]) -> None:
    """Run the measure that the command line names, and print what came of it."""
    parameters = json.loads(sys.argv[2])
    if isinstance(parameters, list):
        result = measures[sys.argv[1]](*parameters)
    else:
        result = measures[sys.argv[1]](**parameters)
    print(json.dumps(result), flush=True)  # noqa: T201 -- its answer


def run(work: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
    """Run work on the reactor of this process, which ends with it."""
    results: list[Any] = []
    # What was imported stays; real processes of either side do the same.
    gc.collect()
    gc.freeze()
    # As our processes do; it takes nothing from the other side.
    sys.setswitchinterval(0.0005)

    async def keep(reactor: Any) -> None:
        results.append(await work(reactor))

    try:
        react(lambda reactor: Deferred.fromCoroutine(keep(reactor)))
    except SystemExit as ended:
        if ended.code:
            raise
    return results[0]


class Counting:
    """Counts rows up to a number, then fires.

    :param timed: take the time that each row has in its event id, in ns.
    """

    def __init__(self, wanted: int, *, timed: bool = False) -> None:
        self.wanted = wanted
        self.timed = timed
        self.seconds: list[float] = []
        self.finished = 0.0
        self.connected: Deferred[None] = Deferred()
        self.done: Deferred[None] = Deferred()

    def count(self, rows: list[Any]) -> None:
        """Take rows of ``events``."""
        if self.timed:
            now = time.monotonic_ns()
            for row in rows:
                self.seconds.append((now - int(row.data.event_id[1:])) / 1e9)
        self.wanted -= len(rows)
        if self.wanted == 0:
            self.finished = time.monotonic()
            self.done.callback(None)

    def position(self) -> None:
        """Record that a writer was heard of."""
        if not self.connected.called:
            self.connected.callback(None)


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Return the usual ones in ms, without the first tenth, which warms up."""
    ordered = sorted(seconds[len(seconds) // 10 :])
    return {
        f"p{percent}": 1000 * ordered[len(ordered) * percent // 100]
        for percent in (50, 99)
    }


class Child:
    """Another process of a measure, which says when it is ready, then its result."""

    def __init__(self, *command: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    async def answer(self) -> Any:
        """Wait for the next line that it prints, a JSON value."""
        assert self._process.stdout is not None
        line = await deferToThread(self._process.stdout.readline)
        if not line:
            raise RuntimeError(f"{self._process.args!r} ended without an answer")
        return json.loads(line)

    def go(self) -> None:
        """Have it begin, if it waits for that."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


class RedisMeasures:
    """What is measured over Redis, with processes of either side.

    :param program: the file of the side, run for each further process.
    :param make: makes a process of ``(reactor, instance_name, counting, port)``;
        behind them, whether to do without hiredis.
    :param traffic: the module with what both sides are given.
    """

    def __init__(
        self, program: str, make: Callable[..., Any], traffic: ModuleType
    ) -> None:
        self._program = program
        self._make = make
        self._traffic = traffic

    def by_name(self) -> dict[str, Callable[..., Any]]:
        """Return all of them."""
        return {
            "receive": self.receive,
            "send": self.send,
            "end_to_end": self.end_to_end,
            "read": self.read,
            "idle": self.idle,
        }

    def receive(self, port: int, rows: int) -> dict[str, float]:
        """Receive and handle rows that a plain socket publishes flat out."""
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
        """Send rows flat out to Redis, where a plain socket subscribes."""
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
        """Write rows in this process; readers, each in another, handle them all.

        :param rate: rows a s; 0 for flat out.
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
        """Be a reader; say when a writer was heard of, then when all rows came."""

        async def work(reactor: Any) -> dict[str, float]:
            counting = Counting(rows, timed=rate > 0)
            process = self._make(reactor, name, counting, port)
            process.connect_redis(port)
            await counting.connected
            print('"ready"', flush=True)  # noqa: T201 -- its answer
            await counting.done
            await process.stop()
            times = percentiles(counting.seconds) if rate else {}
            return {"finished": counting.finished, **times}

        result: dict[str, float] = run(work)
        return result

    def idle(self, port: int, lines: int) -> dict[str, float]:
        """Take the CPU time of a process while USER_IP is published for others."""
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
