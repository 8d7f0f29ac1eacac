"""Fixtures for the tests of the status observer."""

from __future__ import annotations

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.events import CatchUpEvent, PeerHeartbeat
from synapse_replication.instrumentation.status.model import (
    ProcessStatus,
    StallReason,
    WriterStatus,
)
from synapse_replication.instrumentation.status.status_observer import StatusObserver
from tests.support.known_readers import KnownReaders

EVENT = CatchUpEvent("events", "w1", 100, 150)


def heartbeat_of(
    name: str = "w1", *, is_leaving: bool = False, **positions: tuple[int, float]
) -> PeerHeartbeat:
    return PeerHeartbeat(name, "abc", "0.1.0", "host:1", is_leaving, positions)


class StatusObserverTestCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.observer = StatusObserver(
            "x.test", "me", [("events", "w1")], monotonic=self.clock.seconds
        )
        self.known = KnownReaders(self.observer)

    def snapshot(self) -> ProcessStatus:
        return self.observer.snapshot()

    def writer(self) -> WriterStatus:
        (writer,) = self.snapshot().writers
        return writer

    def go_live(self, token: int = 100) -> None:
        self.known.link_up()
        self.known.go_live("events", "w1", token)

    def stalled(self) -> tuple[StallReason | None, float, str]:
        writer = self.writer()
        return writer.reason, writer.stalled_for, writer.detail
