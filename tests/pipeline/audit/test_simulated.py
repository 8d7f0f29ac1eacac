"""Audits simulated deployments, in which an audit must not find an error."""

from __future__ import annotations

from functools import reduce
from random import Random
from typing import Any

from pyspark.sql import DataFrame
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline.audit.checks.announced import (
    announced_absent,
    not_seen_findings,
)
from synapse_replication.pipeline.audit.checks.ids import (
    gap_findings,
    gone_findings,
    two_writers_findings,
)
from synapse_replication.pipeline.audit.checks.wire import (
    order_findings,
    reset_findings,
)
from synapse_replication.pipeline.schemas import ROWS_SCHEMA
from tests.pipeline.audits import (
    TOKENS_SCHEMA,
    found,
    ids_of_rows,
    make_rows,
    tokens_of,
)
from tests.pipeline.shared_session import shared_session
from tests.simulation.cluster import Cluster
from tests.simulation.runner import Run
from tests.simulation.topology import (
    CACHES,
    MEMORY_STREAM,
    TABLES,
)

#: Each seed has different faults: lost or half-open links, crashes, database restarts.
SEEDS = range(8, 18)


class SimulatedTests(SynchronousTestCase):
    """Tests with the recorded lines and the tables of simulated deployments."""

    def test_nothing_is_wrong(self) -> None:
        """
        Whatever the faults are, and however often a recorder is disconnected, there is
        no error.
        """
        rows: list[Any] = []
        tokens: list[Any] = []
        for seed in SEEDS:
            lines, stored = _simulate(seed)
            rows += [(f"{seed}.{stream}", *row) for stream, *row in stored]
            whole = list(tokens_of(lines, f"{seed}"))
            tokens += [_of_seed(seed, token) for token in whole]
            tokens += [
                _of_seed(seed, ("cut", *token[1:]))
                for token in _without_outages(seed, whole)
            ]
        session = shared_session()
        wire = session.createDataFrame(tokens, TOKENS_SCHEMA).cache()
        self.addCleanup(wire.unpersist)
        persisted, idempotent, in_memory = (
            [f"{seed}.{name}" for seed in SEEDS for name in names]
            for names in ([t.name for t in TABLES], [CACHES], [MEMORY_STREAM])
        )
        tables = session.createDataFrame(rows, ROWS_SCHEMA)
        ids = ids_of_rows(tables, make_rows(), wire, persisted).cache()
        self.addCleanup(ids.unpersist)

        lost = announced_absent(ids, wire, idempotent, {}).collect()
        findings = reduce(
            DataFrame.unionByName,
            [
                order_findings(wire, persisted, idempotent),
                reset_findings(wire, in_memory),
                two_writers_findings(ids),
                not_seen_findings(ids, wire, idempotent, {}),
                gap_findings(ids),
                gone_findings(ids),
            ],
        )

        self.assertEqual(lost, [])
        seen = found(findings)
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
        (table.name, row.instance_name, row.stream_id, 0, f'["{row.values[0]}"]', None)
        for table in TABLES
        for row in cluster.database.rows[table.table]
    ]


def _without_outages(seed: int, tokens: list[Any]) -> list[Any]:
    """Remove the tokens that a recorder would miss while it is disconnected."""
    random = Random(seed)
    received, is_up = [], True
    for token in tokens:
        if random.random() < 0.02:
            is_up = not is_up
        if is_up:
            received.append(token)
    return received


def _of_seed(seed: int, token: tuple[Any, ...]) -> tuple[Any, ...]:
    recording, number, t, stream, *rest = token
    return (f"{seed}.{recording}", number, t, f"{seed}.{stream}", *rest)
