"""The simulated cluster: its processes, and the resources that they share."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from random import Random
from typing import Any

from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from synapse_replication.wire.commands import PositionCommand
from tests.simulation.broker import SimulatedBroker
from tests.simulation.clock import SimulatedClock
from tests.simulation.database import SimulatedDatabase, SimulatedStandby
from tests.simulation.invariants import (
    Ledger,
    Reader,
    SimulatedRow,
)
from tests.simulation.network import Connection, SimulatedNetwork
from tests.simulation.process import Process
from tests.simulation.reactor import ProcessReactor
from tests.simulation.topology import (
    CACHES,
    MEMORY_STREAM,
    PROCESSES,
    TABLES,
    Links,
    SavedState,
    choose_links,
)
from tests.simulation.watcher import Counts

#: The share of clusters that simulate the processes of a homeserver, in which a
#: writer's token covers the rows of all writers. The others simulate the processes of
#: the stand-alone host.
SHARED_TOKENS_CHANCE = 0.35


class Cluster:
    """The state of one simulation.

    :param seed: determines the whole run.
    :param trace_to: called for each event with the simulated time in s and a text;
        ``None`` for no trace.
    :param discards: whether writers without the extension may discard rows, as stock
        ones do that cannot publish; all links are then to Redis.
    :param replaces: whether writers acquire their names, and may be suspended and
        replaced.
    :ivar problems: failures that no fault explains.
    """

    def __init__(
        self,
        seed: int,
        trace_to: Callable[[float, str], object] | None = None,
        *,
        discards: bool = False,
        replaces: bool = False,
    ) -> None:
        self.discards = discards
        self.replaces = replaces
        self.clock = SimulatedClock()
        self._trace_to = trace_to
        self.problems: list[str] = []
        self.counts = Counts()
        self.random = Random(f"{seed}/processes")
        setting = Random(f"{seed}/setting")
        self.torture_level = setting.choice([0, 0, 0, 50])
        self.has_small_queues = setting.random() < 0.25
        extension_share = setting.choice([1.0, 0.6, 0.0])
        #: The processes that use the extension; the others behave as stock peers.
        self.speak_extension = {
            name for name in PROCESSES if setting.random() < extension_share
        }
        self.shares_tokens = setting.random() < SHARED_TOKENS_CHANCE
        self.links = choose_links(Random(f"{seed}/links"))
        if discards:
            self.speak_extension.discard("writer1")
            self.links = Links(True, {name: [] for name in PROCESSES}, 3)
        self.sink_failure_chance = self.slow_sink_chance = 0.0
        self.http_failure_chance = 0.0
        self._epoch = 0
        self._row_id = 0
        #: The configured writers; a process reads them when it starts.
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
            self.clock,
            Random(f"{seed}/database"),
            TABLES,
            self.ledger.committed,
            self.ledger.commit_late,
        )
        #: The database of "reader2", if it is a standby. A process of a homeserver
        #: writes to its database, so it has none.
        self.standby: SimulatedStandby | None = None
        if not self.shares_tokens and Random(f"{seed}/standby").random() < 0.3:
            self.standby = SimulatedStandby(
                self.database, Random(f"{seed}/replay"), TABLES
            )
            self.ledger.on_standby.add("reader2")
        self.processes: dict[str, Process] = {}
        #: The processes that were suspended and replaced, and have not ended.
        self.replaced: list[Process] = []
        #: Processes that are about to be stopped and write nothing more.
        self.stopping: set[str] = set()
        self._saved = {name: SavedState() for name in PROCESSES}
        self._last_epochs: dict[str, Reader] = {}
        #: The id of the newest row of each key that "main" wrote, in its current epoch,
        #: to the stream in memory.
        self.in_memory: dict[str, int] = {}

    def trace(self, text: str) -> None:
        """Report an event to the trace, if there is one."""
        if self._trace_to is not None:
            self._trace_to(self.clock.rightNow, text)

    def unexpected(self, what: str, error: BaseException) -> None:
        """Record a failure that no fault explains."""
        self.problems.append(f"{what}: {type(error).__name__}: {error}")

    def retains_rows(self, name: str) -> bool:
        """Return whether a process retains delivered rows across a crash."""
        # A process of a homeserver retains no delivered rows: it resumes at the
        # position that it reads from the database.
        return PROCESSES[name] and not self.shares_tokens

    def make_reactor(self, name: str) -> Any:
        """Return the simulated reactor of a process."""
        return ProcessReactor(self.clock, self.network, name)

    def next_epoch(self) -> int:
        """Return the number of a new epoch."""
        self._epoch += 1
        return self._epoch

    def start(self, name: str) -> None:
        """Start a process, unless it is running."""
        if name not in self.processes:
            self.trace(f"{name} starts")
            self.counts.starts[name] += 1
            self.processes[name] = Process(self, name, self._saved[name])

    def begin_epoch(
        self, name: str, positions: dict[tuple[str, str], int], epoch: int
    ) -> Reader:
        """Record a new epoch of a process that resumes at these positions."""
        last = self._last_epochs.get(name)
        reader = self.ledger.begin_epoch(name, positions, last, epoch)
        if self.retains_rows(name):
            self._last_epochs[name] = reader
        return reader

    def crash(self, name: str) -> None:
        """End a process as ``kill -9`` does."""
        process = self.processes.pop(name, None)
        if process is not None:
            self.trace(f"{name} crashes")
            process.is_up = False
            process.reactor.kill()
            self.ledger.end_epoch(name)
            if name == "main":
                self.in_memory = {}

    def replace(self, name: str) -> Process | None:
        """Suspend a process, so that another can be started in its place.

        :return: the process; ``None`` if none is up.
        """
        process = self.processes.get(name)
        if process is None or not process.is_up:
            return None
        self.trace(f"{name} is suspended")
        process.reactor.suspend()
        self.replaced.append(self.processes.pop(name))
        if name == "main":
            self.in_memory = {}
        return process

    def resume(self, process: Process) -> None:
        """Let a suspended process run on."""
        if process.reactor.is_suspended:
            self.trace(f"the replaced {process.name} resumes")
            self.ledger.resumed[process.name] += 1
            process.reactor.resume()

    def leave(self, process: Process) -> None:
        """End a process that was replaced."""
        if process in self.replaced:
            self.trace(f"the replaced {process.name} ends")
            self.replaced.remove(process)
            process.is_up = False
            process.reactor.kill()

    def make_rows(
        self, process: Process, stream_name: str, count: int
    ) -> list[SimulatedRow]:
        """Return new rows of a process; see :meth:`write`."""
        rows = []
        for _ in range(count):
            self._row_id += 1
            key = str(self._row_id % 4)
            if stream_name == MEMORY_STREAM and process not in self.replaced:
                if not self.in_memory:
                    # No later row replaces this key, so that a missing row is detected.
                    key = "first"
                self.in_memory[key] = self._row_id
            rows.append(SimulatedRow(self._row_id, f"{process.epoch}:{key}"))
        return rows

    def forget(self, name: str) -> None:
        """Delete the saved state of a process that is not running."""
        self._saved[name] = SavedState()
        self._last_epochs.pop(name, None)

    def write(self, name: str, stream_name: str, count: int) -> None:
        """Let a process write rows.

        Do nothing if the process is not up, is about to be stopped, or is not a
        configured writer of the stream.
        """
        process = self.processes.get(name)
        if process is None or not process.is_up or name in self.stopping:
            return
        if name not in self.writers[stream_name]:
            return
        rows = self.make_rows(process, stream_name, count)
        self.counts.writes += 1
        self.trace(f"{name} writes {count} rows to {stream_name}")
        self.run(f"writing {stream_name}", process.write(stream_name, rows))

    def run(self, what: str, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background, and record its failure as a problem."""

        def failed(failure: Failure) -> None:
            assert failure.value is not None
            self.unexpected(what, failure.value)

        Deferred.fromCoroutine(coroutine).addErrback(failed)

    def written(self, name: str, connection: Connection, data: bytes) -> None:
        """Check what a process writes to a connection to another process."""
        if connection.role == "tcp":
            for line in data.split(b"\n"):
                self._published(name, line)

    def _published(self, name: str, line: bytes) -> None:
        if line.startswith(b"POSITION "):
            position = PositionCommand.from_line(line.decode().partition(" ")[2])
            self.ledger.announced(
                position.stream_name,
                position.instance_name,
                position.prev_token,
                position.new_token,
            )

    # -- at the end --------------------------------------------------------------------

    def differences(self) -> list[str]:
        """Describe what is wrong at the end; return an empty list if nothing is.

        If a process is not up, only such processes are named. Otherwise, missing rows
        and disagreements between processes are listed.
        """
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
                    # A writer of this stream announces only its own rows' positions.
                    continue
                found += [
                    f"{name} is at {process.position(stream, writer)} of {stream} of "
                    f"{writer}, which is at {own}"
                    for name, process in self.processes.items()
                    if process.position(stream, writer) != own
                ]
        found += self._catching_up()
        found += self._differing_views()
        return found + self._differing_persisted()

    def _catching_up(self) -> list[str]:
        return [
            f"{name} is fetching {stream} of {writer}"
            for name, process in self.processes.items()
            for stream, receiver in process.handler.receivers.items()
            for writer, reader in receiver.readers().items()
            # Nobody answers for a writer that does not exist.
            if reader.is_catching_up and writer in self.writers[stream]
        ]

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
            # Without the extension, a process does not know the epochs of its peers.
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
