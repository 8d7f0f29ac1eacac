"""What a job shows of its progress: a bar on a terminal, lines in a log.

A job has steps, which it begins one after the other; within a step Spark's tasks
count. There is something to see from the first second: Spark itself takes a few to
start.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TextIO

import attrs
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["JobProgress", "Tasks", "tasks_of"]

#: How often a bar looks at Spark's tasks, s.
_BAR_INTERVAL: Final = 0.5

#: How often a log gets a line within a step, s.
_LOG_INTERVAL: Final = 10.0


@attrs.frozen
class Tasks:
    """The tasks of the stages that Spark works at.

    :ivar failed: attempts that failed; Spark makes others, or the job fails.
    """

    done: int
    total: int
    failed: int = 0


def tasks_of(session: SparkSession) -> Tasks:
    """Return the tasks of the stages that are under way. May be called anywhere."""
    tracker = session.sparkContext.statusTracker()
    # A stage may end between the two questions.
    found = [tracker.getStageInfo(id_) for id_ in tracker.getActiveStageIds()]
    stages = [stage for stage in found if stage is not None]
    return Tasks(
        sum(stage.numCompletedTasks for stage in stages),
        sum(stage.numTasks for stage in stages),
        sum(stage.numFailedTasks for stage in stages),
    )


class JobProgress:
    """Shows the steps of one job, while in the context. Methods: one thread at a time.

    :param out: a terminal gets a bar, all else lines.
    :param steps: how many there are.
    :param now: monotonic s.
    """

    def __init__(
        self,
        out: TextIO,
        steps: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out = out
        self._steps = steps
        self._now = now
        self._started = now()
        self._number = 0
        self._what = ""
        self._failed = 0
        self._look: Callable[[], Tasks] | None = None
        self._over = threading.Event()
        self._watcher: threading.Thread | None = None
        self._bar: Progress | None = None
        if out.isatty():
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[unit]}", style="dim"),
                TimeElapsedColumn(),
                console=Console(file=out),
                transient=True,
            )
            self._task = self._bar.add_task("", total=None, unit="")

    def __enter__(self) -> JobProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        if self._watcher is not None:
            self._watcher.join()
        if self._bar is not None:
            self._bar.stop()

    def begin(self, what: str) -> None:
        """Begin the next step.

        :param what: what is done in it, in a few words.
        """
        self._number += 1
        self._what = what
        self._failed = 0
        if self._bar is None:
            self._write(self._step())
        else:
            self._bar.reset(self._task, description=self._step(), total=None, unit="")

    def watch(self, session: SparkSession) -> None:
        """Show the tasks of a session from now on, by a thread of its own."""
        self._look = lambda: tasks_of(session)
        self._watcher = threading.Thread(target=self._run, daemon=True)
        self._watcher.start()

    def unwatch(self) -> None:
        """Ask the session nothing any more: it is about to end."""
        self._over.set()
        if self._watcher is not None:
            self._watcher.join()

    def show(self, tasks: Tasks) -> None:
        """Show how far the step is; failed attempts in one line each time."""
        if tasks.failed > self._failed:
            failed = tasks.failed - self._failed
            self._failed = tasks.failed
            self._say(f"{failed} task{'s' * (failed > 1)} failed; Spark tries again")
        if self._bar is not None:
            self._bar.update(
                self._task,
                completed=tasks.done,
                total=tasks.total or None,
                unit="tasks" if tasks.total else "",
            )
        elif tasks.total:
            left = tasks.total - tasks.done
            self._write(f"{self._step()}: {tasks.done} tasks done, {left} left")

    def _run(self) -> None:
        interval = _LOG_INTERVAL if self._bar is None else _BAR_INTERVAL
        while not self._over.wait(interval):
            assert self._look is not None
            self.show(self._look())

    def _step(self) -> str:
        return f"step {self._number} of {self._steps}: {self._what}"

    def _say(self, text: str) -> None:
        if self._bar is None:
            self._write(text)
        else:
            self._bar.console.print(text, highlight=False)

    def _write(self, text: str) -> None:
        self._out.write(f"{self._now() - self._started:8.1f} s  {text}\n")
        self._out.flush()
