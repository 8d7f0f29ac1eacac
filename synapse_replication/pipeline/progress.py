"""The progress display of a job: a bar on a terminal, lines in a log.

A job consists of consecutive steps. Within a step, the display counts Spark's tasks, or
files if the job does not use Spark. The display is shown from the beginning of the job,
because Spark takes several seconds to start.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, TextIO

import attrs
from rich import progress
from rich.console import Console
from typing_extensions import Self

from synapse_replication.text import counted, printable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: The interval between two updates of a bar, in s.
_BAR_INTERVAL: Final = 0.5

#: The interval between two lines of a log within a step, in s.
_LOG_INTERVAL: Final = 10.0


@attrs.frozen
class Tasks:
    """The tasks of the stages that Spark is executing, or the files of a step.

    :ivar failed: the number of failed attempts. Spark retries the tasks, or fails the
        job.
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


class Display(contextlib.ExitStack):
    """One line that is updated on a terminal, or lines with times in a log.

    It is shown within its context.

    :param out: where to write: a bar if it is a terminal, lines otherwise.
    """

    def __init__(self, out: TextIO) -> None:
        super().__init__()
        self._out = out
        self._started = time.monotonic()
        self._bar: progress.Progress | None = None
        if out.isatty():
            self._bar = progress.Progress(
                progress.SpinnerColumn(),
                progress.TextColumn("{task.description}"),
                progress.BarColumn(bar_width=24),
                progress.MofNCompleteColumn(),
                progress.TextColumn("{task.fields[note]}", style="dim"),
                progress.TimeElapsedColumn(),
                console=Console(file=out),
                transient=True,
            )
            self._task = self._bar.add_task("starting", total=None, note="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self.enter_context(self._bar)
        return self

    def write(self, text: str) -> None:
        """Write a line, on a terminal above the bar."""
        text = printable(text)
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            self._out.write(f"{time.monotonic() - self._started:8.1f} s  {text}\n")
            self._out.flush()

    def update(self, line: str, text: str, note: str, done: int, total: int) -> None:
        """Write a line in a log, or update the bar.

        :param line: the line in a log.
        :param text: the text before the bar.
        :param note: the text after the bar.
        :param total: the length of the bar; 0 if it is unknown.
        """
        if self._bar is None:
            self.write(line)
        else:
            self._bar.update(
                self._task,
                description=text,
                note=note,
                completed=done,
                total=total or None,
                refresh=True,
            )


class JobProgress(Display):
    """The display of a job's steps. Not thread-safe.

    :param steps: the number of steps.
    :param unit: the plural of what is counted within a step.
    """

    def __init__(self, out: TextIO, steps: int, unit: str = "tasks") -> None:
        super().__init__(out)
        self._unit = unit
        self._steps = steps
        self._number = 0
        self._step = ""
        self._failed = 0
        self._counted = self._started

    def expect(self, steps: int) -> None:
        """Add steps that were unknown at the start of the job to the total."""
        self._steps += steps

    def begin(self, name: str) -> None:
        """Begin the next step.

        :param name: what the step does, in a few words.
        """
        self._number += 1
        self._step = f"step {self._number} of {self._steps}: {name}"
        self._failed = 0
        self.update(self._step, self._step, "", 0, 0)

    @contextlib.contextmanager
    def watching(self, session: SparkSession) -> Iterator[None]:
        """Show the tasks of a session, from a thread, within the context."""
        ended = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(session, ended))
        watcher.daemon = True
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()

    def count(self, done: int, total: int) -> None:
        """Show the progress of the current step, in a log only at intervals.

        :param done: the number of completed units.
        :param total: the number of all units of the step.
        """
        now = time.monotonic()
        if self._bar is not None or now - self._counted >= _LOG_INTERVAL:
            self._counted = now
            self.show(Tasks(done, total))

    def show(self, tasks: Tasks) -> None:
        """Show the progress of the step, and any failures since the last call."""
        if tasks.failed > self._failed:
            failed = counted(tasks.failed - self._failed, "task")
            self._failed = tasks.failed
            self.write(f"{failed} failed; Spark retries, or the job fails")
        if tasks.total:
            left = tasks.total - tasks.done
            line = f"{self._step}: {tasks.done} {self._unit} done, {left} left"
            self.update(line, self._step, self._unit, tasks.done, tasks.total)

    def _watch(self, session: SparkSession, ended: threading.Event) -> None:
        interval = _LOG_INTERVAL if self._bar is None else _BAR_INTERVAL
        while not ended.wait(interval):
            self.show(tasks_of(session))
