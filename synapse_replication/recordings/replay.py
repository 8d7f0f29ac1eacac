"""Replay of a recording through the real parser and handler, and the report on it.

Theory of operation: the streams of the handler's host have no initial position and no
source, because missing rows cannot be fetched. If a recording begins in the middle of a
writer's rows, a POSITION is inserted before the first row, in place of the POSITION
that was sent before the recording began. No operation waits, so each item has been
processed when the handler's ``received`` returns.

Lines, commands, rows and batches are counted as they are read. The parts of the report
that depend on positions come from the handler: from its events, its calls of the row
sink, and its requests to the streams.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias

import attrs
import msgspec
from twisted.internet import task
from twisted.internet.defer import Deferred, succeed
from typing_extensions import override

from synapse_replication.errors import RemoteProtocolError, UnparsableLineError, excerpt
from synapse_replication.handlers import command_handler, events, host_parts
from synapse_replication.handlers.events import DiscardReason
from synapse_replication.handlers.interfaces import Identity
from synapse_replication.handlers.observer import ReplicationObserver, handles
from synapse_replication.handlers.receiving.context import ReceiverOptions
from synapse_replication.recordings.reader import Record, RecordingError
from synapse_replication.streams.rows import decode_json
from synapse_replication.streams.standard.registry import STANDARD_STREAMS
from synapse_replication.streams.stream import (
    Stream,
    StreamDescription,
    StreamUpdateResult,
)
from synapse_replication.wire import rdata
from synapse_replication.wire.commands import Command, PositionCommand

_Key: TypeAlias = tuple[str, str]

#: The most names of a counter of a report.
MAX_NAMES = 1000
#: The name under which all further names are counted.
OTHER_NAMES = "(other names)"
#: The number of lines that are processed together, as in one read of a link.
_CHUNK = 256
#: A position below every token.
_NOWHERE = -(2**63)
#: The maximum number of unparsable lines that are listed; others are only counted.
_MAX_UNPARSABLE = 1000
#: The reasons for which discards are expected, with an explanation of each. A discard
#: for another reason may lose data.
EXPLANATIONS: Mapping[DiscardReason, str] = {
    DiscardReason.OLD_TOKEN: "sent again, at or below the position of its writer",
    DiscardReason.REDUNDANT_POSITION: "repeats a known position",
    DiscardReason.REPEATED: "repeats the known state of a user",
    DiscardReason.UNKNOWN_STREAM: "a stream that this version does not know",
}


@attrs.frozen
class Unparsable:
    """A line that is not a record, or whose command or row cannot be parsed.

    :ivar line_number: its line number in the recording, from 1.
    :ivar error: why it cannot be parsed.
    """

    line_number: int
    error: str


@attrs.frozen
class Gap:
    """A range of tokens whose rows may be missing, according to a later POSITION.

    :ivar after: the writer's last position before the range.
    :ivar up_to: the last token of the range.
    """

    stream: str
    writer: str
    after: int
    up_to: int


class NameCounter(Counter[str]):
    """A counter by names from a recording; those beyond a bound are counted as one."""

    def __setitem__(self, name: str, count: int) -> None:
        if name not in self and len(self) >= MAX_NAMES:
            count += self[OTHER_NAMES]
            name = OTHER_NAMES
        super().__setitem__(name, count)


@attrs.define
class ReplayReport:
    """The report on a recording, which may come from any source.

    A counter has at most :data:`MAX_NAMES` names; the others are counted as
    :data:`OTHER_NAMES`.

    :ivar lines: the number of commands, including those that cannot be parsed; lines
        that are not records are not included.
    :ivar commands: lines by their first word.
    :ivar rdata_rows: rows by stream.
    :ivar batches: finished batches of more than one row, by stream.
    :ivar rdata_at_or_below_position: rows at or below the position that their
        writer had reached, by stream.
    :ivar resets: how often a writer's position moved back, by stream.
    :ivar last_position: the last position by stream and writer.
    :ivar discarded: rows, positions and repeated commands that the handler discarded,
        by the reason, then by the name of the stream or command.
    :ivar extra_fields: rows with unknown additional fields, by stream.
    :ivar gaps: the ranges in which rows may be missing.
    :ivar unparsable_lines: the number of lines that are not records, or whose command
        or row cannot be parsed.
    :ivar unparsable: the first thousand lines that cannot be parsed.
    :ivar failures: other failures, by their text.
    """

    lines: int = 0
    commands: NameCounter = attrs.Factory(NameCounter)
    rdata_rows: NameCounter = attrs.Factory(NameCounter)
    batches: NameCounter = attrs.Factory(NameCounter)
    rdata_at_or_below_position: NameCounter = attrs.Factory(NameCounter)
    resets: NameCounter = attrs.Factory(NameCounter)
    last_position: dict[_Key, int] = attrs.Factory(dict)
    discarded: defaultdict[DiscardReason, NameCounter] = attrs.Factory(
        lambda: defaultdict(NameCounter)
    )
    extra_fields: NameCounter = attrs.Factory(NameCounter)
    gaps: list[Gap] = attrs.Factory(list)
    unparsable_lines: int = 0
    unparsable: list[Unparsable] = attrs.Factory(list)
    failures: NameCounter = attrs.Factory(NameCounter)

    @property
    def is_clean(self) -> bool:
        """Whether nothing failed, and every discard has an expected reason."""
        return not (
            self.unparsable_lines
            or self.failures
            or any(reason not in EXPLANATIONS for reason in self.discarded)
        )

    def add_unparsable(self, number: int, error: str) -> None:
        """Record a line that cannot be parsed."""
        self.unparsable_lines += 1
        if len(self.unparsable) < _MAX_UNPARSABLE:
            self.unparsable.append(Unparsable(number, error))

    def to_json(self) -> dict[str, Any]:
        """Return the report as values that JSON can represent."""
        value: dict[str, Any] = msgspec.to_builtins(self, order="deterministic")
        value["last_position"] = {
            " ".join(key): token for key, token in value["last_position"].items()
        }
        return value


class _RecordedStream:
    """A stream whose only source is the recording."""

    def __init__(self, description: StreamDescription, report: ReplayReport) -> None:
        self.description = description
        self.positions: dict[str, int] = {}
        self._report = report

    def current_token(self, instance_name: str) -> int:
        """Return the position up to which the writer's rows were replayed."""
        return self.positions.get(instance_name, _NOWHERE)

    def minimal_local_current_token(self) -> int:
        """Return 0: the replay writes nothing."""
        return 0

    def has_local_updates(self, from_token: int, upto_token: int) -> bool:
        """Return ``False``: the replay writes nothing."""
        return False

    async def get_updates_since(
        self, instance_name: str, from_token: int, upto_token: int
    ) -> StreamUpdateResult:
        """Record a gap, unless the writer has no position yet; return no rows."""
        if from_token != _NOWHERE:
            gap = Gap(self.description.name, instance_name, from_token, upto_token)
            self._report.gaps.append(gap)
        return StreamUpdateResult([], upto_token, False)


class _Observer(ReplicationObserver):
    def __init__(self, report: ReplayReport) -> None:
        self._report = report

    @handles(events.Discarded)
    def _discarded(self, event: events.Discarded) -> None:
        self._report.discarded[event.reason][event.stream_name] += event.count
        if event.reason is DiscardReason.OLD_TOKEN:
            self._report.rdata_at_or_below_position[event.stream_name] += event.count

    @handles(events.ExtraFields)
    def _extra_fields(self, event: events.ExtraFields) -> None:
        self._report.extra_fields[event.stream_name] += event.count

    @handles(events.StreamReset)
    def _stream_reset(self, event: events.StreamReset) -> None:
        self._report.resets[event.stream_name] += 1

    @handles(events.OperationFailed)
    def _operation_failed(self, event: events.OperationFailed) -> None:
        self._report.failures[f"{event.what}: {event.error}"] += 1

    @handles(events.CatchUpFailed)
    def _catch_up_failed(self, event: events.CatchUpFailed) -> None:
        self.failure(
            f"catching up {event.catch_up.stream_name} {event.catch_up.instance_name}",
            event.error,
        )


class _Clock(host_parts.ReactorClock):
    @override
    def sleep(self, delay: float) -> Deferred[None]:
        return succeed(None)


class _ReplayConnection:
    """The connection on which the recording arrives; sent commands are discarded."""

    name = "recording"
    relays = False
    is_behind = False

    def send_command(self, command: Command) -> None:
        """Do nothing."""

    def send_lines(self, command_name: str, lines: Sequence[bytes]) -> None:
        """Do nothing."""

    def close_with_error(self, text: str) -> None:
        """Do nothing: the line is in the report, and the replay continues."""


class _Replay:
    """A replication host for one recording, which collects the report."""

    def __init__(self) -> None:
        self.report = report = ReplayReport()
        observer = _Observer(report)
        # The name contains a space, so it differs from every instance's name in a
        # recording.
        self.identity = Identity("recorded", "this replay", "")
        # Its time never advances: scheduled calls and retries never run.
        self.clock = _Clock(task.Clock())
        self.streams = self.rows = self
        self.commands = host_parts.SyncingUsers()
        self.notifier = host_parts.WriteNotifier()
        self.run_as_background_process = host_parts.BackgroundProcesses(observer)
        self.stores_user_ips = True
        self._streams = {
            name: _RecordedStream(stream.description, report)
            for name, stream in STANDARD_STREAMS.items()
        }
        self._begun: set[_Key] = set()
        self._unfinished: set[_Key] = set()
        self._connection = _ReplayConnection()
        self._handler = command_handler.ReplicationCommandHandler(
            self,
            observer,
            options=command_handler.HandlerOptions(
                passive=True,
                receiver=ReceiverOptions(
                    reverts_positions=False, position_check_seconds=0
                ),
            ),
        )
        self._handler.new_connection(self._connection)

    # -- the host's streams and its row sink ------------------------------------------

    def get_streams(self) -> Mapping[str, Stream]:
        return self._streams

    def get_streams_to_replicate(self) -> Sequence[Stream]:
        return ()

    def on_rdata(
        self, stream_name: str, instance_name: str, token: int, rows: list[Any]
    ) -> Awaitable[None] | None:
        positions = self._streams[stream_name].positions
        if token <= positions.get(instance_name, _NOWHERE):
            self.report.rdata_at_or_below_position[stream_name] += len(rows)
        else:
            positions[instance_name] = token
        return None

    def on_position(
        self, stream_name: str, instance_name: str, token: int
    ) -> Awaitable[None] | None:
        self._streams[stream_name].positions[instance_name] = token
        return None

    # -- the recording ----------------------------------------------------------------

    def feed(self, records: Sequence[Record]) -> None:
        """Process successive records of the recording."""
        report = self.report
        report.lines += len(records)
        for record in records:
            report.commands[excerpt(record.line.partition(b" ")[0])] += 1
        items = rdata.read_lines([record.line for record in records])
        if any(_why_unparsable(item) is not None for item in items):
            self._find_unparsable(records)
        for item in items:
            if isinstance(item, rdata.RdataGroup):
                self._count_rows(item)
            elif isinstance(item, rdata.InterleavedGroup):
                for group in item.groups():
                    self._count_rows(group)
            elif isinstance(item, PositionCommand):
                key = item.stream_name, item.instance_name
                self._begun.add(key)
                self._unfinished.discard(key)
            self._handler.received(self._connection, [item])

    def _count_rows(self, group: rdata.RdataGroup) -> None:
        key = name, writer = group.stream_name, group.instance_name
        self.report.rdata_rows[name] += len(group.rows)
        for token in group.tokens:
            if token is None:
                self._unfinished.add(key)
            elif key in self._unfinished:
                self._unfinished.discard(key)
                self.report.batches[name] += 1
        if key not in self._begun:
            self._begun.add(key)
            # Insert a POSITION in place of the one that was sent before the recording
            # began.
            before = PositionCommand(name, writer, _NOWHERE, _NOWHERE)
            self._handler.received(self._connection, [before])

    def _find_unparsable(self, records: Iterable[Record]) -> None:
        for record in records:
            for item in rdata.read_lines([record.line]):
                if (error := _why_unparsable(item)) is not None:
                    self.report.add_unparsable(record.number, str(error))

    def finish(self) -> ReplayReport:
        """Complete and return the report."""
        if self.run_as_background_process.count:
            self.report.failures["the handler has not finished"] += 1
        for name, stream in self._streams.items():
            for writer, token in stream.positions.items():
                if token != _NOWHERE:
                    self.report.last_position[name, writer] = token
        return self.report


def _why_unparsable(item: rdata.ReceivedItem) -> RemoteProtocolError | None:
    """Return why a line, or a row of a group, cannot be parsed; ``None`` if it can be.

    Rows are decoded here, because the handler would detect invalid JSON without
    knowing the line number.
    """
    if isinstance(item, rdata.RefusedLine):
        return item.error
    if isinstance(item, (rdata.RdataGroup, rdata.InterleavedGroup)):
        try:
            for row in item.rows:
                decode_json(row)
        except ValueError as error:
            return UnparsableLineError("RDATA", str(error))
    return None


def replay_records(records: Iterable[Record | RecordingError]) -> ReplayReport:
    """Replay a recording through the parser and the handler; return the report."""
    replay = _Replay()
    iterator = iter(records)
    while chunk := list(islice(iterator, _CHUNK)):
        good = [each for each in chunk if isinstance(each, Record)]
        for each in chunk:
            if isinstance(each, RecordingError):
                replay.report.add_unparsable(each.number, each.reason)
        replay.feed(good)
    replay.report.unparsable.sort(key=lambda each: each.line_number)
    return replay.finish()
