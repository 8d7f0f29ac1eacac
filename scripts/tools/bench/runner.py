"""Runs tasks on both sides alternately, each in a process of its own.

The other side is a real Synapse, or another version of this package.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import attrs

from scripts.tools.bench.tables import fill_events
from scripts.tools.bench.tasks import Database, Result, Task, Unit
from synapse_replication.testing.servers import PrivatePostgres, PrivateRedis

_ROOT = Path(__file__).parent.parent.parent.parent
#: The timeout of one round of one side, in s.
TIMEOUT = 900


class BenchError(Exception):
    """A side failed to complete its work."""


@attrs.frozen
class Runner:
    """Runs tasks.

    :ivar other: the Python interpreter of an environment with a real Synapse, or the
        folder of a checkout of this package.
    :ivar rounds: the number of rounds of each task on each side.
    :ivar quick: whether to do less work per round.
    :ivar print_line: prints a line about the progress.
    """

    other: Path
    rounds: int
    quick: bool
    print_line: Callable[[str], object]

    def run(self, tasks: Iterable[Task]) -> list[Result]:
        """Run tasks on private servers.

        :raises BenchError: if a side failed.
        """
        # Remove the limit, so that no slow subscriber is disconnected.
        unlimited = {"client-output-buffer-limit": "pubsub 0 0 0"}
        with (
            PrivatePostgres(durable=True) as postgres,
            PrivateRedis(settings=unlimited) as redis,
        ):
            return [
                result
                for task in tasks
                for result in self._run_task(task, postgres, redis)
            ]

    def _run_task(
        self, task: Task, postgres: PrivatePostgres, redis: PrivateRedis
    ) -> list[Result]:
        count = task.quick_count if self.quick else task.count
        parameters: dict[str, object] = dict(task.parameters)
        if task.redis:
            parameters["port"] = redis.port
        if task.database in (Database.FILLED, Database.VARIED):
            self.print_line(f"{task.name}: filling tables with {count:,} rows")
            dsn = parameters["dsn"] = postgres.new_database()
            fill_events(dsn, count, varied=task.database is Database.VARIED)
        results = [Result(task, unit, [], []) for unit in task.units]
        for number in range(self.rounds):
            for is_other in (False, True):
                self.print_line(
                    f"{task.name}: round {number + 1} of {self.rounds}, "
                    f"{'other' if is_other else 'ours'}"
                )
                if task.database is Database.EMPTY:
                    parameters["dsn"] = postgres.new_database()
                is_stock = is_other and self.other.is_file()
                part = task.stock_part if is_stock else 1
                parameters[task.count_name] = count // part
                answer = self._measure(is_other, task, parameters)
                for result, value in zip(
                    results, values(task.units, answer, count // part), strict=True
                ):
                    rounds = result.other if is_other else result.ours
                    assert isinstance(rounds, list)
                    rounds.append(value)
        for result in results:
            # Print the result now, because a later task may fail.
            self.print_line(result.to_text())
        return results

    def _measure(
        self, is_other: bool, task: Task, parameters: dict[str, object]
    ) -> dict[str, float]:
        side, python, root = "ours", sys.executable, _ROOT
        if is_other and self.other.is_file():
            side, python = "stock", str(self.other)
        elif is_other:
            root = self.other
        path = Path("scripts", "tools", "bench", f"{side}_{task.group}.py")
        # Another version may lack a program that uses only what it has.
        program = root / path if (root / path).exists() else _ROOT / path
        return run_measure([python, str(program)], task.measure, parameters, root=root)


def run_measure(
    command: Sequence[str],
    measure: str,
    parameters: dict[str, object],
    *,
    root: Path = _ROOT,
    time_limit: float = TIMEOUT,
) -> dict[str, float]:
    """Run one measure in a process of its own.

    :param root: the checkout whose package the process imports.
    :param time_limit: the timeout in s.
    :raises BenchError: if the measure failed; the message contains the end of its
        output.
    """
    try:
        done = subprocess.run(
            [*command, measure, json.dumps(parameters)],
            capture_output=True,
            check=False,
            env=os.environ | {"PYTHONPATH": str(root)},
            timeout=time_limit,
        )
    except subprocess.TimeoutExpired:
        raise BenchError(
            f"{measure} did not end in {time_limit:g} s in {command[-1]}"
        ) from None
    lines = done.stdout.decode().splitlines()
    if done.returncode or not lines:
        tail = done.stderr.decode("utf-8", "replace")[-2000:]
        raise BenchError(f"{measure} failed in {command[-1]}:\n{tail}")
    answer: dict[str, float] = json.loads(lines[-1])
    return answer


def values(units: Iterable[Unit], answer: dict[str, float], count: int) -> list[float]:
    """Return the values of a round from the result of a measure."""
    return [
        count / answer["seconds"] if unit is Unit.PER_SECOND else answer[unit.value[1]]
        for unit in units
    ]
