"""The exploration of a writer, and the deliberate bugs that it finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.explore import writer_world
from scripts.tools.explore.writer_search import search
from scripts.tools.explore.writer_world import Block, Bounds, World
from scripts.tools.explore.writer_worlds import SHALLOW
from synapse_replication.streams import writer
from synapse_replication.streams.writer import Evidence, read_evidence
from synapse_replication.streams.writer_positions import WriterPositions
from synapse_replication.streams.writer_table import (
    NAME,
    TRANSACTION,
    Effect,
    NameEvent,
    NameState,
    Step,
    TransactionEvent,
    TransactionState,
)

#: The smallest worlds in which the bugs below show.
_BREAK = Bounds(breaks=1)
_SEVER = Bounds(severs=1)
_FREEZE = Bounds(freezes=1, severs=1, blocks=((1,), (1,)))
_OTHER = Bounds(severs=1, others=1, blocks=((1,), (1,)))
_FAILOVER = Bounds(failovers=1, blocks=((1,), (1,)))
_SET_BACK = Bounds(set_backs=1, blocks=((1, 1), ()))
_SNAPSHOT = Bounds(snapshots=1)


class ShallowTests(SynchronousTestCase):
    """Every state of the small worlds."""

    def test_all(self) -> None:
        """No promise is broken, and rest is always possible."""
        states = 0
        for name, bounds in SHALLOW.items():
            result = search(bounds, 60)
            self.assertEqual(result.broken, "", f"{name}: {result.explain()}")
            self.assertTrue(result.is_complete, name)
            states += result.states
        self.assertGreater(states, 10_000)


class BugTests(SynchronousTestCase):
    """Bugs of the machine and of its driver."""

    def find(self, bounds: Bounds, *patches: Any) -> None:
        """Check that the exploration finds a bug, which its test reproduces."""
        for each in patches:
            each.start()
            self.addCleanup(each.stop)
        result = search(bounds, 60)
        self.assertNotEqual(result.broken, "")
        self.assertIn("world = World(", result.explain())
        if result.broken != "never at rest":
            world = World(bounds)
            with self.assertRaises(Exception):  # noqa: B017 -- any defect
                for event in result.events:
                    list(world.events())
                    world.apply(event)


def _transaction(
    state: TransactionState, event: TransactionEvent, step: Step[TransactionState]
) -> Any:
    steps = {**writer.STEPS, (state.name, event.name): step}
    return patch.object(writer, "STEPS", steps)


def _name(state: NameState, event: NameEvent, step: Step[NameState]) -> Any:
    return patch.object(writer_world, "NAME", {**NAME, (state, event): step})


def _evidence(change: Callable[[Evidence], TransactionEvent]) -> Any:
    return patch.object(writer, "read_evidence", change)


def _positions(name: str, value: Any) -> Any:
    return patch.object(WriterPositions, name, value)


def _world(name: str, value: Any) -> Any:
    return patch.object(World, name, value)


_T, _E = TransactionState, TransactionEvent
_ROLLED_BACK = TRANSACTION[_T.RUNNING, _E.REFUSED]
_COMMITTED = TRANSACTION[_T.COMMITTING, _E.ACKNOWLEDGED]


class MachineBugTests(BugTests):
    """Bugs of the tables, of the evidence and of the positions."""

    def test_finished_on_error(self) -> None:
        """A lost answer counts as a rollback."""
        self.find(_BREAK, _transaction(_T.COMMITTING, _E.DISCONNECTED, _ROLLED_BACK))

    def test_lost_answer_is_success(self) -> None:
        """A lost answer counts as a commit."""
        self.find(_BREAK, _transaction(_T.COMMITTING, _E.DISCONNECTED, _COMMITTED))

    def test_open_is_ended(self) -> None:
        """A transaction that is found open counts as ended."""
        ended = TRANSACTION[_T.LOST, _E.FOUND_ENDED]
        self.find(_BREAK, _transaction(_T.LOST, _E.FOUND_OPEN, ended))

    def test_idle_is_ended(self) -> None:
        """A session that waits for its client counts as ended, and is not ended."""
        ended = TRANSACTION[_T.LOST, _E.FOUND_ENDED]
        self.find(_BREAK, _transaction(_T.LOST, _E.FOUND_IDLE, ended))

    def test_never_settled(self) -> None:
        """A commit that is found does not settle the ids."""
        step = Step(_T.COMMITTED, (Effect.CALL_AFTER,))
        self.find(_BREAK, _transaction(_T.LOST, _E.FOUND_COMMITTED, step))

    def test_evidence_is_inverted(self) -> None:
        """A committed transaction counts as rolled back."""

        def change(evidence: Evidence) -> TransactionEvent:
            if evidence.status == "committed":
                return _E.FOUND_ROLLED_BACK
            return read_evidence(evidence)

        self.find(_BREAK, _evidence(change))

    def test_number_of_another_history(self) -> None:
        """After a failover, the status of another transaction is believed."""

        def change(evidence: Evidence) -> TransactionEvent:
            return read_evidence(
                Evidence(False, True, evidence.status, evidence.session)
            )

        self.find(_FAILOVER, _evidence(change))

    def test_name_without_term(self) -> None:
        """The lock alone lets a process write."""
        step = Step(NameState.HELD, (Effect.ADMIT,))
        self.find(_SEVER, _name(NameState.UNLOCKED, NameEvent.LOCKED, step))

    def test_predecessor_never_ends(self) -> None:
        """A process stops instead of waiting for its predecessor."""
        step = Step(NameState.LOST, (Effect.STOP,))
        self.find(_SEVER, _name(NameState.WAITING, NameEvent.WAITED_LONG, step))

    def test_ids_in_flight_are_ignored(self) -> None:
        """The position passes ids in flight."""
        self.find(
            Bounds(blocks=((1, 1), ())), _positions("_own_limit", lambda self: None)
        )

    def test_fetches_are_ignored(self) -> None:
        """The position passes ids that are being fetched."""
        self.find(
            Bounds(blocks=((1,), ()), others=1),
            _positions("lowest_floor", lambda self: None),
            # Otherwise, an id that was passed is not used.
            _positions("is_usable", lambda self, fetch, id_: True),
        )

    def test_sequence_is_ignored(self) -> None:
        """Another writer's id is announced before the name was checked."""
        announceable = property(lambda self: self.announced)
        self.find(_OTHER, _positions("announceable", announceable))

    def test_old_ids_are_used(self) -> None:
        """Ids of a sequence that went back are used."""
        self.find(_SET_BACK, _positions("is_usable", lambda self, fetch, id_: True))


class DriverBugTests(BugTests):
    """Bugs around the machine."""

    def test_no_fence_at_commit(self) -> None:
        """PostgreSQL does not check the name of a process that commits."""

        def arrives(self: World, number: int, index: int) -> None:
            block = self.processes[number].blocks[index]
            block.commit_sent = False
            if block.server == "open":
                block.server = "committing"

        self.find(_FREEZE, _world("do_commit_arrives", arrives))

    def test_no_fence_at_all(self) -> None:
        """PostgreSQL checks nothing."""
        self.find(_FREEZE, _world("check_term", lambda self, term: None))

    def test_no_fence_at_the_sequence(self) -> None:
        """The name is not checked when the sequence is read."""

        def read(self: World, number: int) -> None:
            process = self.processes[number]
            self.sequence = max(self.sequence, process.knows.max_finished)
            process.knows.set_allocated(self.sequence)

        self.find(_OTHER, _world("do_read_the_sequence", read))

    def test_no_wait(self) -> None:
        """A process starts while its predecessor commits."""
        self.find(_FREEZE, _world("must_wait", lambda self, process: False))

    def test_positions_before_the_term(self) -> None:
        """A process that has the lock announces the ids of its predecessor."""
        lock = World.do_lock

        def announce(self: World, number: int) -> None:
            lock(self, number)
            self.heard = max(self.heard, self.sequence)

        self.find(_FREEZE, _world("do_lock", announce))

    def test_old_page_is_believed(self) -> None:
        """A reader believes a page of an old snapshot."""
        self.find(
            _SNAPSHOT,
            _world("believed_upto", lambda self, target, stored: target),
        )

    def test_finished_when_the_block_is_left(self) -> None:
        """The ids are finished although the outcome is not known."""
        broken = World.do_broken

        def finish(self: World, number: int, index: int) -> None:
            broken(self, number, index)
            process = self.processes[number]
            block = process.blocks[index]
            if block.phase != "done":
                process.knows.finish(block.ids)

        self.find(_BREAK, _world("do_broken", finish))

    def test_position_is_not_announced(self) -> None:
        """Nothing is announced."""
        self.find(Bounds(), _world("do_announce", lambda self, number: None))

    def test_refused_is_committed(self) -> None:
        """Any answer counts as a commit."""

        def answer(self: World, number: int, index: int) -> None:
            block = self.processes[number].blocks[index]
            block.answer = ""
            self._handle(number, block, TransactionEvent.ACKNOWLEDGED)

        self.find(Bounds(failures=1), _world("do_answer", answer))

    def test_session_is_not_ended(self) -> None:
        """A COMMIT that is on its way arrives after the transaction was given up."""

        def ask(self: World, number: int, index: int) -> None:
            block = self.processes[number].blocks[index]
            event = read_evidence(self._evidence(block))
            if event is TransactionEvent.FOUND_IDLE:
                event = TransactionEvent.FOUND_ENDED
            self._handle(number, block, event)

        self.find(_BREAK, _world("do_ask", ask))

    def test_commit_is_repeated(self) -> None:
        """A transaction whose answer was lost is repeated with the same ids."""

        def ask(self: World, number: int, index: int) -> None:
            block = self.processes[number].blocks[index]
            block.outcome, block.answer = TransactionState.RUNNING, ""
            block.server, block.is_connected = "open", True
            block.has_session = True

        self.find(_BREAK, _world("do_ask", ask))

    def test_fetch_is_not_registered(self) -> None:
        """The ids are registered only when the transaction begins."""
        copy = Block.copy

        def take(self: World, number: int, index: int) -> None:
            process = self.processes[number]
            block = copy(process.blocks[index])
            process.knows.end_fetch(block.fetch, [])
            process.blocks[index].phase, block.answer = "have", ""

        self.find(Bounds(blocks=((1, 1), ())), _world("do_take_ids", take))
