"""An observer that records events, for tests to inspect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from typing_extensions import override

from synapse_replication.errors import ProtocolError
from synapse_replication.handlers.events import (
    AheadOfWriter,
    AnnouncedBy,
    BackgroundTask,
    BacklogRequested,
    CatchUpEvent,
    CatchUpFailed,
    CatchUpPage,
    CommandDropReason,
    CommandsDropped,
    DatabaseSetBack,
    Discarded,
    DiscardReason,
    DuplicateInstance,
    EpochChanged,
    ExtraFields,
    FeatureUnavailable,
    GapFound,
    LateRows,
    LineRefused,
    LinksChanged,
    OperationFailed,
    PeerHeartbeat,
    PositionRefuted,
    RemovedWriterDrained,
    RemovedWriterFound,
    Resync,
    Resynced,
    RowsSent,
    RowsUnannounced,
    SendingFailed,
    StreamConnected,
    StreamReset,
    UnannouncedFound,
    UnknownFields,
    Work,
)
from synapse_replication.handlers.observer import ReplicationObserver, handles


class RecordingObserver(ReplicationObserver):
    """Records events.

    :ivar discards: numbers of discarded rows, positions and commands, by (stream or
        command, writer, reason).
    :ivar failures: (description, error) of each reported failure.
    :ivar refused: the errors of refused lines.
    :ivar processes: the descriptions of the background tasks, in order.
    :ivar open_processes: the number of running background tasks.
    :ivar catch_ups: the catch-up events, in order: one each time that a catch-up
        starts, resumes or is retried.
    :ivar pages: (number of rows, upto_token) of each page of the catch-ups.
    :ivar catch_up_failures: (event, error, attempt, retry_in) of each failed attempt.
    :ivar connected: (connection, stream, writer) each time that a writer of a stream
        became connected on a link.
    :ivar resets: (stream, writer, from_token, to_token) of each reset.
    :ivar removed_found: (stream, writer, from_token, upto_token) of each removed writer
        with missing rows.
    :ivar removed_drained: (stream, writer, token) of each drained writer.
    :ivar positions: the latest delivered positions, by (stream, writer).
    :ivar announced: the latest announced positions, by (stream, writer).
    :ivar queue_lengths: all reported lengths, by stream.
    :ivar received: numbers of received rows, by stream.
    :ivar sent: numbers of sent rows, by stream.
    :ivar extra: numbers of rows with unknown additional fields, by stream.
    :ivar sending_failures: (stream, error) of each failure to send rows.
    :ivar connections: the number of links.
    :ivar resyncs: numbers of completed catch-ups that fetched pages, and of failed
        attempts, by (stream, writer, kind).
    :ivar backlog_answers: (stream, writer, error or ``None``) of each request for rows
        of a backlog.
    :ivar gaps: (stream, writer, from_token, upto_token) of each gap.
    :ivar unannounced: (stream, writer, from_token, upto_token) of each stored position
        that was not announced.
    :ivar unannounced_rows: (stream, writer, tokens) that were not announced.
    :ivar late_rows: (stream, writer, tokens) that were delivered late.
    :ivar restarted: the names of restarted instances.
    :ivar duplicates: (name, locations) of each duplicate instance.
    :ivar unknown: the number of unknown fields in messages of the extension.
    :ivar unavailable: (feature, reason) of each unavailable feature.
    :ivar heartbeats: the hellos, heartbeats and goodbyes of peers.
    :ivar drops: numbers of commands that were never sent, by (command, reason).
    :ivar set_back: (stream, writer, stored, position) of each report that the database
        was set back.
    :ivar refuted: (stream, writer, token, last_token) of each token that the source
        refuted.
    :ivar ahead: (stream, writer, position, announced) each time that this process was
        found to be ahead of a writer.
    """

    def __init__(self) -> None:
        self.discards: Counter[tuple[str, str, DiscardReason]] = Counter()
        self.failures: list[tuple[str, BaseException]] = []
        self.refused: list[ProtocolError] = []
        self.unavailable: list[tuple[str, str]] = []
        self.processes: list[str] = []
        self.open_processes = 0
        self.catch_ups: list[CatchUpEvent] = []
        self.pages: list[tuple[int, int]] = []
        self.catch_up_failures: list[
            tuple[CatchUpEvent, BaseException, int, float]
        ] = []
        self.connected: list[tuple[str, str, str]] = []
        self.removed_found: list[tuple[str, str, int, int]] = []
        self.removed_drained: list[tuple[str, str, int]] = []
        self.resets: list[tuple[str, str, int, int]] = []
        self.positions: dict[tuple[str, str], int] = {}
        self.announced: dict[tuple[str, str], int] = {}
        self.heartbeats: list[PeerHeartbeat] = []
        self.queue_lengths: dict[str, list[int]] = {}
        self.received: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.extra: Counter[str] = Counter()
        self.sending_failures: list[tuple[str, BaseException]] = []
        self.connections = 0
        self.resyncs: Counter[tuple[str, str, Resync]] = Counter()
        self.backlog_answers: list[tuple[str, str, BaseException | None]] = []
        self.gaps: list[tuple[str, str, int, int]] = []
        self.unannounced: list[tuple[str, str, int, int]] = []
        self.unannounced_rows: list[tuple[str, str, list[int]]] = []
        self.late_rows: list[tuple[str, str, list[int]]] = []
        self.restarted: list[str] = []
        self.duplicates: list[tuple[str, str]] = []
        self.unknown = 0
        self.drops: Counter[tuple[str, CommandDropReason]] = Counter()
        self.refuted: list[tuple[str, str, int, int]] = []
        self.set_back: list[tuple[str, str, int, int]] = []
        self.ahead: list[tuple[str, str, int, int]] = []

    @handles(FeatureUnavailable)
    def _feature_unavailable(self, event: FeatureUnavailable) -> None:
        self.unavailable.append((event.feature, event.why))

    @handles(LineRefused)
    def _line_refused(self, event: LineRefused) -> None:
        self.refused.append(event.error)

    @override
    def rows_received(self, stream_name: str, count: int) -> None:
        self.received[stream_name] += count

    @handles(Discarded)
    def _discarded(self, event: Discarded) -> None:
        self.discards[event.stream_name, event.instance_name, event.reason] += (
            event.count
        )

    @handles(CommandsDropped)
    def _commands_dropped(self, event: CommandsDropped) -> None:
        self.drops[event.command, event.reason] += event.count

    @handles(ExtraFields)
    def _extra_fields(self, event: ExtraFields) -> None:
        self.extra[event.stream_name] += event.count

    @override
    def queue_changed(self, stream_name: str, length: int) -> None:
        self.queue_lengths.setdefault(stream_name, []).append(length)

    @override
    def position_announced(
        self,
        stream_name: str,
        instance_name: str,
        token: int,
        connection: str,
        by: AnnouncedBy,
    ) -> None:
        self.announced[stream_name, instance_name] = token

    @handles(PeerHeartbeat)
    def _heartbeat_received(self, heartbeat: PeerHeartbeat) -> None:
        self.heartbeats.append(heartbeat)

    @override
    def position_changed(
        self, stream_name: str, instance_name: str, token: int
    ) -> None:
        self.positions[stream_name, instance_name] = token

    @handles(StreamConnected)
    def _stream_connected(self, event: StreamConnected) -> None:
        self.connected.append(
            (event.connection, event.stream_name, event.instance_name)
        )

    @handles(StreamReset)
    def _stream_reset(self, event: StreamReset) -> None:
        self.resets.append(
            (event.stream_name, event.instance_name, event.from_token, event.to_token)
        )

    @handles(RemovedWriterFound)
    def _removed_writer_found(self, event: RemovedWriterFound) -> None:
        self.removed_found.append(
            (event.stream_name, event.instance_name, event.from_token, event.upto_token)
        )

    @handles(RemovedWriterDrained)
    def _removed_writer_drained(self, event: RemovedWriterDrained) -> None:
        self.removed_drained.append(
            (event.stream_name, event.instance_name, event.token)
        )

    @handles(DatabaseSetBack)
    def _database_set_back(self, event: DatabaseSetBack) -> None:
        self.set_back.append(
            (event.stream_name, event.instance_name, event.stored, event.position)
        )

    @handles(PositionRefuted)
    def _position_refuted(self, event: PositionRefuted) -> None:
        self.refuted.append(
            (event.stream_name, event.instance_name, event.token, event.last_token)
        )

    @handles(AheadOfWriter)
    def _ahead_of_writer(self, event: AheadOfWriter) -> None:
        self.ahead.append(
            (event.stream_name, event.instance_name, event.position, event.announced)
        )

    @handles(CatchUpEvent)
    def _catch_up(self, event: CatchUpEvent) -> None:
        self.catch_ups.append(event)

    @handles(CatchUpPage)
    def _catch_up_page(self, event: CatchUpPage) -> None:
        self.pages.append((event.rows, event.upto_token))

    @handles(CatchUpFailed)
    def _catch_up_failed(self, event: CatchUpFailed) -> None:
        self.catch_up_failures.append(
            (event.catch_up, event.error, event.attempt, event.retry_in)
        )

    @handles(RowsSent)
    def _stream_updates_sent(self, event: RowsSent) -> None:
        self.sent[event.stream_name] += event.count

    @handles(SendingFailed)
    def _sending_failed(self, event: SendingFailed) -> None:
        self.sending_failures.append((event.stream_name, event.error))

    @handles(Resynced)
    def _resynced(self, event: Resynced) -> None:
        self.resyncs[event.stream_name, event.instance_name, event.kind] += 1

    @handles(BacklogRequested)
    def _backlog_requested(self, event: BacklogRequested) -> None:
        self.backlog_answers.append(
            (event.stream_name, event.instance_name, event.error)
        )

    @handles(GapFound)
    def _gap_found(self, event: GapFound) -> None:
        self.gaps.append(
            (event.stream_name, event.instance_name, event.from_token, event.upto_token)
        )

    @handles(UnannouncedFound)
    def _unannounced_found(self, event: UnannouncedFound) -> None:
        self.unannounced.append(
            (event.stream_name, event.instance_name, event.from_token, event.upto_token)
        )

    @handles(RowsUnannounced)
    def _rows_unannounced(self, event: RowsUnannounced) -> None:
        self.unannounced_rows.append(
            (event.stream_name, event.instance_name, list(event.tokens))
        )

    @handles(LateRows)
    def _late_rows_delivered(self, event: LateRows) -> None:
        self.late_rows.append(
            (event.stream_name, event.instance_name, list(event.tokens))
        )

    @handles(EpochChanged)
    def _epoch_changed(self, event: EpochChanged) -> None:
        self.restarted.append(event.instance_name)

    @handles(DuplicateInstance)
    def _duplicate_instance(self, event: DuplicateInstance) -> None:
        self.duplicates.append((event.instance_name, event.places))

    @handles(UnknownFields)
    def _unknown_fields(self, event: UnknownFields) -> None:
        self.unknown += event.count

    @handles(LinksChanged)
    def _connections_changed(self, event: LinksChanged) -> None:
        self.connections = event.count

    @override
    def span(self, work: Work) -> AbstractContextManager[object]:
        if isinstance(work, BackgroundTask):
            return self._process(work.description)
        return super().span(work)

    @contextmanager
    def _process(self, description: str) -> Iterator[None]:
        self.processes.append(description)
        self.open_processes += 1
        try:
            yield
        finally:
            self.open_processes -= 1

    @handles(OperationFailed)
    def _failure(self, event: OperationFailed) -> None:
        self.failures.append((event.what, event.error))
