"""What a simulated process needs of its cluster."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from random import Random
from typing import Any, Protocol

from synapse_replication.app.host import StandaloneHost
from synapse_replication.streams.backlog import Backlog
from synapse_replication.testing.simulation.clock import SimulatedClock
from synapse_replication.testing.simulation.database import SimulatedDatabase
from synapse_replication.testing.simulation.invariants import Ledger, Reader
from synapse_replication.testing.simulation.network import SimulatedNetwork
from synapse_replication.testing.simulation.parts import Parts
from synapse_replication.testing.simulation.watcher import Counts

__all__ = ["Environment", "Neighbour"]


class Neighbour(Protocol):
    """Another process, as far as requests over HTTP see it.

    :ivar is_up: it answers.
    :ivar backlog: what it sent last; ``None`` if it keeps none.
    """

    is_up: bool
    host: StandaloneHost
    backlog: Backlog | None


class Environment(Protocol):
    """All that a process shares with others, and what records what it does.

    Implemented by :class:`~synapse_replication.testing.simulation.cluster.Cluster`.

    :ivar processes: those that run, by name.
    :ivar writers: of each stream, by its name.
    :ivar speak_extension: the names of those that speak the extension.
    :ivar shares_tokens: processes are those of a homeserver, whose token of a writer
        covers what all writers have persisted; else those of the stand-alone host.
    :ivar sink_failure_chance: that a host refuses rows.
    :ivar slow_sink_chance: that a host takes its time.
    :ivar http_failure_chance: that a request to another process fails.
    """

    parts: Parts
    random: Random
    clock: SimulatedClock
    network: SimulatedNetwork
    database: SimulatedDatabase
    ledger: Ledger
    counts: Counts
    speak_extension: set[str]
    has_small_queues: bool
    shares_tokens: bool
    torture_level: int
    sink_failure_chance: float
    slow_sink_chance: float
    http_failure_chance: float

    @property
    def writers(self) -> Mapping[str, Sequence[str]]:
        """The declared writers of each stream."""
        ...

    @property
    def processes(self) -> Mapping[str, Neighbour]:
        """The processes by name."""
        ...

    def trace(self, text: str) -> None:
        """Record what happens."""

    def unexpected(self, what: str, error: BaseException) -> None:
        """Record a failure that no fault explains."""

    def keeps_rows(self, name: str) -> bool:
        """Return whether a process keeps what it was handed over a crash."""
        ...

    def make_reactor(self, name: str) -> Any:
        """Make what a process takes for a reactor."""

    def next_epoch(self) -> int:
        """Return the next number of a life of a process."""
        ...

    def begins(self, name: str, positions: dict[tuple[str, str], int]) -> Reader:
        """Record a new life, which goes on with what the last one kept."""
        ...

    def run(self, what: str, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run what nobody waits for, and which never fails."""
