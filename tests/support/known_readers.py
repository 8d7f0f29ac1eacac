"""The readers and links of a process, as its status observer sees them."""

from __future__ import annotations

from typing import Any

import attrs

from synapse_replication.handlers.events import (
    AnnouncedBy,
    CatchUpEvent,
    CatchUpFailed,
    LinkDown,
    LinksChanged,
    LinkUp,
    RemovedWriterFound,
    StreamConnected,
)
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.instrumentation.status.status_observer import (
    NO_SOURCES,
    StatusObserver,
)
from synapse_replication.streams.reader import Reader, ReaderPolicy
from synapse_replication.streams.reader_decisions import Fetch
from synapse_replication.streams.reader_state import CatchUpState, LinkPhase, LinkState
from synapse_replication.wire.close_reason import CloseReason


class KnownReaders:
    """Sets the state of readers, and sends the events that belong to it.

    :param status: reads the state.
    :param observer: receives the events; by default, only ``status`` does.
    """

    def __init__(
        self, status: StatusObserver, observer: ReplicationObserver | None = None
    ) -> None:
        self._observer = observer or status
        self._links: list[str] = []
        self._readers: dict[tuple[str, str], Reader] = {}
        self._status = status
        self.connect()

    def connect(self, **sources: Any) -> None:
        """Give the status further sources."""
        readers = attrs.evolve(NO_SOURCES, readers=self._readers.copy)
        self._status.connect(attrs.evolve(readers, **sources))

    def of(self, stream_name: str, instance_name: str) -> Reader:
        """Return the reader of a writer; add it if it is new."""
        key = stream_name, instance_name
        if key not in self._readers:
            reader = Reader(ReaderPolicy(), lambda token: True, lambda: 0)
            reader._links = {link: LinkState(0) for link in self._links}
            self._readers[key] = reader
        return self._readers[key]

    def link_up(self, link: str = "redis") -> None:
        """Add a link."""
        self._links.append(link)
        for reader in self._readers.values():
            reader._links.setdefault(link, LinkState(0))
        self._observer.observe(LinkUp(link))
        self._observer.observe(LinksChanged(len(self._links)))

    def link_lost(self, link: str = "redis", why: str = "gone") -> None:
        """Remove a link."""
        self._links.remove(link)
        if link not in self._links:
            for reader in self._readers.values():
                reader._links.pop(link, None)
        self._observer.observe(LinksChanged(len(self._links)))
        self._observer.observe(LinkDown(link, CloseReason.LOST, why))

    def announce(
        self,
        stream_name: str,
        instance_name: str,
        token: int,
        *,
        link: str = "redis",
        by: AnnouncedBy = AnnouncedBy.POSITION,
    ) -> None:
        """Receive a token of a writer."""
        self._observer.position_announced(stream_name, instance_name, token, link, by)

    def go_live(
        self, stream_name: str, instance_name: str, token: int, link: str = "redis"
    ) -> None:
        """Receive a writer's POSITION, and have all its rows up to it."""
        self.announce(stream_name, instance_name, token, link=link)
        reader = self.of(stream_name, instance_name)
        reader._links[link] = LinkState(token, LinkPhase.COMPLETE)
        reader._catch_up = reader._request = None
        self._observer.position_changed(stream_name, instance_name, token)
        self._observer.observe(StreamConnected(link, stream_name, instance_name))

    def fetch(self, event: CatchUpEvent) -> None:
        """Request the missing rows of a writer."""
        reader = self.of(event.stream_name, event.instance_name)
        start, end = event.from_token, event.upto_token
        if reader._catch_up is None:
            reader._catch_up = CatchUpState(start, end, start)
        reader._request = Fetch(start, end, False)
        self._observer.observe(event)

    def fail(self, event: CatchUpEvent, error: Exception, attempt: int) -> None:
        """Fail to fetch, and retry later."""
        self.of(event.stream_name, event.instance_name)._request = None
        self._observer.observe(CatchUpFailed(event, error, attempt, 5.0))

    def drain(
        self, stream_name: str, instance_name: str, from_token: int, upto: int
    ) -> None:
        """Begin to fetch the last rows of a removed writer."""
        catch_up = CatchUpState(from_token, upto, from_token, drain_upto=upto)
        self.of(stream_name, instance_name)._catch_up = catch_up
        self._observer.observe(
            RemovedWriterFound(stream_name, instance_name, from_token, upto)
        )

    def finish(self, stream_name: str, instance_name: str, token: int) -> None:
        """Deliver the last missing row of a writer."""
        reader = self.of(stream_name, instance_name)
        reader._catch_up = reader._request = None
        self._observer.position_changed(stream_name, instance_name, token)
