"""The interface that a cluster provides to its simulated processes."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from random import Random
from typing import Any, Protocol

from synapse_replication.app.host import StandaloneHost
from synapse_replication.streams.backlog import Backlog
from tests.simulation.clock import SimulatedClock
from tests.simulation.database import SimulatedDatabase, SimulatedStandby
from tests.simulation.invariants import Ledger, Reader
from tests.simulation.network import SimulatedNetwork
from tests.simulation.topology import Links
from tests.simulation.watcher import Counts


class Neighbour(Protocol):
    """Another process, as seen by requests over HTTP.

    :ivar is_up: whether the process responds to requests.
    :ivar host: the host of the process.
    :ivar backlog: the backlog of the process; ``None`` if it has none.
    """

    is_up: bool
    host: StandaloneHost
    backlog: Backlog | None


class Environment(Protocol):
    """The resources that processes share, and the records of their actions.

    Implemented by :class:`~tests.simulation.cluster.Cluster`.

    :ivar processes: the running processes, by name.
    :ivar writers: the configured writers of each stream, by its name.
    :ivar speak_extension: the names of the processes that use the extension.
    :ivar discards: whether writers may discard rows.
    :ivar replaces: whether writers acquire their names, and may be replaced.
    :ivar shares_tokens: true if the processes simulate those of a homeserver, in which
        a writer's token states that the rows of all writers up to it are persisted;
        false if the processes simulate those of the stand-alone host.
    :ivar links: the links between the processes, and to Redis.
    :ivar sink_failure_chance: the probability that a sink rejects rows or an epoch.
    :ivar slow_sink_chance: the probability that a sink rejects rows or delivers them
        late, unless ``sink_failure_chance`` is greater: then no sink is slow.
    :ivar http_failure_chance: the probability that a request to a process fails.
    """

    random: Random
    clock: SimulatedClock
    network: SimulatedNetwork
    database: SimulatedDatabase
    standby: SimulatedStandby | None
    ledger: Ledger
    counts: Counts
    discards: bool
    replaces: bool
    speak_extension: set[str]
    has_small_queues: bool
    shares_tokens: bool
    links: Links
    torture_level: int
    sink_failure_chance: float
    slow_sink_chance: float
    http_failure_chance: float

    @property
    def writers(self) -> Mapping[str, Sequence[str]]:
        """The configured writers of each stream, by its name."""
        ...

    @property
    def processes(self) -> Mapping[str, Neighbour]:
        """The running processes, by name."""
        ...

    def trace(self, text: str) -> None:
        """Report an event to the trace."""

    def unexpected(self, what: str, error: BaseException) -> None:
        """Record a failure that no fault explains."""

    @property
    def replaced(self) -> Sequence[Any]:
        """The processes that were suspended and replaced, and have not ended."""
        ...

    def leave(self, process: Any) -> None:
        """End a process that was replaced."""

    def retains_rows(self, name: str) -> bool:
        """Return whether a process retains delivered rows across a crash."""
        ...

    def make_reactor(self, name: str) -> Any:
        """Return the simulated reactor of a process."""

    def next_epoch(self) -> int:
        """Return the number of a new epoch."""
        ...

    def begin_epoch(
        self, name: str, positions: dict[tuple[str, str], int], epoch: int
    ) -> Reader:
        """Record a new epoch of a process that resumes at these positions."""
        ...

    def run(self, what: str, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background, and record its failure as a problem."""
