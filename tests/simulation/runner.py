"""One run of the simulation: traffic and faults, then a quiet period, then a result."""

from __future__ import annotations

import gc
import random
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random

import attrs
from twisted.logger import ILogObserver, LogEvent, LogLevel, globalLogPublisher
from twisted.python.failure import Failure
from zope.interface import implementer

from tests.simulation.cluster import Cluster
from tests.simulation.faults import Faults
from tests.simulation.invariants import ViolationError
from tests.simulation.moves import Moves
from tests.simulation.topology import MEMORY_STREAM, PROCESSES, WRITERS
from tests.simulation.watcher import Counts

#: The time in s at which traffic and faults begin.
BEGIN = 2.0
#: The time in s at which faults end. In the 2 s before, no further write is scheduled,
#: except those that are part of a fault.
END = 17.0
#: The shortest time in s from :data:`END` to the check of the positions, in which
#: messages in flight arrive, unless a fault had slowed down their connection.
ARRIVAL_SECONDS = 2.0
#: The shortest time in s between the last move of a stream and the end of faults.
LAST_MOVE = 3.0
#: The time in s after the last fault within which all positions must agree.
LIVENESS_SECONDS = 60.0
#: The time in s within which half-open connections are detected and replaced. To Redis,
#: there is a ping every 5 s with a timeout of 5 s, and a second half-open connection
#: may be detected only after the first was replaced; a direct link has a timeout of 25
#: s.
NOTICE_SECONDS = 32.0
#: The time in s within which a connection is closed and replaced that became half-open
#: before its first command.
NAMELESS_SECONDS = 70.0
#: The time in s without agreement after which all processes announce their positions.
#: Rows behind a half-open connection may be noticed only after it was replaced.
ANNOUNCE_SECONDS = NOTICE_SECONDS + 3.0
#: The time in s during which an idle cluster must send no messages on the main channel.
IDLE_SECONDS = 5.0
#: The number of allowed catch-ups of each process beyond those that events explain.
ALLOWANCE = 10


@attrs.frozen
class Result:
    """The result of one seed.

    :ivar seed: the seed.
    :ivar failure: the violated invariant, or the unexpected error; ``None`` for none.
    :ivar crashed: whether the failure is an unexpected error.
    :ivar agreed_after: the time in s from the end of the faults until all positions
        agreed.
    """

    seed: int
    failure: str | None
    crashed: bool
    counts: Counts
    committed_rows: int
    applied_rows: int
    excused_rows: int
    excused_resets: int
    messages: int
    agreed_after: float
    simulated_seconds: float
    calls: int


def simulate(
    seed: int,
    trace_to: Callable[[float, str], object] | None = None,
    *,
    discards: bool = False,
    replaces: bool = False,
) -> Result:
    """Run the cluster of a seed to its end, or to the first violation or other error.

    :param trace_to: called with (time, text) for each event.
    :param discards: whether writers may discard rows instead of publishing them; no
        writer is then moved, and nothing false is announced.
    :param replaces: whether writers acquire their names, and may be suspended and
        replaced; none is moved.
    """
    # Exclude existing objects, which do not belong to this seed, from the garbage
    # collection.
    gc.freeze()
    with unhandled_errors() as unhandled:
        run = Run(seed, trace_to, discards=discards, replaces=replaces)
        result = _simulate(run, seed)
        # The unhandled error of a Deferred is logged when the Deferred is collected.
        gc.collect()
    gc.unfreeze()
    if unhandled and result.failure is None:
        return attrs.evolve(result, failure=unhandled[0], crashed=True)
    return result


def _simulate(run: Run, seed: int) -> Result:
    failure: str | None = None
    crashed = False
    try:
        run.run()
    except ViolationError as violation:
        failure = str(violation)
    except Exception as error:  # noqa: BLE001 -- reported in the result
        crashed = True
        where = traceback.extract_tb(error.__traceback__)[-1]
        failure = (
            f"{type(error).__name__}: {error} ({where.filename}:{where.lineno}, "
            f"{where.name})"
        )
    cluster = run.cluster
    for name in list(cluster.processes):
        cluster.crash(name)
    for process in list(cluster.replaced):
        cluster.leave(process)
    cluster.clock.calls.clear()
    return Result(
        seed,
        failure,
        crashed,
        cluster.counts,
        cluster.ledger.committed_rows,
        cluster.ledger.applied_rows,
        cluster.ledger.excused_rows,
        cluster.ledger.excused_resets,
        cluster.broker.messages,
        run.agreed_after,
        cluster.clock.rightNow,
        cluster.clock.made,
    )


@contextmanager
def unhandled_errors() -> Iterator[list[str]]:
    """Collect unhandled errors in Deferreds."""
    found: list[str] = []

    @implementer(ILogObserver)
    def observe(event: LogEvent) -> None:
        if event.get("log_level") is LogLevel.critical and "log_failure" in event:
            failure: Failure = event["log_failure"]
            found.append(f"unhandled error {failure.value!r}")

    globalLogPublisher.addObserver(observe)
    try:
        yield found
    finally:
        globalLogPublisher.removeObserver(observe)


class Run:
    """A simulation whose cluster can be inspected.

    The arguments are those of :func:`simulate`.

    :ivar cluster: the cluster.
    :ivar end: the simulated time in s at which the faults end.
    :ivar agreed_after: the time in s from the end of the faults until all positions
        agreed.
    """

    def __init__(
        self,
        seed: int,
        trace_to: Callable[[float, str], object] | None = None,
        *,
        discards: bool = False,
        replaces: bool = False,
    ) -> None:
        # The jitter of the attempts to read from the database at a start.
        random.seed(seed)
        self.cluster = Cluster(seed, trace_to, discards=discards, replaces=replaces)
        self.agreed_after = 0.0
        self.end = END
        self._random = Random(f"{seed}/traffic")
        self._faults = Faults(self.cluster, seed, BEGIN, END)
        if not (discards or replaces):
            Moves(self.cluster, seed, BEGIN, END - LAST_MOVE)
        self._rate = self._random.choice([4.0, 8.0, 16.0])

    def run(self) -> None:
        """Run to the end.

        :raises ViolationError: if an invariant does not hold.
        """
        self._start_all()
        # Wait: a false position that is still in flight could arrive after all
        # positions agreed.
        self._go_until(self.end + ARRIVAL_SECONDS)
        self._wait_for_agreement()
        self._check_idle()
        self._check_catch_ups()

    def _start_all(self) -> None:
        clock = self.cluster.clock
        for name in PROCESSES:
            clock.callLater(self._random.random(), self.cluster.start, name)
        clock.callLater(BEGIN, self._write)

    def _go_until(self, when: float) -> None:
        cluster = self.cluster
        while cluster.clock.rightNow < when:
            cluster.clock.run_until(min(when, cluster.clock.rightNow + 1.0))
            problems = cluster.ledger.violations + cluster.problems
            if problems:
                raise ViolationError(problems[0])

    def _write(self) -> None:
        cluster, source = self.cluster, self._random
        streams = list(cluster.writers)
        stream = source.choice(streams)
        if stream == MEMORY_STREAM and source.random() < 0.5:
            stream = streams[0]
        rows = source.choice([1, 1, 2, 3, 7])
        # Several writes at the same time, whose ids are in flight together.
        for _ in range(source.choice([1, 1, 3])):
            cluster.write(source.choice(cluster.writers[stream]), stream, rows)
        if cluster.clock.rightNow < self.end - 2.0:
            cluster.clock.callLater(source.expovariate(self._rate), self._write)

    def _wait_for_agreement(self) -> None:
        cluster = self.cluster
        is_announced = False
        while found := cluster.differences():
            self.agreed_after = cluster.clock.rightNow - self.end
            if self.agreed_after > LIVENESS_SECONDS:
                raise ViolationError(
                    f"{LIVENESS_SECONDS:g} s after the last fault, " + "; ".join(found)
                )
            if self.agreed_after > 5.0:
                self._nudge()
            if self.agreed_after > ANNOUNCE_SECONDS and not is_announced:
                is_announced = True
                self._announce()
            self._go_until(cluster.clock.rightNow + 0.5)
        self.agreed_after = cluster.clock.rightNow - self.end

    def _nudge(self) -> None:
        """Make each writer write another row if its readers may need one.

        A reader that receives a row with an unreadable token does not know what to
        fetch until it receives the next row of the writer. If a reader is ahead of a
        writer, the sequence is first advanced to the reader's position.
        """
        cluster, lied_about = self.cluster, self._faults.liar.lied_about
        for _, stream, writer in list(self._faults.unread):
            cluster.write(writer, stream, 1)
        self._faults.unread.clear()
        # Like an operator, follow the runbook for a reader that is ahead of its writer,
        # unless a slower link only showed an earlier position: no alert fires for that.
        for process in cluster.processes.values():
            for (stream, writer), position in process.watcher.ahead.items():
                own = cluster.processes.get(writer)
                if own and own.is_up and own.position(stream, writer) >= position:
                    continue
                cluster.database.set_sequence(f"{stream}_seq", position)
                cluster.counts.repairs += 1
                lied_about.add((stream, writer))
            process.watcher.ahead.clear()
        # Without the extension, only the writer's next row reveals a false position.
        for stream, writer in sorted(lied_about):
            cluster.write(writer, stream, 1)
        lied_about.clear()

    def _announce(self) -> None:
        """Let every process announce its positions, as when a new process connects.

        Stock peers announce unchanged positions at no other time. To a reader that
        accepted a forged row, the writer's next rows look old; only this announcement
        reveals the error.
        """
        for name, process in self.cluster.processes.items():
            self.cluster.counts.announcements[name] += 1
            process.handler.sender.announce_positions()

    def _count_commands(self, seconds: float) -> int:
        """Return the number of commands that are sent within a time in s."""
        before = self.cluster.counts.commands
        self._go_until(self.cluster.clock.rightNow + seconds)
        return self.cluster.counts.commands - before

    def _check_idle(self) -> None:
        cluster, clock = self.cluster, self.cluster.clock
        # Half-open connections that are detected now may still cause messages.
        deadline = clock.rightNow + NAMELESS_SECONDS
        self._go_until(clock.rightNow + NOTICE_SECONDS)
        while sent := self._count_commands(IDLE_SECONDS):
            if clock.rightNow > deadline:
                raise ViolationError(
                    f"{sent} commands in {IDLE_SECONDS:g} s, although the cluster was "
                    "idle"
                )
        if found := cluster.differences():
            raise ViolationError("disagreement after agreement: " + "; ".join(found))

    def _check_catch_ups(self) -> None:
        """Compare the number of catch-ups with the events that explain them."""
        cluster, counts = self.cluster, self.cluster.counts
        pairs = len(WRITERS) * len(cluster.writers)
        # Every process may miss rows of a writer that was disconnected or started.
        for_every_process = sum(
            (counts.announcements[writer] + counts.starts[writer])
            for writer in WRITERS
            for _ in cluster.writers
        )
        others = counts.garbled + counts.sink_failures + counts.collapses
        # Each false position may cause a check, a rewind and a further catch-up.
        others += 6 * counts.faults["lie"] + counts.fallbacks
        # Each discarded token may be fetched because of a stored position.
        others += self.cluster.ledger.discarded_tokens
        for name, made in counts.catch_ups.items():
            allowed = (
                counts.subscriptions[name] * pairs
                + for_every_process
                + others
                + counts.drains[name]
                + ALLOWANCE
            )
            if made > allowed:
                raise ViolationError(
                    f"{name} caught up {made} times; {allowed} are explained"
                )
