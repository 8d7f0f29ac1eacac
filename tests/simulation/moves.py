"""Changes of the writers of streams, as an operator makes them.

Theory of operation: a plan is derived from a seed. Each move changes the writers of one
stream: it replaces a writer, restores the previous writers, adds a writer or removes
one. The stream's old and new writers are stopped cleanly or killed, the configuration
changes, and these instances are restarted. If the cluster simulates a homeserver's
processes (``Cluster.shares_tokens``), every instance is restarted in this way. If not,
each instance that saves rows continues to run during the move, or is killed and
restarts some seconds later, with or without its saved state.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from tests.simulation.cluster import Cluster
from tests.simulation.topology import (
    CACHES,
    PROCESSES,
    TABLES,
    WRITERS,
)

#: The time that a cleanly stopped instance has for sending its rows, in s.
_STOP_SECONDS = 2.0


class Moves:
    """Performs a plan of moves.

    :param cluster: the cluster.
    :param seed: determines the plan.
    :param start: no move begins earlier than this many s after the creation.
    :param until: no move begins later than this many s after the creation.
    """

    def __init__(self, cluster: Cluster, seed: int, start: float, until: float) -> None:
        self._cluster = cluster
        self._random = random = Random(f"{seed}/moves")
        self._before: dict[str, Sequence[str]] = {}
        self._moving: set[str] = set()
        if cluster.standby is not None:
            # On a standby, it is not known when the rows of a removed writer are final.
            return
        for _ in range(random.choice([0, 1, 1, 2, 3])):
            at = start + random.random() * (until - start)
            cluster.clock.callLater(at, self._move)

    def _move(self) -> None:
        cluster, random = self._cluster, self._random
        stream = random.choice([t.name for t in TABLES if t.name != CACHES])
        if stream in self._moving:
            return
        self._moving.add(stream)
        old = cluster.writers[stream]
        kind, new = self._choose(stream, old)
        concerned = [name for name in WRITERS if name in {*old, *new}]
        if cluster.shares_tokens:
            # A homeserver requires a restart of all of its processes.
            concerned = list(PROCESSES)
        self._before[stream] = old
        is_killed = random.random() < 0.6
        manner = "killed" if is_killed else "stopped"
        cluster.counts.moves[f"{kind}, {manner}"] += 1
        cluster.trace(f"MOVE {stream} {kind}: {old} {manner}, then {new}")
        self._stop_some_readers()
        if is_killed:
            self._change(stream, concerned, new)
            return
        for name in concerned:
            cluster.stopping.add(name)
        cluster.clock.callLater(_STOP_SECONDS, self._change, stream, concerned, new)

    def _choose(self, stream: str, old: Sequence[str]) -> tuple[str, Sequence[str]]:
        random = self._random
        others = [name for name in WRITERS if name not in old]
        before = self._before.get(stream)
        choices: list[tuple[str, Sequence[str]]] = []
        if before is not None and before != old:
            choices += [("moved back", before)] * 2
        if others:
            choices.append(("added", (*old, random.choice(others))))
            replaced = list(old)
            replaced[random.randrange(len(replaced))] = random.choice(others)
            choices += [("moved", tuple(replaced))] * 2
        if len(old) > 1:
            removed = random.choice(old)
            remaining = tuple(name for name in old if name != removed)
            choices.append(("removed", remaining))
        return random.choice(choices)

    def _stop_some_readers(self) -> None:
        cluster, random = self._cluster, self._random
        for name, saves_rows in PROCESSES.items():
            if not saves_rows or cluster.shares_tokens or random.random() < 0.4:
                continue
            cluster.crash(name)
            if random.random() < 0.2:
                cluster.trace(f"{name} loses its saved state")
                cluster.forget(name)
            cluster.clock.callLater(3.0 + random.random() * 5, cluster.start, name)

    def _change(
        self, stream: str, concerned: Sequence[str], new: Sequence[str]
    ) -> None:
        cluster = self._cluster
        for name in concerned:
            cluster.crash(name)
            cluster.stopping.discard(name)
            delay = self._random.random() * 4
            cluster.clock.callLater(delay, cluster.start, name)
        cluster.writers[stream] = new
        self._moving.discard(stream)
