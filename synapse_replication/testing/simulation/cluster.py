"""The simulated cluster: its processes, and what they share."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from random import Random
from typing import Any

from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from synapse_replication.testing.simulation.broker import SimulatedBroker
from synapse_replication.testing.simulation.clock import SimulatedClock
from synapse_replication.testing.simulation.database import SimulatedDatabase
from synapse_replication.testing.simulation.invariants import (
    Ledger,
    Reader,
    SimulatedRow,
)
from synapse_replication.testing.simulation.network import SimulatedNetwork
from synapse_replication.testing.simulation.parts import (
    CACHES,
    MEMORY_STREAM,
    PROCESSES,
    TABLES,
    Kept,
    Parts,
)
from synapse_replication.testing.simulation.process import Process
from synapse_replication.testing.simulation.reactor import ProcessReactor
from synapse_replication.testing.simulation.watcher import Counts
from synapse_replication.wire.commands.standard import PositionCommand

__all__ = ["Cluster"]

#: How many of the clusters have the processes of a homeserver.
SHARED_TOKENS_CHANCE = 0.35


class Cluster:
    """Everything that there is in one simulation.

    :param seed: decides everything.
    :param trace_to: is given (time, text) of what happens; ``None`` for nobody.
    :ivar problems: what failed and should not have.
    """

    def __init__(
        self,
        seed: int,
        parts: Parts | None = None,
        trace_to: Callable[[float, str], object] | None = None,
    ) -> None:
        self.parts = parts or Parts()
        self.clock = SimulatedClock()
        self._trace_to = trace_to
        self.problems: list[str] = []
        self.counts = Counts()
        self.random = Random(f"{seed}/processes")
        setting = Random(f"{seed}/setting")
        self.torture_level = setting.choice([0, 0, 0, 50])
        self.has_small_queues = setting.random() < 0.25
        speakers = setting.choice([1.0, 0.6, 0.0])
        #: Who speaks the extension; the others are as stock peers.
        self.speak_extension = {
            name for name in PROCESSES if setting.random() < speakers
        }
        self.shares_tokens = setting.random() < SHARED_TOKENS_CHANCE
        self.sink_failure_chance = self.slow_sink_chance = 0.0
        self.http_failure_chance = 0.0
        self._epoch = 0
        self._row_id = 0
        #: As the configuration has them now; who starts reads it.
        self.writers: dict[str, Sequence[str]] = {
            table.name: table.writers for table in TABLES
        }
        self.writers[MEMORY_STREAM] = ("main",)
        self.ledger = Ledger(
            frozenset([CACHES]), frozenset([MEMORY_STREAM]), self.trace
        )
        self.network = SimulatedNetwork(self.clock, Random(f"{seed}/network"))
        self.broker = SimulatedBroker(
            self.network, Random(f"{seed}/broker"), self._published
        )
        self.database = SimulatedDatabase(
            self.clock, Random(f"{seed}/database"), TABLES, self.ledger.committed
        )
        self.processes: dict[str, Process] = {}
        #: Those that write nothing more before they are stopped.
        self.stopping: set[str] = set()
        self._kept = {name: Kept() for name in PROCESSES}
        self._last_lives: dict[str, Reader] = {}
        #: What "main" wrote in memory in its present life: the newest row of a key.
        self.in_memory: dict[str, int] = {}

    def trace(self, text: str) -> None:
        """Return what happens, if anybody wants to know."""
        if self._trace_to is not None:
            self._trace_to(self.clock.rightNow, text)

    def unexpected(self, what: str, error: BaseException) -> None:
        """Record a failure that no fault explains."""
        self.problems.append(f"{what}: {type(error).__name__}: {error}")

    def keeps_rows(self, name: str) -> bool:
        """Return whether a process keeps what it was handed over a crash."""
        # A homeserver begins where its database is.
        return PROCESSES[name] and not self.shares_tokens

    def make_reactor(self, name: str) -> Any:
        """Make what a process takes for a reactor; no more of it than it uses."""
        return ProcessReactor(self.clock, self.network, name)

    def next_epoch(self) -> int:
        """Return the next number of a life of a process."""
        self._epoch += 1
        return self._epoch

    def start(self, name: str) -> None:
        """Start a process that is not there."""
        if name not in self.processes:
            self.trace(f"{name} starts")
            self.counts.starts[name] += 1
            self.processes[name] = Process(self, name, self._kept[name])

    def begins(self, name: str, positions: dict[tuple[str, str], int]) -> Reader:
        """Record a new life, which goes on with what the last one kept."""
        last = self._last_lives.get(name)
        reader = self.ledger.begins(name, positions, last)
        if self.keeps_rows(name):
            self._last_lives[name] = reader
        return reader

    def crash(self, name: str) -> None:
        """End a process as by ``kill -9``."""
        process = self.processes.pop(name, None)
        if process is not None:
            self.trace(f"{name} crashes")
            process.is_up = False
            process.reactor.kill()
            self.ledger.ends(name)
            if name == "main":
                self.in_memory = {}

    def forget(self, name: str) -> None:
        """Lose what a process that is not there keeps over its crashes."""
        self._kept[name] = Kept()
        self._last_lives.pop(name, None)

    def write(self, name: str, stream_name: str, count: int) -> None:
        """Have a process write, if it is there."""
        process = self.processes.get(name)
        if process is None or not process.is_up or name in self.stopping:
            return
        if name not in self.writers[stream_name]:
            return
        rows = []
        for _ in range(count):
            self._row_id += 1
            key = str(self._row_id % 4)
            if stream_name == MEMORY_STREAM:
                if not self.in_memory:
                    # No later row hides that this one was missed.
                    key = "first"
                self.in_memory[key] = self._row_id
            rows.append(SimulatedRow(self._row_id, f"{process.epoch}:{key}"))
        self.counts.writes += 1
        self.trace(f"{name} writes {count} rows to {stream_name}")
        self.run(f"writing {stream_name}", process.write(stream_name, rows))

    def run(self, what: str, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run what nobody waits for, and which never fails."""

        def failed(failure: Failure) -> None:
            assert failure.value is not None
            self.unexpected(what, failure.value)

        Deferred.fromCoroutine(coroutine).addErrback(failed)

    def _published(self, name: str, line: bytes) -> None:
        if line.startswith(b"POSITION "):
            position = PositionCommand.from_line(line.decode().partition(" ")[2])
            self.ledger.announced(
                position.stream_name,
                position.instance_name,
                position.prev_token,
                position.new_token,
            )

    # -- in the end --------------------------------------------------------------------

    def differences(self) -> list[str]:
        """Return where processes do not agree; empty once they do."""
        found = [
            f"{name} is not up"
            for name in PROCESSES
            if name not in self.processes or not self.processes[name].is_up
        ]
        if found:
            return found
        found = self.ledger.missing()
        for stream, writers in self.writers.items():
            for writer in writers:
                own = self.processes[writer].position(stream, writer)
                if stream == CACHES:
                    # Moves of others are not announced.
                    continue
                found += [
                    f"{name} is at {process.position(stream, writer)} of {stream} of "
                    f"{writer}, which is at {own}"
                    for name, process in self.processes.items()
                    if process.position(stream, writer) != own
                ]
        found += self._differing_views()
        return found + self._differing_persisted()

    def _differing_views(self) -> list[str]:
        found = []
        epoch = self.processes["main"].epoch
        for name, reader in self.ledger.readers.items():
            view = reader.views.get(MEMORY_STREAM, {})
            if name == "main" or not self.in_memory or view == self.in_memory:
                continue
            hidden = MEMORY_STREAM in reader.hidden_resets or (
                reader.epochs.get(MEMORY_STREAM, epoch) != epoch
            )
            # Who does not speak the extension knows nothing of epochs.
            if hidden and not {"main", name} <= self.speak_extension:
                self.counts.hidden_resets.add(f"{name}-{epoch}")
                continue
            found.append(f"{name} sees {view} of {MEMORY_STREAM}, not {self.in_memory}")
        return found

    def _differing_persisted(self) -> list[str]:
        found = []
        for table in TABLES:
            if table.name == CACHES:
                continue
            upto = {
                writer: self.processes[writer]
                .generators[table.name]
                .get_persisted_upto_position()
                for writer in self.writers[table.name]
            }
            if len(set(upto.values())) > 1:
                found.append(f"{table.name} is persisted up to {upto}")
        return found
