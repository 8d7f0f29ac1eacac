"""An observer that tracks the state of every writer, link and peer.

Theory of operation: :class:`StatusObserver` receives all observer events and records
what was heard of each (stream, writer), and when. The state of the writer's rows is
that of its reader, which is read for each snapshot. ``verdict.py`` derives the status
from both, on request, because most of it depends on the current time.

The lag in s is the age of the oldest write that was not delivered here. A heartbeat
states how long ago each position was reached. This is a duration, so a difference
between the clocks of the two machines does not matter; the lag is too small only by the
message's transit time. If a writer sends no heartbeats, a position is assumed to have
been written when it was first announced.

A writer is *stalled* once a problem with its rows has lasted for
:data:`~.records.STALLED_AFTER` s, so that short interruptions are not reported. Memory
is bounded: an entry that the configuration does not name expires after a period without
events, except a link that is up and a writer of which rows are missing. Beyond
:data:`~.records.MAX_NAMES` entries of a kind, a new link replaces the link that has
been down the longest, and a new peer replaces the peer whose last heartbeat is the
oldest; entries that the configuration names are not replaced. Any other new entry is
not stored.

docs/operators-guide.rst describes the status page.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import attrs
from msgspec.structs import replace
from typing_extensions import override

from synapse_replication import __version__
from synapse_replication.errors import DatabaseBehindError, excerpt
from synapse_replication.handlers import events
from synapse_replication.handlers.epochs import USUAL_INTERVAL
from synapse_replication.handlers.observer import ReplicationObserver, handles
from synapse_replication.instrumentation.status import model, records
from synapse_replication.instrumentation.status.report import StatusReport
from synapse_replication.streams.reader import Reader
from synapse_replication.streams.reader_table import State
from synapse_replication.streams.stuck_ids import StuckId
from synapse_replication.text import counted

#: Returns the buffers of open connections.
BufferSource: TypeAlias = Callable[[], Iterable[events.ConnectionBuffers]]

#: The time between two samples above which this process has paused, in s.
PAUSED_AFTER = 9.0


@attrs.frozen(kw_only=True)
class StatusSources:
    """What a status reads in addition to the events.

    Each function is called for each snapshot, and must be thread-safe.

    :ivar readers: returns the readers of all writers, by (stream, writer).
    :ivar own_positions: returns, for each stream that this process writes, the token up
        to which its rows were sent or skipped, by the stream's name.
    :ivar stuck_ids: returns the stuck ids.
    :ivar damage: what the sink says about damaged rows; empty if it found none.
    """

    readers: Callable[[], Mapping[tuple[str, str], Reader]]
    own_positions: Callable[[], Mapping[str, int]]
    stuck_ids: Callable[[], Iterable[StuckId]]
    damage: str


#: The sources of a process that has no readers yet.
NO_SOURCES = StatusSources(readers=dict, own_positions=dict, stuck_ids=tuple, damage="")


class StatusObserver(ReplicationObserver):
    """Tracks the replication status of this process.

    Call its methods in the reactor's thread. Only :meth:`snapshot` may also be called
    in another thread, in which a homeserver serves its metrics.

    :param server_name: the server name that the status shows.
    :param instance_name: the name of this process.
    :param expected: the (stream, writer) pairs from which rows are expected.
    :param needs_link: whether this process makes links; if so, it is not ready while no
        link is up.
    :param own_links: the names of further links that this process makes itself.
    :param monotonic: returns a monotonic time in s.
    """

    def __init__(
        self,
        server_name: str,
        instance_name: str,
        expected: Iterable[tuple[str, str]] = (),
        *,
        needs_link: bool = False,
        own_links: Iterable[str] = (),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server_name = server_name
        self._instance_name = instance_name
        self._monotonic = monotonic
        self._needs_link = needs_link
        self._started = now = monotonic()
        self._expected: frozenset[tuple[str, str]] = frozenset()
        self._writers: dict[tuple[str, str], records.WriterRecord] = {}
        self.expect(expected)
        #: The names of the links that this process makes itself.
        self._own_links = frozenset({instance_name, *records.REDIS_LINKS, *own_links})
        self._links: dict[str, records.LinkRecord] = {}
        self._peers: dict[str, records.PeerRecord] = {}
        #: By instance name: the locations of two processes with that name, and the time
        #: of the last detection, in s.
        self._duplicates: dict[str, tuple[str, float]] = {}
        self._hearing = records.HearingRecord(is_up=False, since=now)
        self._sampled_at = now
        self._buffer_sources: list[BufferSource] = []
        #: By stream: how many rows of this process were not sent, because they are not
        #: valid, and when the first was skipped.
        self._unsent: dict[str, tuple[int, float]] = {}
        self._sources = NO_SOURCES

    def expect(self, writers: Iterable[tuple[str, str]]) -> None:
        """Expect rows of further (stream, writer) pairs, from now on."""
        now = self._monotonic()
        added = {key for key in writers if key[1] != self._instance_name}
        self._expected |= added
        for key in added:
            self._writers[key] = records.WriterRecord(now, now)

    def connect(self, sources: StatusSources) -> None:
        """Read these sources from now on; until then, a snapshot has no writers' state.

        Call this once, when the readers exist.
        """
        self._sources = sources

    def watch_buffers(self, source: BufferSource) -> None:
        """Register a source of buffers, which is read for each snapshot and scrape.

        :param source: returns the buffers of the open connections that it knows.
        """
        self._buffer_sources.append(source)

    def buffers(self) -> list[events.ConnectionBuffers]:
        """Return the buffers of all open connections whose source is registered."""
        return [each for source in self._buffer_sources for each in source()]

    def sample(self) -> None:
        """Append each writer's lag to its history, and remove expired entries.

        Call this every few seconds.
        """
        now = self._monotonic()
        if now - self._sampled_at > PAUSED_AFTER:
            # This process was stopped meanwhile, or its reactor was blocked: what its
            # peers sent is still to be read.
            self._hearing = replace(self._hearing, since=now)
        self._sampled_at = now
        for writer in self._writers.values():
            writer.history.append(writer.lag())
            if len(writer.history) > records.MAX_HISTORY:
                del writer.history[0]
        self._remove_expired(now)

    def _remove_expired(self, now: float) -> None:
        """Remove entries that have expired and that the configuration does not name."""
        before = now - records.FORGET_AFTER
        expected_names = self._expected_names()
        readers = self._sources.readers()
        for key, writer in list(self._writers.items()):
            reader = readers.get(key)
            is_missing = reader is not None and reader.is_catching_up
            if key not in self._expected and writer.is_idle(before) and not is_missing:
                del self._writers[key]
        for name, link in list(self._links.items()):
            if not link.up and link.since <= before and name not in self._own_links:
                del self._links[name]
        for name, peer in list(self._peers.items()):
            if peer.seen <= before and name not in expected_names:
                del self._peers[name]
        for name, (_, seen) in list(self._duplicates.items()):
            if seen <= before:
                del self._duplicates[name]

    def _expected_names(self) -> frozenset[str]:
        return frozenset(name for _, name in self._expected)

    # -- events -----------------------------------------------------------------------

    def _writer(self, stream_name: str, instance_name: str) -> records.WriterRecord:
        """Return the record of a writer; one that is not stored if there is no room.

        That of this process is not stored either.
        """
        key = stream_name, instance_name
        writer = self._writers.get(key)
        if writer is None:
            now = self._monotonic()
            writer = records.WriterRecord(now, now)
            if instance_name != self._instance_name:
                records.store_if_room(self._writers, key, writer)
        return writer

    @override
    def position_announced(
        self,
        stream_name: str,
        instance_name: str,
        token: int,
        connection: str,
        by: events.AnnouncedBy,
    ) -> None:
        writer = self._writer(stream_name, instance_name)
        now = self._monotonic()
        writer.hear(connection, by, now)
        if token != writer.announced or writer.behind_us is not None:
            writer.announce(token, now)

    @override
    def position_changed(
        self, stream_name: str, instance_name: str, token: int
    ) -> None:
        writer = self._writer(stream_name, instance_name)
        writer.move(token, self._monotonic())
        if writer.catch_up_from is not None and not writer.lag():
            writer.catch_up_from = None

    @handles(events.StreamConnected)
    def _stream_connected(self, event: events.StreamConnected) -> None:
        writer = self._writer(event.stream_name, event.instance_name)
        writer.catch_up_from = None
        writer.end_catch_up_problems()
        writer.was_live = writer.was_live or not writer.lag()

    @handles(events.StreamReset, events.PositionLowered)
    def _position_moved_back(self, event: events.PositionMovedBack) -> None:
        writer = self._writer(event.stream_name, event.instance_name)
        writer.move_back(event.to_token, self._monotonic())
        if isinstance(event, events.StreamReset):
            writer.skipped = writer.lost_tokens = 0
            writer.problems.pop(model.StallReason.ROWS_SKIPPED, None)
            writer.problems.pop(model.StallReason.ROWS_LOST, None)

    @handles(events.Discarded)
    def _discarded(self, event: events.Discarded) -> None:
        now = self._monotonic()
        if event.reason is events.DiscardReason.UNDECLARED_WRITER:
            self._undeclared_writer(event.stream_name, event.instance_name)
        elif event.reason is events.DiscardReason.LOST:
            writer = self._writer(event.stream_name, event.instance_name)
            writer.lost_tokens += event.count
            writer.add_problem(
                model.StallReason.ROWS_LOST,
                now,
                f"the rows of {counted(writer.lost_tokens, 'token')} are lost: they "
                "are not in the writer's memory any more",
            )
        elif event.reason is events.DiscardReason.UNPARSABLE:
            self._writer(event.stream_name, event.instance_name).lost_since = now
        elif event.reason is events.DiscardReason.SKIPPED:
            if event.instance_name == self._instance_name:
                before, since = self._unsent.get(event.stream_name, (0, now))
                self._unsent[event.stream_name] = before + event.count, since
                return
            writer = self._writer(event.stream_name, event.instance_name)
            writer.skipped += event.count
            were = "was" if writer.skipped == 1 else "were"
            writer.add_problem(
                model.StallReason.ROWS_SKIPPED,
                now,
                f"{counted(writer.skipped, 'row')} {were} skipped, because even their "
                "source returns them in a form that this process cannot decode",
            )

    def _undeclared_writer(self, stream_name: str, instance_name: str) -> None:
        """Record one undeclared writer of a stream: a peer can make up any number."""
        if any(
            model.StallReason.UNDECLARED_WRITER in writer.problems
            for (name, _), writer in self._writers.items()
            if name == stream_name
        ):
            return
        self._writer(stream_name, instance_name).add_problem(
            model.StallReason.UNDECLARED_WRITER,
            self._monotonic(),
            f"rows of {instance_name} were discarded, because the configuration of "
            "this process does not name it as a writer",
        )

    @handles(events.DatabaseSetBack)
    def _database_set_back(self, event: events.DatabaseSetBack) -> None:
        writer = self._writer(event.stream_name, event.instance_name)
        stored, position = writer.set_back or (event.stored, event.position)
        stored, position = min(stored, event.stored), max(position, event.position)
        writer.set_back = stored, position
        writer.add_problem(
            model.StallReason.DATABASE_SET_BACK,
            self._monotonic(),
            f"the database was set back to {stored}; this process had delivered rows "
            f"up to {position}, and those after {stored} may not exist any more",
        )

    @handles(events.PositionRefuted)
    def _position_refuted(self, event: events.PositionRefuted) -> None:
        writer = self._writers.get((event.stream_name, event.instance_name))
        if writer is not None:
            undelivered = [
                each for each in writer.undelivered if each[0] <= event.last_token
            ]
            writer.undelivered = undelivered
            writer.announced = undelivered[-1][0] if undelivered else writer.position
            writer.end_catch_up_problems()

    @handles(events.AheadOfWriter)
    def _ahead_of_writer(self, event: events.AheadOfWriter) -> None:
        writer = self._writer(event.stream_name, event.instance_name)
        if writer.behind_us is None:
            writer.behind_since = self._monotonic()
        writer.behind_us = event.announced

    @handles(events.CatchUpEvent)
    def _catch_up(self, event: events.CatchUpEvent) -> None:
        writer = self._writer(event.stream_name, event.instance_name)
        now = self._monotonic()
        if writer.position is None:
            writer.move(event.from_token, now)
        if writer.catch_up_from is None:
            writer.catch_up_from = event.from_token
            writer.missing_since = now
        writer.fetching_since = now
        writer.announce(event.upto_token, now)

    @handles(events.Resynced)
    def _resynced(self, event: events.Resynced) -> None:
        writer = self._writer(event.stream_name, event.instance_name)
        is_partial = event.kind is events.Resync.PARTIAL
        writer.resynced_at = self._monotonic() if is_partial else None

    @handles(events.StreamAbsent)
    def _stream_absent(self, event: events.StreamAbsent) -> None:
        absent = {key for key in self._expected if key[0] == event.stream_name}
        self._expected -= absent
        for key in absent:
            del self._writers[key]

    @handles(events.RemovedWriterFound)
    def _removed_writer_found(self, event: events.RemovedWriterFound) -> None:
        writer = self._writer(event.stream_name, event.instance_name)
        now = self._monotonic()
        writer.is_drained = False
        writer.move(event.from_token, now)
        writer.announce(event.upto_token, now)
        writer.heard_at, writer.heard_by = now, events.AnnouncedBy.DATABASE

    @handles(events.RemovedWriterDrained)
    def _removed_writer_drained(self, event: events.RemovedWriterDrained) -> None:
        writer = self._writers.get((event.stream_name, event.instance_name))
        if writer is not None:
            # It sends no rows unless it returns.
            writer.is_drained = True
            writer.problems.pop(model.StallReason.UNDECLARED_WRITER, None)

    @handles(events.CatchUpPage)
    def _catch_up_page(self, event: events.CatchUpPage) -> None:
        stream_name = event.catch_up.stream_name
        instance_name = event.catch_up.instance_name
        self.position_changed(stream_name, instance_name, event.upto_token)
        if event.rows:
            self._writer(stream_name, instance_name).has_written = True

    @handles(events.CatchUpFailed)
    def _catch_up_failed(self, event: events.CatchUpFailed) -> None:
        failed, error = event.catch_up, event.error
        writer = self._writer(failed.stream_name, failed.instance_name)
        if isinstance(error, DatabaseBehindError):
            reason = model.StallReason.DATABASE_BEHIND
            writer.problems.pop(model.StallReason.CATCH_UP_FAILS, None)
            writer.add_problem(reason, self._monotonic(), str(error))
            return
        writer.problems.pop(model.StallReason.DATABASE_BEHIND, None)
        text = excerpt(str(error) or type(error).__name__)
        writer.add_problem(
            model.StallReason.CATCH_UP_FAILS,
            self._monotonic(),
            f"catch-up in ({failed.from_token}, {failed.upto_token}] failed, "
            f"attempt {event.attempt}: {text}",
        )

    # -- links and peers --------------------------------------------------------------

    @handles(events.LinksChanged)
    def _links_changed(self, event: events.LinksChanged) -> None:
        if self._hearing.is_up != (event.count > 0):
            self._hearing = records.HearingRecord(event.count > 0, self._monotonic())

    @handles(events.LinkUp)
    def _link_up(self, event: events.LinkUp) -> None:
        link = self._link(event.connection)
        if not link.up:
            link.since = self._monotonic()
        link.up += 1
        link.why = link.peer = ""
        link.address = event.address

    @handles(events.PeerNamed)
    def _peer_named(self, event: events.PeerNamed) -> None:
        self._link(event.connection).peer = event.instance_name

    @handles(events.LinkDown)
    def _link_down(self, event: events.LinkDown) -> None:
        link = self._link(event.connection)
        if not link.up:
            return
        link.up -= 1
        if not link.up:
            link.since = self._monotonic()
            link.why = excerpt(event.why)

    @handles(events.ConnectFailed)
    def _connect_failed(self, event: events.ConnectFailed) -> None:
        link = self._link(event.connection)
        if not link.up and event.why:
            link.why = excerpt(event.why)

    def _link(self, name: str) -> records.LinkRecord:
        """Return the record of a link; one that is not stored if there is no room."""
        link = self._links.get(name)
        if link is not None:
            return link
        if len(self._links) >= records.MAX_NAMES:
            # Names that peers invent must not displace the links that are up.
            downs = [
                (known.since, other)
                for other, known in self._links.items()
                if not known.up and other not in self._own_links
            ]
            if downs:
                del self._links[min(downs)[1]]
        link = records.LinkRecord(self._monotonic())
        records.store_if_room(self._links, name, link)
        return link

    @handles(events.PeerHeartbeat)
    def _peer_heartbeat(self, heartbeat: events.PeerHeartbeat) -> None:
        now = self._monotonic()
        name = heartbeat.instance_name
        # The peers are in the order in which they were heard.
        self._peers.pop(name, None)
        if len(self._peers) >= records.MAX_NAMES:
            expected_names = self._expected_names()
            others = (other for other in self._peers if other not in expected_names)
            if (oldest := next(others, None)) is not None:
                del self._peers[oldest]
        records.store_if_room(self._peers, name, records.PeerRecord(heartbeat, now))
        for stream_name, (token, age) in heartbeat.positions.items():
            writer = self._writers.get((stream_name, name))
            if writer is not None:
                writer.announce(token, now - max(age, 0.0))
                writer.heard_at, writer.heard_by = now, events.AnnouncedBy.HEARTBEAT
                writer.lost_since = None
                if not heartbeat.is_leaving:
                    writer.announced_at = now

    @handles(events.PeerSilent)
    def _peer_silent(self, event: events.PeerSilent) -> None:
        peer = self._peers.get(event.instance_name)
        if peer is not None and peer.heartbeat.epoch == event.epoch:
            # Its watchers heard it at the usual interval until then.
            heartbeat = attrs.evolve(peer.heartbeat, every=USUAL_INTERVAL)
            seen = max(peer.seen, self._monotonic() - event.seconds)
            self._peers[event.instance_name] = records.PeerRecord(heartbeat, seen)

    @handles(events.DuplicateInstance)
    def _duplicate_instance(self, event: events.DuplicateInstance) -> None:
        records.store_if_room(
            self._duplicates,
            event.instance_name,
            (excerpt(event.places), self._monotonic()),
        )

    def is_quiet(self) -> bool:
        """Return whether a look shows that nothing is stalled, and nothing can be soon.

        This takes a fraction of the time of :meth:`snapshot`. If false, nothing is
        known: take a snapshot.
        """
        now = self._monotonic()
        if not self._hearing.is_up or self._duplicates:
            return False
        asked_at = records.last_asked(self._links) or 0.0
        if any(
            peer.heartbeat.is_leaving
            or peer.is_silent(peer.seen, now)
            or (peer.heartbeat.answers and peer.seen < asked_at)
            for peer in self._peers.values()
        ):
            return False
        readers = self._sources.readers()
        return not any(self._sources.stuck_ids()) and all(
            writer.is_quiet()
            and (reader := readers.get(key)) is not None
            and reader.state is State.LIVE
            for key, writer in self._writers.items()
        )

    # -- the status --------------------------------------------------------------------

    def _written_here(self, name: str, token: int, now: float) -> model.WriterStatus:
        status = model.WriterStatus(
            name, self._instance_name, model.Condition.WRITTEN_HERE, token, token
        )
        if name not in self._unsent:
            return status
        count, since = self._unsent[name]
        return replace(
            status,
            condition=model.Condition.STALLED,
            reason=model.StallReason.ROWS_SKIPPED,
            stalled_for=now - since,
            detail=f"{count:,} row(s) of this process were skipped, because they are "
            "not valid JSON; the log names them",
        )

    def snapshot(self) -> model.ProcessStatus:
        """Return the current replication status."""
        now = self._monotonic()
        # dict.copy() is atomic: another thread may change the records meanwhile.
        report = StatusReport(
            self._writers.copy(),
            self._links.copy(),
            self._peers.copy(),
            self._duplicates.copy(),
            self._hearing,
            self._sources.readers(),
            self._expected,
            now,
        )
        writers = report.writers()
        for writer in writers:
            record = self._writers.get((writer.stream_name, writer.instance_name))
            if record and writer.condition is model.Condition.LIVE and not writer.lag:
                record.was_live = True
        writers += [
            self._written_here(name, token, now)
            for name, token in self._sources.own_positions().items()
        ]
        writers.sort(key=lambda writer: (writer.stream_name, writer.instance_name))
        return model.ProcessStatus(
            self._server_name,
            self._instance_name,
            __version__,
            now - self._started,
            tuple(report.not_ready(writers, needs_link=self._needs_link)),
            tuple(writers),
            tuple(report.links(self.buffers())),
            tuple(report.peers()),
            tuple(report.duplicates()),
            report.cut_off_for(),
            tuple(self._sources.stuck_ids()),
            self._sources.damage,
        )
