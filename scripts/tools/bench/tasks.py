"""The benchmark's tasks, and the aggregation of the results of several rounds."""

from __future__ import annotations

import enum
import statistics
from collections.abc import Sequence

import attrs


class Unit(enum.Enum):
    """The unit of a result.

    The value contains the text of the unit, the key in the result, and whether the unit
    is a rate: the task's count divided by the time in the result. A greater rate is
    better; for all other units, a lower value is better.
    """

    PER_SECOND = ("/s", "seconds", True)
    P50 = ("ms, p50", "p50", False)
    P99 = ("ms, p99", "p99", False)
    BYTES = ("bytes", "bytes", False)
    CPU = ("ms of CPU", "cpu", False)
    CPU_SECONDS = ("s of CPU", "cpu_seconds", False)
    MEBIBYTES = ("MiB", "mebibytes", False)
    MILLISECONDS = ("ms", "milliseconds", False)
    MESSAGES = ("messages", "messages", False)
    STATEMENTS = ("statements", "statements", False)

    @property
    def shown(self) -> str:
        """The text that follows a figure."""
        return self.value[0].partition(",")[0]


class Database(enum.Enum):
    """The database of a task."""

    NONE = "nothing"
    EMPTY = "an empty database for each round of each side"
    FILLED = "one database with ``count`` messages, which is only read"
    VARIED = "one database with ``count`` events of all kinds, which is only read"


@attrs.frozen(kw_only=True)
class Task:
    """A piece of work that both sides do.

    :ivar name: the name of the task, also for ``--only``.
    :ivar group: the end of the names of the modules that implement the task.
    :ivar measure: the name of the function in these modules.
    :ivar count: the amount of work per round.
    :ivar quick_count: the amount of work per round in a quick run.
    :ivar stock_part: the real Synapse does ``1/stock_part`` of the work, if it would
        take long and the cost per item does not depend on the count.
    :ivar count_name: the function's parameter for the count.
    :ivar units: the units of the results.
    :ivar parameters: the function's other parameters.
    :ivar database: the database whose ``dsn`` is passed to the function.
    :ivar is_of_package: whether a real Synapse has nothing to compare: the task needs
        another version of this package.
    :ivar redis: whether the ``port`` of a Redis server is passed to the function.
    """

    name: str
    group: str
    measure: str
    count: int
    quick_count: int
    stock_part: int = 1
    count_name: str = "rows"
    units: tuple[Unit, ...] = (Unit.PER_SECOND,)
    parameters: dict[str, int | bool | str] = attrs.Factory(dict)
    database: Database = Database.NONE
    redis: bool = False
    is_of_package: bool = False


def _redis(name: str, measure: str, count: int, quick_count: int, **more: int) -> Task:
    return Task(
        name=name,
        group="redis",
        measure=measure,
        count=count,
        quick_count=quick_count,
        stock_part=5,
        parameters=dict(more),
        redis=True,
    )


def _get_next(callers: int, count: int, stock_part: int) -> Task:
    return Task(
        name=f"get_next, {callers} callers",
        group="storage",
        measure="get_next",
        count=count,
        quick_count=count // 4,
        stock_part=stock_part,
        count_name="blocks",
        parameters={"callers": callers},
        database=Database.EMPTY,
    )


def _writes(kind: str, callers: int, count: int) -> Task:
    return Task(
        name=f"{kind}, {callers} callers in a process",
        group="write",
        measure="writes",
        count=count,
        quick_count=count // 4,
        units=(Unit.PER_SECOND, Unit.CPU),
        parameters={"callers": callers, "kind": kind},
        database=Database.EMPTY,
        redis=True,
        is_of_package=True,
    )


def _messages(kind: str) -> Task:
    return Task(
        name=f"messages of {kind}",
        group="write",
        measure="messages",
        count=200,
        quick_count=50,
        units=(Unit.MESSAGES, Unit.STATEMENTS),
        parameters={"kind": kind},
        database=Database.EMPTY,
        redis=True,
        is_of_package=True,
    )


def _lines(name: str, measure: str) -> Task:
    return Task(
        name=name,
        group="wire",
        measure=measure,
        count=200_000,
        quick_count=50_000,
        count_name="lines",
    )


def _catch_up(name: str, count: int, database: Database) -> Task:
    return Task(
        name=name,
        group="storage",
        measure="catch_up",
        count=count,
        quick_count=count // 20,
        # The cost of a row does not depend on the number of rows.
        stock_part=10,
        database=database,
    )


TASKS: tuple[Task, ...] = (
    _lines("parse", "parse"),
    _lines("parse, by command", "parse_commands"),
    _lines("serialise", "serialise"),
    _lines("serialise, by command", "serialise_commands"),
    Task(
        name="receive over TCP",
        group="wire",
        measure="receive_tcp",
        count=100_000,
        quick_count=30_000,
        stock_part=5,
    ),
    _redis("receive over Redis, hiredis", "receive", 100_000, 20_000),
    _redis("send over Redis", "send", 100_000, 20_000),
    _redis("end to end", "end_to_end", 100_000, 20_000, readers=1, rate=0),
    attrs.evolve(
        _redis(
            "end to end, 1,000/s", "end_to_end", 10_000, 1_500, readers=1, rate=1000
        ),
        units=(Unit.P50, Unit.P99),
        stock_part=1,
    ),
    _redis("fan-out to 8 readers", "end_to_end", 25_000, 5_000, readers=8, rate=0),
    _get_next(1, 400, 1),
    _get_next(10, 4_000, 4),
    _get_next(50, 10_000, 5),
    _writes("get_next", 1, 1_000),
    _writes("write", 1, 1_000),
    _writes("write", 10, 4_000),
    _writes("write_txn", 1, 1_000),
    _writes("write_txn", 10, 4_000),
    _messages("get_next"),
    _messages("write"),
    _messages("write_txn"),
    _catch_up("catch-up", 1_000_000, Database.FILLED),
    _catch_up("catch-up, all kinds", 300_000, Database.VARIED),
    Task(
        name="memory of a queued row",
        group="wire",
        measure="memory",
        count=100_000,
        quick_count=10_000,
        units=(Unit.BYTES,),
    ),
    Task(
        name="idle, 10,000 USER_IP",
        group="redis",
        measure="idle",
        count=10_000,
        quick_count=10_000,
        count_name="lines",
        units=(Unit.CPU,),
        redis=True,
    ),
    Task(
        name="start-up",
        group="storage",
        measure="start_up",
        count=5_000_000,
        quick_count=100_000,
        units=(Unit.MILLISECONDS,),
        database=Database.FILLED,
    ),
)


@attrs.frozen
class Result:
    """The result of all rounds of a task.

    :ivar ours: the value of each round of this package.
    :ivar other: the value of each round of the real Synapse, or of another version of
        this package.
    """

    task: Task
    unit: Unit
    ours: Sequence[float]
    other: Sequence[float]

    @property
    def ratio(self) -> float:
        """The ratio of the medians; greater than 1 if this package is better."""
        ours, other = statistics.median(self.ours), statistics.median(self.other)
        if self.unit is Unit.PER_SECOND:
            return ours / other
        return other / ours if ours else float("inf")

    @property
    def name(self) -> str:
        """The name of the measured quantity."""
        unit = self.unit.value[0]
        return self.task.name + (
            unit.partition("ms")[2] if self.unit in (Unit.P50, Unit.P99) else ""
        )

    def to_text(self) -> str:
        """Return the result as one line."""
        ours, other = statistics.median(self.ours), statistics.median(self.other)
        return (
            f"{self.name}: {ours:,.2f} against {other:,.2f} {self.unit.shown}, "
            f"ratio {self.ratio:.2f}"
        )

    def to_json(self) -> dict[str, object]:
        """Return the result as a JSON value."""
        return {
            "task": self.name,
            "unit": self.unit.value[0],
            "ours": _summary(self.ours),
            "other": _summary(self.other),
            "ratio": round(self.ratio, 3),
        }


def _summary(values: Sequence[float]) -> dict[str, object]:
    return {
        "median": round(statistics.median(values), 2),
        "least": round(min(values), 2),
        "most": round(max(values), 2),
        "rounds": [round(value, 2) for value in values],
    }
