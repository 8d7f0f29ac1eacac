"""Property tests: the positions that several writers of a stream announce."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.streams.writer_positions import WriterPositions

#: Restarts end all running operations, so they are rare.
RARELY = st.sampled_from([False] * 9 + [True])


@attrs.define
class Process:
    """A process of the cluster, with a model of its state in plain sets."""

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
    """Writers and a reader on one sequence, each compared with a naive model."""

    def __init__(self) -> None:
        super().__init__()
        self.sequence = 1
        self.writers = ["a", "b", "c"]
        self.stored: dict[str, int] = {}
        self.committed: set[int] = set()
        #: allocated ids that are not finished, with the writer of each.
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
            # A new writer stores its initial position before its first id.
            self.stored.setdefault(name, positions.announced)
        for other, process in self.processes.items():
            if other != name and other in self.writers:
                self.processes[name].inbox.append((other, process.positions.announced))

    def stop(self, name: str) -> None:
        """Kill a process, which rolls its open ids back."""
        self.processes.pop(name, None)
        for id_ in [i for i, writer in self.open.items() if writer == name]:
            del self.open[id_]

    def broadcast(self, name: str, token: int) -> None:
        for other, process in self.processes.items():
            if other != name:
                process.inbox.append((name, token))

    def expect(self, name: str) -> None:
        """Compute the expected positions of a process by brute force, and compare."""
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
        """Advance the sequence; the process has not registered the ids yet."""
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
            self.broadcast(name, self.processes[name].positions.announced)

    @rule(data=st.data())
    def receive(self, data: st.DataObject) -> None:
        if name := self.pick(data, _has_inbox):
            self.deliver(name)

    def deliver(self, name: str) -> None:
        process = self.processes[name]
        writer, token = process.inbox.pop(0)
        process.positions.advance(writer, token)
        process.others[writer] = max(process.others.get(writer, 0), token)
        process.known_finished.add(token)
        self.expect(name)

    @rule(data=st.data(), happens=RARELY)
    def restart(self, data: st.DataObject, happens: bool) -> None:
        if not happens:
            return
        name = data.draw(st.sampled_from(sorted(self.processes)))
        self.stop(name)
        self.start(name)

    @rule(writers=st.sets(st.sampled_from("abcd"), min_size=1), happens=RARELY)
    def change_writers(self, writers: set[str], happens: bool) -> None:
        """
        Change the configured writers and restart all processes, one after another.
        """
        if not happens:
            return
        for name in list(self.processes):
            self.stop(name)
        self.writers = sorted(writers)
        self.stored = {w: p for w, p in self.stored.items() if w in writers}
        for name in (*self.writers, "reader"):
            self.start(name)

    @rule(happens=RARELY)
    def settle_down(self, happens: bool) -> None:
        """Finish and announce everything; then all processes agree on the end."""
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
                self.broadcast(name, self.processes[name].positions.announced)
            for name, process in self.processes.items():
                while process.inbox:
                    self.deliver(name)
        ends = {process.positions.persisted_upto for process in self.processes.values()}
        assert len(ends) == 1
        assert ends.pop() >= max(self.committed, default=1)

    # -- invariants

    @invariant()
    def no_open_id_is_complete(self) -> None:
        first_open = min(self.open, default=self.sequence + 1)
        for process in self.processes.values():
            assert process.positions.persisted_upto < first_open

    @invariant()
    def no_open_own_id_is_announced(self) -> None:
        for name in self.writers:
            ours = [i for i, writer in self.open.items() if writer == name]
            if process := self.processes.get(name):
                announced = process.positions.announced
                assert announced < min(ours, default=self.sequence + 1)
                assert announced not in self.open

    @invariant()
    def finished_ids_below_the_announced_position(self) -> None:
        for process in self.processes.values():
            positions = process.positions
            covered = {i for i in process.finished_here if i <= positions.announced}
            assert positions.local >= max(covered, default=0)


def _has_inbox(process: Process) -> bool:
    return bool(process.inbox)


def _awaits_ids(process: Process) -> bool:
    return any(not ids for _, ids in process.fetches.values())


class ClusterTests(SynchronousTestCase):
    """Several processes with events in any order."""

    def test_invariants(self) -> None:
        """
        In any order of events, no open id counts as persisted, only finished ids are
        announced, and finally all processes agree.
        """
        run_state_machine_as_test(
            ClusterMachine,
            settings=settings(
                derandomize=True,
                deadline=None,
                max_examples=80,
                stateful_step_count=60,
                suppress_health_check=list(HealthCheck),
            ),
        )
