"""The steps of one scenario: load, fault, recovery under load, end, check."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
from msgspec import structs

from scripts.tools.faults.deployment import FaultDeployment, row_keys
from scripts.tools.faults.scenarios import Scenario
from scripts.tools.faults.stalls import (
    LASTING,
    LoggedStall,
    is_true,
    read_stalls,
    shown_stalls,
)
from synapse_replication.demo.check import JournalEntry, WriterTally, compare
from synapse_replication.demo.course import Tail
from synapse_replication.demo.deployment import (
    READERS,
    WRITERS,
    DemoPlan,
    wait_until_ready,
)
from synapse_replication.demo.display import positions_agree
from synapse_replication.demo.script import STREAMS, DemoStream
from synapse_replication.errors import ReplicationError

#: The interval at which the files are read, in s.
POLL = 0.1

#: The duration of load before a fault, and the minimum duration after it, in s.
LOAD_BEFORE = 2.0
LOAD_AFTER = 1.0

#: The time within which all readers must catch up, in s; a dead link is detected within
#: 60 s.
CATCH_UP_TIMEOUT = 75.0

#: The time within which a process shows no stall any more, in s: it looks for stuck ids
#: every 5 s.
STATUS_TIMEOUT = 6.0

#: The maximum number of writes of the script to skip.
MOST_SKIPPED = 500

Positions = dict[tuple[str, str], int]


@attrs.frozen
class Settings:
    """The settings of all scenarios.

    :ivar seed: the seed of random choices: durations, and the start of the script.
    """

    recording: Path
    rate: float
    seed: int


@attrs.frozen
class Result:
    """The result of a scenario; a line of the table.

    :ivar written: the number of rows that should have reached each reader.
    :ivar received: the number of rows in the journals of all readers.
    :ivar refused: the number of writes that failed while the database was down or full.
    :ivar catch_ups: the number of catch-ups of all readers since the load began.
    :ivar seconds: the time in s from the end of the fault until each reader had all
        rows written before the fault ended; ``None`` if that took too long.
    :ivar agreed: whether all positions were equal after the writers had ended.
    :ivar stalls: the number of stalls and resets that processes logged, and of stalls
        that they show at the end.
    :ivar false_stalls: those that the fault does not explain.
    :ivar skipped: why the scenario could not run here; empty if it ran.
    :ivar error: other failures; empty if there were none.
    """

    scenario: str
    written: int = 0
    received: int = 0
    refused: int = 0
    lost: int = 0
    duplicated: int = 0
    reordered: int = 0
    catch_ups: int = 0
    seconds: float | None = None
    agreed: bool = False
    stalls: int = 0
    false_stalls: tuple[str, ...] = ()
    skipped: str = ""
    error: str = ""

    @property
    def is_good(self) -> bool:
        """Whether no row was lost, duplicated or reordered, and all positions agree."""
        if self.skipped:
            return True
        wrong = self.lost + self.duplicated + self.reordered
        return (
            bool(
                self.written and self.agreed and not wrong and self.seconds is not None
            )
            and not self.error
            and not self.false_stalls
        )


def have_caught_up(targets: Positions, readers: Iterable[Positions]) -> bool:
    """Return whether each reader has reached each writer's last token.

    :param targets: the last token of each ``(stream, writer)``.
    """
    return all(
        reader.get(key, -1) >= token
        for reader in readers
        for key, token in targets.items()
    )


def _all_equal(
    readers: Iterable[Positions], writers_of: Callable[[DemoStream], Sequence[str]]
) -> bool:
    """Return whether all readers have the same position for all writers of a stream."""
    by_stream: dict[str, set[int]] = {}
    known = list(readers)
    for stream in STREAMS.values():
        by_stream[stream.name] = {
            reader.get((stream.name, writer), -1)
            for reader in known
            for writer in writers_of(stream)
        }
    return all(len(positions) == 1 for positions in by_stream.values())


def make_result(
    scenario: str,
    tallies: list[WriterTally],
    *,
    catch_ups: int,
    seconds: float | None,
    removed: Collection[tuple[str, str]] = (),
) -> Result:
    """Return the result of a scenario: the sums of the comparisons.

    :param removed: the ``(stream, writer)`` pairs of removed writers, whose positions
        need not agree with the others.
    """
    agreed = positions_agree(
        [t for t in tallies if (t.stream_name, t.instance_name) not in removed]
    ) and all(tally.has_caught_up for tally in tallies)
    return Result(
        scenario,
        written=sum(tally.written for tally in tallies) // len(READERS),
        received=sum(tally.received for tally in tallies),
        lost=sum(tally.missing for tally in tallies),
        duplicated=sum(tally.duplicated for tally in tallies),
        reordered=sum(tally.out_of_order for tally in tallies),
        catch_ups=catch_ups,
        seconds=seconds,
        agreed=agreed,
    )


def without_rows(
    journal: Sequence[JournalEntry],
    stream: str,
    writer: str,
    rows: Counter[tuple[int, str]],
) -> Sequence[JournalEntry]:
    """Remove rows of a writer from a journal, each at most as often as counted.

    :param rows: the rows, as :func:`row_keys` returns them.
    """
    if not rows:
        return journal
    left = Counter(rows)

    def is_kept(token: int, row: Any) -> bool:
        (key,) = row_keys([(token, row)])
        left[key] -= 1
        return left[key] < 0

    return [
        structs.replace(
            entry, rows=[row for row in entry.rows if is_kept(entry.token, row)]
        )
        if (entry.stream_name, entry.instance_name) == (stream, writer)
        else entry
        for entry in journal
    ]


def run_scenario(
    scenario: Scenario, settings: Settings, print_line: Callable[[str], None]
) -> Result:
    """Run a scenario on a deployment of its own.

    :param print_line: prints a line.
    """
    if reason := scenario.why_skipped():
        return Result(scenario.name, skipped=reason)
    chance = random.Random(f"{settings.seed} {scenario.name}")
    use_redis = not scenario.needs.direct_tcp
    plan = DemoPlan(settings.recording, 0, settings.rate, use_redis=use_redis)
    deployment = FaultDeployment(plan, scenario.needs, chance.randrange(MOST_SKIPPED))
    try:
        course = _Course(deployment, scenario, chance)
        result = course.run()
        if not result.is_good:
            for tally in course.tallies:
                if not tally.is_good:
                    print_line(str(tally))
            print_line(_logs(deployment))
        return result
    except ReplicationError as error:
        return Result(scenario.name, error=str(error))
    finally:
        deployment.close()


def _logs(deployment: FaultDeployment) -> str:
    return "\n".join(
        f"the end of the log of {name}:\n{process.log_tail()}"
        for name, process in deployment.processes.items()
    )


class _Course:
    """Performs the steps of a scenario, and follows its writers and readers.

    :ivar tallies: the comparisons at the end.
    """

    def __init__(
        self, deployment: FaultDeployment, scenario: Scenario, chance: random.Random
    ) -> None:
        self._deployment = deployment
        self._scenario = scenario
        self._chance = chance
        self._writers = [Tail(deployment.log_of(name)) for name in WRITERS]
        self._readers = [Tail(deployment.journal_of(name)) for name in READERS]
        self.tallies: list[WriterTally] = []

    def run(self) -> Result:
        deployment = self._deployment
        deployment.start_servers()
        deployment.start_processes()
        wait_until_ready(deployment.processes.values())
        before = deployment.catch_ups()

        deployment.let_writers_begin()
        self._wait(LOAD_BEFORE + self._chance.random(), lambda: False)
        started = time.time()
        self._scenario.cause(deployment, self._chance)
        ended, fault_ended = time.time(), time.monotonic()
        self._update()
        targets = self._written()
        counts = [tail.rows for tail in self._writers]
        for tail in self._writers:
            # A writer that was stopped cleanly has logged "finished".
            tail.finished = False
        found = self._wait(CATCH_UP_TIMEOUT, lambda: self._is_past(targets))
        seconds = time.monotonic() - fault_ended if found else None
        self._wait(LOAD_AFTER, lambda: False)
        have_resumed = self._wait(CATCH_UP_TIMEOUT, lambda: self._have_resumed(counts))

        deployment.end_writers()
        self._wait(CATCH_UP_TIMEOUT, self._have_finished)
        self._wait(CATCH_UP_TIMEOUT, self._agree)
        catch_ups = deployment.catch_ups() - before
        refused = deployment.refused_writes()
        shown: list[LoggedStall] = []
        self._wait(STATUS_TIMEOUT, lambda: not self._read_shown(shown))
        statuses = deployment.stop_processes()
        self.tallies = self._compare()
        result = make_result(
            self._scenario.name,
            self.tallies,
            catch_ups=catch_ups,
            seconds=seconds,
            removed={
                (stream.name, writer)
                for stream in STREAMS.values()
                for writer in deployment.all_writers_of(stream)
                if writer not in deployment.writers_of(stream)
            },
        )
        errors = [
            f"{name} ended with {code}" for name, code in statuses.items() if code
        ]
        if not have_resumed:
            errors.append("a writer did not resume writing after the fault")
        stalls = [
            stall
            for name, process in deployment.processes.items()
            for stall in read_stalls(name, process.log_text())
        ]
        false = [
            str(stall)
            for stall in stalls
            if not is_true(stall, self._scenario.name, started, ended)
        ]
        false += [
            f"shown at the end: {stall}"
            for stall in shown
            if stall.reason not in LASTING
            or not is_true(stall, self._scenario.name, started, ended)
        ]
        return attrs.evolve(
            result,
            refused=refused,
            stalls=len(stalls) + len(shown),
            false_stalls=tuple(false),
            error="; ".join(errors),
        )

    def _read_shown(self, shown: list[LoggedStall]) -> list[LoggedStall]:
        """Replace the stalls by those that the processes show now."""
        deployment = self._deployment
        shown[:] = [
            stall
            for name in deployment.processes
            for stall in shown_stalls(name, deployment.get_status(name))
        ]
        return shown

    def _wait(self, seconds: float, condition: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + seconds
        while True:
            self._update()
            if condition():
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL)

    def _update(self) -> None:
        for process in self._deployment.processes.values():
            process.check()
        for tail in (*self._writers, *self._readers):
            tail.read_new_lines()

    def _have_resumed(self, counts: list[int]) -> bool:
        return all(
            tail.rows > count
            for name, tail, count in zip(WRITERS, self._writers, counts, strict=True)
            if self._deployment.is_writing(name)
        )

    def _have_finished(self) -> bool:
        return all(
            tail.finished
            for name, tail in zip(WRITERS, self._writers, strict=True)
            if self._deployment.is_writing(name)
        )

    def _written(self) -> Positions:
        return {
            key: token
            for tail in self._writers
            for key, token in tail.positions.items()
        }

    def _is_past(self, targets: Positions) -> bool:
        return have_caught_up(targets, [tail.positions for tail in self._readers])

    def _agree(self) -> bool:
        readers = [tail.positions for tail in self._readers]
        return have_caught_up(self._written(), readers) and _all_equal(
            readers, self._deployment.writers_of
        )

    def _compare(self) -> list[WriterTally]:
        tallies = []
        journals = {name: self._deployment.journal(name) for name in READERS}
        for stream in STREAMS.values():
            for writer in self._deployment.all_writers_of(stream):
                written = self._deployment.written_rows(stream, writer)
                forgotten = self._deployment.forgotten_rows(stream, writer)
                tallies += [
                    compare(
                        stream.name,
                        writer,
                        reader,
                        written,
                        without_rows(journal, stream.name, writer, forgotten),
                    )
                    for reader, journal in journals.items()
                ]
        return tallies
