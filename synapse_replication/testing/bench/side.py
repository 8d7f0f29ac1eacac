"""What the two sides have in common: how a measure runs and answers.

Needs Twisted and the standard library only.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import react
from twisted.internet.threads import deferToThread

__all__ = ["Child", "Counting", "main", "percentiles", "run"]


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
        """Take note that a writer was heard of."""
        if not self.connected.called:
            self.connected.callback(None)


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Give the usual ones in ms, without the first tenth, which warms up."""
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
