"""The progress display of a job: a bar on a terminal, lines in a log.

A job consists of steps, which it begins one after the other. Within a step, the display
counts Spark's tasks, or the files of a job without Spark. It starts with the job,
because Spark itself takes several seconds to start.
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

#: The interval between two updates of a bar, in s.
_BAR_INTERVAL: Final = 0.5

#: The interval between two lines of a log within a step, in s.
_LOG_INTERVAL: Final = 10.0


@attrs.frozen
class Tasks:
    """The tasks of the stages that Spark is executing, or the files of a step.

    :ivar failed: attempts that failed; Spark retries them, or the job fails.
    """

    done: int
    total: int
    failed: int = 0


def tasks_of(session: SparkSession) -> Tasks:
    """Return the tasks of the active stages. Thread-safe."""
    tracker = session.sparkContext.statusTracker()
    # A stage may end between the two calls.
    found = [tracker.getStageInfo(id_) for id_ in tracker.getActiveStageIds()]
    stages = [stage for stage in found if stage is not None]
    return Tasks(
        sum(stage.numCompletedTasks for stage in stages),
        sum(stage.numTasks for stage in stages),
        sum(stage.numFailedTasks for stage in stages),
    )


class JobProgress:
    """Shows the steps of one job, while in the context. Not thread-safe.

    :param out: gets a bar if it is a terminal, lines otherwise.
    :param steps: the number of steps.
    :param now: returns monotonic time in s.
    :param unit: what is counted within a step.
    """

    def __init__(
        self,
        out: TextIO,
        steps: int,
        now: Callable[[], float] = time.monotonic,
        unit: str = "tasks",
    ) -> None:
        self._out = out
        self._unit = unit
        self._steps = steps
        self._now = now
        self._started = now()
        self._number = 0
        self._what = ""
        self._failed = 0
        self._counted = Tasks(0, 0)
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

    def expect(self, steps: int) -> None:
        """Add steps, which were not known at the start of the job."""
        self._steps += steps

    def begin(self, what: str) -> None:
        """Begin the next step.

        :param what: what the step does, in a few words.
        """
        self._number += 1
        self._what = what
        self._failed = 0
        self._counted = Tasks(0, 0)
        if self._bar is None:
            self._write(self._step())
        else:
            self._bar.reset(self._task, description=self._step(), total=None, unit="")

    def watch(self, session: SparkSession) -> None:
        """Show the tasks of a session from now on, from a thread."""
        self._start(lambda: tasks_of(session))

    def count(self, done: int, total: int) -> None:
        """Set how far the current step is, for a thread that shows it in intervals.

        :param done: how many of ``total`` are done.
        """
        self._counted = Tasks(done, total)
        if self._watcher is None:
            self._start(lambda: self._counted)

    def _start(self, look: Callable[[], Tasks]) -> None:
        self._look = look
        self._watcher = threading.Thread(target=self._run, daemon=True)
        self._watcher.start()

    def unwatch(self) -> None:
        """Stop the thread, for instance because the session is about to end."""
        self._over.set()
        if self._watcher is not None:
            self._watcher.join()

    def show(self, tasks: Tasks) -> None:
        """Show how far the step is; a line for newly failed attempts."""
        if tasks.failed > self._failed:
            failed = tasks.failed - self._failed
            self._failed = tasks.failed
            self._say(f"{failed} task{'s' * (failed > 1)} failed; Spark retries")
        if self._bar is not None:
            self._bar.update(
                self._task,
                completed=tasks.done,
                total=tasks.total or None,
                unit=self._unit if tasks.total else "",
            )
        elif tasks.total:
            left = tasks.total - tasks.done
            self._write(f"{self._step()}: {tasks.done} {self._unit} done, {left} left")

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
