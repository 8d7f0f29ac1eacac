"""The observer of a simulated process, which counts events and reports failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import attrs
from typing_extensions import override

from synapse_replication.errors import CatchUpError, RowDecodeError
from synapse_replication.handlers.events import (
    AheadOfWriter,
    CatchUpEvent,
    CatchUpFailed,
    CatchUpPage,
    Discarded,
    DiscardReason,
    LinkDown,
    LinkUp,
    OperationFailed,
    PositionLowered,
    PositionRefuted,
    RemovedWriterDrained,
    RemovedWriterFound,
    SendingFailed,
    StreamConnected,
    StreamReset,
)
from synapse_replication.handlers.observer import ReplicationObserver, handles
from synapse_replication.wire.commands import PingCommand
from synapse_replication.wire.extension import COUNTED_AS


@attrs.define
class Counts:
    """Numbers of events in one simulation.

    :ivar writes: attempted writes.
    :ivar starts: starts, by process.
    :ivar subscriptions: established links, by process.
    :ivar announcements: repeated announcements of all positions, by process: after lost
        publishes, and at the end of a run if the positions do not agree.
    :ivar commands: sent commands, without pings.
    :ivar catch_ups: started catch-ups, by process; one that resumes after a page, or is
        retried, is not counted again.
    :ivar garbled: rows that were made unreadable in transit.
    :ivar sink_failures: batches and epochs that a sink rejected.
    :ivar collapses: discards of rows because a catch-up would fetch them.
    :ivar faults: faults, by kind.
    :ivar partial_resyncs: pages from the backlog of a writer.
    :ivar moves: changes of a stream's writers, by kind.
    :ivar drains: started drains of removed writers, by process.
    :ivar drained_rows: delivered rows of removed writers.
    :ivar refuted: positions that were found to be false.
    :ivar fallbacks: resets of a position to a lower one.
    :ivar repairs: sequences that the runner advanced, as an operator would, because a
        reader was ahead of its writer.
    :ivar hidden_resets: restarts of the writer of the stream in memory that a reader
        could not detect; each is stored as ``READER-EPOCH``, with the writer's new
        epoch.
    """

    writes: int = 0
    starts: Counter[str] = attrs.Factory(Counter)
    subscriptions: Counter[str] = attrs.Factory(Counter)
    announcements: Counter[str] = attrs.Factory(Counter)
    commands: int = 0
    catch_ups: Counter[str] = attrs.Factory(Counter)
    garbled: int = 0
    sink_failures: int = 0
    collapses: int = 0
    faults: Counter[str] = attrs.Factory(Counter)
    partial_resyncs: int = 0
    moves: Counter[str] = attrs.Factory(Counter)
    drains: Counter[str] = attrs.Factory(Counter)
    drained_rows: int = 0
    refuted: int = 0
    fallbacks: int = 0
    repairs: int = 0
    hidden_resets: set[str] = attrs.Factory(set)


class Watcher(ReplicationObserver):
    """The observer of one epoch of a process.

    :param name: the name of the process.
    :param counts: the counters to update.
    :param trace: called with a text for most kinds of events.
    :param unexpected: called with failures that no fault explains.
    :param cut_off: called with ``name`` when the process obtains or loses a link,
        because it may have missed messages, and with ``is_lost=True`` if it lost it.
    :param reset: called with ``name``, a stream and its writer when the position of the
        process moved back below rows that were delivered.
    :param moved_back: the same when it moved back, but not below such rows; called also
        with the position that it left.
    """

    def __init__(
        self,
        name: str,
        counts: Counts,
        trace: Callable[[str], object],
        unexpected: Callable[[str, BaseException], object],
        cut_off: Callable[..., object],
        reset: Callable[[str, str, str], object],
        moved_back: Callable[[str, str, str, int], object],
    ) -> None:
        self._name = name
        self.counts = counts
        self._trace = trace
        self._unexpected = unexpected
        self._cut_off = cut_off
        self._reset = reset
        self._moved_back = moved_back
        self._reached: dict[tuple[str, str], int] = {}
        self._fetched: dict[tuple[str, str], CatchUpEvent] = {}
        #: Positions of this process that are ahead of the writer, by (stream, writer).
        self.ahead: dict[tuple[str, str], int] = {}

    @handles(LinkUp)
    def _link_up(self, event: LinkUp) -> None:
        self._trace(f"{self._name}: {event.connection} is up")
        if event.connection != "redis_out":
            self._cut_off(self._name)
            self.counts.subscriptions[self._name] += 1

    @handles(LinkDown)
    def _link_down(self, event: LinkDown) -> None:
        self._trace(f"{self._name}: {event.connection} is lost: {event.why}")
        if event.connection != "redis_out":
            self._cut_off(self._name, is_lost=True)

    @override
    def commands_sent(self, connection: str, command: str, count: int) -> None:
        if command not in (PingCommand.NAME, COUNTED_AS):
            self.counts.commands += count

    @handles(StreamConnected)
    def _stream_connected(self, event: StreamConnected) -> None:
        self._trace(
            f"{self._name}: {event.stream_name} of {event.instance_name} is live"
        )

    @handles(RemovedWriterFound)
    def _removed_writer_found(self, event: RemovedWriterFound) -> None:
        self.counts.drains[self._name] += 1
        self._trace(
            f"{self._name} drains {event.stream_name} of {event.instance_name} in "
            f"({event.from_token}, {event.upto_token}]"
        )

    @handles(RemovedWriterDrained)
    def _removed_writer_drained(self, event: RemovedWriterDrained) -> None:
        self._trace(
            f"{self._name} has drained {event.stream_name} of {event.instance_name} up "
            f"to {event.token}"
        )

    @handles(Discarded)
    def _discarded(self, event: Discarded) -> None:
        if event.reason not in (
            DiscardReason.OWN_ECHO,
            DiscardReason.REDUNDANT_POSITION,
        ):
            self._trace(
                f"{self._name} discards {event.count} items of {event.stream_name} of "
                f"{event.instance_name}: {event.reason.value}"
            )
        if event.reason is DiscardReason.CATCHING_UP:
            self.counts.collapses += 1

    @handles(PositionRefuted)
    def _position_refuted(self, event: PositionRefuted) -> None:
        self.counts.refuted += 1
        self._trace(
            f"{self._name}: {event.instance_name} cannot be at {event.token} of "
            f"{event.stream_name}"
        )

    @handles(AheadOfWriter)
    def _ahead_of_writer(self, event: AheadOfWriter) -> None:
        self._trace(
            f"{self._name} is at {event.position} of {event.stream_name} of "
            f"{event.instance_name}, which reports that it is at {event.announced}"
        )
        self.ahead[event.stream_name, event.instance_name] = event.position

    @handles(StreamReset)
    def _stream_reset(self, event: StreamReset) -> None:
        self._trace_move(event)
        self._reset(self._name, event.stream_name, event.instance_name)

    @handles(PositionLowered)
    def _position_lowered(self, event: PositionLowered) -> None:
        self._trace_move(event)
        self._moved_back(
            self._name, event.stream_name, event.instance_name, event.from_token
        )

    def _trace_move(self, event: StreamReset | PositionLowered) -> None:
        self.counts.fallbacks += 1
        self._trace(
            f"{self._name} moves back from {event.from_token} to {event.to_token} of "
            f"{event.stream_name} of {event.instance_name}"
        )

    @handles(CatchUpEvent)
    def _catch_up(self, event: CatchUpEvent) -> None:
        key = event.stream_name, event.instance_name
        last = self._fetched.get(key, event)
        is_read_ahead = last.from_token < event.from_token < last.upto_token
        if self._reached.pop(key, None) != event.from_token and not is_read_ahead:
            self.counts.catch_ups[self._name] += 1
        self._fetched[key] = event
        self._trace(
            f"{self._name} fetches {event.stream_name} of {event.instance_name} in "
            f"({event.from_token}, {event.upto_token}]"
        )
        self._reached[key] = event.from_token

    @handles(CatchUpPage)
    def _catch_up_page(self, event: CatchUpPage) -> None:
        self._reached[event.catch_up.stream_name, event.catch_up.instance_name] = (
            event.upto_token
        )

    @handles(CatchUpFailed)
    def _catch_up_failed(self, event: CatchUpFailed) -> None:
        self._reached[event.catch_up.stream_name, event.catch_up.instance_name] = (
            event.catch_up.from_token
        )
        self._trace(
            f"{self._name}: fetching {event.catch_up.stream_name} of "
            f"{event.catch_up.instance_name} failed, retrying in {event.retry_in:.1f} "
            f"s: {event.error!r}"
        )

    @handles(SendingFailed)
    def _sending_failed(self, event: SendingFailed) -> None:
        if not isinstance(event.error, CatchUpError):
            self._unexpected(f"sending {event.stream_name}", event.error)

    @handles(OperationFailed)
    def _operation_failed(self, event: OperationFailed) -> None:
        self._trace(f"{self._name}: {event.what} failed: {event.error!r}")
        if not isinstance(event.error, CatchUpError | RowDecodeError) and type(
            event.error
        ).__name__ not in (
            "OperationalError",
            "SerializationFailure",
            "SinkError",
            "ImplausiblePositionError",
        ):
            self._unexpected(f"{self._name}: {event.what}", event.error)
