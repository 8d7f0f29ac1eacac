"""What all parts of a received stream share."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from synapse_replication.backoff import Backoff
from synapse_replication.handlers.interfaces import BackgroundRunner, Clock, RowSink
from synapse_replication.handlers.observer import DiscardReason, ReplicationObserver
from synapse_replication.handlers.receiving.partial_resync import PartialResync
from synapse_replication.handlers.receiving.queue import Pacer
from synapse_replication.streams.positions import PLAUSIBLE_DISTANCE
from synapse_replication.streams.stream import Stream, StreamDescription

__all__ = ["ReceiverOptions", "StreamContext"]


@attrs.frozen
class ReceiverOptions:
    """The bounds of a received stream.

    :ivar max_queue_size: bytes that wait in its queue, and of an unfinished batch;
        beyond, rows are fetched again instead.
    :ivar max_batch_rows: rows of an unfinished batch; beyond, they are fetched
        when the batch is finished.
    :ivar break_after_rows: rows handled before the reactor gets its turn.
    :ivar break_after_seconds: s of handling before the reactor gets its turn.
    :ivar backoff: between attempts to catch up.
    :ivar takes_positions_back: fetch again what a position skipped without rows, if
        the writer contradicts it. Not for a recording, which nobody can be asked about.
    :ivar plausible_distance: positions so far beyond the source's last are believed.
    """

    max_queue_size: int = 8 * 1024 * 1024
    max_batch_rows: int = 10_000
    break_after_rows: int = 2_000
    break_after_seconds: float = 0.01
    backoff: Backoff = attrs.field(factory=Backoff)
    takes_positions_back: bool = True
    plausible_distance: int = PLAUSIBLE_DISTANCE


@attrs.frozen(eq=False, kw_only=True)
class StreamContext:
    """A received stream, and what its parts need of their surroundings.

    :ivar sink: where its rows go.
    :ivar pacer: shared by all streams of the process.
    :ivar partial: asks writers for what they sent last, before the stream's own
        source is asked; ``None`` to ask that at once.
    :ivar is_plausible: whether a writer's token is as near as tokens of the stream are.
    """

    stream: Stream
    sink: RowSink
    clock: Clock
    run_as_background_process: BackgroundRunner
    observer: ReplicationObserver
    options: ReceiverOptions
    pacer: Pacer
    partial: PartialResync | None = None
    description: StreamDescription = attrs.field(init=False)
    name: str = attrs.field(init=False)
    is_plausible: Callable[[str, int], bool] = attrs.field(init=False)

    @description.default
    def _description_of_stream(self) -> StreamDescription:
        return self.stream.description

    @name.default
    def _name_of_stream(self) -> str:
        return self.stream.description.name

    @is_plausible.default
    def _is_plausible_in_stream(self) -> Callable[[str, int], bool]:
        found: Callable[[str, int], bool] = getattr(
            self.stream, "is_plausible", _is_always_plausible
        )
        return found

    def discard(self, instance_name: str, reason: DiscardReason, count: int) -> None:
        """Report rows or positions that are discarded, if there are any."""
        if count:
            self.observer.discarded(self.name, instance_name, reason, count)

    def report_position(self, instance_name: str) -> None:
        """Report where this process stands with a writer."""
        self.observer.position_changed(
            self.name, instance_name, self.stream.current_token(instance_name)
        )


def _is_always_plausible(instance_name: str, token: int) -> bool:
    return True
