"""A small world of a writer, its successor, their database, and a reader.

The writer's parts are the real ones: its positions, the outcome of its transactions,
what an answer of the database proves, the table of its name, and the allocation of ids.
The database, the network and the driver are modelled here. Ids are distances from zero.

The promise: *no reader's position ever passes a committed row that it did not deliver*,
whatever the writer's process believed; and the application is told what is true.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Final, TypeAlias

import attrs

from synapse_replication.storage import queries
from synapse_replication.storage.admission import Admission
from synapse_replication.storage.id_streams import IdStream
from synapse_replication.storage.sequences import fetch_ids
from synapse_replication.streams import writer as machine
from synapse_replication.streams.writer_positions import WriterPositions
from synapse_replication.streams.writer_table import (
    NAME,
    Effect,
    NameEvent,
    NameState,
    TransactionEvent,
    TransactionState,
)

Event: TypeAlias = tuple[Any, ...]

_STREAM: Final = IdStream(
    stream_name="s", sequence="s_seq", tables=(), writers=("w1", "w2")
)


class BrokenPromiseError(Exception):
    """A promise of the writer was broken."""


class NameRefusedError(Exception):
    """The database refused a statement, because the name was acquired since."""


@attrs.frozen
class Bounds:
    """The size of a world: what may happen in it.

    :ivar blocks: the number of ids of each transaction, by process.
    :ivar freezes: how often a process is suspended.
    :ivar breaks: how many connections break.
    :ivar severs: how often all sessions of a process end.
    :ivar failures: how many commits fail.
    :ivar failovers: how often the database fails over.
    :ivar set_backs: how often the sequence is set back, by one id.
    :ivar snapshots: how many old snapshots the reader may read.
    :ivar others: how many rows another writer writes.
    """

    blocks: tuple[tuple[int, ...], ...] = ((2,), (1,))
    freezes: int = 0
    breaks: int = 0
    severs: int = 0
    failures: int = 0
    failovers: int = 0
    set_backs: int = 0
    snapshots: int = 0
    others: int = 0


_FAULTS: Final = (
    "freezes",
    "breaks",
    "severs",
    "failures",
    "failovers",
    "set_backs",
    "snapshots",
    "others",
)
FREEZE, BREAK, SEVER, FAIL, FAILOVER, SET_BACK, SNAPSHOT, OTHER = range(len(_FAULTS))

#: The events that nothing makes happen: liveness does not count on them.
FAULT_EVENTS: Final = frozenset(
    {"freeze", "break", "sever", "fail", "failover", "set back", "snapshot", "other"}
)


class Block:
    """A transaction of a process, at both ends.

    :ivar phase: ``want`` ids, ``asked`` for them, ``given`` by the server, ``have``
        them, ``open``, ``done``.
    :ivar server: what the server has: ``none``, ``open``, ``committing``,
        ``committed`` or ``aborted``.
    :ivar has_session: whether its session exists at the server.
    :ivar is_connected: whether its connection is usable.
    :ivar commit_sent: whether a COMMIT is on its way to the server.
    :ivar answer: the answer that is on its way to the process.
    :ivar history: the history of the server in which it began.
    """

    __slots__ = (
        "answer",
        "commit_sent",
        "count",
        "fetch",
        "has_session",
        "history",
        "ids",
        "is_connected",
        "outcome",
        "phase",
        "server",
    )

    def __init__(self, count: int) -> None:
        self.count = count
        self.phase = "want"
        self.ids: tuple[int, ...] = ()
        self.fetch = 0
        self.outcome = TransactionState.RUNNING
        self.server = "none"
        self.has_session = self.is_connected = self.commit_sent = False
        self.answer = ""
        self.history = 0

    def copy(self) -> Block:
        new = Block.__new__(Block)
        for name in Block.__slots__:
            setattr(new, name, getattr(self, name))
        return new

    def key(self) -> Hashable:
        return tuple(getattr(self, name) for name in Block.__slots__)


class Process:
    """An incarnation of the writer."""

    __slots__ = ("blocks", "heard_other", "is_frozen", "name", "positions", "term")

    def __init__(self, counts: Sequence[int]) -> None:
        self.name = NameState.UNLOCKED
        self.is_frozen = False
        self.term = 0
        self.positions: WriterPositions | None = None
        self.blocks = [Block(count) for count in counts]
        self.heard_other = 0

    def copy(self) -> Process:
        new = Process.__new__(Process)
        new.name, new.is_frozen, new.term = self.name, self.is_frozen, self.term
        new.positions = None if self.positions is None else _copy(self.positions)
        new.blocks = [block.copy() for block in self.blocks]
        new.heard_other = self.heard_other
        return new

    def key(self) -> Hashable:
        positions = None if self.positions is None else _key(self.positions)
        blocks = tuple(block.key() for block in self.blocks)
        return (
            self.name,
            self.is_frozen,
            self.term,
            positions,
            blocks,
            self.heard_other,
        )

    @property
    def runs(self) -> bool:
        """Whether it executes code, and may write."""
        return self.name is NameState.HELD and not self.is_frozen

    @property
    def knows(self) -> WriterPositions:
        """Its positions, once it has loaded them."""
        assert self.positions is not None
        return self.positions

    def handle(self, event: NameEvent) -> Sequence[Effect]:
        """Let its name's table decide."""
        step = NAME.get((self.name, event))
        if step is None:
            raise BrokenPromiseError(f"{event.value} while {self.name.value}")
        self.name = step.state
        return step.effects


def _copy(positions: WriterPositions) -> WriterPositions:
    new = WriterPositions.__new__(WriterPositions)
    new.__dict__.update(positions.__dict__)
    finished = positions._finished
    new._finished = type(finished)()
    new._finished._starts = finished._starts[:]
    new._finished._ends = finished._ends[:]
    for name in ("_fetches", "_others", "_in_flight"):
        setattr(new, name, getattr(positions, name).copy())
    for name in ("_in_flight_heap", "_own_finished", "_others_heap"):
        setattr(new, name, getattr(positions, name)[:])
    return new


def _key(positions: WriterPositions) -> Hashable:
    return (
        tuple(positions._finished._starts),
        tuple(positions._finished._ends),
        tuple(positions._fetches.items()),
        tuple(sorted(positions._in_flight)),
        tuple(sorted(positions._own_finished)),
        tuple(positions._others.items()),
        positions.persisted_upto,
        positions.max_finished,
        positions.announced,
        positions.local,
        positions._announceable,
        positions._allocated,
    )


class _Cursor:
    """Executes the statements that allocate ids, at the modelled database."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rows: list[tuple[int, ...]] = []

    def execute(self, statement: str, parameters: dict[str, Any]) -> None:
        world = self._world
        if statement == queries.SQL["admit"]:
            world.check_term(parameters["term"])
            return
        count = parameters["count"]
        first = world.sequence + 1
        world.sequence += count
        if statement == queries.SQL["skip_ids"]:
            self._rows = [(world.sequence,)]
            return
        if statement.endswith(queries.SQL["id_and_term"]):
            self._rows = [(first, world.term)]
            return
        world.check_term(parameters["term"])
        self._rows = [(id_,) for id_ in range(first, first + count)]

    def fetchall(self) -> list[tuple[int, ...]]:
        return self._rows

    def fetchone(self) -> tuple[int, ...]:
        return self._rows[0]


class World:
    """One state; :meth:`apply` changes it, :meth:`events` lists what may happen."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.left = [getattr(bounds, name) for name in _FAULTS]
        self.sequence, self.term, self.history = 1, 1, 0
        self.lock: int | None = 0
        self.rows: frozenset[int] = frozenset()
        self.stored = 1
        self.other = 0
        self.processes = [Process(counts) for counts in bounds.blocks]
        first = self.processes[0]
        first.name, first.term = NameState.HELD, 1
        first.positions = self._load()
        # The reader.
        self.heard = self.position = 1
        self.delivered: frozenset[int] = frozenset()
        self.snapshot: tuple[frozenset[int], int] | None = None

    def copy(self) -> World:
        new = World.__new__(World)
        new.__dict__.update(self.__dict__)
        new.left = self.left[:]
        new.processes = [process.copy() for process in self.processes]
        return new

    def key(self) -> Hashable:
        return (
            tuple(self.left),
            self.sequence,
            self.term,
            self.history,
            self.lock,
            self.rows,
            self.stored,
            self.other,
            tuple(process.key() for process in self.processes),
            self.heard,
            self.position,
            self.delivered,
            self.snapshot,
        )

    # -- what may happen ---------------------------------------------------------------

    def events(self) -> Iterator[Event]:
        """Yield each event that may happen now."""
        for number, process in enumerate(self.processes):
            yield from self._of_process(number, process)
            for index, block in enumerate(process.blocks):
                yield from self._of_server(number, index, block)
                if process.runs:
                    yield from _of_block(number, index, block)
        yield from self._of_reader()
        yield from self._of_database()

    def _of_process(self, number: int, process: Process) -> Iterator[Event]:
        if process.is_frozen:
            yield "resume", number
            return
        if process.name is NameState.UNLOCKED:
            yield "lock", number
        elif process.name is NameState.WAITING:
            if self.is_committing(process):
                yield "end predecessor", number
            if self.lock != number:
                yield "lost lock", number
            elif not self.must_wait(process):
                yield "acquire", number
        elif process.name is NameState.HELD:
            yield from self._of_holder(number, process)
        if self.left[SEVER] and process.name is not NameState.UNLOCKED:
            yield "sever", number

    def _of_holder(self, number: int, process: Process) -> Iterator[Event]:
        if self.lock != number:
            yield "lock again", number
        if process.knows.announceable > self.heard:
            yield "announce", number
        if process.knows.local > self.stored:
            yield "store", number
        if process.knows.is_beyond_sequence:
            yield "read the sequence", number
        if process.heard_other < self.other:
            yield "hear", number
        if self.left[FREEZE]:
            yield "freeze", number

    def _of_server(self, number: int, index: int, block: Block) -> Iterator[Event]:
        if block.phase == "asked":
            yield "allocate", number, index
        if block.commit_sent:
            yield "commit arrives", number, index
        if block.server == "committing":
            yield "committed", number, index
            if self.left[FAIL]:
                yield "fail", number, index
        if block.server == "open" and not (block.is_connected or block.commit_sent):
            yield "notice", number, index

    def _of_reader(self) -> Iterator[Event]:
        if self.heard > self.position:
            yield "read", False
            if self.snapshot is not None:
                yield "read", True
        if self.left[SNAPSHOT] and self.snapshot is None:
            yield ("snapshot",)

    def _of_database(self) -> Iterator[Event]:
        if self.left[BREAK]:
            for number, process in enumerate(self.processes):
                for index, block in enumerate(process.blocks):
                    if block.is_connected:
                        yield "break", number, index
        if self.left[FAILOVER]:
            yield "failover", True
            if any(
                block.server == "committing"
                for process in self.processes
                for block in process.blocks
            ):
                yield "failover", False
        if self.left[SET_BACK] and self.sequence > 1:
            yield ("set back",)
        if self.left[OTHER]:
            yield ("other",)

    # -- what happens ------------------------------------------------------------------

    def apply(self, event: Event) -> None:
        """Let an event happen.

        :raises BrokenPromiseError: if it breaks a promise.
        """
        getattr(self, "do_" + event[0].replace(" ", "_"))(*event[1:])

    def check_term(self, term: int) -> None:
        """Do what ``synapse_replication_admit`` does."""
        if term != self.term:
            raise NameRefusedError

    def is_committing(self, process: Process) -> bool:
        """Whether a commit of another process has locked the name."""
        return any(
            block.server == "committing"
            for other in self.processes
            if other is not process
            for block in other.blocks
        )

    def must_wait(self, process: Process) -> bool:
        """Whether the database lets a process wait for the term."""
        return self.is_committing(process)

    def _load(self) -> WriterPositions:
        return WriterPositions(
            "w1",
            _STREAM.writers,
            {"w1": self.stored, "w2": max(self.other, 1)},
            sorted(self.rows),
            allocated=self.sequence,
        )

    def _is_admitted(self, process: Process) -> bool:
        """Return whether a process still has its name; if not, tell it."""
        try:
            self.check_term(process.term)
        except NameRefusedError:
            self._refused(process)
            return False
        return True

    def _refused(self, process: Process) -> None:
        if Effect.STOP in process.handle(NameEvent.REFUSED):
            for block in process.blocks:
                block.is_connected = False

    def do_lock(self, number: int) -> None:
        process = self.processes[number]
        if self.lock is None:
            self.lock = number
            process.handle(NameEvent.LOCKED)

    def do_lock_again(self, number: int) -> None:
        process = self.processes[number]
        if self.term != process.term:
            self._refused(process)
        elif self.lock is None:
            self.lock = number
            process.handle(NameEvent.LOCKED)
        else:
            process.handle(NameEvent.LOCK_REFUSED)

    def do_lost_lock(self, number: int) -> None:
        self.processes[number].handle(NameEvent.SESSION_LOST)

    def do_end_predecessor(self, number: int) -> None:
        process = self.processes[number]
        if Effect.END_PREDECESSOR in process.handle(NameEvent.WAITED_LONG):
            for other in self.processes:
                for block in other.blocks:
                    if other is not process and block.server == "committing":
                        block.server = "aborted"
                        block.has_session = block.is_connected = False

    def do_acquire(self, number: int) -> None:
        process = self.processes[number]
        if Effect.ADMIT in process.handle(NameEvent.ACQUIRED):
            self.term += 1
            process.term = self.term
            process.positions = self._load()
            process.heard_other = self.other

    def do_fetch(self, number: int, index: int) -> None:
        process = self.processes[number]
        block = process.blocks[index]
        block.fetch, block.phase = process.knows.begin_fetch(), "asked"

    def do_allocate(self, number: int, index: int) -> None:
        process = self.processes[number]
        block, positions = process.blocks[index], process.knows

        def usable(ids: list[int]) -> list[int]:
            return [id_ for id_ in ids if positions.is_usable(block.fetch, id_)]

        try:
            block.ids = tuple(
                fetch_ids(
                    _Cursor(self),
                    _STREAM,
                    block.count,
                    usable,
                    positions.max_finished,
                    Admission("w1", process.term),
                )
            )
            block.answer = "ids"
        except NameRefusedError:
            block.answer = "refused"
        block.phase = "given"

    def do_take_ids(self, number: int, index: int) -> None:
        process = self.processes[number]
        block = process.blocks[index]
        answer, block.answer = block.answer, ""
        if answer == "refused":
            process.knows.end_fetch(block.fetch, [])
            block.fetch, block.phase = 0, "done"
            self._refused(process)
            return
        if not all(process.knows.is_usable(block.fetch, id_) for id_ in block.ids):
            # As in the generator: another fetch.
            process.knows.end_fetch(block.fetch, [])
            block.ids, block.fetch, block.phase = (), 0, "want"
            return
        process.knows.end_fetch(block.fetch, list(block.ids))
        block.fetch, block.phase = 0, "have"

    def do_begin(self, number: int, index: int) -> None:
        block = self.processes[number].blocks[index]
        block.phase, block.server, block.history = "open", "open", self.history
        block.has_session = block.is_connected = True

    def do_commit(self, number: int, index: int) -> None:
        block = self.processes[number].blocks[index]
        self._handle(number, block, TransactionEvent.COMMIT_SENT)
        block.commit_sent = True

    def do_commit_arrives(self, number: int, index: int) -> None:
        process = self.processes[number]
        block = process.blocks[index]
        block.commit_sent = False
        if block.server != "open":
            return
        try:
            self.check_term(process.term)
        except NameRefusedError:
            block.server, block.answer = "aborted", "refused"
        else:
            block.server = "committing"

    def do_committed(self, number: int, index: int) -> None:
        process = self.processes[number]
        block = process.blocks[index]
        block.server, block.answer = "committed", "committed"
        if process.term != self.term:
            raise BrokenPromiseError("a commit under a name that another process holds")
        if block.outcome is TransactionState.ROLLED_BACK:
            raise BrokenPromiseError("a commit that was reported as rolled back")
        self.rows |= set(block.ids)
        missed = [id_ for id_ in block.ids if id_ <= self.position]
        if missed:
            raise BrokenPromiseError(f"the reader has passed {missed}")

    def do_fail(self, number: int, index: int) -> None:
        block = self.processes[number].blocks[index]
        self.left[FAIL] -= 1
        block.server, block.answer = "aborted", "failed"

    def do_answer(self, number: int, index: int) -> None:
        process = self.processes[number]
        block = process.blocks[index]
        answer, block.answer = block.answer, ""
        event = TransactionEvent.REFUSED
        if answer == "committed":
            event = TransactionEvent.ACKNOWLEDGED
        block.is_connected = block.has_session = False
        self._handle(number, block, event)
        if answer == "refused":
            self._refused(process)

    def do_broken(self, number: int, index: int) -> None:
        block = self.processes[number].blocks[index]
        block.answer = ""
        self._handle(number, block, TransactionEvent.DISCONNECTED)

    def do_ask(self, number: int, index: int) -> None:
        block = self.processes[number].blocks[index]
        event = machine.read_evidence(self._evidence(block))
        if Effect.END_SESSION in self._handle(number, block, event):
            block.has_session = False
            if block.server == "open":
                block.server = "aborted"

    def _evidence(self, block: Block) -> machine.Evidence:
        is_same = block.history == self.history
        status = {"open": "in progress", "committing": "in progress"}.get(
            block.server, block.server
        )
        if not is_same:
            # The number is that of another transaction now, with another outcome.
            status = "aborted" if status == "committed" else "committed"
        session = None
        if block.has_session and is_same:
            session = {"open": "idle in transaction", "committing": "active"}.get(
                block.server, "idle"
            )
        return machine.Evidence(False, is_same, status, session)

    def _handle(
        self, number: int, block: Block, event: TransactionEvent
    ) -> Sequence[Effect]:
        process = self.processes[number]
        outcome = machine.TransactionOutcome(block.outcome)
        effects = outcome.handle(event)
        block.outcome = outcome.state
        if Effect.CALL_AFTER in effects and block.server != "committed":
            raise BrokenPromiseError("call_after, but it is not committed")
        if Effect.CALL_ON_EXCEPTION in effects and block.server == "committed":
            raise BrokenPromiseError("call_on_exception, but it is committed")
        if Effect.SETTLE in effects:
            process.knows.finish(block.ids)
            block.phase, block.is_connected = "done", False
        return effects

    def do_announce(self, number: int) -> None:
        self.heard = self.processes[number].knows.announceable

    def do_store(self, number: int) -> None:
        process = self.processes[number]
        if self._is_admitted(process):
            self.stored = max(self.stored, process.knows.local)

    def do_read_the_sequence(self, number: int) -> None:
        process = self.processes[number]
        if self._is_admitted(process):
            known = process.knows.max_finished
            # As SequenceCheck: a sequence behind an announced id is advanced.
            self.sequence = max(self.sequence, known)
            process.knows.set_allocated(self.sequence)

    def do_hear(self, number: int) -> None:
        process = self.processes[number]
        process.heard_other = self.other
        process.knows.advance("w2", self.other)

    def do_freeze(self, number: int) -> None:
        self.left[FREEZE] -= 1
        self.processes[number].is_frozen = True

    def do_resume(self, number: int) -> None:
        self.processes[number].is_frozen = False

    def do_break(self, number: int, index: int) -> None:
        self.left[BREAK] -= 1
        self.processes[number].blocks[index].is_connected = False

    def do_notice(self, number: int, index: int) -> None:
        block = self.processes[number].blocks[index]
        block.server, block.has_session = "aborted", False

    def do_sever(self, number: int) -> None:
        self.left[SEVER] -= 1
        self._end_sessions(number)

    def _end_sessions(self, number: int) -> None:
        if self.lock == number:
            self.lock = None
        for block in self.processes[number].blocks:
            block.is_connected = False
            block.commit_sent = False
            if block.server != "committing":
                block.has_session = False
            if block.server == "open":
                block.server = "aborted"

    def do_failover(self, completes: bool) -> None:
        self.left[FAILOVER] -= 1
        self.history += 1
        for number, process in enumerate(self.processes):
            for index, block in enumerate(process.blocks):
                if block.server == "committing":
                    if completes:
                        self.do_committed(number, index)
                    else:
                        block.server = "aborted"
            self._end_sessions(number)

    def do_set_back(self) -> None:
        self.left[SET_BACK] -= 1
        self.sequence -= 1

    def do_snapshot(self) -> None:
        self.left[SNAPSHOT] -= 1
        self.snapshot = self.rows, self.stored

    def do_other(self) -> None:
        self.left[OTHER] -= 1
        self.sequence += 1
        self.other = self.sequence

    def do_read(self, is_old: bool) -> None:
        rows, target = self.rows, self.heard
        if is_old:
            assert self.snapshot is not None
            rows, stored = self.snapshot
            target = self.believed_upto(target, stored)
        if target <= self.position:
            return
        self.delivered |= {id_ for id_ in rows if self.position < id_ <= target}
        self.position = target
        missed = {id_ for id_ in self.rows if id_ <= target} - self.delivered
        if missed:
            raise BrokenPromiseError(f"the reader passes {sorted(missed)}")

    def believed_upto(self, target: int, stored: int) -> int:
        """Return up to where the reader believes a page of an old snapshot.

        :param stored: the writer's stored position in that snapshot.
        """
        return min(target, stored)

    # -- rest --------------------------------------------------------------------------

    def is_at_rest(self) -> bool:
        """Whether everything was delivered, and nothing is unsettled."""
        if max(self.rows, default=0) > self.position:
            return False
        return all(
            block.phase == "done"
            for process in self.processes
            if process.name is NameState.HELD
            for block in process.blocks
        ) and any(process.runs for process in self.processes)


def _of_block(number: int, index: int, block: Block) -> Iterator[Event]:
    lost = block.outcome is TransactionState.LOST
    if block.phase == "want":
        yield "fetch", number, index
    elif block.phase == "given":
        yield "take ids", number, index
    elif block.phase == "have":
        yield "begin", number, index
    elif lost:
        yield "ask", number, index
    elif block.phase == "open":
        if not block.is_connected:
            yield "broken", number, index
        elif block.outcome is TransactionState.RUNNING:
            yield "commit", number, index
        if block.answer and block.is_connected:
            yield "answer", number, index
