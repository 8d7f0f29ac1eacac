"""Computes the status of a process from its records and its readers."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping

import attrs
from msgspec.structs import replace

from synapse_replication.handlers.events import ConnectionBuffers
from synapse_replication.instrumentation.status import model, records, verdict
from synapse_replication.streams.reader import Reader
from synapse_replication.streams.reader_table import State
from synapse_replication.text import incoming_label, named_label

_FETCHES = frozenset({State.DUE, State.FETCHING, State.DELIVERING, State.PAUSED})
_NEVER = float("-inf")
#: If so many processes fall silent at once, the link is suspect, not they.
SEVERAL = 2
#: The reasons of stalls whose cause is that an instance, or its link, is gone.
_UNREACHABLE = (model.StallReason.WRITER_GONE, model.StallReason.NO_LINK)


@attrs.define(eq=False, repr=False, slots=False)
class StatusReport:
    """The status at one moment.

    :param writers: what was heard of each writer, by (stream, writer).
    :param links: the links of the process, by name.
    :param peers: the peers, by instance name.
    :param duplicates: by instance name: the locations of two processes with that name,
        and when they were last noticed, in s.
    :param hearing: whether the process can hear others.
    :param readers: the readers of the writers that the process follows.
    :param expected: the writers that the configuration names.
    :param now: the monotonic time of the status, in s.
    """

    _writers: Mapping[tuple[str, str], records.WriterRecord]
    _links: Mapping[str, records.LinkRecord]
    _peers: Mapping[str, records.PeerRecord]
    _duplicates: Mapping[str, tuple[str, float]]
    _hearing: records.HearingRecord
    _readers: Mapping[tuple[str, str], Reader]
    _expected: frozenset[tuple[str, str]]
    _now: float

    def __attrs_post_init__(self) -> None:
        hearing = self._hearing
        # Since when the process can hear others; from now on if it cannot.
        self._hearing_since = hearing.since if hearing.is_up else self._now
        # Computed once: there may be a thousand writers, peers and links.
        self._heard = self._last_signs_of_life()
        asked_at = records.last_asked(self._links)
        self._peers = {
            name: replace(
                peer,
                heard_at=self._heard.get(name, _NEVER),
                asked_at=asked_at if peer.heartbeat.answers else None,
            )
            for name, peer in self._peers.items()
        }
        self._silence_since = self._find_silence()
        links = self._links.items()
        self._newest_link = max((at.since for _, at in links if at.up), default=0.0)
        lost = [f"{name}: {link.why}" for name, link in links if not link.up]
        self._lost_links = "; ".join(lost)

    def _last_signs_of_life(self) -> dict[str, float]:
        """Return when the last row or POSITION of each process arrived."""
        heard: dict[str, float] = {}
        for (_, name), writer in self._writers.items():
            if writer.spoke_at is not None:
                heard[name] = max(heard.get(name, 0.0), writer.spoke_at)
        return heard

    def _find_silence(self) -> float | None:
        """Return since when nothing has arrived, if several processes should speak."""
        hearing = self._hearing
        if not hearing.is_up:
            return None
        heartbeats = (peer.seen for peer in self._peers.values())
        last = max((hearing.since, *heartbeats, *self._heard.values()))
        # Those that had ended before the others were heard are not expected to speak.
        speaking = [
            peer
            for peer in self._peers.values()
            if not peer.heartbeat.is_leaving
            and not verdict.is_replaced(peer, self._hearing_since)
            and peer.heartbeat.every < records.PEER_SILENT_AFTER
            and not peer.is_silent(hearing.since, last)
        ]
        return last if len(speaking) >= SEVERAL else None

    # -- writers ----------------------------------------------------------------------

    def writers(self) -> list[model.WriterStatus]:
        """Return the status of each writer that matters."""
        keys = dict.fromkeys((*self._writers, *self._readers))
        writers = {key: self._writer(key) for key in keys if self._is_shown(key)}
        return [each for key, each in writers.items() if self._matters(key, each)]

    def _matters(self, key: tuple[str, str], status: model.WriterStatus) -> bool:
        """Return whether a writer can have rows that this process lacks.

        Any instance may write some streams, and announces a position in them even if it
        only reads. When it is gone and has written nothing, nothing is missing, and
        nothing needs it back.
        """
        writer = self._writers.get(key)
        return (
            key in self._expected
            or status.reason not in _UNREACHABLE
            or writer is None
            or writer.has_written
            or bool(writer.lag())
        )

    def _is_shown(self, key: tuple[str, str]) -> bool:
        """Return whether a writer is shown.

        A writer that the configuration does not name is not required to return: it is
        not shown after its goodbye, or if it was idle for long.
        """
        writer = self._writers.get(key)
        if writer is not None and writer.is_drained:
            return False
        if key in self._expected:
            return True
        if writer is None:
            return False
        if any(reason in writer.problems for reason in model.ALWAYS_SHOWN):
            return True
        peer = self._peers.get(key[1])
        if (
            peer is not None
            and peer.heartbeat.is_leaving
            and not verdict.is_replaced(peer, self._hearing_since)
        ):
            return False
        reader = self._readers.get(key)
        if reader is not None and reader.state in _FETCHES:
            # Rows of the writer are missing here.
            return True
        return not writer.is_idle(self._now - records.FORGET_AFTER)

    def _writer(self, key: tuple[str, str]) -> model.WriterStatus:
        writer = self._writers.get(key) or records.WriterRecord(self._now, self._now)
        reader = self._readers.get(key)
        # A copy, because another thread may change the record meanwhile.
        writer = copy.copy(writer)
        facts = self._facts(key, writer, reader)
        written_at = writer.oldest()
        found = verdict.diagnose(facts, self._now)
        heard_at = self._now if writer.heard_at is None else writer.heard_at
        is_fetching = facts.state in _FETCHES and not facts.deaf_detail
        return model.WriterStatus(
            *key,
            found.condition,
            writer.position,
            writer.announced,
            writer.lag(),
            0.0 if written_at is None else self._now - written_at,
            writer.catch_up_from if is_fetching else None,
            found.reason,
            0.0 if found.reason is None else self._now - found.since,
            found.detail,
            tuple(writer.history),
            writer.link,
            "" if writer.heard_by is None else writer.heard_by.value,
            self._now - heard_at,
            writer.resynced_at is not None
            and self._now - writer.resynced_at < records.RESYNC_SHOWN_FOR,
        )

    def _facts(
        self, key: tuple[str, str], writer: records.WriterRecord, reader: Reader | None
    ) -> verdict.WriterFacts:
        hearing = self._hearing
        link_name, link = self._link_of(key[1], writer)
        return verdict.WriterFacts(
            instance_name=key[1],
            record=writer,
            hearing=hearing,
            state=State.WAITING if reader is None else reader.state,
            is_removed=reader is not None and reader.is_draining,
            deaf_detail="" if hearing.is_up else self._lost_links,
            waiting_since=max(writer.since, hearing.since, self._newest_link),
            process_heard_at=self._heard.get(key[1]),
            link_down_since=link.since if link is not None and not link.up else None,
            link_detail="" if link is None else f"{link_name}: {link.why}",
            silence_since=self._silence_since,
            peer=self._peers.get(key[1]),
        )

    def _link_of(
        self, instance_name: str, writer: records.WriterRecord
    ) -> tuple[str, records.LinkRecord | None]:
        """Return the link on which a writer was last heard, and its name.

        If only heartbeats were heard, it is a link to the writer itself.
        """
        links = self._links
        if writer.link in links:
            return writer.link, links[writer.link]
        direct = [
            (bool(link.up), link.since, name)
            for name, link in links.items()
            if instance_name in (name, link.peer)
        ]
        if not direct:
            return "", None
        name = max(direct)[-1]
        return name, links[name]

    # -- peers, duplicates and links --------------------------------------------------

    def peers(self) -> Iterator[model.PeerStatus]:
        """Yield the status of each peer, ordered by name.

        A peer that the configuration does not name is left out after its goodbye.
        """
        names = {name for _, name in self._expected}
        silence = self._silence_since
        silent_for = 0.0 if silence is None else self._now - silence
        is_silent = silent_for > records.PEER_SILENT_AFTER
        since = self._now if is_silent else self._hearing_since
        until = verdict.heard_until(self._now, silence)
        for name, peer in sorted(self._peers.items()):
            if verdict.is_replaced(peer, self._hearing_since):
                heard_for = self._now - peer.heard_at
                yield model.PeerStatus(name, "", "", "", heard_for, is_gone=False)
            elif name in names or not peer.heartbeat.is_leaving:
                yield model.PeerStatus(
                    name,
                    peer.heartbeat.epoch,
                    peer.heartbeat.version,
                    peer.heartbeat.where,
                    self._now - peer.seen,
                    verdict.is_gone(peer, since, until),
                )

    def duplicates(self) -> Iterator[model.DuplicateStatus]:
        """Yield the instance names that two processes have used recently."""
        for name, (places, seen) in sorted(self._duplicates.items()):
            if self._now - seen < records.DUPLICATE_FOR:
                yield model.DuplicateStatus(name, places, self._now - seen)

    def links(self, buffers: Iterable[ConnectionBuffers]) -> Iterator[model.LinkStatus]:
        """Yield the status of each link, ordered by name.

        :param buffers: the buffers of all connections.
        """
        queued: dict[str, tuple[int, int]] = {}
        for each in buffers:
            commands, size = queued.get(each.connection, (0, 0))
            queued[each.connection] = (
                commands + each.pending_commands,
                size + each.send_buffer + each.kernel_send_buffer,
            )
        for name, link in sorted(self._links.items()):
            commands, size = queued.get(name, (0, 0))
            since = self._now - link.since
            label = incoming_label(self._name_peer(name, link.peer), link.address)
            yield model.LinkStatus(label, link.up, since, link.why, commands, size)

    def _name_peer(self, link: str, peer: str) -> str:
        """Return the name of a link, with that of the instance at its other end.

        :param peer: its name; if it is empty, that of the only writer heard is used.
        """
        names = {peer}
        if not peer:
            writers = self._writers.items()
            names = {name for (_, name), each in writers if each.link == link}
        return named_label(link, *names) if len(names) == 1 else link

    def cut_off_for(self) -> float:
        """Return for how long the process has had no link, in s; 0 if it has one."""
        return 0.0 if self._hearing.is_up else self._now - self._hearing.since

    # -- readiness --------------------------------------------------------------------

    def not_ready(
        self, writers: Iterable[model.WriterStatus], *, needs_link: bool
    ) -> Iterator[str]:
        """Yield the reasons for which the process is not ready.

        A process that makes links, or has a record of a link, is not ready while it
        hears nothing. A writer that is not absent delays readiness until, for the first
        time, it is live and all its rows have been delivered.
        """
        has_links = needs_link or bool(self._links)
        if has_links and not self._hearing.is_up:
            yield "no link is up"
        for status in writers:
            key = status.stream_name, status.instance_name
            writer = self._writers.get(key)
            if writer is None or writer.was_live or status.reason in model.ABSENT:
                continue
            if status.condition is not model.Condition.LIVE or status.lag:
                yield model.describe_writer(status)
