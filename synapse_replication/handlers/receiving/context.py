"""What the parts that receive a stream need from outside: host, options, breaks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import attrs

from synapse_replication.handlers.events import Discarded, DiscardReason
from synapse_replication.handlers.interfaces import Clock, EpochSink, ReplicationHost
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.handlers.receiving.partial_resync import PartialResync
from synapse_replication.handlers.timer import Backoff
from synapse_replication.options import option
from synapse_replication.streams.stream import CheckedStream, Stream
from synapse_replication.streams.writer_positions import PLAUSIBLE_DISTANCE

#: If no work was counted for this time, in s, the reactor has probably run in the
#: meantime, so no break is due.
_IDLE = 0.0005


class ReactorYielder:
    """Limiter of the work that is done on rows before yielding to the reactor.

    All streams of a process share this object: the data of one socket read often
    belongs to many streams, none of which would exceed the limits by itself.

    :param max_rows: the number of rows after which a break is due.
    :param max_seconds: the time of continuous work after which a break is due, in s.
    """

    def __init__(self, clock: Clock, max_rows: int, max_seconds: float) -> None:
        self._clock = clock
        self._max_rows = max_rows
        self._max_seconds = max_seconds
        self._breaks = 0
        self._reset()

    def _reset(self) -> None:
        self._rows = 0
        self._started = self._last_work = self._clock.seconds()

    def count(self, rows: int) -> None:
        """Count rows, or other items, that were handled since the last break."""
        self._rows += rows
        self._last_work = self._clock.seconds()

    def is_due(self) -> bool:
        """Return whether a break is due. Call it before each piece of work."""
        now = self._clock.seconds()
        if now - self._last_work > _IDLE:
            self._reset()
        return self._rows >= self._max_rows or now - self._started >= self._max_seconds

    async def take_break(self) -> None:
        """Yield to the reactor once, and reset the counts."""
        breaks = self._breaks
        await self._clock.sleep(0)
        # Several queues may wait in the same break; only the first one that resumes
        # resets the counts.
        if self._breaks == breaks:
            self._breaks += 1
            self._reset()


@attrs.frozen
class ReceiverOptions:
    """The limits and retry settings of a received stream.

    :ivar max_queue_size: the most bytes of each stream that may be queued for a slow
        row sink, and the most bytes of an unfinished batch; if there are more, the rows
        of the queue or batch are dropped and fetched later.
    :ivar max_batch_rows: the most rows of an unfinished batch; a larger batch is
        dropped, and fetched when it is complete.
    :ivar break_after_rows: the number of rows to handle before yielding to the reactor.
    :ivar break_after_seconds: the time for which to handle rows before yielding to the
        reactor, in s.
    :ivar backoff: the delays between attempts to catch up.
    :ivar reverts_positions: whether to revert a position that proves false: the reader
        returns to the token before the range over which the position advanced without
        rows. False for a recording, whose writers cannot be queried.
    :ivar plausible_distance: the most ids by which a position may exceed the last known
        value of its stream's sequence without being verified by a query to the
        database. For a stream held in memory, the position is compared with the
        writer's last known position, and the query goes to the writer. A sequence is
        never advanced to a position beyond this distance. The value must exceed the
        number of ids that a stream uses in one transaction.
    :ivar position_check_seconds: the mean time between two reads of stream_positions,
        in s, which find rows that a writer has not announced. 0 disables the reads.
    """

    # The minimum suffices for the largest row over Redis.
    max_queue_size: int = attrs.field(
        default=8 * 1024 * 1024,
        metadata=option("max_queue_bytes", minimum=1024 * 1024),
    )
    max_batch_rows: int = attrs.field(default=10_000, metadata=option(minimum=100))
    break_after_rows: int = 2_000
    break_after_seconds: float = 0.01
    backoff: Backoff = attrs.field(factory=Backoff)
    reverts_positions: bool = True
    # The default is far greater than the number of ids announced between two queries of
    # the sequence, and far smaller than the number of ids that the sequence has left.
    plausible_distance: int = attrs.field(
        default=PLAUSIBLE_DISTANCE, metadata=option(minimum=1000, maximum=2**40)
    )
    position_check_seconds: float = attrs.field(
        default=5.0, metadata=option(minimum=0, maximum=3600)
    )


class StreamContext:
    """A stream, and what the parts that receive it need from outside.

    It exists before these parts, which :class:`.StreamParts` holds.

    :ivar sink: the host's row sink.
    :ivar yielder: shared by all streams of the process.
    :ivar partial: fetches rows from writers' backlogs before the stream's own source is
        queried; ``None`` to query only the source.
    :ivar is_plausible: returns whether a writer's token is within the stream's
        plausible distance; always true if the stream does not check tokens.
    """

    def __init__(
        self,
        stream: Stream,
        host: ReplicationHost,
        observer: ReplicationObserver,
        options: ReceiverOptions,
        yielder: ReactorYielder,
        partial: PartialResync | None = None,
    ) -> None:
        self.stream = stream
        self.description = stream.description
        self.name = stream.description.name
        self.is_plausible: Callable[[str, int], bool] = (
            stream.is_plausible
            if isinstance(stream, CheckedStream)
            else lambda instance_name, token: True
        )
        self.sink = host.rows
        self.clock = host.clock
        self.run_as_background_process = host.run_as_background_process
        self.observer = observer
        self.options = options
        self.yielder = yielder
        self.partial = partial

    def saved_epochs(self) -> dict[str, str]:
        """Return the epoch of the saved rows of each writer, if the sink saved it."""
        if not isinstance(self.sink, EpochSink):
            return {}
        return {
            writer: epoch
            for (stream, writer), epoch in self.sink.saved_epochs().items()
            if stream == self.name
        }

    def save_epoch(self, instance_name: str, epoch: str) -> Awaitable[None] | None:
        """Have the sink save the epoch of a writer's next rows, if it saves epochs."""
        if not isinstance(self.sink, EpochSink):
            return None
        return self.sink.on_epoch(self.name, instance_name, epoch)

    def discard(self, instance_name: str, reason: DiscardReason, count: int) -> None:
        """Report discarded rows or positions, unless ``count`` is 0."""
        if count:
            self.observer.observe(Discarded(self.name, instance_name, reason, count))

    def report_position(self, instance_name: str) -> None:
        """Report the token up to which a writer's rows were delivered."""
        self.observer.position_changed(
            self.name, instance_name, self.stream.current_token(instance_name)
        )
