"""Audits simulated deployments, in which an audit must not find an error."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, ClassVar

from twisted.trial.unittest import SynchronousTestCase

from tests.pipeline.audits import Deployment, Key, found, lines_of
from tests.simulation.cluster import Cluster
from tests.simulation.runner import Run
from tests.simulation.topology import CACHES, MEMORY_STREAM, TABLES


class SimulatedTests(SynchronousTestCase):
    """Tests with the recorded lines and the tables of simulated deployments.

    Each seed has different faults: lost or half-open links, crashes, database restarts.
    :mod:`tests.external.long.test_simulated` has more of them.
    """

    seeds: ClassVar[Sequence[int]] = (8, 12, 15)

    def test_nothing_is_wrong(self) -> None:
        """
        Whatever the faults are, and however often a recorder is disconnected, there is
        no error.
        """
        rows: list[Key] = []
        lines: list[Any] = []
        for seed in self.seeds:
            texts, stored = _simulate(seed)
            rows += [(f"{seed}.{stream}", *row) for stream, *row in stored]
            whole = lines_of(texts, f"{seed}")
            lines += [_of_seed(seed, line) for line in whole]
            lines += [
                _of_seed(seed, ("cut", *line[1:]))
                for line in _without_outages(seed, whole)
            ]
        persisted, idempotent, in_memory = (
            [f"{seed}.{name}" for seed in self.seeds for name in names]
            for names in ([t.name for t in TABLES], [CACHES], [MEMORY_STREAM])
        )
        deployment = Deployment(
            tables=rows,
            lines=lines,
            persisted=persisted,
            idempotent=idempotent,
            in_memory=in_memory,
        )
        seen = found(deployment.audit())

        self.assertEqual([each for each in seen if each[1] != "info"], [])
        # The faults did occur.
        self.assertLessEqual(
            {"row_not_seen", "id_without_row", "stream_reset"},
            {each[0] for each in seen},
        )


def _simulate(seed: int) -> tuple[list[str], list[Any]]:
    lines: list[str] = []
    simulation = Run(seed)
    publish = simulation.cluster.broker.publish

    def record(sender: Any, channel: bytes, line: bytes) -> int:
        if b"/" not in channel:
            lines.append(line.decode())
        return publish(sender, channel, line)

    simulation.cluster.broker.publish = record  # type: ignore[method-assign]
    simulation.run()
    return lines, _stored(simulation.cluster)


def _stored(cluster: Cluster) -> list[Any]:
    return [
        (table.name, row.instance_name, row.stream_id)
        for table in TABLES
        for row in cluster.database.rows[table.table]
    ]


def _without_outages(seed: int, lines: list[Any]) -> list[Any]:
    """Remove the lines that a recorder would miss while it is disconnected."""
    random = Random(seed)
    received, is_up = [], True
    for line in lines:
        if random.random() < 0.02:
            is_up = not is_up
        if is_up:
            received.append(line)
    return received


def _of_seed(seed: int, line: tuple[Any, ...]) -> tuple[Any, ...]:
    recording, number, t, command, stream, *rest = line
    return (f"{seed}.{recording}", number, t, command, f"{seed}.{stream}", *rest)
