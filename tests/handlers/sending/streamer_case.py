"""The base class of the streamer's tests."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.command_handler import ReplicationCommandHandler
from synapse_replication.handlers.sending.command_sender import SendingListener
from synapse_replication.handlers.sending.streamer import (
    ReplicationStreamer,
    StreamerOptions,
)
from synapse_replication.testing.doubles import MemoryConnection, SourceStream
from tests.handlers.fixtures import Row
from tests.support.recording_observer import RecordingHost


class ReversingRandom(Random):
    """A deterministic random source: ``shuffle`` reverses."""

    def random(self) -> float:
        return 0.5

    def shuffle(self, x: list[Any]) -> None:  # type: ignore[override]
        x.reverse()


class RecordingBacklog(SendingListener):
    """Records the rows that are sent, as (stream, previous token, tokens)."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, int | None, list[int]]] = []
        self.moves: list[tuple[str, int]] = []

    def retains(self, stream_name: str) -> bool:
        return stream_name == "events"

    def before_rows_sent(
        self,
        stream_name: str,
        prev_token: int | None,
        batches: Sequence[tuple[int, Sequence[bytes]]],
    ) -> None:
        self.rows.append((stream_name, prev_token, [token for token, _ in batches]))

    def position_advanced(self, stream_name: str, token: int) -> None:
        self.moves.append((stream_name, token))


class StreamerTestCase(SynchronousTestCase):
    """An instance ``w`` that writes ``events`` and ``caches``."""

    def build(self, options: StreamerOptions | None = None) -> None:
        self.events = SourceStream("events", Row, instance_name="w")
        self.caches = SourceStream(
            "caches", Row, instance_name="w", announce_own_moves_only=True
        )
        self.events.is_guess = self.caches.is_guess = False
        self.host = RecordingHost(
            self.events, self.caches, written=["events", "caches"], instance_name="w"
        )
        self.handler = ReplicationCommandHandler(self.host, self.host.observer)
        self.streamer = ReplicationStreamer(
            self.host,
            self.handler.sender,
            self.host.observer,
            options=options,
            random_source=ReversingRandom(),
        )
        self.streamer.start()
        self.connection = MemoryConnection()
        self.handler.new_connection(self.connection)
        self.connection.take()

    def setUp(self) -> None:
        self.build()

    def write(self, token: int, *rows: str) -> None:
        """Commit rows of this instance and notify the streamer."""
        self.events.persist("w", token, *([row] for row in rows))
        self.host.notifier.notify()

    def block_link(self) -> list[str]:
        """
        Let the link fall behind while many rows are sent; return the lines not yet
        sent.
        """
        self.build(StreamerOptions(max_rows=2))
        self.events.page_rows = 3
        for token in range(1, 8):
            self.events.persist("w", token, [str(token)])
        self.host.notifier.notify()
        self.assertEqual(len(self.connection.take()), 2)
        self.connection.is_behind = True
        self.host.reactor.pump([0.01] * 5)
        self.assertEqual(self.connection.take(), [])
        return [f'RDATA events w {n} ["{n}"]' for n in range(3, 8)]

    def make_link_writable(self) -> None:
        """Let the link become writable again, and report that."""
        self.connection.is_behind = False
        self.handler.ready_again(self.connection)
