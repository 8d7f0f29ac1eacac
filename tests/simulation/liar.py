"""A peer that publishes false positions: the *liar*.

Each lie announces a position of a declared or an undeclared writer, in one of the forms
of :class:`LieForm`, near the real position or far from it. The seed determines which
processes receive the announcement.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from random import Random

from synapse_replication.streams.rows import encode_json
from synapse_replication.wire.extension import (
    CHANNEL,
    ExtensionMessage,
    MessageType,
    StreamPosition,
    encode_message,
)
from tests.simulation.cluster import Cluster
from tests.simulation.topology import (
    CACHES,
    MEMORY_STREAM,
    PROCESSES,
    TABLES,
)

#: A position far beyond every plausible one.
FAR = 2**62
#: A plausible false position is less than this distance above the last id of the
#: stream's sequence or, for a stream in memory, above the main process's position (0
#: while that process is down).
NEAR = 40
#: An instance that is not declared as a writer of any stream.
UNDECLARED = "zz"


class LieForm(enum.Enum):
    """How a false position is announced."""

    PLAIN = "a POSITION"
    RANGE = "a POSITION with a range"
    ROW = "a row"
    HEARTBEAT = "a heartbeat"
    UNDECLARED = "a POSITION of an undeclared writer"


class Liar:
    """Publishes false positions in a cluster."""

    def __init__(self, cluster: Cluster, random: Random) -> None:
        self._cluster = cluster
        self._random = random
        self._row_id = 0
        #: The (stream, declared writer) pairs for which a false position was announced.
        #: The simulation's runner clears the set when it has handled them.
        self.lied_about: set[tuple[str, str]] = set()

    def lie(self) -> str:
        """Publish one false position, and return its description."""
        cluster, random = self._cluster, self._random
        form = random.choice(list(LieForm))
        speakers = cluster.speak_extension & set(cluster.processes)
        is_far = random.random() < 0.5
        # Do not lie where no reader could recover. For an idempotent stream, a false
        # position near the real one cannot be detected afterwards. For a stream in
        # memory, such a position remains in effect until the writer announces a greater
        # one, which stock peers rarely do.
        tables = [table.name for table in TABLES if is_far or table.name != CACHES]
        streams = tables if form is LieForm.ROW else [*tables, MEMORY_STREAM]
        if not is_far and cluster.speak_extension < set(PROCESSES):
            streams = tables
        stream = random.choice(streams)
        writer = random.choice(cluster.writers[stream])
        cluster.ledger.disputed.add(stream)
        if form is LieForm.UNDECLARED:
            writer = UNDECLARED
        else:
            self.lied_about.add((stream, writer))
        if form is LieForm.HEARTBEAT and writer not in speakers:
            form = LieForm.PLAIN
        token = FAR if is_far else self._near(stream) + random.randrange(1, NEAR)
        listeners = [name for name in PROCESSES if random.random() < 0.7]
        text = f"{form.value}: {stream} of {writer} is at {token}, to {listeners}"
        if not is_far and writer != UNDECLARED:
            cluster.ledger.doubted |= {(name, stream, writer) for name in listeners}
        self._publish(form, stream, writer, token, listeners)
        return text

    def _near(self, stream: str) -> int:
        cluster = self._cluster
        if stream == MEMORY_STREAM:
            main = cluster.processes.get("main")
            return (
                main.position(stream, "main") if main is not None and main.is_up else 0
            )
        return cluster.database.sequences[f"{stream}_seq"]

    def _publish(
        self,
        form: LieForm,
        stream: str,
        writer: str,
        token: int,
        listeners: Sequence[str],
    ) -> None:
        broker = self._cluster.broker
        if form is LieForm.HEARTBEAT:
            # The epoch is public: the status page shows it.
            epoch = self._cluster.processes[writer].host.identity.instance_id
            now = int(self._cluster.clock.seconds() * 1000)
            message = ExtensionMessage(
                type=MessageType.HEARTBEAT,
                instance_name=writer,
                epoch=epoch,
                time_ms=now,
                positions={stream: StreamPosition(token, now)},
            )
            broker.inject(f"hs/{CHANNEL}", encode_message(message), listeners)
            return
        if form is LieForm.ROW:
            self._row_id -= 1
            row = encode_json([self._row_id, "0:0"]).decode()
            line = f"RDATA {stream} {writer} {token} {row}"
            forged = self._cluster.ledger.forged.setdefault(
                (stream, writer, token), set()
            )
            forged.add(self._row_id)
        else:
            previous = token if form is LieForm.PLAIN else 0
            line = f"POSITION {stream} {writer} {previous} {token}"
        broker.inject("hs", line.encode(), listeners)
