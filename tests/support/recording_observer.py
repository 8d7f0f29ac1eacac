"""An observer that records events by their kind, and a host with such an observer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from attrs import astuple
from typing_extensions import override

from synapse_replication.errors import ProtocolError
from synapse_replication.handlers import events
from synapse_replication.handlers.observer import ReplicationObserver, handles
from synapse_replication.testing.doubles import MemoryHost, SourceStream

#: The attributes that record events as tuples of their values.
_RECORDED: Mapping[type, str] = {
    events.FeatureUnavailable: "unavailable",
    events.StreamAbsent: "absent",
    events.StreamConnected: "connected",
    events.StreamReset: "resets",
    events.PositionLowered: "lowered",
    events.RemovedWriterFound: "removed_found",
    events.RemovedWriterDrained: "removed_drained",
    events.DatabaseSetBack: "set_back",
    events.PositionRefuted: "refuted",
    events.AheadOfWriter: "ahead",
    events.CatchUpFailed: "catch_up_failures",
    events.SendingFailed: "sending_failures",
    events.BacklogRequested: "backlog_answers",
    events.GapFound: "gaps",
    events.UnannouncedFound: "unannounced",
    events.RowsUnannounced: "unannounced_rows",
    events.LateRows: "late_rows",
    events.PeerNamed: "named",
    events.DuplicateInstance: "duplicates",
    events.OperationFailed: "failures",
    events.LineRefused: "refused",
}


class RecordingObserver(ReplicationObserver):
    """Records events.

    :ivar discards: numbers of discarded rows, positions and commands, by (stream or
        command, writer, reason).
    :ivar failures: (description, error) of each reported failure.
    :ivar refused: (connection, error) of each refused line.
    :ivar links: ("made", connection) of each established link, ("lost", connection,
        reason, text) of each lost one, and ("failed", connection, text) of each failed
        attempt to connect.
    :ivar retries: the delays before the next attempts to connect, in s.
    :ivar received_commands: numbers of received commands, by (connection, command).
    :ivar sent_commands: the same of sent commands.
    :ivar cache: ("set", cache) and ("get", cache, whether it was a hit) of each access
        to the external cache.
    :ivar persisting: the positions that were about to be persisted.
    :ivar persisted: those that were persisted.
    :ivar not_persisted: those of which this failed.
    :ivar processes: the descriptions of the background tasks, in order.
    :ivar open_processes: the number of running background tasks.
    :ivar catch_ups: the catch-up events, in order: one each time that a catch-up
        starts, resumes or is retried.
    :ivar pages: (number of rows, upto_token) of each page of the catch-ups.
    :ivar catch_up_failures: (event, error, attempt, retry_in) of each failed attempt.
    :ivar absent: the streams that the database does not have.
    :ivar connected: (connection, stream, writer) each time that a writer of a stream
        became connected on a link.
    :ivar resets: (stream, writer, from_token, to_token) of each reset.
    :ivar lowered: the same of each position that moved back without a reset.
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
    :ivar named: (connection, name) of each peer of a direct link.
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
        self.discards: Counter[tuple[str, str, events.DiscardReason]] = Counter()
        self.failures: list[tuple[str, BaseException]] = []
        self.refused: list[tuple[str, ProtocolError]] = []
        self.links: list[tuple[str, ...]] = []
        self.retries: list[float] = []
        self.received_commands: Counter[tuple[str, str]] = Counter()
        self.sent_commands: Counter[tuple[str, str]] = Counter()
        self.cache: list[tuple[object, ...]] = []
        self.persisting: list[int] = []
        self.persisted: list[int] = []
        self.not_persisted: list[int] = []
        self.unavailable: list[tuple[str, str]] = []
        self.processes: list[str] = []
        self.open_processes = 0
        self.catch_ups: list[events.CatchUpEvent] = []
        self.pages: list[tuple[int, int]] = []
        self.catch_up_failures: list[
            tuple[events.CatchUpEvent, BaseException, int, float]
        ] = []
        self.absent: list[tuple[str]] = []
        self.connected: list[tuple[str, str, str]] = []
        self.removed_found: list[tuple[str, str, int, int]] = []
        self.removed_drained: list[tuple[str, str, int]] = []
        self.resets: list[tuple[str, str, int, int]] = []
        self.lowered: list[tuple[str, str, int, int]] = []
        self.positions: dict[tuple[str, str], int] = {}
        self.announced: dict[tuple[str, str], int] = {}
        self.heartbeats: list[events.PeerHeartbeat] = []
        self.silent: list[events.PeerSilent] = []
        self.queue_lengths: dict[str, list[int]] = {}
        self.received: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.extra: Counter[str] = Counter()
        self.sending_failures: list[tuple[str, BaseException]] = []
        self.connections = 0
        self.resyncs: Counter[tuple[str, str, events.Resync]] = Counter()
        self.backlog_answers: list[tuple[str, str, BaseException | None]] = []
        self.gaps: list[tuple[str, str, int, int]] = []
        self.unannounced: list[tuple[str, str, int, int]] = []
        self.unannounced_rows: list[tuple[str, str, tuple[int, ...]]] = []
        self.late_rows: list[tuple[str, str, tuple[int, ...]]] = []
        self.restarted: list[str] = []
        self.named: list[tuple[str, str]] = []
        self.duplicates: list[tuple[str, str]] = []
        self.unknown = 0
        self.drops: Counter[tuple[str, events.CommandDropReason]] = Counter()
        self.refuted: list[tuple[str, str, int, int]] = []
        self.set_back: list[tuple[str, str, int, int]] = []
        self.ahead: list[tuple[str, str, int, int]] = []

    @override
    def observe(self, event: events.Event) -> None:
        """Record an event."""
        if (attribute := _RECORDED.get(type(event))) is not None:
            getattr(self, attribute).append(astuple(event))
        else:
            super().observe(event)

    @override
    def rows_received(self, stream_name: str, count: int) -> None:
        self.received[stream_name] += count

    @handles(events.Discarded)
    def _discarded(self, event: events.Discarded) -> None:
        self.discards[event.stream_name, event.instance_name, event.reason] += (
            event.count
        )

    @handles(events.CommandsDropped)
    def _commands_dropped(self, event: events.CommandsDropped) -> None:
        self.drops[event.command, event.reason] += event.count

    @handles(events.ExtraFields)
    def _extra_fields(self, event: events.ExtraFields) -> None:
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
        by: events.AnnouncedBy,
    ) -> None:
        self.announced[stream_name, instance_name] = token

    @handles(events.PeerHeartbeat)
    def _peer_heartbeat(self, heartbeat: events.PeerHeartbeat) -> None:
        self.heartbeats.append(heartbeat)

    @handles(events.PeerSilent)
    def _peer_silent(self, event: events.PeerSilent) -> None:
        self.silent.append(event)

    @override
    def position_changed(
        self, stream_name: str, instance_name: str, token: int
    ) -> None:
        self.positions[stream_name, instance_name] = token

    @handles(events.CatchUpEvent)
    def _catch_up(self, event: events.CatchUpEvent) -> None:
        self.catch_ups.append(event)

    @handles(events.CatchUpPage)
    def _catch_up_page(self, event: events.CatchUpPage) -> None:
        self.pages.append((event.rows, event.upto_token))

    @handles(events.RowsSent)
    def _rows_sent(self, event: events.RowsSent) -> None:
        self.sent[event.stream_name] += event.count

    @handles(events.Resynced)
    def _resynced(self, event: events.Resynced) -> None:
        self.resyncs[event.stream_name, event.instance_name, event.kind] += 1

    @handles(events.EpochChanged)
    def _epoch_changed(self, event: events.EpochChanged) -> None:
        self.restarted.append(event.instance_name)

    @handles(events.UnknownFields)
    def _unknown_fields(self, event: events.UnknownFields) -> None:
        self.unknown += event.count

    @handles(events.LinkUp)
    def _link_up(self, event: events.LinkUp) -> None:
        self.links.append(("made", event.connection))

    @handles(events.LinkDown)
    def _link_down(self, event: events.LinkDown) -> None:
        self.links.append(("lost", event.connection, event.reason.value, event.why))

    @handles(events.ConnectFailed)
    def _connect_failed(self, event: events.ConnectFailed) -> None:
        self.links.append(("failed", event.connection, event.why))
        self.retries.append(event.retry_in)

    @override
    def commands_received(self, connection: str, command: str, count: int) -> None:
        self.received_commands[connection, command] += count

    @override
    def commands_sent(self, connection: str, command: str, count: int) -> None:
        self.sent_commands[connection, command] += count

    @handles(events.ExternalCacheSet)
    def _external_cache_set(self, event: events.ExternalCacheSet) -> None:
        self.cache.append(("set", event.cache_name))

    @handles(events.ExternalCacheGet)
    def _external_cache_get(self, event: events.ExternalCacheGet) -> None:
        self.cache.append(("get", event.cache_name, event.hit))

    @handles(events.PositionPersistBegun)
    def _position_persist_begun(self, event: events.PositionPersistBegun) -> None:
        self.persisting.append(event.token)

    @handles(events.PositionPersisted)
    def _position_persisted(self, event: events.PositionPersisted) -> None:
        self.persisted.append(event.token)

    @handles(events.PositionPersistFailed)
    def _position_persist_failed(self, event: events.PositionPersistFailed) -> None:
        self.not_persisted.append(event.token)

    @handles(events.LinksChanged)
    def _links_changed(self, event: events.LinksChanged) -> None:
        self.connections = event.count

    @override
    def span(self, work: events.Work) -> AbstractContextManager[object]:
        if isinstance(work, events.BackgroundTask):
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


class RecordingHost(MemoryHost):
    """A host whose observer is a :class:`RecordingObserver`; see ``MemoryHost``."""

    observer: RecordingObserver

    def __init__(self, *streams: SourceStream, **options: Any) -> None:
        super().__init__(*streams, observer=RecordingObserver(), **options)
