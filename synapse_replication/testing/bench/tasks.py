"""What is measured, and how the figures of many rounds become one."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import attrs

__all__ = ["TASKS", "Result", "Task"]


@attrs.frozen(kw_only=True)
class Task:
    """A piece of work that both sides do.

    :ivar name: for people and ``--only``.
    :ivar measure: the name of the function in ``ours.py`` and ``stock.py``.
    :ivar unit: what is counted.
    :ivar count: how many a round does.
    :ivar quick_count: how many a round does in a quick run.
    :ivar count_name: the function's parameter for it.
    :ivar parameters: the function's other parameters.
    :ivar needs_database: the function is given ``dsn``, of an empty database.
    """

    name: str
    measure: str
    unit: str
    count: int
    quick_count: int
    count_name: str
    parameters: dict[str, int] = attrs.Factory(dict)
    needs_database: bool = False


def _get_next(callers: int, count: int) -> Task:
    return Task(
        name=f"get_next, {callers} callers",
        measure="get_next",
        unit="blocks",
        count=count,
        quick_count=count // 4,
        count_name="blocks",
        parameters={"callers": callers},
        needs_database=True,
    )


TASKS: tuple[Task, ...] = (
    Task(
        name="parse",
        measure="parse",
        unit="lines",
        count=200_000,
        quick_count=50_000,
        count_name="lines",
    ),
    Task(
        name="serialise",
        measure="serialise",
        unit="lines",
        count=200_000,
        quick_count=50_000,
        count_name="lines",
    ),
    Task(
        name="receive over TCP",
        measure="receive_tcp",
        unit="rows",
        count=100_000,
        quick_count=30_000,
        count_name="rows",
    ),
    _get_next(1, 400),
    _get_next(10, 2_000),
    _get_next(50, 4_000),
)


@attrs.frozen
class Result:
    """What the rounds of a task came to.

    :ivar ours: operations per s, of each round.
    :ivar stock: the same of the real Synapse.
    """

    task: Task
    ours: Sequence[float]
    stock: Sequence[float]

    @property
    def ratio(self) -> float:
        """How many times as fast the median of ours is."""
        return statistics.median(self.ours) / statistics.median(self.stock)

    def to_json(self) -> dict[str, object]:
        """Give all of it as a JSON value."""
        return {
            "task": self.task.name,
            "unit": f"{self.task.unit}/s",
            "ours": _summary(self.ours),
            "stock": _summary(self.stock),
            "ratio": round(self.ratio, 2),
        }


def _summary(rates: Sequence[float]) -> dict[str, object]:
    return {
        "median": round(statistics.median(rates), 1),
        "least": round(min(rates), 1),
        "most": round(max(rates), 1),
        "rounds": [round(rate, 1) for rate in rates],
    }
