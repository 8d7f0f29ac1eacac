"""Tests for synapse_replication.streams.positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.streams.positions import FinishedIds, WriterPositions


class FinishedIdsTests(SynchronousTestCase):
    """Tests for FinishedIds."""

    @settings(derandomize=True, deadline=None)
    @given(
        st.lists(st.integers(1, 40)), st.integers(0, 40), st.integers(0, 40), st.data()
    )
    def test_agrees_with_a_set(
        self, ids: list[int], start: int, limit: int, data: st.DataObject
    ) -> None:
        """It answers as a plain set of integers would."""
        finished = FinishedIds()
        for id_ in ids:
            finished.add(id_)
        model = set(ids)
        self.assertEqual({i for i in range(50) if i in finished}, model)
        end = start
        while end + 1 in model:
            end += 1
        self.assertEqual(finished.run_from(start), end)
        self.assertEqual(
            finished.last_upto(limit),
            max((i for i in model if i <= limit), default=None),
        )
        finished.forget_upto(limit)
        self.assertEqual(
            {i for i in range(limit + 1, 50) if i in finished},
            {i for i in model if i > limit},
        )

    def test_bounded(self) -> None:
        """
        With too many gaps the greatest range is forgotten: persisted-up-to is
        reached by its smaller neighbours first.
        """
        finished = FinishedIds(max_ranges=2)
        for id_ in (9, 5, 7, 3):
            finished.add(id_)
        self.assertEqual([i for i in range(10) if i in finished], [3, 5])
        self.assertEqual(len(finished), 2)


def allocate(positions: WriterPositions, *ids: int) -> None:
    """Have ids fetched and registered."""
    positions.end_fetch(positions.begin_fetch(), ids)


class WriterPositionsTests(SynchronousTestCase):
    """Tests for WriterPositions."""

    def test_out_of_order(self) -> None:
        """Ids finish in any order; the position follows when a gap closes."""
        positions = WriterPositions("master", ["master"], {"master": 7})
        allocate(positions, 8, 9)
        allocate(positions, 10)
        positions.finish([9])
        self.assertEqual(positions.announced, 7)
        positions.finish([8])
        self.assertEqual(positions.announced, 9)
        positions.finish([10])
        self.assertEqual(positions.persisted_upto, 10)

    def test_advance_between_nextval_and_registration(self) -> None:
        """
        Others announce greater ids while ours is still being fetched: we
        announce nothing above it, and nobody passes it.
        """
        positions = WriterPositions("a", ["a", "b"], {"a": 7, "b": 7})
        fetch = positions.begin_fetch()
        positions.advance("b", 9)
        positions.advance("b", 10)
        self.assertEqual((positions.announced, positions.persisted_upto), (7, 7))
        positions.end_fetch(fetch, [8])
        self.assertEqual((positions.announced, positions.persisted_upto), (7, 7))
        positions.finish([8])
        self.assertEqual((positions.announced, positions.persisted_upto), (10, 10))

    def test_finished_row_below_the_announced_position(self) -> None:
        """
        An id is finished while another is being fetched, and a remote
        position arrives: as soon as the announced position covers the id, so does
        the newest of our own.
        """
        positions = WriterPositions("a", ["a", "b"], {"a": 1847, "b": 1847})
        first = positions.begin_fetch()
        second = positions.begin_fetch()
        positions.end_fetch(first, [1848])
        positions.finish([1848])
        positions.advance("b", 1847)
        self.assertEqual(positions.announced, 1848)
        self.assertEqual(positions.local, 1848)
        positions.end_fetch(second, [1849])
        positions.finish([1849])
        self.assertEqual(positions.announced, 1849)

    def test_announceable(self) -> None:
        """What is finished may be announced, whatever is known of the sequence."""
        positions = WriterPositions("a", ["a"], {"a": 7})
        self.assertEqual(positions.announceable, 7)
        allocate(positions, 8, 9)
        positions.finish([9])
        self.assertEqual(positions.announceable, 7)
        positions.finish([8])
        self.assertEqual(positions.announceable, 9)

    def test_id_that_another_announced(self) -> None:
        """A sequence that gives what another writer announced before has gone back."""
        positions = WriterPositions("a", ["a", "b"], {"a": 7, "b": 7})
        allocate(positions, 8)
        positions.advance("b", 10)
        fetch = positions.begin_fetch()
        self.assertFalse(positions.is_usable(fetch, 10))
        self.assertTrue(positions.is_usable(fetch, 11))

    def test_others_know_first(self) -> None:
        """Another writer announces our id, committed but not finished here."""
        positions = WriterPositions("a", ["a", "b"], {"a": 37, "b": 37})
        positions.end_fetch(positions.begin_fetch(), [38])
        positions.end_fetch(positions.begin_fetch(), [39])
        positions.finish([38])
        self.assertEqual(positions.announced, 38)
        positions.advance("b", 39)
        self.assertEqual(positions.announced, 38)
        self.assertEqual(positions.persisted_upto, 38)
        positions.finish([39])
        self.assertEqual(positions.announced, 39)
        self.assertEqual(positions.persisted_upto, 39)
        self.assertEqual(positions.local, 39)

    def test_new_writer(self) -> None:
        """A writer without a stored position starts at persisted-up-to."""
        positions = WriterPositions(
            "new", ["a", "b", "new"], {"a": 3, "b": 7}, finished=[4, 5]
        )
        self.assertEqual(positions.persisted_upto, 5)
        self.assertEqual(positions.all_positions(), {"a": 3, "b": 7, "new": 7})
        reader = WriterPositions("reader", ["a", "b", "new"], {"a": 3, "b": 7}, [4, 5])
        self.assertEqual(reader.all_positions(), {"a": 3, "b": 7, "new": 5})

    def test_first_id_is_not_announced_before_it_is_finished(self) -> None:
        """A new writer's first id stays unannounced until it is persisted."""
        positions = WriterPositions("new", ["a", "new"], {"a": 7})
        allocate(positions, 8)
        self.assertEqual((positions.announced, positions.persisted_upto), (7, 7))
        self.assertEqual(positions.local, 7)

    def test_removed_writer_is_forgotten(self) -> None:
        """Who is no writer any more does not hold the others up."""
        positions = WriterPositions("a", ["a", "b"], {"a": 7, "b": 8, "gone": 2})
        self.assertEqual(positions.persisted_upto, 8)
        self.assertNotIn("gone", positions.all_positions())

    def test_idle_writer_follows_the_others(self) -> None:
        """Who writes nothing may announce what the others have reached."""
        positions = WriterPositions("a", ["a", "b"], {"a": 7, "b": 7})
        positions.advance("b", 20)
        self.assertEqual((positions.announced, positions.persisted_upto), (20, 20))
        self.assertEqual(positions.local, 7)

    def test_unknown_ids_are_never_announced(self) -> None:
        """
        An id between ours that somebody else got is not announced: a peer would
        take it for finished, and pass it in a run without gaps.
        """
        positions = WriterPositions("a", ["a", "b"], {"a": 7, "b": 7})
        allocate(positions, 9)
        self.assertEqual(positions.announced, 7)
        positions.finish([9])
        peer = WriterPositions("reader", ["a", "b"], {"a": 7, "b": 7})
        peer.advance("a", positions.announced)
        self.assertEqual(peer.persisted_upto, 7)

    def test_run_without_gaps(self) -> None:
        """Ids that are finished one by one pass a writer that is behind."""
        reader = WriterPositions("reader", ["a", "b"], {"a": 3, "b": 5}, [4])
        self.assertEqual(reader.persisted_upto, 5)
        reader.advance("b", 6)
        reader.advance("b", 8)
        self.assertEqual(reader.persisted_upto, 6)
        reader.advance("b", 7)
        self.assertEqual(reader.persisted_upto, 8)
        self.assertEqual(reader.writer_position("a"), 3)
        self.assertEqual(reader.current_token("a"), 8)

    def test_reader_announces_nothing_of_its_own(self) -> None:
        """Who is no declared writer stands where everything is persisted."""
        reader = WriterPositions("reader", ["a", "b"], {"a": 3, "b": 5})
        self.assertEqual(reader.current_token("reader"), 3)
        self.assertEqual(reader.all_positions(), {"a": 3, "b": 5})

    def test_sequence_that_went_back(self) -> None:
        """An id that is known already, or was passed, is not used again."""
        positions = WriterPositions("a", ["a", "b"], {"a": 40, "b": 40})
        fetch = positions.begin_fetch()
        positions.advance("b", 42)
        self.assertEqual(
            [positions.is_usable(fetch, id_) for id_ in (39, 40, 41, 42, 43)],
            [False, False, True, False, True],
        )
        self.assertRaises(ValueError, positions.end_fetch, fetch, [40])
        self.assertRaises(ValueError, positions.end_fetch, fetch, [43, 43])
        positions.end_fetch(fetch, [])
        self.assertEqual(positions.announced, 42)

    def test_first_id(self) -> None:
        """Nobody wrote: everything stands at 1, and 1 is not used."""
        positions = WriterPositions("a", ["a", "b"])
        self.assertEqual((positions.announced, positions.persisted_upto), (1, 1))
        self.assertFalse(positions.is_usable(positions.begin_fetch(), 1))

    def test_anybody_may_write(self) -> None:
        """Without declared writers this process writes, and hears of others."""
        positions = WriterPositions("a", complete_upto=6)
        allocate(positions, 7)
        positions.finish([7])
        self.assertEqual(positions.announced, 7)
        positions.advance("b", 9)
        self.assertEqual(positions.all_positions(), {"a": 7, "b": 9})
        self.assertEqual(positions.persisted_upto, 9)

    def test_finished_twice(self) -> None:
        """Finishing an id that is not in flight is a mistake of the caller."""
        positions = WriterPositions("a", ["a"])
        allocate(positions, 2)
        positions.finish([2])
        self.assertRaises(KeyError, positions.finish, [2])


#: What ends everything that is going on is rare, so that much goes on.
SELDOM = st.sampled_from([False] * 9 + [True])


@attrs.define
class Process:
    """A process of the model, and what it knows, in plain sets."""

    positions: WriterPositions
    known_finished: set[int]
    others: dict[str, int]
    announced: int
    persisted_upto: int
    local: int
    finished_here: set[int] = attrs.Factory(set)
    in_flight: set[int] = attrs.Factory(set)
    fetches: dict[int, tuple[int, list[int]]] = attrs.Factory(dict)
    inbox: list[tuple[str, int]] = attrs.Factory(list)


class ClusterMachine(RuleBasedStateMachine):
    """Writers and a reader over one sequence, with a naive model beside each."""

    def __init__(self) -> None:
        super().__init__()
        self.sequence = 1
        self.writers = ["a", "b", "c"]
        self.stored: dict[str, int] = {}
        self.committed: set[int] = set()
        #: ids that are given out and not finished, and the writer of each.
        self.open: dict[int, str] = {}
        self.processes: dict[str, Process] = {}

    @initialize()
    def begin(self) -> None:
        for name in (*self.writers, "reader"):
            self.start(name)

    # -- the model's own steps

    def start(self, name: str) -> None:
        known = {w: p for w, p in self.stored.items() if w in self.writers}
        low = min(known.values(), default=1)
        rows = {i for i in self.committed if i > low}
        upto = self.sequence if self.writers == [name] else 1
        positions = WriterPositions(name, self.writers, self.stored, rows, upto)
        finished = {1, *known.values(), *rows, upto}
        self.processes[name] = Process(
            positions=positions,
            known_finished=finished,
            others={
                w: known.get(w, positions.persisted_upto)
                for w in self.writers
                if w != name
            },
            announced=positions.announced,
            persisted_upto=positions.persisted_upto,
            local=positions.local,
        )
        if name in self.writers:
            # A new writer stores where it begins, before its first id.
            self.stored.setdefault(name, positions.announced)
        for other, process in self.processes.items():
            if other != name and other in self.writers:
                self.processes[name].inbox.append((other, process.positions.announced))

    def stop(self, name: str) -> None:
        """Kill a process: what it had open is rolled back."""
        self.processes.pop(name, None)
        for id_ in [i for i, writer in self.open.items() if writer == name]:
            del self.open[id_]

    def tell(self, name: str, token: int) -> None:
        for other, process in self.processes.items():
            if other != name:
                process.inbox.append((name, token))

    def expect(self, name: str) -> None:
        """Derive by brute force what a process may say, and compare."""
        process = self.processes[name]
        if name in self.writers:
            bounds = [i - 1 for i in process.in_flight]
            bounds += [floor for floor, _ in process.fetches.values()]
            limit = min(bounds, default=10**9)
            fits = [i for i in process.known_finished if i <= limit]
            process.announced = max([process.announced, *fits])
            slowest = min([*process.others.values(), process.announced])
        else:
            slowest = min(process.others.values())
        upto = max(process.persisted_upto, slowest)
        while upto + 1 in process.known_finished:
            upto += 1
        process.persisted_upto = upto
        process.announced = max(process.announced, upto)
        seen = [i for i in process.finished_here if i <= process.announced]
        process.local = max([process.local, *seen])
        positions = process.positions
        assert positions.persisted_upto == process.persisted_upto
        assert positions.announced == process.announced
        if name in self.writers:
            assert positions.local == process.local
        assert {w: positions.writer_position(w) for w in process.others} == (
            process.others
        )

    def pick(self, data: st.DataObject, has: Callable[[Process], Any]) -> str | None:
        names = sorted(
            name
            for name, process in self.processes.items()
            if has(process) and (name in self.writers or has is _has_inbox)
        )
        return data.draw(st.sampled_from(names)) if names else None

    # -- rules

    @rule(data=st.data())
    def begin_fetch(self, data: st.DataObject) -> None:
        if name := self.pick(data, lambda process: True):
            process = self.processes[name]
            handle = process.positions.begin_fetch()
            process.fetches[handle] = (max(process.known_finished), [])
            self.expect(name)

    @rule(data=st.data(), count=st.integers(1, 3))
    def nextval(self, data: st.DataObject, count: int) -> None:
        """The sequence answers; the process does not know it yet."""
        if name := self.pick(data, _awaits_ids):
            process = self.processes[name]
            handle = data.draw(
                st.sampled_from(
                    [h for h, (_, ids) in process.fetches.items() if not ids]
                )
            )
            for _ in range(count):
                self.sequence += 1
                process.fetches[handle][1].append(self.sequence)
                self.open[self.sequence] = name

    @rule(data=st.data(), cancelled=st.booleans())
    def end_fetch(self, data: st.DataObject, cancelled: bool) -> None:
        if name := self.pick(data, lambda process: process.fetches):
            process = self.processes[name]
            handle = data.draw(st.sampled_from(sorted(process.fetches)))
            _, ids = process.fetches.pop(handle)
            process.positions.end_fetch(handle, ids)
            process.in_flight.update(ids)
            self.expect(name)
            if cancelled and ids:
                self.finished(name, ids, commit=False)

    @rule(data=st.data(), commit=st.booleans())
    def finish(self, data: st.DataObject, commit: bool) -> None:
        if name := self.pick(data, lambda process: process.in_flight):
            in_flight = sorted(self.processes[name].in_flight)
            ids = data.draw(
                st.lists(st.sampled_from(in_flight), min_size=1, unique=True)
            )
            self.finished(name, ids, commit)

    def finished(self, name: str, ids: list[int], commit: bool) -> None:
        process = self.processes[name]
        if commit:
            self.committed.update(ids)
        for id_ in ids:
            del self.open[id_]
        process.in_flight.difference_update(ids)
        process.known_finished.update(ids)
        process.finished_here.update(ids)
        process.positions.finish(ids)
        self.expect(name)
        self.stored[name] = max(self.stored.get(name, 0), process.positions.local)

    @rule(data=st.data())
    def announce(self, data: st.DataObject) -> None:
        if name := self.pick(data, lambda process: True):
            self.tell(name, self.processes[name].positions.announced)

    @rule(data=st.data())
    def hear(self, data: st.DataObject) -> None:
        if name := self.pick(data, _has_inbox):
            self.deliver(name)

    def deliver(self, name: str) -> None:
        process = self.processes[name]
        writer, token = process.inbox.pop(0)
        process.positions.advance(writer, token)
        process.others[writer] = max(process.others.get(writer, 0), token)
        process.known_finished.add(token)
        self.expect(name)

    @rule(data=st.data(), happens=SELDOM)
    def restart(self, data: st.DataObject, happens: bool) -> None:
        if not happens:
            return
        name = data.draw(st.sampled_from(sorted(self.processes)))
        self.stop(name)
        self.start(name)

    @rule(writers=st.sets(st.sampled_from("abcd"), min_size=1), happens=SELDOM)
    def change_writers(self, writers: set[str], happens: bool) -> None:
        """The configuration changes: everybody is restarted, one after another."""
        if not happens:
            return
        for name in list(self.processes):
            self.stop(name)
        self.writers = sorted(writers)
        self.stored = {w: p for w, p in self.stored.items() if w in writers}
        for name in (*self.writers, "reader"):
            self.start(name)

    @rule(happens=SELDOM)
    def settle_down(self, happens: bool) -> None:
        """Liveness: once all is finished and told, all agree on the end."""
        if not happens:
            return
        for name in self.writers:
            process = self.processes[name]
            for handle in list(process.fetches):
                _, ids = process.fetches.pop(handle)
                process.positions.end_fetch(handle, ids)
                process.in_flight.update(ids)
                self.expect(name)
            if process.in_flight:
                self.finished(name, sorted(process.in_flight), commit=True)
        for _ in range(2):
            for name in self.writers:
                self.tell(name, self.processes[name].positions.announced)
            for name, process in self.processes.items():
                while process.inbox:
                    self.deliver(name)
        ends = {process.positions.persisted_upto for process in self.processes.values()}
        assert len(ends) == 1
        assert ends.pop() >= max(self.committed, default=1)

    # -- what always holds

    @invariant()
    def nothing_open_is_called_complete(self) -> None:
        first_open = min(self.open, default=self.sequence + 1)
        for process in self.processes.values():
            assert process.positions.persisted_upto < first_open

    @invariant()
    def nothing_open_of_ours_is_announced(self) -> None:
        for name in self.writers:
            ours = [i for i, writer in self.open.items() if writer == name]
            if process := self.processes.get(name):
                announced = process.positions.announced
                assert announced < min(ours, default=self.sequence + 1)
                assert announced not in self.open

    @invariant()
    def nothing_finished_hides_below_the_announced_position(self) -> None:
        for process in self.processes.values():
            positions = process.positions
            covered = {i for i in process.finished_here if i <= positions.announced}
            assert positions.local >= max(covered, default=0)


def _has_inbox(process: Process) -> bool:
    return bool(process.inbox)


def _awaits_ids(process: Process) -> bool:
    return any(not ids for _, ids in process.fetches.values())


class ClusterTests(SynchronousTestCase):
    """Several processes, any order of events."""

    def test_invariants(self) -> None:
        """
        Whatever is allocated, finished, cancelled, announced,
        delayed or restarted, nothing open is called complete, what is announced
        is finished, and in the end all agree.
        """
        run_state_machine_as_test(
            ClusterMachine,
            settings=settings(
                derandomize=True,
                deadline=None,
                max_examples=200,
                stateful_step_count=60,
                suppress_health_check=list(HealthCheck),
            ),
        )
