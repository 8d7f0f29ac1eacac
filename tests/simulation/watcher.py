"""The observer of a simulated process, which counts events and reports failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import attrs
from typing_extensions import override

from synapse_replication.errors import CatchUpError, RowDecodeError
from synapse_replication.handlers.observer import (
    CatchUpEvent,
    DiscardReason,
    ReplicationObserver,
)
from synapse_replication.wire.commands.standard import PingCommand
from synapse_replication.wire.connection import CloseReason
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
        because it may have missed messages.
    :param reset: called with ``name``, a stream and its writer when the position of the
        process moved back.
    """

    def __init__(
        self,
        name: str,
        counts: Counts,
        trace: Callable[[str], object],
        unexpected: Callable[[str, BaseException], object],
        cut_off: Callable[[str], object],
        reset: Callable[[str, str, str], object],
    ) -> None:
        self._name = name
        self.counts = counts
        self._trace = trace
        self._unexpected = unexpected
        self._cut_off = cut_off
        self._reset = reset
        self._reached: dict[tuple[str, str], int] = {}
        self._fetched: dict[tuple[str, str], CatchUpEvent] = {}
        #: Positions of this process that are ahead of the writer, by (stream, writer).
        self.ahead: dict[tuple[str, str], int] = {}

    @override
    def connection_made(self, connection: str) -> None:
        self._trace(f"{self._name}: {connection} is up")
        if connection != "redis_out":
            self._cut_off(self._name)
            self.counts.subscriptions[self._name] += 1

    @override
    def connection_lost(self, connection: str, reason: CloseReason, why: str) -> None:
        self._trace(f"{self._name}: {connection} is lost: {why}")
        if connection != "redis_out":
            self._cut_off(self._name)

    @override
    def commands_sent(self, connection: str, command: str, count: int) -> None:
        if command not in (PingCommand.NAME, COUNTED_AS):
            self.counts.commands += count

    @override
    def stream_connected(
        self, connection: str, stream_name: str, instance_name: str
    ) -> None:
        self._trace(f"{self._name}: {stream_name} of {instance_name} is live")

    @override
    def removed_writer_found(
        self, stream_name: str, instance_name: str, from_token: int, upto_token: int
    ) -> None:
        self.counts.drains[self._name] += 1
        self._trace(
            f"{self._name} drains {stream_name} of {instance_name} in "
            f"({from_token}, {upto_token}]"
        )

    @override
    def removed_writer_drained(
        self, stream_name: str, instance_name: str, token: int
    ) -> None:
        self._trace(
            f"{self._name} has drained {stream_name} of {instance_name} up to {token}"
        )

    @override
    def discarded(
        self, stream_name: str, instance_name: str, reason: DiscardReason, count: int
    ) -> None:
        if reason not in (DiscardReason.OWN_ECHO, DiscardReason.REDUNDANT_POSITION):
            self._trace(
                f"{self._name} discards {count} items of {stream_name} of "
                f"{instance_name}: {reason.value}"
            )
        if reason is DiscardReason.CATCHING_UP:
            self.counts.collapses += 1

    @override
    def position_refuted(
        self, stream_name: str, instance_name: str, token: int, last_token: int
    ) -> None:
        self.counts.refuted += 1
        self._trace(
            f"{self._name}: {instance_name} cannot be at {token} of {stream_name}"
        )

    @override
    def ahead_of_writer(
        self, stream_name: str, instance_name: str, position: int, announced: int
    ) -> None:
        self._trace(
            f"{self._name} is at {position} of {stream_name} of {instance_name}, which "
            f"reports that it is at {announced}"
        )
        self.ahead[stream_name, instance_name] = position

    @override
    def stream_reset(
        self, stream_name: str, instance_name: str, from_token: int, to_token: int
    ) -> None:
        self.counts.fallbacks += 1
        self._trace(
            f"{self._name} moves back from {from_token} to {to_token} of {stream_name} "
            f"of {instance_name}"
        )
        self._reset(self._name, stream_name, instance_name)

    @contextmanager
    @override
    def catch_up(self, event: CatchUpEvent) -> Iterator[None]:
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
        yield

    @override
    def catch_up_page(self, event: CatchUpEvent, rows: int, upto_token: int) -> None:
        self._reached[event.stream_name, event.instance_name] = upto_token

    @override
    def catch_up_failed(
        self, event: CatchUpEvent, error: BaseException, attempt: int, retry_in: float
    ) -> None:
        self._reached[event.stream_name, event.instance_name] = event.from_token
        self._trace(
            f"{self._name}: fetching {event.stream_name} of {event.instance_name} "
            f"failed, retrying in {retry_in:.1f} s: {error!r}"
        )

    @override
    def sending_failed(self, stream_name: str, error: BaseException) -> None:
        if not isinstance(error, CatchUpError):
            self._unexpected(f"sending {stream_name}", error)

    @override
    def failure(self, what: str, error: BaseException) -> None:
        self._trace(f"{self._name}: {what} failed: {error!r}")
        if not isinstance(error, CatchUpError | RowDecodeError) and type(
            error
        ).__name__ not in (
            "OperationalError",
            "SerializationFailure",
            "SinkError",
            "ImplausiblePositionError",
        ):
            self._unexpected(f"{self._name}: {what}", error)
