"""An observer that records events, for tests to inspect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from typing_extensions import override

from synapse_replication.errors import ProtocolError
from synapse_replication.handlers.observer import (
    AnnouncedBy,
    CatchUpEvent,
    CommandDropReason,
    DiscardReason,
    PeerHeartbeat,
    ReplicationObserver,
    Resync,
)


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
        self.ahead: list[tuple[str, str, int, int]] = []

    @override
    def feature_unavailable(self, feature: str, why: str) -> None:
        self.unavailable.append((feature, why))

    @override
    def line_refused(self, connection: str, error: ProtocolError) -> None:
        self.refused.append(error)

    @override
    def rows_received(self, stream_name: str, count: int) -> None:
        self.received[stream_name] += count

    @override
    def discarded(
        self, stream_name: str, instance_name: str, reason: DiscardReason, count: int
    ) -> None:
        self.discards[stream_name, instance_name, reason] += count

    @override
    def commands_dropped(
        self, command: str, reason: CommandDropReason, count: int
    ) -> None:
        self.drops[command, reason] += count

    @override
    def extra_fields(self, stream_name: str, count: int) -> None:
        self.extra[stream_name] += count

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

    @override
    def heartbeat_received(self, heartbeat: PeerHeartbeat) -> None:
        self.heartbeats.append(heartbeat)

    @override
    def position_changed(
        self, stream_name: str, instance_name: str, token: int
    ) -> None:
        self.positions[stream_name, instance_name] = token

    @override
    def stream_connected(
        self, connection: str, stream_name: str, instance_name: str
    ) -> None:
        self.connected.append((connection, stream_name, instance_name))

    @override
    def stream_reset(
        self, stream_name: str, instance_name: str, from_token: int, to_token: int
    ) -> None:
        self.resets.append((stream_name, instance_name, from_token, to_token))

    @override
    def removed_writer_found(
        self, stream_name: str, instance_name: str, from_token: int, upto_token: int
    ) -> None:
        self.removed_found.append((stream_name, instance_name, from_token, upto_token))

    @override
    def removed_writer_drained(
        self, stream_name: str, instance_name: str, token: int
    ) -> None:
        self.removed_drained.append((stream_name, instance_name, token))

    @override
    def position_refuted(
        self, stream_name: str, instance_name: str, token: int, last_token: int
    ) -> None:
        self.refuted.append((stream_name, instance_name, token, last_token))

    @override
    def ahead_of_writer(
        self, stream_name: str, instance_name: str, position: int, announced: int
    ) -> None:
        self.ahead.append((stream_name, instance_name, position, announced))

    @override
    def catch_up(self, event: CatchUpEvent) -> AbstractContextManager[object]:
        self.catch_ups.append(event)
        return super().catch_up(event)

    @override
    def catch_up_page(self, event: CatchUpEvent, rows: int, upto_token: int) -> None:
        self.pages.append((rows, upto_token))

    @override
    def catch_up_failed(
        self, event: CatchUpEvent, error: BaseException, attempt: int, retry_in: float
    ) -> None:
        self.catch_up_failures.append((event, error, attempt, retry_in))

    @override
    def stream_updates_sent(self, stream_name: str, count: int) -> None:
        self.sent[stream_name] += count

    @override
    def sending_failed(self, stream_name: str, error: BaseException) -> None:
        self.sending_failures.append((stream_name, error))

    @override
    def resynced(self, stream_name: str, instance_name: str, kind: Resync) -> None:
        self.resyncs[stream_name, instance_name, kind] += 1

    @override
    def backlog_requested(
        self, stream_name: str, instance_name: str, error: BaseException | None
    ) -> None:
        self.backlog_answers.append((stream_name, instance_name, error))

    @override
    def gap_found(
        self, stream_name: str, instance_name: str, from_token: int, upto_token: int
    ) -> None:
        self.gaps.append((stream_name, instance_name, from_token, upto_token))

    @override
    def unannounced_found(
        self, stream_name: str, instance_name: str, from_token: int, upto_token: int
    ) -> None:
        self.unannounced.append((stream_name, instance_name, from_token, upto_token))

    @override
    def rows_unannounced(
        self, stream_name: str, instance_name: str, tokens: Sequence[int]
    ) -> None:
        self.unannounced_rows.append((stream_name, instance_name, list(tokens)))

    @override
    def late_rows_delivered(
        self, stream_name: str, instance_name: str, tokens: Sequence[int]
    ) -> None:
        self.late_rows.append((stream_name, instance_name, list(tokens)))

    @override
    def epoch_changed(self, instance_name: str) -> None:
        self.restarted.append(instance_name)

    @override
    def duplicate_instance(self, instance_name: str, places: str) -> None:
        self.duplicates.append((instance_name, places))

    @override
    def unknown_fields(self, connection: str, count: int) -> None:
        self.unknown += count

    @override
    def connections_changed(self, count: int) -> None:
        self.connections = count

    @contextmanager
    @override
    def background_process(self, description: str) -> Iterator[None]:
        self.processes.append(description)
        self.open_processes += 1
        try:
            yield
        finally:
            self.open_processes -= 1

    @override
    def failure(self, what: str, error: BaseException) -> None:
        self.failures.append((what, error))
