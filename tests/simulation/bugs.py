"""
Bugs of other implementations, reintroduced on purpose: the simulation must find each.

Each bug is a context manager, in which one part of the code is patched.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import ModuleType
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

from synapse_replication.app import stream_setup
from synapse_replication.dropin.host_streams import HostStream
from synapse_replication.handlers.interfaces import Link
from synapse_replication.handlers.receiving.items import Announcement
from synapse_replication.handlers.receiving.stream_parts import StreamParts
from synapse_replication.handlers.receiving.writer_receiver import WriterReceiver
from synapse_replication.redis.subscriber import RedisSubscriber
from synapse_replication.storage import id_generators
from synapse_replication.storage.open_transactions import PredecessorWait
from synapse_replication.storage.postgres_stream import PostgresStream
from synapse_replication.storage.sequences import load_positions
from synapse_replication.streams.reader import Reader
from synapse_replication.streams.reader_decisions import Finding, Verdict
from synapse_replication.streams.reader_state import LinkPhase
from synapse_replication.streams.stream import RemovedWriter, StreamUpdateResult
from synapse_replication.streams.writer_positions import WriterPositions
from synapse_replication.wire.commands import PositionCommand
from synapse_replication.wire.rdata import RdataGroup
from tests.simulation import process
from tests.simulation.sink import ProcessSink


@contextmanager
def _replicates_before_subscribed() -> Iterator[None]:
    """Send REPLICATE before the subscription is confirmed."""
    report, subscribe = RedisSubscriber.report_connection, RedisSubscriber.authenticated

    def authenticated(self: RedisSubscriber) -> None:
        report(self)
        # A slow subscription.
        self.factory.reactor_clock.callLater(0.1, subscribe, self)

    with (
        patch.object(RedisSubscriber, "authenticated", authenticated),
        patch.object(RedisSubscriber, "report_connection", lambda self: None),
    ):
        yield


def _delivers_during_catch_up() -> AbstractContextManager[object]:
    """Deliver rows that arrive during a catch-up immediately."""

    def is_live_on(self: Reader, link: Link) -> bool:
        state = self._links.get(link)
        return state is not None and state.phase is not LinkPhase.WAITING

    return patch.object(Reader, "is_live_on", is_live_on)


_RECEIVERS: WeakKeyDictionary[StreamParts, list[WriterReceiver]] = WeakKeyDictionary()


@contextmanager
def _with_siblings(name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Patch a method that uses :func:`_readers_of_stream`."""
    original = WriterReceiver.__init__

    def init(
        self: WriterReceiver, instance_name: str, stream: StreamParts, *args: Any
    ) -> None:
        original(self, instance_name, stream, *args)
        _RECEIVERS.setdefault(stream, []).append(self)

    with (
        patch.object(WriterReceiver, "__init__", init),
        patch.object(WriterReceiver, name, method),
    ):
        yield


def _readers_of_stream(writer: WriterReceiver) -> list[Reader]:
    """Return the readers of all writers of the stream of ``writer``."""
    return [other.reader for other in _RECEIVERS[writer._stream]]


def _collects_batches_by_stream() -> AbstractContextManager[object]:
    """Collect the rows of a batch by stream instead of by writer."""
    original = WriterReceiver._handle_slice

    def handle_slice(
        self: WriterReceiver, link: Link, tokens: list[Any], rows: list[bytes]
    ) -> Awaitable[None] | None:
        own = self.reader._links[link]
        for other in _readers_of_stream(self):
            if other is not self.reader:
                state = other._links[link]
                own.pending, state.pending = state.pending + own.pending, []
        return original(self, link, tokens, rows)

    return _with_siblings("_handle_slice", handle_slice)


def _drops_all_batches() -> AbstractContextManager[object]:
    """Drop the unfinished batches of all writers at the POSITION of one."""
    original = WriterReceiver._announce

    def announce(self: WriterReceiver, link: Link, item: Announcement) -> None:
        if isinstance(item, PositionCommand):
            for reader in _readers_of_stream(self):
                if (state := reader._links.get(link)) is not None:
                    state.pending = []
        original(self, link, item)

    return _with_siblings("_announce", announce)


def _makes_all_writers_live() -> AbstractContextManager[object]:
    """Accept the rows of all writers after the POSITION of one."""
    original = WriterReceiver._handle_rows

    def handle(
        self: WriterReceiver, link: Link, group: RdataGroup
    ) -> Awaitable[None] | None:
        state = self.reader._links[link]
        if state.phase is LinkPhase.WAITING and any(
            reader._links[link].phase is LinkPhase.COMPLETE
            for reader in _readers_of_stream(self)
        ):
            state.phase = LinkPhase.COMPLETE
        return original(self, link, group)

    return _with_siblings("_handle_rows", handle)


def _compares_links_with_the_position() -> AbstractContextManager[object]:
    """Compare the first POSITION of a link with rows that another link carried."""
    original = Reader.link_up

    def link_up(self: Reader, link: Link) -> None:
        original(self, link)
        self._links[link].heard = self._position

    return patch.object(Reader, "link_up", link_up)


def _reads_each_link() -> AbstractContextManager[object]:
    """Deliver what is new on a link, even if another link carried it before."""
    original = Reader.batch

    def batch(self: Reader, link: Link, token: int, size: int) -> Verdict:
        is_new = token > self._links[link].heard
        verdict: Verdict = original(self, link, token, size)
        if verdict is Verdict.OLD and is_new and self._catch_up is None:
            return Verdict.DELIVER
        return verdict

    return patch.object(Reader, "batch", batch)


def _skips_unreadable_rows() -> AbstractContextManager[object]:
    """Skip an unreadable row of a batch, and deliver the others."""
    return patch.object(Reader, "lost_rows", lambda self, link: 0)


class _AnnouncesOnRemotePositions(WriterPositions):
    """
    Moves the announced position past a finished id of its own when another writer
    announces during a fetch, while ``local`` stays behind.
    """

    _moved_to = 0

    def advance(self, instance_name: str, id_: int) -> None:
        super().advance(instance_name, id_)
        if self.is_writer and self.lowest_in_flight() is None:
            # Ignores ids that are being fetched.
            self._moved_to = self.max_finished

    @property
    def announceable(self) -> int:
        return max(super().announceable, self._moved_to)

    def writer_position(self, instance_name: str) -> int:
        position = super().writer_position(instance_name)
        if instance_name == self.instance_name:
            return max(position, self._moved_to)
        return position


class _IgnoresFetches(WriterPositions):
    """Ignores an id between nextval and its registration."""

    def lowest_floor(self) -> int | None:
        return None

    def is_usable(self, fetch: int, id_: int) -> bool:
        return id_ > self.floor_of(fetch)


def _with_positions(type_: type[WriterPositions]) -> AbstractContextManager[object]:
    return patch.object(
        id_generators, "load_positions", partial(load_positions, positions_type=type_)
    )


def _starts_at_once() -> AbstractContextManager[object]:
    """Start a writer while transactions of its predecessor are open."""
    return patch.object(PredecessorWait, "is_over", lambda self, txn: True)


@contextmanager
def _ignores_epochs() -> Iterator[None]:
    """Detect a restarted writer of a stream in memory only by a lower POSITION."""

    def epoch_reported(
        self: Reader, link: Link, token: int, epoch: str, *, has_restarted: bool
    ) -> Finding:
        return Finding.NOTHING

    def accepts_epoch(self: Reader, result: StreamUpdateResult) -> bool:
        return True

    with (
        patch.object(Reader, "epoch_reported", epoch_reported),
        patch.object(Reader, "_accepts_epoch", accepts_epoch),
    ):
        yield


@contextmanager
def _saves_no_epochs() -> Iterator[None]:
    """Assume that the first epoch received is the epoch of the saved positions."""
    reported, accepts = Reader.epoch_reported, Reader._accepts_epoch

    def epoch_reported(
        self: Reader, link: Link, token: int, epoch: str, *, has_restarted: bool
    ) -> Finding:
        self._epoch = self._epoch or epoch
        found: Finding = reported(self, link, token, epoch, has_restarted=has_restarted)
        return found

    def accepts_epoch(self: Reader, result: StreamUpdateResult) -> bool:
        self._epoch = self._epoch or result.epoch
        return accepts(self, result)

    with (
        patch.object(Reader, "epoch_reported", epoch_reported),
        patch.object(Reader, "_accepts_epoch", accepts_epoch),
        patch.object(ProcessSink, "saved_epochs", lambda self: {}),
    ):
        yield


class _TrustsPersistedUpto(HostStream):
    """Treats everything that all writers have persisted as delivered."""

    def current_token(self, instance_name: str) -> int:
        return int(self.original.current_token(instance_name))


class _LateBaseline(HostStream):
    """
    Starts an undeclared writer at the host's position at the time of the first query
    about the writer, instead of that at startup.
    """

    def current_token(self, instance_name: str) -> int:
        received = self._received
        if received is None or instance_name == self._instance_name:
            return super().current_token(instance_name)
        return received.setdefault(
            instance_name, int(self.original.current_token(instance_name))
        )

    def advance(self, instance_name: str, token: int, *, is_position: bool) -> None:
        self.current_token(instance_name)
        super().advance(instance_name, token, is_position=is_position)


class _RevealsRows(HostStream):
    """
    Accepts positions immediately, so that users are never shown a row of another writer
    that this process missed and is about to fetch.
    """

    def writers_behind(self, instance_name: str, token: int) -> list[str]:
        return []


class _IgnoresRemovedWriters(PostgresStream):
    """Does not search for the committed rows of removed writers."""

    async def find_removed_writers(self) -> Mapping[str, RemovedWriter]:
        return {}


class _FindsRemovedWritersOnce(PostgresStream):
    """Does not detect the removal of a writer while running."""

    _has_searched = False

    async def find_removed_writers(self) -> Mapping[str, RemovedWriter]:
        if self._has_searched:
            return {}
        found = await super().find_removed_writers()
        self._has_searched = True
        return found


def _in_module(
    module: ModuleType, name: str, type_: type
) -> Callable[[], AbstractContextManager[object]]:
    """Replace a class in a module that creates instances of it."""
    return lambda: patch.object(module, name, type_)


BUGS: Mapping[str, Callable[[], AbstractContextManager[object]]] = {
    "reconnect-order": _replicates_before_subscribed,
    "rows-during-catch-up": _delivers_during_catch_up,
    "interleaved-batches": _collects_batches_by_stream,
    "position-during-batch": _drops_all_batches,
    "gap-per-writer": _makes_all_writers_live,
    "late position": _compares_links_with_the_position,
    "repeated rows": _reads_each_link,
    "unreadable-row": _skips_unreadable_rows,
    "covered-rows": lambda: _with_positions(_AnnouncesOnRemotePositions),
    "unregistered-id": lambda: _with_positions(_IgnoresFetches),
    "open-ids-at-restart": _starts_at_once,
    "typing-reset": _ignores_epochs,
    "typing-reset, saved": _saves_no_epochs,
    "shared token": _in_module(process, "HostStream", _TrustsPersistedUpto),
    "late baseline": _in_module(process, "HostStream", _LateBaseline),
    "revealed rows": _in_module(process, "HostStream", _RevealsRows),
    "removed": _in_module(stream_setup, "PostgresStream", _IgnoresRemovedWriters),
    "removed, running": _in_module(
        stream_setup, "PostgresStream", _FindsRemovedWritersOnce
    ),
}

#: For each bug, the seed at which its search starts: the first that found it.
FOUND_BY: Mapping[str, int] = {
    "reconnect-order": 239,
    "interleaved-batches": 18,
    "late position": 151,
    "position-during-batch": 116,
    "gap-per-writer": 271,
    "unreadable-row": 22,
    "covered-rows": 271,
    "unregistered-id": 72,
    "open-ids-at-restart": 934,
    "typing-reset": 16,
    "typing-reset, saved": 18,
    "shared token": 33,
    "late baseline": 39,
    "revealed rows": 6,
    "removed": 4,
    "removed, running": 18,
}
