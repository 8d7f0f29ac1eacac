"""The row sink of a simulated process."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any, Protocol

from twisted.internet.task import deferLater

from tests.simulation.environment import Environment
from tests.simulation.invariants import Reader
from tests.simulation.topology import SavedState
from tests.simulation.watcher import Watcher


class SinkOwner(Protocol):
    """The process that has a sink.

    :ivar reader: the epoch of the process in the ledger.
    :ivar saved: the saved state of the process.
    :ivar is_judged: whether it has its place in the ledger.
    """

    name: str
    cluster: Environment
    reactor: Any
    watcher: Watcher
    reader: Reader
    saved: SavedState

    @property
    def is_judged(self) -> bool: ...

    def save(self, key: tuple[str, str], token: int) -> None:
        """Save a position across crashes, if the process saves its state."""


class SinkError(Exception):
    """Simulated fault: a sink rejected rows or an epoch."""


class ProcessSink:
    """The row sink of a process, which reports to the ledger, and saves positions."""

    def __init__(self, process: SinkOwner) -> None:
        self._process = process

    def on_rdata(
        self, stream_name: str, instance_name: str, token: int, rows: list[Any]
    ) -> Awaitable[None] | None:
        """Deliver rows, with the delays and failures of the cluster."""
        cluster = self._process.cluster
        chance = cluster.random.random()
        if chance < cluster.sink_failure_chance:
            self._process.watcher.counts.sink_failures += 1
            raise SinkError(f"{token} of {stream_name} was rejected")
        if chance < cluster.slow_sink_chance:
            return self._deliver_later(stream_name, instance_name, token, rows)
        self._deliver(stream_name, instance_name, token, rows)
        return None

    def on_late_rdata(
        self, stream_name: str, instance_name: str, token: int, rows: list[Any]
    ) -> Awaitable[None] | None:
        """Deliver rows that their writer discarded."""
        return self.on_rdata(stream_name, instance_name, token, rows)

    async def _deliver_later(
        self, stream_name: str, instance_name: str, token: int, rows: list[Any]
    ) -> None:
        await deferLater(self._process.reactor, self._process.cluster.random.random())
        self._deliver(stream_name, instance_name, token, rows)

    def _deliver(
        self, stream_name: str, instance_name: str, token: int, rows: list[Any]
    ) -> None:
        process = self._process
        if process.is_judged:
            process.cluster.ledger.delivered(
                process.reader, stream_name, instance_name, token, rows
            )
        if instance_name not in process.cluster.writers[stream_name]:
            process.watcher.counts.drained_rows += len(rows)
        key = stream_name, instance_name
        process.save(key, max(token, process.saved.positions.get(key, 0)))

    def on_position(self, stream_name: str, instance_name: str, token: int) -> None:
        """Deliver a position."""
        process = self._process
        if process.is_judged:
            process.cluster.ledger.position(
                process.reader, stream_name, instance_name, token
            )
        process.save((stream_name, instance_name), token)

    def saved_positions(self) -> Mapping[tuple[str, str], int]:
        """Return the saved positions, by (stream, writer)."""
        return dict(self._process.saved.positions)

    def saved_epochs(self) -> Mapping[tuple[str, str], str]:
        """Return the saved epochs, by (stream, writer)."""
        return self._process.saved.epochs

    def on_epoch(self, stream_name: str, instance_name: str, epoch: str) -> None:
        """Save a writer's new epoch, with 0 as the position in that epoch.

        If the process does not save its state, do not save the epoch.

        :raises SinkError: if the cluster simulates a failure of the sink.
        """
        process = self._process
        process.cluster.trace(
            f"{process.name} records epoch {epoch} of {stream_name} of {instance_name}"
        )
        if process.cluster.random.random() < process.cluster.sink_failure_chance:
            process.watcher.counts.sink_failures += 1
            raise SinkError(f"{epoch} of {stream_name} was rejected")
        key = stream_name, instance_name
        process.save(key, 0)
        if process.cluster.retains_rows(process.name):
            process.saved.epochs[key] = epoch
